"""The plan of an audit of a model service, checked once before anything runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, get_args

from rasura.core.errors import InputError
from rasura.core.options import known
from rasura.core.values import Task
from rasura.registry import SERVICE_ATTACKS
from rasura.registry.services import ServiceProtection, parse_service_protection
from rasura.runs.fields import typed
from rasura.victims.weights import task_for

WEIGHTS = ("uploaded", "trained")
"""The weights that the operator reads: those uploaded, before any training, or those after training."""


@dataclass(frozen=True)
class ServicePlan:
    """``limit`` texts of ``data`` with at least four words, sent under each of ``protections``
    (``obfuslm:k=10/epsilon=0.1``; see ``rasura list service-protections``) and read by each of ``attacks``. The attacks use
    ``references`` texts from ``reference``, which must not contain audited texts; with ``drop_shared``, shared texts are
    left out. ``keys``: the number of keys of the service, drawn one by one from ``key`` on. Every text is sent under every
    key, and the texts are those of ``seed``. What one key hides says nothing of another: behind one, no protection holds.
    ``weights``: attack the service as it was ``uploaded``, before any training, or as it was after training (``trained``).
    ``task``: empty for the one that the model's folder states. ``text_column``, ``pair_column``, ``label_column``: unusual
    column names of the files. ``show_text``: keep the recovered text unmasked.
    """

    data: str
    reference: str
    model: str = "minilm"
    task: str = ""
    protections: tuple[str, ...] = ("obfuslm",)
    attacks: tuple[str, ...] = tuple(SERVICE_ATTACKS)
    limit: int = 64
    references: int = 5000
    seed: int = 0
    budget: str = "quick"
    weights: tuple[str, ...] = ("uploaded",)
    show_text: bool = False
    text_column: str | None = None
    pair_column: str | None = None
    label_column: str | None = None
    drop_shared: bool = False
    key: int = 0
    keys: int = 1

    @cached_property
    def parsed(self) -> Mapping[str, ServiceProtection]:
        """Each of ``protections``, parsed once, and the baseline ``none``."""
        return {text: parse_service_protection(text) for text in ("none", *self.protections)}

    def checked(self) -> ServicePlan:
        """This plan. Raises ``InputError`` if it is wrong."""
        if not self.task:
            return replace(self, task=task_for(None, self.model)).checked()
        known("task", self.task, [t for t in get_args(Task) if t != "vision"])
        known("budget", self.budget, ("quick", "default", "paper"))
        _ = [protection.adversaries for protection in self.parsed.values()]
        for name in self.weights:
            known("weights", name, WEIGHTS)
        for name in self.attacks:
            known("attack on a service", name, SERVICE_ATTACKS)
        if self.key < 0:
            raise InputError(f"key is {self.key}; expected a whole number of at least 0")
        for kind in ("protections", "attacks", "weights"):
            if not getattr(self, kind) or len(set(getattr(self, kind))) < len(getattr(self, kind)):
                raise InputError(f"no {kind} were given, or one was given twice; pass each one once")
        for name in ("limit", "references", "keys"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; expected at least 1")
        return self

    def canonical(self) -> dict[str, Any]:
        """The plan as plain JSON values: with the texts, the identity of a run's folder."""
        return {"kind": "service", **json.loads(json.dumps(asdict(self)))}


def service_plan_of(found: Mapping[str, Any], source: str) -> ServicePlan:
    """A plan from plain values with the names of ``ServicePlan``'s fields."""
    values = typed(ServicePlan, found, source)
    for name in ("data", "reference"):
        if name not in values:
            raise InputError(f"{source}: {name} is missing; expected a data file")
    return ServicePlan(**values)
