"""Recovering text from an update that was captured elsewhere, in a file of any framework, with any subset of the
parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from torch import Tensor

from rasura.core.given import of_kind
from rasura.core.interfaces import InputError, NotApplicable
from rasura.core.rng import generator
from rasura.core.so_far import Stage, interruptible
from rasura.core.threat import observe_update
from rasura.core.values import UNKNOWN, Message, Observation, Parameter, Reconstruction
from rasura.registry import trusted, with_open_ends
from rasura.report.notes import SURE
from rasura.runs.attempt import Outcome, Status, attempt
from rasura.runs.read_request import ReadRequest
from rasura.runs.reading_notes import notes
from rasura.runs.update_files import Update, holding, load_hidden, load_update, of_round, open_update
from rasura.victims.loading import Victim
from rasura.victims.structure import check_blocks

__all__ = ["ReadRequest", "ReadResult", "adapter_among", "load_hidden", "load_update", "read_update"]


@dataclass(frozen=True)
class ReadResult:
    """What was recovered from an update.

    ``status``: ``ok``, or ``failed`` or ``not_applicable`` with the ``reason``; there are no texts then. ``confidence``:
    ``verified``, ``span``, ``matched`` or ``none``, as in ``Reconstruction``. ``attack``: the attack that gave the answer.
    ``tokens``: the token ids of each text, None where a position stayed open. ``labels``: a class id for each text.
    ``ordered``: false for a bag of tokens. ``seconds``: duration of the attack. ``file``: the recognised format of the
    update's file, and how its names were matched, one line each. ``notes``: what the texts do not show, one line each.
    """

    status: Status
    reason: str
    attack: str
    texts: tuple[str, ...] = ()
    confidence: str = "none"
    tokens: tuple[tuple[int | None, ...], ...] = ()
    ordered: bool = True
    labels: tuple[int, ...] | None = None
    seconds: float = 0.0
    details: Mapping[str, Parameter] = field(default_factory=dict)
    file: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``rasura read --json`` prints them."""
        read = {
            "texts": list(self.texts), "confidence": self.confidence, "attack": self.attack,
            "tokens": [list(text) for text in self.tokens], "file": list(self.file),
        }  # fmt: skip
        if self.status != "ok":
            return {**read, "seconds": None, "reason": self.reason}
        return {
            **read, "ordered": self.ordered, "labels": list(self.labels) if self.labels is not None else None,
            "notes": list(self.notes), "seconds": self.seconds, "details": dict(self.details),
        }  # fmt: skip

    @property
    def lines(self) -> tuple[str, ...]:
        """The texts for a reader; in words where no word of a text was recovered."""
        return tuple(text if text.strip() else "(no word of this text was recovered)" for text in self.texts)

    @property
    def without_texts(self) -> str:
        """What is said where there are no texts."""
        if self.labels:
            named = ", ".join(map(str, self.labels))
            return f"no text was recovered, but an estimate of the labels, if the loss is plain cross entropy: {named}"
        return f"nothing was recovered: {self.reason or 'the attack returned no text'}"

    @property
    def claim(self) -> str:
        """The confidence, what it claims short of a proof, and the attack that gave the answer."""
        short = "" if self.confidence == "verified" else f" ({SURE[self.confidence]})"
        return f"{self.confidence}{short} by {self.attack} in {self.seconds:.1f} s"

    def _repr_html_(self) -> str:
        """What a notebook shows: the texts, and how sure they are."""
        if not self.texts:
            return f"<p>{escape(self.without_texts)}</p>"
        rows = "".join(f"<li>{escape(text)}</li>" for text in self.lines)
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<ul>{rows}</ul>{notes}<p>{escape(self.claim)}</p>"


