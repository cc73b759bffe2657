"""``rasura read --candidates``: for each given text, whether it was in the round, and how reliable such an answer is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from rasura.core.batches import Batch, contents, places_of_each
from rasura.core.given import of_kind
from rasura.core.interfaces import InputError
from rasura.data.classes import class_names, model_classes
from rasura.data.text import Example, encode, load_examples, load_labelled, place_of
from rasura.metrics.membership import Rate, needed
from rasura.registry.candidates import like_earlier, scores
from rasura.runs.candidate_rounds import LEVEL, Text, by_label, not_simulated, reliability, simulate
from rasura.runs.reading import ReadRequest, observed
from rasura.runs.reading_checks import LOADED
from rasura.victims.batching import split
from rasura.victims.loading import Victim, with_one_label
from rasura.victims.outputs import predicts

ENOUGH = needed(LEVEL) - 1
"""Minimum number of different reference texts with a candidate's label for an answer at that level."""

IN, LIKE, BEYOND = "in the round", "much like a text that scores higher", "more than the batch holds"
"""Answers of candidates at ``LEVEL``. ``IN``: this text, or one much like it. ``LIKE``: much like a candidate with a higher
score, which explains its own. ``BEYOND``: as many texts as the batch holds have higher scores."""


@dataclass(frozen=True)
class Candidate:
    """One given text. ``score``: higher is likelier; NaN if its gradient or loss is zero or not finite. ``p``: the fraction
    of texts outside the round with its label (causal models: of all texts outside) that score as high or higher, estimated
    from such reference texts; None without any. ``verdict``: ``in the round`` (this text, or one much like it, which
    reference texts are not), ``much like a text that scores higher``, ``more than the batch holds``, ``not told`` or
    ``no level``.
    """

    text: str
    score: float
    p: float | None
    verdict: str


@dataclass(frozen=True)
class CandidatesRead:
    """The candidates in the file's order, and the reliability of the score: its AUC and its true positive rate at 1 % false
    positives among texts of the same label, in ``simulated`` rounds of reference texts; None without simulated rounds, or
    with fewer texts of each label than it takes. ``references``: different reference texts, as the model sees them;
    ``repeated``: rows that were left out. ``by_chance``: so many candidates are ``in the round`` on average, at most, if
    none of them was in it. ``few``: the classes of candidates with fewer than ``ENOUGH`` reference texts, and how many."""

    candidates: tuple[Candidate, ...]
    references: int
    simulated: int = 0
    auc: Rate | None = None
    tpr: Rate | None = None
    repeated: int = 0
    by_chance: float = 0.0
    few: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``rasura read --candidates --json`` prints them."""
        return asdict(self)


Progress = Callable[[int, int], None]
"""Is told how many texts are scored, and of how many."""


def read_candidates(
    path: str | Path,
    candidates: str | Path,
    victim: Victim,
    request: ReadRequest | None = None,
    simulated: int = 0,
    progress: Progress = lambda done, total: None,
) -> CandidatesRead:
    """Decide for each text of the file ``candidates`` whether it was in the round that produced the update in ``path``.

    ``request.reference``: texts of the same kind that were not in the round. With ``ENOUGH`` of them that have a candidate's
    label, its ``p`` is at most ``LEVEL`` for one in a hundred such texts that were not in the round; with fewer there is no
    answer. ``simulated``: rounds trained here on half of the reference texts (``request.size`` if it is known), as in
    ``request.update`` and with the same entries hidden, to measure the score where the truth is known. ``progress`` counts
    each text once, and the reference texts once more in each simulated round. Raises ``InputError`` for bad input, for a
    model that is no classifier with one label a text, and if simulated rounds would leave out something of the request
    (``not_simulated``).
    """
    request = of_kind(request or ReadRequest(), ReadRequest, "request", "what is known is ReadRequest(batch_size=2)")
    victim = with_one_label(of_kind(victim, Victim, "victim", LOADED))
    given = _labelled(candidates, victim)
    references = [] if request.reference is None else _labelled(request.reference, victim)
    asked, read, local = rows_of(victim, given), rows_of(victim, references), request.local
    known, other = ([one for row in some for one in contents(row)] for some in (asked, read))
    if both := sum(map(set(known).__contains__, other)):
        raise InputError(f"{request.reference} contains {both} of the candidates; expected other texts of the same kind")
    rows = [read[k] for k in places_of_each(other)]
    with observed(path, victim, request) as (update, seen):
        if simulated and (missing := not_simulated(request, update, seen)):
            raise InputError(
                f"reliability cannot be measured: simulated rounds have no {' and no '.join(missing)}; leave out "
                "--simulated-rounds"
            )
        sent, visible = seen.gradients, seen.visible
        signed = seen.message.sign != "unknown"
        counted = _Counted(len(asked) + len(rows) * (1 + simulated), progress)
        found = scores(victim.model, counted(inputs_of(asked)), sent, local, visible, signed)
        labels = [label_of(row) for row in rows]
        others = by_label(scores(victim.model, counted(inputs_of(rows)), sent, local, visible, signed), labels)
        told = [judged(s, others.get(label_of(row), ())) for s, row in zip(found, asked)]
        same = [key for row in asked for key in contents(row, labels=True)]
        likeliest = [k for k in places_of_each(same) if told[k][1] == IN]
        likeliest.sort(key=lambda k: -found[k])
        inputs = inputs_of([asked[k] for k in likeliest])
        alike = like_earlier(victim.model, inputs, inputs_of(rows), list(sent), visible, signed)
        word = dict(zip((same[k] for k in likeliest), answers(alike, request.size)))
        listed = tuple(
            Candidate(e.text, s, p, word.get(key, verdict)) for e, s, (p, verdict), key in zip(given, found, told, same)
        )
        repeated, by_chance = len(read) - len(rows), LEVEL * len(set(same))
        few = _few(victim, asked, labels)
        result = CandidatesRead(listed, len(rows), repeated=repeated, by_chance=by_chance, few=few)
        if not simulated:
            return result
        rounds = simulate(victim, rows, list(sent), local, request.size, simulated, request.seed, visible, signed, counted)
    ranked, rate = reliability(rounds, labels)
    return replace(result, simulated=simulated, auc=ranked, tpr=rate)


class _Counted:
    """Texts on their way to be scored, of which ``progress`` is told."""

    def __init__(self, total: int, progress: Progress) -> None:
        self.total, self.progress, self.done = total, progress, 0

    def __call__(self, texts: Iterable[Text]) -> Iterator[Text]:
        for text in texts:
            yield text
            self.done += 1
            self.progress(self.done, self.total)


def _labelled(file: str | Path, victim: Victim) -> list[Example]:
    """The texts of ``file`` with the classes of ``victim`` as labels: the gradient of a text with another label is that of
    another text."""
    if victim.task != "classification":
        return list(load_examples(file))
    return list(load_labelled(file, _classes(victim), victim.name, count=victim.num_labels))


def _classes(victim: Victim) -> tuple[str, ...]:
    return class_names(getattr(victim.model.config, "id2label", None)) or model_classes(victim.name)


def label_of(row: Batch) -> int | None:
    """The label of a batch of one text; None for a causal model, whose labels are the tokens."""
    return int(row.labels[0]) if row.labels.dim() == 1 else None


def _few(victim: Victim, asked: Sequence[Batch], labels: Sequence[int | None]) -> dict[str, int]:
    """The classes of the texts ``asked`` that fewer than ``ENOUGH`` of the references' ``labels`` are, and how many are."""
    names = dict(enumerate(_classes(victim)))
    wanted = sorted({label for row in asked if (label := label_of(row)) is not None})
    return {names.get(k, str(k)): labels.count(k) for k in wanted if labels.count(k) < ENOUGH}


