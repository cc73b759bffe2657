"""The plan of attacks on a trained model, checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from rasura.core.interfaces import Defense, InputError
from rasura.core.options import known
from rasura.core.values import Task
from rasura.metrics.membership import auc_bound, needed
from rasura.registry import MEMBERSHIP, membership_adversaries, parse_defense, usual_membership
from rasura.runs.membership_rows import cut, learned, told_by, trained_under
from rasura.victims.adapters import base_of
from rasura.victims.recipe import Recipe
from rasura.victims.weights import is_adapter, task_of


@dataclass(frozen=True)
class MembershipPlan:
    """Attacks that separate ``members`` from ``non_members`` (files of texts with labels) of the trained ``model``.

    ``rows``: the ``rows.json`` of a training run, which lists the rows of ``members`` that were used. If ``non_members`` is
    None, the rows held out are the non-members. ``base``: the public model from which training started; None for the base
    of an adapter, or the one that ``rows`` name. ``task``: None for what the model's folder states.
    ``attacks``: None for the usual ones of the task, and those that know ``defense``. ``defense``, ``recipe``: how the
    model was trained; without ``recipe`` as ``rows`` say, or for five epochs. The adversary trains ``shadow_models`` models
    in the same way, each on a random half of the candidates and of ``reference``, a file of other texts. Texts are cut as
    ``rows`` say. ``fprs``: false positive rates; empty for 1 % and 0.1 %, if there are enough texts. ``epsilon``,
    ``delta``: a guarantee with which the figures are compared. ``limit``: maximum number of texts asked about on each side;
    others are compared with all ``members``. ``text_column``, ``pair_column``, ``label_column``: unusual column names of
    the files. Labels that are text stand for the model's classes of the same names.
    """

    model: str
    members: str
    non_members: str | None = None
    rows: str | None = None
    base: str | None = None
    task: str | None = None
    attacks: tuple[str, ...] | None = None
    reference: str | None = None
    defense: str = "none"
    shadow_models: int = 8
    fprs: tuple[float, ...] = ()
    epsilon: float | None = None
    delta: float = 0.0
    limit: int | None = None
    num_labels: int | None = None
    truncate: bool = False
    max_length: int | None = None
    text_column: str | None = None
    pair_column: str | None = None
    label_column: str | None = None
    recipe: Recipe | None = None

    @cached_property
    def parts(self) -> Defense:
        """The parts of ``defense`` in training, parsed once."""
        return parse_defense(self.defense)

    @cached_property
    def learning(self) -> Recipe:
        """How shadow models learn."""
        return self.recipe or learned(self.model, self.members, self.rows, 0, {})

    def _told(self) -> dict[str, Any]:
        return {} if self.rows is None else told_by(self.rows, self.members)

    @property
    def chose(self) -> bool:
        """Whether the non-members were held out by the training, and chose which epoch's weights it kept or when it stopped.

        Rows of an earlier version do not say when a training stops: of these, only those that kept the best epoch count."""
        found = self._told().get("recipe")
        if self.non_members is not None or not isinstance(found, dict):
            return False
        before = found.get("epochs", 0) if found.get("keep") == "best" else 1
        compared: Any = found.get("compared", before)
        return bool(compared > 1)

    def _check_protection(self) -> None:
        """Raises ``InputError`` where shadow models would be trained under another protection than the model was."""
        told = trained_under(self.model)
        if told is None or told == self.defense:
            return
        if [p.mechanism for p in replace(self, defense=told).parts] != [p.mechanism for p in self.parts]:
            raise InputError(
                f"{self.model} was trained under {told}, so that shadow models under {self.defense} would say nothing "
                f"of it; pass --defense {told}"
            )

    def _named_by_rows(self) -> str | None:
        """The model on which the training of ``rows`` began."""
        found = self._told().get("base")
        return found if isinstance(found, str) and found else None

    def checked(self) -> MembershipPlan:
        """This plan, with base, task and attacks filled in. Raises ``InputError`` if it is wrong."""
        task = self.task or task_of(self.model)
        known("task", task, [t for t in get_args(Task) if t != "vision"])
        attacks = self.attacks
        if attacks is None:  # without those that know the protection, nothing could be said of the model
            attacks = tuple(dict.fromkeys((*usual_membership(task), *membership_adversaries(self.defense).attacks)))
        _ = self.parts
        self._check_protection()
        truncate, max_length = cut(self._told(), str(self.rows), self.truncate, self.max_length)
        if self.non_members is None and self.rows is None:
            raise InputError(
                "there are no texts that the model was not trained on; pass --non-members, or --rows of a training run"
            )
        if not attacks:
            raise InputError(f"no attack given; expected at least one of {', '.join(MEMBERSHIP)}")
        for name in attacks:
            known("membership attack", name, MEMBERSHIP)
            if task not in MEMBERSHIP[name].tasks:
                raise InputError(f"{name} is an attack on {' and '.join(sorted(MEMBERSHIP[name].tasks))} models, but the "
                    f"task is {task}; leave it out")  # fmt: skip
        if self.shadow_models < 2 or self.shadow_models % 2:
            raise InputError(
                f"shadow models: {self.shadow_models}; expected an even number of at least 2: each text is in half of them"
            )
        if self.limit is not None and self.limit < 2:
            raise InputError(f"limit is {self.limit}; expected at least 2 texts of each side")
        for fpr in self.fprs:
            needed(fpr)
        if self.epsilon is not None:
            auc_bound(self.epsilon, self.delta)
        elif self.delta:
            raise InputError(f"delta is {self.delta} without an epsilon; also pass --epsilon")
        base = self.base or (base_of(Path(self.model)) if is_adapter(self.model) else self._named_by_rows())
        if base is None:  # shadow models and comparisons from another model would make the attacks look weak
            raise InputError(f"{self.model} does not say on which model its training began; pass that model as --base")
        return replace(
            self, task=task, attacks=attacks, base=base, recipe=self.learning, truncate=truncate, max_length=max_length
        )