def read_update(
    path: str | Path, victim: Victim, request: ReadRequest | None = None, begun: Callable[[Stage], None] | None = None
) -> ReadResult:
    """Recover text from the update in the file ``path``, which was computed with the model ``victim``.

    ``read_update("update.safetensors", victim, ReadRequest(batch_size=2, dropout=0.1)).texts``. If the attack finds nothing
    or is not applicable, ``status`` says so. ``begun``: hears which attack of a portfolio begins; an interruption
    then ends with the best guess so far. Raises ``InputError`` for bad input.
    """
    request = of_kind(request or ReadRequest(), ReadRequest, "request", "what is known is ReadRequest(batch_size=2)")
    with observed(path, victim, request) as (update, seen):

        def guess() -> Reconstruction:
            if all(n in seen.visible and not bool(seen.visible[n].any()) for n in seen.gradients):
                raise NotApplicable("every entry of the update is hidden, so there is nothing to read")
            run = partial(request.method, seen, rng=generator(request.seed, "read"), budget=request.budget)
            found = trusted(run() if begun is None else interruptible(run, begun), seen, request.method)
            return with_open_ends(found, seen, getattr(victim.tokenizer, "eos_token_id", None))

        outcome = attempt(guess, raises=(Exception,))
    return replace(_result(outcome, victim, request), file=update.notes)


def adapter_among(model: str | Path, *places: str | Path | None) -> Path | None:
    """The first of ``places`` that is the folder of a PEFT adapter, if ``model`` is not one itself; otherwise None."""
    if (Path(model) / "adapter_config.json").is_file():
        return None
    return next((Path(p) for p in places if p is not None and (Path(p) / "adapter_config.json").is_file()), None)


@contextmanager
def observed(path: str | Path, victim: Victim, request: ReadRequest) -> Iterator[tuple[Update, Observation]]:
    """The update in the file ``path``, and the view of someone who captured it. Inside the block, the victim's model holds
    the weights that the client had; everything that an attack computes must use these."""
    request.checked(victim)
    before = request.before if request.before_round is None else of_round(Path(path), request.before_round)
    check_blocks(victim.model)
    update = open_update(path, victim, before=before, names_from=request.names_from)
    with holding(victim.model, update.before):
        yield update, _observed(update, victim, request)


def _observed(update: Update, victim: Victim, request: ReadRequest) -> Observation:
    """The view of someone who captured the update."""
    from rasura.victims.models import parts

    entries, local = dict(update.entries), request.local
    if local.kind != "fedsgd":
        entries = {n: t / -local.learning_rate for n, t in entries.items()}
    if request.frozen_embeddings:
        entries = {n: t for n, t in entries.items() if n not in parts(victim.model).embedding_names}
    visible = {} if request.hidden is None else load_hidden(request.hidden, victim)
    visible = {n: mask for n, mask in visible.items() if n in entries and not bool(mask.all())}
    entries |= {n: entries[n] * mask for n, mask in visible.items()}
    _refuse_zeros(entries, visible)
    prior = request.scorer
    return observe_update(
        Message(entries, visible, kind=local.kind, sign="unknown" if request.update is None else "stated"),
        victim.task,
        model=victim.model,
        vocabulary=victim.vocabulary,
        mechanism=request.mechanism,
        batch_size=request.size,
        labels=request.labels,
        lengths=request.lengths,
        reference_text=request.reference_texts,
        language_model=None if prior is None else (prior.model, prior.vocabulary),
    )


def _refuse_zeros(entries: Mapping[str, Tensor], visible: Mapping[str, Tensor]) -> None:
    """Raises ``InputError`` where entries are seen and all are zero: any text explains such an update, so a guess would be
    called matched."""
    seen = any(n not in visible or bool(visible[n].any()) for n in entries)
    if seen and not any(bool(t.any()) for t in entries.values()):
        which = "visible entry" if visible else "entry"
        raise InputError(f"every {which} of the update is zero, so nothing can be read from it")


def _result(outcome: Outcome[Reconstruction], victim: Victim, request: ReadRequest) -> ReadResult:
    guess, seconds = outcome.guess, round(outcome.wall_seconds, 3)
    if guess is None:
        return ReadResult(outcome.status, outcome.reason, request.attack, seconds=seconds, details=outcome.details)
    return ReadResult(
        outcome.status,
        outcome.reason,
        str(guess.details.get("attack", request.method.name)),
        tuple(victim.vocabulary.text(t) for t in guess.tokens),
        guess.confidence,
        tuple(tuple(None if t == UNKNOWN else t for t in text) for text in guess.tokens),
        guess.ordered,
        guess.labels,
        seconds,
        guess.details,
        notes=notes(guess, victim, request),
    )
