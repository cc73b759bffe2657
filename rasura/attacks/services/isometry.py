"""Isometry (ours): distances identify the rows of a table that was only rotated, reflected and shifted.

SentinelLMs keeps every distance between rows. Those to the rows whose ids are known (special tokens) and to the mean of all
rows name most rows at once; the rigid motion that fits these pairs best (Kabsch 1976, without its determinant) turns the
served table back, and then the nearest public row names the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rasura.attacks.services.tables import KEPT, Tables
from rasura.core.answers import ServiceObservation, TokenReading
from rasura.core.interfaces import Budget, NotApplicable
from rasura.core.specs import ServiceAttackSpec

SWEEPS = 3
"""How often the motion is fitted again, to the pairs of the previous fit."""

PAIRS = 2000
"""Rows that it is fitted to, at least those of a square matrix: those that fitted best."""


@dataclass(frozen=True)
class Isometry:
    """Pairs by distances, the rigid motion by least squares, the nearest row."""

    name: str = "isometry"

    def __call__(self, seen: ServiceObservation, *, rng: torch.Generator, budget: Budget) -> TokenReading:
        if seen.mechanism.name != "sentinellms":
            raise NotApplicable("no announced protection preserves all distances")
        tables = Tables(seen)
        fixed = torch.tensor(sorted(seen.vocabulary.special_ids))
        public, served = tables.public.double(), tables.served.double()
        near, away = closest(marks(served, fixed)[tables.usable], marks(public, fixed)[tables.usable])
        best = away.argsort()[: max(PAIRS, 2 * public.shape[1])]
        pairs, onto = tables.usable[best], tables.usable[near[best]]
        turned = served
        for _ in range(SWEEPS):
            turned = moved(served, served[pairs], public[onto])
            near, away = closest(turned[pairs], public[tables.usable])
            onto = tables.usable[near]
        guesses = torch.cdist(turned[tables.ids], public[tables.usable]).topk(KEPT, largest=False).indices
        return tables.reading(tables.usable[guesses], residual=float(away.median()))


def marks(table: Tensor, fixed: Tensor) -> Tensor:
    """Of every row its distances to the rows ``fixed`` and to the mean of all, ``(rows, fixed + 1)``."""
    return torch.cdist(table, torch.cat([table[fixed], table.mean(0, keepdim=True)]))


def closest(rows: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """For each of ``rows`` the nearest of ``others``, and how far it is."""
    found = [torch.cdist(some, others).min(1) for some in torch.split(rows, 512)]
    return torch.cat([f.indices for f in found]), torch.cat([f.values for f in found])


def moved(table: Tensor, rows: Tensor, onto: Tensor) -> Tensor:
    """``table`` behind the rotation or reflection and shift that bring ``rows`` nearest to ``onto``, pair by pair."""
    centre, target = rows.mean(0), onto.mean(0)
    left, _, right = torch.linalg.svd((rows - centre).T @ (onto - target))
    out: Tensor = (table - centre) @ left @ right + target
    return out


SPEC = ServiceAttackSpec(
    name="isometry",
    about="undoes a rotation of the embedding table, which preserves distances",
    source="Rasura",
    make=Isometry,
    home=("sentinellms", "bert"),
    protection=True,
)
