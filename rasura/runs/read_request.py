"""What is asked of an update that was captured elsewhere, and what is stated about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from rasura.core.given import of_kind
from rasura.core.interfaces import Attack, Budget, Defense, InputError
from rasura.core.local import Local
from rasura.core.mechanisms import Dropout, FrozenEmbeddings
from rasura.core.values import Mechanism, Reconstruction
from rasura.data.text import load_examples
from rasura.registry import attack as make_attack
from rasura.registry import parse_update
from rasura.runs.reading_checks import LOADED, check_known, whole_numbers
from rasura.victims.loading import Victim, load


@dataclass(frozen=True)
class ReadRequest:
    """How to read an update, and what is known about it. The attacks estimate whatever is not given.

    ``batch_size``, ``labels`` and ``lengths`` describe the texts behind the update: their number, and for each text its
    class id (from 0) and its length in tokens, special ones included. The model decides which are possible
    (``reading_checks``). ``dropout``: the dropout rate when the update was computed. ``frozen_embeddings``: do
    not use the embeddings' gradients. ``hidden``: a file that marks the entries which the adversary does not see
    (``load_hidden``). ``reference``: a file of texts of the same kind. ``language_model``: the folder or hub id of a causal
    model. ``update``: how the update was computed, as in ``rasura audit --update``; with ``fedavg-sgd:4:0.01`` the file
    holds the weights after minus the weights before; with ``fedsgd``, a gradient. None: one gradient, or what one step made
    of it, whose sign is not known. ``before``: a file or folder with the weights before the round, if the
    update's file holds the weights after it; ``before_round``: the round of these global weights, which are searched for
    beside the file. ``names_from``: an adapter or model whose weights are in a list without names.

    Raises ``InputError`` if a value is wrong.
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
    update: str | None = None
    budget: Budget = field(default_factory=Budget)
    seed: int = 0
    before: str | Path | None = None
    before_round: int | None = None
    names_from: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("labels", "lengths"):
            object.__setattr__(self, name, whole_numbers(getattr(self, name), name))
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(f"batch size is {self.batch_size}; expected at least 1")
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout is {self.dropout}; expected at least 0 and less than 1")
        for name, given in (("labels", self.labels), ("lengths", self.lengths)):
            if given and len(given) != self.size:
                raise InputError(f"{len(given)} {name} for a batch of {self.size}; give one for each text")
        if self.local.kind == "fedsgd" and self.local.lora:
            raise InputError(
                "update lora: pass the folder of the adapter as --model instead; its gradient has the update kind fedsgd"
            )
        if self.before is not None and self.before_round is not None:
            raise InputError("before and before_round were both given; pass one of them")
        if (self.before is not None or self.before_round is not None) and self.local.kind == "fedsgd":
            raise InputError(
                "a difference of weights is not a gradient; pass how it was trained, with the learning rate, "
                "for example --update fedavg-sgd:1:0.01 or --update fedavg-adamw:4:5e-5"
            )
        _ = self.method

    def checked(self, victim: Victim) -> ReadRequest:
        """This request. Raises ``InputError`` for labels and lengths that no text of ``victim`` has."""
        of_kind(victim, Victim, "victim", LOADED)
        check_known(self.labels, self.lengths, victim)
        return self

    @property
    def size(self) -> int | None:
        """The number of texts in the batch; None if it is unknown."""
        return self.batch_size or len(self.lengths or self.labels or ()) or None

    @cached_property
    def method(self) -> Attack[Reconstruction]:
        """The attack."""
        return make_attack(self.attack)

    @cached_property
    def parsed_update(self) -> tuple[Local, Defense]:
        """``update`` as local training, and what was then applied to the message."""
        return parse_update(self.update or "fedsgd")

    @cached_property
    def scorer(self) -> Victim | None:
        """The ``language_model``, loaded once for all updates."""
        return None if self.language_model is None else load(self.language_model, "causal", attacked=False)

    @cached_property
    def reference_texts(self) -> tuple[str, ...] | None:
        """The texts of the file ``reference``, read once for all updates."""
        return None if self.reference is None else tuple(e.text for e in load_examples(self.reference))

    @property
    def local(self) -> Local:
        """The local training behind the update."""
        return self.parsed_update[0]

    @property
    def mechanism(self) -> tuple[Mechanism, ...]:
        """The public description of how the update was computed."""
        local, wire = self.parsed_update
        stated = self.update not in (None, "fedsgd")
        made: list[Mechanism] = [local.mechanism, *(p.mechanism for p in wire)] if stated else []
        made += [FrozenEmbeddings()] if self.frozen_embeddings else []
        return (*made, Dropout(self.dropout)) if self.dropout else tuple(made)
