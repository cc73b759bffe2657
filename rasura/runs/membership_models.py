"""The two models that membership attacks ask: the audited model, and the public one on which its training began."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rasura.core.answers import Answers
from rasura.core.batches import Batch
from rasura.core.errors import InputError, NotApplicable
from rasura.runs.membership_plan import MembershipPlan
from rasura.runs.membership_rows import body, told_by
from rasura.victims.adapters import base_of, revision_of, turns_off, with_adapter_like
from rasura.victims.fingerprint import fingerprints
from rasura.victims.loading import Victim, load, with_one_label, with_own_head
from rasura.victims.outputs import answers
from rasura.victims.weights import is_adapter


class QueriedModels:
    """The audited model of ``plan`` and its public base. Each is asked once about each of the ``kept`` sets of texts.

    The base of a LoRA adapter is the audited model with the adapter disabled; it is loaded on its own only where an attack
    needs its weights. Raises ``InputError`` for a base with other tokens, and for an audited classifier without its head.
    """

    def __init__(self, plan: MembershipPlan, num_labels: int, device: str) -> None:
        self.plan, self.device = plan, device
        task: Any = plan.task
        here = is_adapter(plan.model)
        moved = here and plan.base != base_of_or_none(plan.model)
        audited = load(
            str(plan.base) if moved else plan.model, task, num_labels=num_labels, seed=plan.learning.seed, device=device,
            attacked=False, adapter=plan.model if moved else None,
        )  # fmt: skip
        self.victim = with_one_label(with_own_head(audited))
        off = here and turns_off(Path(plan.model))
        self.switch: Any = self.victim.model.disable_adapter if off else None  # type: ignore[union-attr]  # of PEFT
        self.pad = self.victim.vocabulary.pad_id or 0
        self.kept: tuple[Sequence[Batch], ...] = ()
        self._known: dict[tuple[str, int], Answers] = {}
        if self.switch is None and self.base.vocabulary.size != self.victim.vocabulary.size:
            raise InputError(
                f"{plan.base} has {self.base.vocabulary.size} tokens, but {plan.model} has "
                f"{self.victim.vocabulary.size}; pass the public model from which training started as --base"
            )

        if plan.rows is not None and self.switch is None:
            began = told_by(plan.rows, plan.members).get("base_weights")
            if began is not None and began != body(self.base):
                raise InputError(
                    f"{plan.base} has other weights than the model on which the training of {plan.rows} began; pass that "
                    "model as --base"
                )

    @cached_property
    def base(self) -> Victim:
        """The public model from which training started, with a head drawn from the plan's seed."""
        return self.fresh(self.plan.learning.seed)

    def of_base(self) -> Mapping[str, Any]:
        """What tells the public model from others, for ``RunStore.describe``; empty where the audited model holds it."""
        return fingerprints("base model", self.base.model, self.base.vocabulary) if self.switch is None else {}

    def fresh(self, seed: int) -> Victim:
        """The public model, with a head drawn from ``seed``."""
        task: Any = self.plan.task
        labels = self.victim.num_labels or 2
        base, adapter = str(self.plan.base), self.plan.model
        revision = revision_of(Path(adapter), base) if is_adapter(adapter) else None
        return load(base, task, num_labels=labels, seed=seed, device=self.device, attacked=False, revision=revision)

    def learning(self, victim: Victim, seed: int) -> nn.Module:
        """The model of ``victim`` as a shadow model trains it: with fresh adapters where the audited model has adapters."""
        here = Path(self.plan.model)
        return with_adapter_like(victim.model, here, seed) if is_adapter(here) else victim.model

    def ask(self, rows: Sequence[Batch]) -> Answers:
        """The audited model's answers."""
        return self._answers("audited", rows)

    def ask_reference(self, rows: Sequence[Batch]) -> Answers:
        """The public model's answers. Raises ``NotApplicable`` where they are the audited model's own for each of ``rows``:
        a comparison then says nothing of what was trained."""
        found = self._answers("reference", rows)
        if self.untrained(rows):
            raise NotApplicable(
                f"{self.plan.base} answers every text as {self.plan.model} does, so there is nothing to compare; pass the "
                "model as it was after training, and as --base the public one from which training started"
            )
        return found

    def before(self, rows: Sequence[Batch]) -> torch.Tensor:
        """The public model's loss on each of ``rows``, in nats: what texts tell that no training on them has seen."""
        return self._answers("reference", rows).losses

    def untrained(self, rows: Sequence[Batch]) -> bool:
        """Whether the audited model answers each of ``rows`` as the public one does: then no training shows in it."""
        if not rows:
            return False
        now, before = (self._answers(which, rows).losses for which in ("audited", "reference"))
        return torch.equal(now, before)

    def _answers(self, which: str, rows: Sequence[Batch]) -> Answers:
        kept = any(rows is some for some in self.kept)
        if kept and (which, id(rows)) in self._known:
            return copy.deepcopy(self._known[which, id(rows)])  # an attack may write into what it was told
        audited = which == "audited" or self.switch is not None
        with self.switch() if which == "reference" and self.switch is not None else nullcontext():
            found = answers((self.victim if audited else self.base).model, rows, self.pad, tokens=kept)
        if kept:
            self._known[which, id(rows)] = copy.deepcopy(found)
        return found


def base_of_or_none(model: str) -> str | None:
    """The base model that an adapter names; None where it names none that can be loaded."""
    try:
        return base_of(Path(model))
    except InputError:
        return None
