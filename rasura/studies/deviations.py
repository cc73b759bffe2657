"""What substituted tokens change in a model's loss and gradients: the theory of obfuscation, checked on trained models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import linear_regression, mean
from typing import Any

import torch

from rasura.core.batches import Batch
from rasura.core.exact import norm
from rasura.core.rng import generator
from rasura.runs.train_plan import TrainPlan
from rasura.runs.trained import folder_of
from rasura.runs.training import Training
from rasura.studies.files import Study
from rasura.studies.metric_values import row_of
from rasura.studies.plots import Curve, Plot
from rasura.studies.tables import head
from rasura.victims.loading import Victim, load, with_own_head
from rasura.victims.step import step

COMPARED = ("drift", "loss", "gradient")
"""What the paper gives of each model: how far the weights moved, the mean deviations of loss and gradient."""

MODELS = ("as it was", "trained on the texts", "trained on substitutes")


@dataclass(frozen=True)
class Deviation:
    """One text and its substitutes, before one model: both losses, norms of both gradients and of their difference."""

    losses: tuple[float, float]
    norms: tuple[float, float]
    difference: float

    @property
    def loss(self) -> float:
        """How far the losses lie apart."""
        return abs(self.losses[0] - self.losses[1])


@dataclass(frozen=True)
class Deviations:
    """``drift``: the distance that training moved the weights, by model; ``pairs``: for every model, text by text."""

    drift: Mapping[str, float]
    pairs: Mapping[str, Sequence[Deviation]]

    def bounds(self) -> list[float]:
        """Each text's joint bound of the deviations before the model as it was (GHOST, Assumption 4)."""
        return [max(p.loss, p.difference) for p in self.pairs[MODELS[0]]]


def measured(
    plan: TrainPlan, folder: Path, texts: int, progress: Callable[[str, int, int], None] | None = None
) -> Deviations:
    """The first ``texts`` training texts and their substitutes, before the models that ``plan`` left in ``folder``.

    ``plan`` has two defenses: none, and the one that substitutes. Gradients are of all weights, dropout is off.
    """
    training = Training(plan, folder)
    seed = plan.recipe.seed
    fresh = training.victim(seed)
    texts_of = (training.rows[:texts], training.protected_rows(plan.defenses[1], fresh)[:texts])
    task: Any = plan.task
    models = [folder / folder_of(d, seed) / "model" for d in plan.defenses]
    victims = [fresh, *(with_own_head(load(path, task, num_labels=training.labels, attacked=False)) for path in models)]
    start = {n: p.detach().clone() for n, p in fresh.model.named_parameters()}
    drift, pairs = {}, {}
    for name, victim in zip(MODELS, victims):
        moved = [(p.detach() - start[n]).square().sum() for n, p in victim.model.named_parameters()]
        drift[name] = float(torch.stack(moved).sum().sqrt())
        found = []
        for number, (text, substitutes) in enumerate(zip(*texts_of)):
            found.append(_deviation(victim, text, substitutes))
            if progress is not None:
                progress(f"deviations, {name}", number + 1, len(texts_of[0]))
        pairs[name] = found
    return Deviations(drift, pairs)


def _deviation(victim: Victim, text: Batch, substitutes: Batch) -> Deviation:
    model, known = victim.model, victim.vocabulary
    taken = [step(model, one, task=victim.task, vocabulary=known, rng=generator(0)) for one in (text, substitutes)]
    first, second = (t.message.gradients for t in taken)
    losses, norms = (taken[0].loss, taken[1].loss), (float(norm(first.values())), float(norm(second.values())))
    return Deviation(losses, norms, float(norm(g - second[n] for n, g in first.items())))


def deviations_section(study: Study, plan: TrainPlan, found: Deviations) -> str:
    """Means over the texts; the slopes of both deviations over the joint bound, by least squares as in the paper."""
    columns = ["model", "weights moved", "loss", "of substitutes", "deviation of the loss", "norm of the gradient"]
    columns += ["deviation of the gradient", "over the norm", "slope, loss", "slope, gradient"]
    columns.append("paper (weights moved / loss / gradient)")
    bounds = found.bounds()
    about = f"{len(bounds)} training texts of {Path(plan.data).name} and their substitutes, seed {plan.recipe.seed}"
    lines = head(study, plan, about, columns)
    for name, pairs in found.pairs.items():
        losses, changes = [p.loss for p in pairs], [p.difference for p in pairs]
        slopes = [linear_regression(bounds, y).slope for y in (losses, changes)] if len(set(bounds)) > 1 else [nan, nan]
        values = [mean(p.losses[k] for p in pairs) for k in (0, 1)] + [mean(losses), mean(p.norms[0] for p in pairs)]
        values += [mean(changes), mean(p.difference / max(p.norms[0], 1e-300) for p in pairs), *slopes]
        paper = study.figure({"model": name}, COMPARED)
        lines.append(row_of([name, *(f"{v:.3g}" for v in (found.drift[name], *values)), paper]))
    return "\n".join([*lines, ""])


def deviations_plot(found: Deviations) -> Plot:
    """Both deviations before the model that was trained on substitutes, over each text's joint bound."""
    bounds, pairs = found.bounds(), found.pairs[MODELS[2]]
    curves = [("loss", [p.loss for p in pairs]), ("gradient, norm", [p.difference for p in pairs])]
    dots = [Curve(name, [(x, y, y, y) for x, y in zip(bounds, values)], loose=True) for name, values in curves]
    return Plot(dots, "joint bound before training", "deviation", bounded=False)
