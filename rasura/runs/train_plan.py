"""The plan of a training, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, get_args

from rasura.accounting import Run, assumes_poisson, checked_delta, formal
from rasura.accounting.guarantees import Batching
from rasura.core.interfaces import Defense, InputError
from rasura.core.local import TARGETS
from rasura.core.options import known
from rasura.core.values import Task
from rasura.registry import parse_defense
from rasura.registry.services import ServiceProtection, parse_service_protection
from rasura.runs.gradient_canaries import LEAST
from rasura.runs.noise_target import SOLVED, noiseless, solved_all, with_noise
from rasura.victims.fixed_order import check_ordered
from rasura.victims.recipe import Recipe
from rasura.victims.trainable import local
from rasura.victims.weights import task_for


@dataclass(frozen=True)
class TrainPlan:
    """A training on ``data`` under each of ``defenses`` and from each seed, evaluated on ``test``.

    ``task``: empty for the one that the model's folder states. ``holdout``: fraction of the training texts held out,
    unprotected, for early stopping; without ``test``, the model is also evaluated on them. ``limit``: number of training
    texts, drawn by the first seed; None for all. ``max_length``: maximum length of a text in tokens; with ``truncate``,
    longer texts are cut. ``lora``: rank of adapters, 0 for all weights; ``targets`` and ``adapter_dropout`` as in
    ``core.local.Adapter``. ``delta``: probability with which a formal guarantee may fail; None for 0.1 / number of
    training texts. ``target_epsilon``: ``dp-sgd``, ``normalised`` and ``dp-ftrl`` name no noise, and get the least with
    which all epochs spend at most this epsilon. ``service``: ``defenses`` are protections of a model service (``rasura
    list service-protections``), which receives all texts, including those for evaluation.
    ``text_column``, ``pair_column``, ``label_column``: unusual column names of the files. Labels that are text are numbered;
    ``result.json`` and the model's folder list the names. ``unit``: the column of ``data`` that says whose each text is.
    Persons are then drawn, clipped and hidden under ``dp-sgd`` and ``normalised``, each with the mean gradient of all their
    texts; guarantee and batch size are for persons, and persons are held out whole. ``gradient_canaries``: so many join
    each training with a guarantee by ``dp-sgd`` or ``normalised``, and measure a lower bound of its epsilon; 0 for none.
    """

    data: str
    test: str | None = None
    model: str = "minilm"
    task: str = ""
    defenses: tuple[str, ...] = ("none",)
    limit: int | None = None
    holdout: float = 0.1
    num_labels: int | None = None
    lora: int = 0
    truncate: bool = False
    max_length: int | None = None
    seeds: int = 1
    delta: float | None = None
    recipe: Recipe = field(default_factory=Recipe)
    service: bool = False
    text_column: str | None = None
    pair_column: str | None = None
    label_column: str | None = None
    targets: str = TARGETS[0]
    adapter_dropout: float = 0.0
    target_epsilon: float | None = None
    unit: str | None = None
    gradient_canaries: int = 0

    @cached_property
    def parts(self) -> Mapping[str, Defense]:
        """The parts of each of ``defenses`` in training, parsed once; empty if they protect a service."""
        return {text: () if self.service else local(parse_defense(self._noised(text))) for text in self.defenses}

    def _noised(self, text: str) -> str:
        """``text`` with some noise where only the number of training texts will say how much a target epsilon needs."""
        return with_noise(text, 1.0) if self.target_epsilon is not None and noiseless(text) else text

    def run(self, examples: int, sampling: Batching = "poisson") -> Run:
        """All epochs over ``examples`` training texts, or persons."""
        recipe = self.recipe
        unit: Literal["text", "person"] = "text" if self.unit is None or sampling != "poisson" else "person"
        return Run(examples, recipe.batch_size, recipe.epochs, self.delta, sampling, unit=unit)

    def held_out(self, count: int) -> int:
        """How many of ``count`` texts, or persons, are held out."""
        return max(1, round(self.holdout * count))

    def with_noise_for(self, examples: int) -> TrainPlan:
        """This plan with the noise that its target epsilon needs for ``examples`` training texts, or persons, and with each
        defense once: a training that is counted twice would be two models."""
        found, target = self.defenses, self.target_epsilon
        solved = found if target is None else solved_all(found, target, self.run(examples))
        once = tuple(dict.fromkeys(solved))
        return self if (once, target) == (found, None) else replace(self, defenses=once, target_epsilon=None)

    @cached_property
    def protections(self) -> Mapping[str, ServiceProtection]:
        """Each of ``defenses``, parsed once, if they protect a service; otherwise empty."""
        return {text: parse_service_protection(text) for text in self.defenses} if self.service else {}

    def checked(self) -> TrainPlan:
        """This plan. Raises ``InputError`` if it is wrong."""
        if not self.task:
            return replace(self, task=task_for(None, self.model, self.num_labels)).checked()
        known("task", self.task, [t for t in get_args(Task) if t != "vision"])
        _ = self.protections
        for parts in self.parts.values():
            check_ordered([p.counted for p in parts])
        if not 0 < self.holdout < 1:
            raise InputError(f"holdout is {self.holdout}; expected a fraction of the training texts between 0 and 1")
        for name in ("limit", "seeds", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; expected at least 1")
        if self.delta is not None:
            checked_delta(self.delta)
        if self.target_epsilon is not None and (self.service or not any(map(noiseless, self.defenses))):
            raise InputError(f"a target epsilon was given, but no defense is {' or '.join(SOLVED)}; pass --defense dp-sgd")
        if self.unit is not None:
            self._check_unit()
        if self.gradient_canaries:
            self._check_canaries()
        if self.lora < 0:
            raise InputError(f"lora is {self.lora}; expected a rank, or 0 to train all weights")
        known("targets", self.targets, TARGETS)
        if not 0 <= self.adapter_dropout < 1:
            raise InputError(f"adapter_dropout is {self.adapter_dropout}; expected at least 0 and below 1")
        if (self.adapter_dropout or self.targets != TARGETS[0]) and not self.lora:
            raise InputError("targets and adapter_dropout apply to adapters; also pass their rank as lora")
        if self.service and self.lora:
            raise InputError(
                f"lora is {self.lora}, but under protections of a service all weights are trained; leave it out"
            )
        return self

    def _check_unit(self) -> None:
        """Raises ``InputError`` unless each defense protects persons, ``none`` aside, which is there to compare with."""
        hidden = [n for n, parts in self.parts.items() if by_chance(parts)]
        others = [n for n in self.defenses if n not in hidden and n != "none"]
        if self.service or others or not hidden:
            raise InputError(
                f"the unit {self.unit} needs dp-sgd or normalised with a guarantee, which alone protect persons; found "
                f"{', '.join(others or self.defenses)}"
            )

    def _check_canaries(self) -> None:
        """Raises ``InputError`` where no defense takes canaries, or for too few of them."""
        if self.gradient_canaries < LEAST:
            raise InputError(f"{self.gradient_canaries} gradient canaries; expected at least {LEAST}, or 0 for none")
        if self.service or not any(map(by_chance, self.parts.values())):
            raise InputError(
                f"gradient canaries need dp-sgd or normalised with a guarantee; found {', '.join(self.defenses)}"
            )


def by_chance(parts: Defense) -> bool:
    """Whether ``parts`` have a guarantee for batches drawn by Poisson sampling, of texts or of persons."""
    mechanisms = [part.counted for part in parts]
    return formal(mechanisms) is not None and assumes_poisson(mechanisms)
