"""The matrix of an audit: its cells, their ids in the store, and which cells share a training step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from typing import Any

from rasura.core.records import cell_key
from rasura.core.run_store import RunStore
from rasura.core.threat import THREATS
from rasura.runs.audit_data import AuditData
from rasura.runs.plans import Plan


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix."""

    attack: str
    update: str
    defense: str
    threat: str
    batch_size: int
    seed: int
    batch: int
    key: str

    @property
    def protected_update(self) -> list[str]:
        """The name of the kind of message; for one gradient it leaves the seeds as they always were."""
        return [self.defense] if self.update == "fedsgd" else [self.update, self.defense]

    @property
    def of_step(self) -> tuple[Any, ...]:
        """The coordinates that the cells of one step share."""
        # An active adversary has the step taken on weights of its own.
        own = self.attack if THREATS[self.threat].active else ""
        return self.update, self.defense, self.batch_size, self.seed, self.batch, own


def enumerated(
    plan: Plan, data: AuditData, defenses: Collection[str], names: Mapping[tuple[str, int], Sequence[str]]
) -> Iterator[Cell]:
    """Every cell of ``plan``, those that share a step one after another. ``names``: of the texts or images of each batch, by
    protection and batch size.

    A cell's id depends on the texts of its own batch, and on no others: an audit of more texts takes over the cells of one
    with fewer. Where the model lies does not matter either; which weights it has is checked apart from this.
    """
    known: dict[str, Any] = {} if data.reference_name is None else {"reference": data.reference_name}
    known |= {
        name: str(value)
        for name in ("language_model", "entries", "max_length")
        if (value := getattr(plan, name)) is not None
    }
    known |= {"model": Path(plan.model).name, "task": plan.task, "num_labels": plan.num_labels or data.num_labels}
    for size in plan.batch_sizes:
        for seed in range(plan.seed, plan.seed + plan.seeds):
            for batch in range(max(len(names[defense, size]) for defense in defenses)):
                for update, defense, threat, attack in product(plan.updates, defenses, plan.threats, plan.attacks):
                    if batch >= len(names[defense, size]):
                        continue
                    where = {"attack": attack, "defense": defense, "threat": threat, "batch_size": size}
                    where |= {"seed": seed, "batch": batch, "budget": plan.budget}
                    where |= {"update": update} if update != "fedsgd" else {}
                    key = cell_key(data=names[defense, size][batch], **known, **where)
                    yield Cell(attack, update, defense, threat, size, seed, batch, key)


def by_step(cells: Iterable[Cell], store: RunStore) -> list[list[Cell]]:
    """The cells that ``store`` lacks, those that share a step together."""
    return [left for _, some in groupby(cells, key=lambda c: c.of_step) if (left := [c for c in some if c.key not in store])]
