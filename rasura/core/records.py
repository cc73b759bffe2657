"""One finished cell as a ``Record``, its id, and the required form of a stored record. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

SCHEMA = 3

MASK = "███"
"""Stands in place of a private word, whatever its length: even a length can give a name away."""

LABELS = "label_accuracy"
"""The score of the labels that an attack named: 1 for each label of the batch that is among them. It is of no text."""

CUT = "cut"
"""In the details of a record: for each text how many of its tokens were sent, and how many it has; for each image its
pixels a side as sent, and before. Empty if none was cut, cropped or scaled."""

Details = Mapping[str, Any]
"""What an attack reports besides its scores, in any form. Verdicts read ``ran`` and ``attack`` of the portfolio, as
texts."""

Adversaries = Mapping[str, Any]
"""Which attacks know the protection: ``attacks``, ``unknown`` parts, ``protection_readers``; see
``rasura.registry.Adversaries``."""


CLIENT = "client"
"""Stored in place of an attack: what the client of a model service itself reads from the model's output."""

OPERATOR = "service-operator"
"""The threat model of a model service. Under it the seed of a Record is the number of the service's key."""

ACTIVE_THREATS = frozenset({"malicious-server"})
"""Threat models whose server may send crafted weights: the names of those of ``rasura.core.threat`` that are ``active``."""


@dataclass(frozen=True)
class Record:
    """One cell: an attack on one batch under one defense and one threat model.

    ``update``: what the adversary has: a kind of update; ``model`` for an attack on a trained model; for a model service,
    the weights that the adversary reads, ``uploaded`` or ``trained``. ``batch_size``: number of texts or images. ``scores``
    and ``blind``: metric -> per_record, mean, low, high, worst, n, unit, higher_is, bounds. ``status``, with ``reason``: ok,
    failed (the attack ran and found nothing), crashed (an error) or not_applicable; scores are empty unless ok.
    ``examples``: a number for each text or image of the batch, equal for equal examples. ``recovered`` is masked unless
    requested. ``known_by``: the attacks that know the protection; without them, no verdict says that the protection stops
    anything. ``sent_bytes``: size of the message on the wire if something is sealed, otherwise of its entries;
    ``defense_seconds``: wall-clock seconds of the protections on data and message. ``crafted``: the server crafted the
    weights.
    """

    key: str
    attack: str
    defense: str
    threat: str
    model: str
    data: str
    batch_size: int
    seed: int
    batch: int
    status: str
    examples: list[int] = field(default_factory=list)
    update: str = "fedsgd"
    reason: str = ""
    confidence: str = "none"
    scores: Mapping[str, Any] = field(default_factory=dict)
    blind: Mapping[str, Any] = field(default_factory=dict)
    recovered: list[dict[str, Any]] = field(default_factory=list)
    details: Details = field(default_factory=dict)
    known_by: Adversaries = field(default_factory=dict)
    n_tokens: int = 0
    sent_bytes: int = 0
    defense_seconds: float = 0.0
    threat_plain: str = ""
    crafted: bool = False
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_mb: float = 0.0
    device: str = "cpu"
    versions: Mapping[str, str] = field(default_factory=dict)
    schema: int = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Record:
        """The Record with the plain values ``found``, as read from a run store."""
        return cls(**{one.name: found[one.name] for one in fields(cls)})


def canonical(value: Any) -> str:
    """Canonical JSON: the same text for the same value, in every process. Refuses values that JSON cannot represent."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def cell_key(**coordinates: Any) -> str:
    """The id of a cell, made from its coordinates; the same in every process."""
    return hashlib.sha256(canonical(coordinates).encode()).hexdigest()[:24]


def wrong_in(record: object) -> str:
    """What is wrong with a stored record: the first field that a report relies on and that is not as expected. Empty if
    nothing is wrong."""
    if not isinstance(record, dict):
        return "it is not a record"
    for one in fields(Record):
        if one.name not in record or not _FORMS[str(one.type)](record[one.name]):
            return f"its {one.name} is not as expected"
    if record["status"] not in STATES:
        return "its status is not as expected"
    return ""


def _number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < float("inf")  # type: ignore[arg-type]  # a number by then


def _words(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)


def _scores(value: object) -> bool:
    """Metric -> its measured values: numbers, or null where there is none."""
    if not isinstance(value, dict) or not all(isinstance(v, dict) for v in value.values()):
        return False
    every = [v for score in value.values() for v in score.get("per_record", [])] if _lists(value) else [""]
    every += [score[name] for score in value.values() for name in ("mean", "low", "high", "worst") if name in score]
    return all(v is None or _number(v) for v in every)


def _lists(scores: dict[str, Any]) -> bool:
    return all(isinstance(score.get("per_record", []), list) for score in scores.values())


STATES = ("ok", "failed", "crashed", "not_applicable")

_FORMS: Mapping[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "int": lambda value: type(value) is int and value >= 0,
    "bool": lambda value: isinstance(value, bool),
    "float": _number,
    "Mapping[str, Any]": _scores,
    "Details": lambda value: isinstance(value, dict),
    "Adversaries": lambda value: isinstance(value, dict) and all(_words(v) for v in value.values()),
    "list[int]": lambda value: isinstance(value, list) and all(type(v) is int and v >= 0 for v in value),
    "list[dict[str, Any]]": lambda value: isinstance(value, list) and all(isinstance(v, dict) for v in value),
    "Mapping[str, str]": lambda value: isinstance(value, dict) and all(isinstance(v, str) for v in value.values()),
}
"""By the annotation of a field of ``Record``: a check of the stored value's form."""
