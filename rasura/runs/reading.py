"""Reading an update that somebody captured elsewhere: one safetensors file, any subset of the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rasura.core.interfaces import Attack, Budget, Defense, InputError, NotApplicable
from rasura.core.local import Local
from rasura.core.mechanisms import Dropout, FrozenEmbeddings
from rasura.core.rng import generator
from rasura.core.threat import observe_update
from rasura.core.values import UNKNOWN, Mechanism, Message, Observation, Parameter, Reconstruction
from rasura.data.text import load_examples
from rasura.registry import attack as make_attack
from rasura.registry import parse_update
from rasura.runs.attempt import Outcome, Status, attempt
from rasura.runs.update_files import load_hidden, load_update
from rasura.victims.loading import Victim, load


@dataclass(frozen=True)
class ReadRequest:
    """How to read an update, and what is known of it. The attacks estimate whatever is not given.

    ``batch_size``, ``labels`` and ``lengths`` describe the texts behind the update: their number, and for each text its
    class id and its length in tokens. ``dropout``: its rate while the
    update was made. ``frozen_embeddings``: leave the embeddings' gradients unread. ``hidden``: a file that says which
    entries the adversary does not see (``load_hidden``). ``reference``: a file of texts of the same kind.
    ``language_model``: the folder or hub id of a causal model. ``update``: how the file came about, as in
    ``rasura audit --update``; with ``fedavg-sgd:4:0.01`` it holds the weights after minus the weights before.

    Raises ``InputError`` for what is wrong with it.
    """

    attack: str = "best"
    batch_size: int | None = None
    labels: Sequence[int] | None = None
    lengths: Sequence[int] | None = None
    dropout: float = 0.0
    frozen_embeddings: bool = False
    hidden: str | Path | None = None
    reference: str | Path | None = None
    language_model: str | None = None
    update: str = "fedsgd"
    budget: Budget = field(default_factory=Budget)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("labels", "lengths"):
            given = getattr(self, name)
            object.__setattr__(self, name, tuple(given) if given else None)
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(f"batch size is {self.batch_size}; expected at least 1")
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout is {self.dropout}; expected at least 0 and less than 1")
        for name, given in (("labels", self.labels), ("lengths", self.lengths)):
            if given and len(given) != self.size:
                raise InputError(f"{len(given)} {name} for a batch of {self.size}; give one for each text")
        if self.local.kind == "fedsgd" and self.local.lora:
            raise InputError("update lora: pass the adapter's folder as --model instead; its gradient is fedsgd")
        _ = self.method

    @property
    def size(self) -> int | None:
        """How many texts are in the batch; None where nothing says so."""
        return self.batch_size or len(self.lengths or self.labels or ()) or None

    @cached_property
    def method(self) -> Attack[Reconstruction]:
        """The attack."""
        return make_attack(self.attack)

    @cached_property
    def parsed_update(self) -> tuple[Local, Defense]:
        """``update`` as local training, and what happened to the message after it."""
        return parse_update(self.update)

    @property
    def local(self) -> Local:
        """The local training behind the update."""
        return self.parsed_update[0]

    @property
    def mechanism(self) -> tuple[Mechanism, ...]:
        """The public description of how the update was made."""
        local, wire = self.parsed_update
        made: list[Mechanism] = [local.mechanism, *(p.mechanism for p in wire)] if self.update != "fedsgd" else []
        made += [FrozenEmbeddings()] if self.frozen_embeddings else []
        return (*made, Dropout(self.dropout)) if self.dropout else tuple(made)


@dataclass(frozen=True)
class ReadResult:
    """What was read of an update.

    ``status``: ``ok``, or ``failed`` or ``not_applicable`` with the ``reason``; there are no texts then. ``confidence``:
    ``verified``, ``span``, ``matched`` or ``none``, as in ``Reconstruction``. ``attack``: the one that gave the answer.
    ``tokens``: the token ids of each text, None where a position stayed open. ``labels``: a class id for each
    text. ``ordered``: false for a bag of tokens. ``seconds``: what the attack took.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``rasura read --json`` prints them."""
        read = {
            "texts": list(self.texts), "confidence": self.confidence, "attack": self.attack,
            "tokens": [list(text) for text in self.tokens],
        }  # fmt: skip
        if self.status != "ok":
            return {**read, "seconds": None, "reason": self.reason}
        return {
            **read, "ordered": self.ordered, "labels": list(self.labels) if self.labels is not None else None,
            "seconds": self.seconds, "details": dict(self.details),
        }  # fmt: skip


def read_update(path: str | Path, victim: Victim, request: ReadRequest | None = None) -> ReadResult:
    """Read the text behind the update in the file ``path``, which was made with the model ``victim``.

    ``read_update("update.safetensors", victim, ReadRequest(batch_size=2, dropout=0.1)).texts``. An attack that finds nothing
    or cannot be tried is the result's ``status``. Raises ``InputError`` for bad input.
    """
    request = request or ReadRequest()
    seen = _observed(path, victim, request)

    def guess() -> Reconstruction:
        if all(n in seen.visible and not bool(seen.visible[n].any()) for n in seen.gradients):
            raise NotApplicable("every entry of the update is hidden, so that there is nothing to read")
        return request.method(seen, rng=generator(request.seed, "read"), budget=request.budget)

    return _result(attempt(guess, raises=(Exception,)), victim, request)


def _observed(path: str | Path, victim: Victim, request: ReadRequest) -> Observation:
    """What whoever captured the update sees."""
    from rasura.victims.models import parts

    entries, local = load_update(path, victim), request.local
    if local.kind != "fedsgd":
        entries = {n: t / -local.learning_rate for n, t in entries.items()}
    if request.frozen_embeddings:
        entries = {n: t for n, t in entries.items() if n not in parts(victim.model).embedding_names}
    visible = {} if request.hidden is None else load_hidden(request.hidden, victim)
    visible = {n: mask for n, mask in visible.items() if n in entries and not bool(mask.all())}
    entries |= {n: entries[n] * mask for n, mask in visible.items()}
    prior = None if request.language_model is None else load(request.language_model, "causal", attacked=False)
    return observe_update(
        Message(entries, visible, kind=local.kind),
        victim.task,
        model=victim.model,
        vocabulary=victim.vocabulary,
        mechanism=request.mechanism,
        batch_size=request.size,
        labels=request.labels,
        lengths=request.lengths,
        reference_text=None if request.reference is None else tuple(e.text for e in load_examples(request.reference)),
        language_model=None if prior is None else (prior.model, prior.vocabulary),
    )


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
    )
