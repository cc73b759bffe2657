"""What a report shows, as values: the entries of the matrix, prices, and the findings as a whole. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rasura.core.rounding import percent
from rasura.report.labels import LabelReading
from rasura.report.language import recorded
from rasura.report.pooled import Level
from rasura.report.scores import BLIND, Setting
from rasura.report.verdicts import Verdict

ACCUMULATE = "frozen-embeddings+accumulate:1.0d, which waits for as many different tokens as the model is wide"
SUMMED = "sealing:all/by=secagg, which shows the server the sum of at least three clients; with fewer, sealing:all/by=bfv"


@dataclass(frozen=True)
class Wording:
    """How one kind of data is spoken of: one record, several, and what the headline metric is a share of.

    ``more``: protections that a run may add, by what stands in the columns that have them; what they do, not what they are
    worth.
    """

    one: str
    many: str
    share: str
    unit: str
    more: Mapping[str, str] = field(default_factory=dict)

    @property
    def here(self) -> Wording:
        """The same in the language that is written now."""
        said = {name: recorded(getattr(self, name)) for name in ("one", "many", "share", "unit")}
        return replace(self, **said, more={part: recorded(text) for part, text in self.more.items()})


TEXTS = Wording("note", "notes", "of the words", "Words recovered, %", {"accumulate": ACCUMULATE, "sealing:all": SUMMED})


IMAGES = Wording("image", "images", "of the structure (SSIM)", "Structure recovered (SSIM), %", {"sealing:all": SUMMED})


RISKS = {
    "token_recall": "words read back", "rougeL": "text read back (ROUGE-L)", "rouge1": "words read back (ROUGE-1)",
    "rouge2": "pairs of words read back (ROUGE-2)", "ssim": "structure read back (SSIM)",
}  # fmt: skip
"""What the risk of a calibration is called, by its metric."""


def risk_name(metric: str) -> str:
    """What ``metric`` is a share of, in words; a metric without a name of its own keeps its short one."""
    return recorded(RISKS.get(metric, metric))


@dataclass(frozen=True)
class Entry:
    """One entry of the matrix: an attack under a protection, in ``cells`` updates.

    ``level``: of the examples that were measured, those where the attack gave up at the score of guessing. Of several threat
    models or batch sizes ``setting`` is the one where the attack read most; ``level``, ``blind``, ``seconds``, ``verified``
    and ``notes``, the number of examples that can be scored, are of it alone. ``silent``: no guess there can be scored, so
    that ``level`` is that of guessing, and nothing was read. Of the ``cells``, ``scored`` gave a guess at the data, and
    ``labels`` named labels alone; none is both. ``verified``: how many examples have a proven guess, each counted once.
    ``mark``: value, ``labels`` (named labels and no text: see ``labels`` of the findings), ``·`` (gave up), ``!`` (crashed),
    ``?`` (no guess can be scored) or ``–`` (not applicable).
    """

    attack: str
    defense: str
    level: Level | None
    blind: float
    reasons: tuple[str, ...]
    notes: int
    cells: int
    scored: int
    gave_up: int
    crashed: int
    verified: int
    seconds: float
    labels: int = 0
    setting: Setting = ("honest-server", 1)
    silent: bool = False

    @property
    def mark(self) -> str:
        """What the cell shows."""
        if self.level is not None and not self.silent:
            return f"{percent(self.level.mean):.0f}"
        if self.crashed or self.labels:
            return "!" if self.crashed else "labels"
        return "·" if self.gave_up else "?" if self.scored else "–"

    @property
    def coverage(self) -> tuple[int, int] | None:
        """How many examples of how many the figure is of, where it is not of all."""
        if self.level is None or self.level.n == self.notes:
            return None
        return self.level.n, self.notes

    @property
    def step(self) -> int:
        """Shade 0 to 5 by risk above the baseline."""
        if self.level is None:
            return 0
        above = max(0.0, self.level.mean - self.blind) / max(1e-9, 1 - self.blind)
        return min(5, int(above * 5 + 0.999)) if above > 0.02 else 0


@dataclass(frozen=True)
class Price:
    """What a protection costs on average: ``sent`` bytes of an update, ``seconds`` to make it."""

    sent: float
    seconds: float


@dataclass(frozen=True)
class Findings:
    """Everything that the page shows, for one metric. ``sizes``: how many examples the updates hold, which may be fewer than
    the batch size. ``baseline``: columns without protection, with which the others are compared; ``judged``: those that the
    run is judged by. ``blind``: guessing in the setting of the headline. ``without_a_figure``: how many examples of how many
    cannot be scored. ``labels``: what was read of labels. ``settings``: how many threat models and batch sizes there are.
    ``unfinished``: why nothing is said for a protection where the run has more results than are here; empty otherwise."""

    metric: str
    attacks: tuple[str, ...]
    columns: tuple[str, ...]
    matrix: Mapping[tuple[str, str], Entry]
    best: Mapping[str, Entry]
    blind: Level | None
    sentence: tuple[str, ...]
    recommendation: str
    threats: Mapping[str, str]
    evidence: tuple[dict[str, Any], ...]
    sizes: tuple[int, ...]
    cells: int
    gave_up: int
    crashed: int
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    baseline: tuple[str, ...] = ()
    judged: tuple[str, ...] = ()
    words: Wording = TEXTS
    figures: tuple[dict[str, Any], ...] = ()
    prices: Mapping[str, Price] = field(default_factory=dict)
    without_a_figure: tuple[int, int] = (0, 0)
    labels: tuple[LabelReading, ...] = ()
    settings: int = 1
    unfinished: str = ""

    @property
    def all_gave_up(self) -> bool:
        """Whether every attempt of every attack ended, and none guessed anything, no text and no label."""
        tried = [e for (attack, _), e in self.matrix.items() if attack != BLIND]
        return bool(tried) and not self.unfinished and all(e.gave_up == e.cells for e in tried)

    def figure(self, column: str) -> Entry | None:
        """The strongest attack on ``column`` with its figure. None where no attack has one, or where something that was
        not measured could have read more: no figure stands for a protection beside "not measured"."""
        return self.best.get(column) if self.verdicts[column].read is not None else None

    def mark(self, column: str) -> str:
        """The mark of ``figure`` in the matrix: ``?`` where none may stand, ``–`` where no attack has one."""
        entry = self.figure(column)
        return entry.mark if entry is not None else "?" if column in self.best else "–"