def judged(score: float, others: Sequence[float]) -> tuple[float | None, str]:
    """The p-value of ``score`` among ``others`` of the same label, which were not in the round, and the answer at
    ``LEVEL``. A text's gradient depends on its label: others would show how rare the label is, not whether it was there."""
    if not others:
        return None, "no level"
    p = (1 + sum(not other < score for other in others)) / (1 + len(others))
    if len(others) < ENOUGH or math.isnan(score):
        return p, "no level"
    return p, IN if p <= LEVEL else "not told"


def answers(alike: Sequence[bool], size: int | None) -> list[str]:
    """The answers for texts at ``LEVEL``, highest score first, of a round of ``size`` texts (None: unknown). ``alike``:
    whether each is much like one before it."""
    out, named = [], 0
    for like in alike:
        full = size is not None and named >= size
        out.append(LIKE if like else BEYOND if full else IN)
        named += out[-1] == IN
    return out


def inputs_of(rows: Sequence[Batch]) -> list[dict[str, Tensor]]:
    """The keyword arguments of the model for each of ``rows``."""
    return [row.inputs() for row in rows]


def rows_of(victim: Victim, examples: Sequence[Example]) -> list[Batch]:
    """``examples`` in the form that the model takes, one text each; texts that are too long are truncated, as in training.
    Raises ``InputError`` for a text of which a causal model predicts nothing."""
    if not examples:
        return []
    labels = victim.num_labels if victim.task == "classification" else 2
    rows = split(
        encode(examples, victim.tokenizer, victim.task, max_length=victim.max_length, num_labels=labels, truncate=True)
    )
    for k, (example, row) in enumerate(zip(examples, rows), 1):
        if victim.task == "causal" and not predicts(row):
            raise InputError(
                f"{place_of(example, k)}: the text has one token, of which the model predicts none; remove the row"
            )
    return rows
