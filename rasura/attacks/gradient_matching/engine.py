"""The engine behind DLG, TAG and their kin: K restarts as one batch, the best iterate kept, tokens only at the end.

``start`` chooses starting points, ``descend`` takes continuous steps; a method with discrete moves calls ``descend`` again
on the State that it has rearranged, and a method with a prior adds its term where ``embedding_norm`` stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rasura.attacks.gradient_matching.objective import Kind
from rasura.attacks.gradient_matching.problem import Problem, pose
from rasura.attacks.verify import VERIFIED, check
from rasura.interfaces import AttackFailed, Budget
from rasura.values import Grant, Observation, Reconstruction

CHUNK = 16
"""Starting points that are judged at once."""


@dataclass(frozen=True)
class Work:
    """Work of one budget level: ``candidates`` are judged once, the best ``restarts`` of them take ``steps`` steps."""

    candidates: int
    restarts: int
    steps: int


@dataclass(frozen=True)
class Settings:
    """One method of the family; presets name the published ones.

    ``alpha``: weight of L1. ``learning_rate`` is in units of the embedding table's standard deviation, so that one value fits
    all models; it falls by ``decay`` every ``decay_every`` steps. ``label_rate``: the learning rate of label logits.
    ``weight_decay``: AdamW's; 0 is Adam. ``embedding_norm``: weight of LAMP's regulariser.
    """

    objective: Kind
    levels: Mapping[str, Work]
    alpha: float = 0.0
    learning_rate: float = 0.25
    label_rate: float = 0.1
    decay: float = 0.89
    decay_every: int = 50
    weight_decay: float = 0.0
    embedding_norm: float = 0.0


@dataclass(frozen=True)
class State:
    """Restarts and the best that each has seen: ``e`` ``(restarts, batch, length, hidden)``, label logits ``y``
    ``(restarts, batch, classes)``, and the ``loss`` ``(restarts,)`` that they reach."""

    e: Tensor
    y: Tensor
    loss: Tensor


def start(problem: Problem, settings: Settings, work: Work, rng: torch.Generator) -> State:
    """The best ``work.restarts`` of ``work.candidates`` random texts, with undecided labels."""
    s = settings
    e = problem.draw(work.candidates, rng)
    # Not exactly undecided: equal logits stay equal where the classes' gradients mirror each other.
    y = 0.1 * torch.randn(work.candidates, len(problem.lengths), max(problem.classes, 1), generator=rng).to(e)
    chunks = zip(torch.split(e, CHUNK), torch.split(y, CHUNK))
    loss = torch.cat([problem.misfit(a, b, s.objective, s.alpha, graph=False) for a, b in chunks])
    kept = loss.topk(min(work.restarts, work.candidates), largest=False).indices
    return State(e[kept], y[kept], loss[kept])


def descend(problem: Problem, state: State, settings: Settings, steps: int) -> State:
    """``steps`` steps of Adam from ``state``; each restart ends at its best point, which may be the first.

    A restart whose values or slopes stop being finite keeps its best point. Raises ``AttackFailed`` when all of them do.
    """
    s = settings
    e, y = state.e.clone().requires_grad_(True), state.y.clone().requires_grad_(problem.solves_labels)
    wanted, rates = [e], [s.learning_rate * float(problem.table.std())]
    if problem.solves_labels:
        wanted, rates = [e, y], [*rates, s.label_rate]
    groups = [{"params": [v], "lr": rate} for v, rate in zip(wanted, rates)]
    optimizer = torch.optim.AdamW(groups, weight_decay=s.weight_decay)
    best_e, best_y, best = state.e, state.y, torch.full_like(state.loss, float("inf"))
    alive = torch.ones_like(best, dtype=torch.bool)
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate * s.decay ** (step // s.decay_every)
        whole = loss = problem.misfit(e, y, s.objective, s.alpha, graph=True)
        if s.embedding_norm:
            whole = loss + s.embedding_norm * problem.norm_gap(e)
        slopes = torch.autograd.grad(whole.sum(), wanted)
        with torch.no_grad():
            alive &= torch.isfinite(loss)
            for slope in slopes:
                alive &= torch.isfinite(slope.flatten(1)).all(1)
            if not bool(alive.any()):
                raise AttackFailed(f"every restart diverged by step {step} (loss or slope not finite)")
            better = alive & (loss < best)
            best = torch.where(better, loss, best)
            best_e = torch.where(better[:, None, None, None], e, best_e)
            best_y = torch.where(better[:, None, None], y, best_y)
        for variable, slope in zip(wanted, slopes):
            # A dead restart gets no slope, and its NaN must not reach the others through the optimiser.
            rest = (1,) * (slope.dim() - 1)
            variable.grad = torch.where(alive.reshape(-1, *rest), slope, torch.zeros_like(slope))
        assert e.grad is not None
        e.grad *= problem.free[..., None]
        held = e.detach().clone()
        optimizer.step()
        with torch.no_grad():  # known tokens stay, also under weight decay
            e.copy_(torch.where(problem.free[..., None], e, held))
    return State(best_e, best_y, best)


@dataclass(frozen=True)
class GradientMatching:
    """Optimises dummy embeddings (and soft labels where none are granted) until their gradient is the observed one.

    Only visible entries count, and embeddings' gradients are never used (GRAB's benchmark setting). Lengths that are not
    granted are estimated (``problem.estimate_lengths``). A granted mechanism that clips makes distances scale-free. Raises
    ``AttackFailed`` on divergence and ``NotApplicable`` for fused attention, with the reason.
    """

    name: str
    settings: Settings
    needs: frozenset[Grant] = frozenset({Grant.MODEL, Grant.BASE_MODEL, Grant.BATCH_SIZE})
    uses: frozenset[Grant] = frozenset({Grant.LABELS, Grant.LENGTHS, Grant.MECHANISM})

    def __call__(self, seen: Observation, *, rng: torch.Generator, budget: Budget) -> Reconstruction:
        s, work = self.settings, self.settings.levels[budget.level]
        problem = pose(seen)
        state = descend(problem, start(problem, s, work, rng), s, work.steps)
        winner = int(state.loss.argmin())
        tokens = problem.tokens(state.e[winner])
        details = {"restarts": len(state.e), "steps": work.steps, "objective": s.objective}
        error, labels = check(seen, tokens)
        if error < VERIFIED:
            return Reconstruction(tokens, "verified", labels=labels, residual=error, details=details)
        if problem.labels is not None:
            labels = tuple(problem.labels.argmax(-1).tolist())
        elif problem.solves_labels:
            labels = tuple(state.y[winner].argmax(-1).tolist())
        return Reconstruction(tokens, "matched", labels=labels, residual=float(state.loss[winner]), details=details)
