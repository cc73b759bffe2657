"""The guarantee that a calibration states of a setting: what the training guarantees that its command runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rasura.accounting import guarantee, sampling_for
from rasura.core.values import Mechanism
from rasura.data.text import columns_of, load_examples
from rasura.runs.audit_data import AuditData, batches_of
from rasura.runs.held_out import left_out, parted
from rasura.runs.plans import Plan
from rasura.runs.train_plan import TrainPlan
from rasura.runs.uncovered import uncovered
from rasura.victims.batching import split
from rasura.victims.loading import Victim


@dataclass(frozen=True)
class TrainedOn:
    """The ``examples`` that a training by ``plan`` is on, as ``victim`` sees them in the ``audit``, and those that are
    ``held`` out."""

    plan: TrainPlan
    audit: Plan
    victim: Victim
    examples: Sequence[Any]
    held: Sequence[Any]

    @cached_property
    def _rows(self) -> list[Any]:
        return batches_of(self.examples, self.audit, self.victim)

    def promised(self, mechanisms: Sequence[Mechanism], sizes: Sequence[int]) -> dict[str, Any]:
        """The planned guarantee under ``mechanisms`` with secure noise, with what it does not cover among its warnings.
        ``sizes``: entries of each trained tensor. Raises ``InputError`` for texts that cannot be
        trained on."""
        if self.held:
            held = batches_of(self.held, self.audit, self.victim)
            left_out([one for some in held for one in split(some)], self._rows, self.plan)
        run = self.plan.run(len(self.examples), sampling_for(mechanisms))
        found = guarantee(mechanisms, run, sizes=sizes)
        if found.epsilon is not None or found.otherwise is not None:
            more = uncovered(self.plan, self._rows, self.held, owned=False)
            found = replace(found, warnings=(*found.warnings, *more))
        return {**found.to_dict(), "examples": len(self.examples)}


def trained_on(plan: TrainPlan, audit: Plan, victim: Victim, data: AuditData, *, read: bool) -> TrainedOn:
    """What a training by ``plan`` is on: its file where it can be ``read``, or else the texts of the audit's ``data``; of
    images, which no command trains on, all. Raises ``InputError`` for a file that cannot be trained on."""
    if plan.task == "vision":
        return TrainedOn(plan, audit, victim, data.images, ())
    everything = load_examples(plan.data, columns=columns_of(plan), model=plan.model) if read else data.examples
    kept, held = parted(plan, everything)
    return TrainedOn(plan, audit, victim, [everything[k] for k in kept], [everything[k] for k in held])
