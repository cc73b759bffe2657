"""The public description of each protection of an update, as typed values that answer the questions of adaptive attacks.

There is one frozen class for each protection and each kind of update. ``mechanism(name, parameters)`` makes one from its
plain form (``.name`` and ``.parameters``, which may come from JSON) and refuses unknown ones: an unknown protection must
never count as one without noise. Protections of model services are not included; they have their own attacks, which know
them by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rasura.core.checked import flag, number, rules, whole, word
from rasura.core.errors import InputError
from rasura.core.noise_mechanisms import Directional as Directional
from rasura.core.noise_mechanisms import DpFtrl as DpFtrl
from rasura.core.noise_mechanisms import DpSgd as DpSgd
from rasura.core.noise_mechanisms import Gaussian as Gaussian
from rasura.core.noise_mechanisms import Laplace as Laplace
from rasura.core.noise_mechanisms import Normalised as Normalised
from rasura.core.protection import KNOWN, Protection
from rasura.core.values import Mechanism, Stage


def mechanism(name: str, parameters: Mapping[str, Any] | None = None) -> Protection:
    """The protection called ``name`` with these parameters. Raises ``InputError`` for unknown names, bad values.

    >>> mechanism("gaussian", {"sigma": 0.1})
    Gaussian(sigma=0.1, clip=1.0)
    """
    if name not in KNOWN:
        raise InputError(f"unknown mechanism {name!r}; known: {', '.join(sorted(KNOWN))}")
    made, given = KNOWN[name], dict(parameters or {})
    names = rules(made)
    for one in given:
        if one not in names:
            raise InputError(f"{name}: unknown parameter {one!r}; known: {', '.join(names) or 'none'}")
    lacking = [n for n, one in names.items() if n not in given and one.default is one.default_factory]
    if lacking:
        raise InputError(f"{name}: the parameter {lacking[0]} is missing; a mechanism must state it")
    return made(**given)


def typed(described: Mechanism) -> Protection:
    """``described`` as a typed protection; unchanged if it already is one. Raises as ``mechanism`` does."""
    return described if isinstance(described, Protection) else mechanism(described.name, described.parameters)


# Kinds of update, and the plain aggregation


@dataclass(frozen=True)
class Mean(Protection, named="mean", at=Stage.AGGREGATE):
    """The unchanged gradient of the mean loss."""


@dataclass(frozen=True)
class _Trained(Protection):
    """The change made by a client's local training; with ``lora`` above 0, the change of adapters of that rank."""

    steps: int = whole(1, minimum=1)
    learning_rate: float = number(1.0, minimum=0, open="low")
    weight_decay: float = number(0.0, minimum=0)
    lora: int = whole(0, minimum=0)


@dataclass(frozen=True)
class FedSgd(_Trained, named="fedsgd", at=Stage.AGGREGATE):
    """One gradient."""


@dataclass(frozen=True)
class FedAvgSgd(_Trained, named="fedavg-sgd", at=Stage.AGGREGATE):
    """Several steps of SGD."""


@dataclass(frozen=True)
class FedAvgAdamW(_Trained, named="fedavg-adamw", at=Stage.AGGREGATE):
    """Several steps of AdamW."""


# What is left out, or coarser


@dataclass(frozen=True)
class _Hiding(Protection):
    """A part of the update does not arrive."""

    @property
    def hides_entries(self) -> bool:
        return True


@dataclass(frozen=True)
class FrozenEmbeddings(_Hiding, named="frozen-embeddings", at=Stage.MODEL):
    """The embeddings are not trained, so their gradients are not sent."""


@dataclass(frozen=True)
class FrozenBlocks(_Hiding, named="frozen-blocks", at=Stage.MODEL):
    """The embeddings and the first ``n`` blocks are not trained."""

    n: int = whole(minimum=0)


@dataclass(frozen=True)
class Pruning(_Hiding, named="pruning", at=Stage.WIRE):
    """The fraction ``ratio`` of the entries that is smallest is left out."""

    ratio: float = number(minimum=0, maximum=1, open="high")

    @property
    def hides_entries(self) -> bool:
        return self.ratio > 0


@dataclass(frozen=True)
class RandomPruning(Pruning, named="random-pruning", at=Stage.WIRE):
    """A random fraction ``ratio`` of the entries is left out."""


@dataclass(frozen=True)
class Sealing(_Hiding, named="sealing", at=Stage.WIRE):
    """Entries are encrypted: the fraction ``ratio`` that matters most by ``metric``, or the tensors named by it."""

    metric: str = word()
    ratio: float | None = number(None, minimum=0, maximum=1, optional=True)
    scope: str = word("global", words=("global", "tensor"))
    embeddings: str = word("counted", words=("counted", "sealed", "clear"))
    scheme: str = word("none", words=("none", "bfv", "ckks", "secagg"))
    noise_budget_bits: float | None = number(None, optional=True, absent=True)


@dataclass(frozen=True)
class Fp16(Protection, named="fp16", at=Stage.WIRE):
    """Entries in half precision. Rounding is not noise: equal entries are rounded alike."""


@dataclass(frozen=True)
class Bf16(Protection, named="bf16", at=Stage.WIRE):
    """Entries in bfloat16."""


@dataclass(frozen=True)
class Sign(Protection, named="sign", at=Stage.WIRE):
    """Only the signs of the entries."""


# What is done to the model, the texts, the moment


@dataclass(frozen=True)
class Dropout(Protection, named="dropout", at=Stage.MODEL):
    """Active dropout with probability ``p``."""

    p: float = number(minimum=0, maximum=1, open="high")

    @property
    def dropout_rate(self) -> float:
        return self.p


@dataclass(frozen=True)
class Ghost(Protection, named="ghost", at=Stage.DATA):
    """Tokens are replaced by others before training; the parameters are those of ``ShadowSettings`` and ``Selection``."""

    k: int = whole(minimum=1)
    overlap: float = number(minimum=0, maximum=1)
    grow: int = whole(minimum=1)
    max_k: int = whole(minimum=1)
    language: str | None = word(optional=True)
    direct: bool = flag()
    indirect: bool = flag()
    lemma: bool = flag()
    group: int = whole(minimum=1)
    choices: int = whole(minimum=1)
    keep_punctuation: bool = flag()
    keep_numbers: bool = flag()
    round_trip: bool = flag()
    beam: int = whole(minimum=1)
    tried: int = whole(minimum=0)
    sweeps: int = whole(minimum=0)
    enough: float = number(minimum=0, maximum=1, open="high")
    start: str = word(words=("nearest", "random"))

    @property
    def changes_texts(self) -> bool:
        return True


@dataclass(frozen=True)
class Accumulate(Protection, named="accumulate", at=Stage.WIRE):
    """Nothing is sent below this many different ``tokens``, or ``widths`` times the hidden size: one of the two."""

    tokens: int | None = whole(None, minimum=1, optional=True, absent=True)
    widths: float | None = number(None, minimum=0, open="low", optional=True, absent=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.tokens is None) == (self.widths is None):
            raise InputError("accumulate: expected either tokens or widths")

    @property
    def accumulates(self) -> bool:
        return True
