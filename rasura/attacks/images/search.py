"""The search for images whose gradient is the observed one: signed steps of Adam, then L-BFGS."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from rasura.attacks.images.layers import ImageGradients, LayerInput, layer_input
from rasura.attacks.shared.comparing import relative_error
from rasura.attacks.updates.gradient_matching.factors import Factor
from rasura.core.interfaces import AttackFailed
from rasura.core.rng import child
from rasura.core.values import Observation, Parameter, Reconstruction

_SMOOTH = 1e-3
"""Total variation is ``sqrt(d^2 + _SMOOTH^2)``, which has a gradient everywhere; differences below 1/255 cost little."""


POINTS = 20
"""Parts of a search after which its loss is told."""


@dataclass(frozen=True)
class Settings:
    """One method. ``features``: weight of the linear layers' inputs beside the cosine; ``polish``: L-BFGS at the end.

    Adam on the gradient's sign, its rate times 0.1 after 3/8, 5/8 and 7/8 of the steps (the decay of the paper's public
    code). The rates, and ``total_variation``, the weight of the prior beside the cosine, were chosen on two images.
    """

    total_variation: float = 1e-2
    learning_rate: float = 0.1
    features: float = 0.0
    polish: bool = False


@dataclass(frozen=True)
class Work:
    """Work of one budget level: restarts (all in one batch), steps of Adam, and steps of L-BFGS where there is a polish."""

    restarts: int
    steps: int
    polish: int


FEATURES_ALONE = (0.1, 0.03, 0.01)


WITH_GRADIENT = (1e-3, 1e-4)
"""Weights of the total variation, one after another: from a smooth image that has the features roughly to one that has them
exactly, and then the gradient."""


def total_variation(x: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels (smoothed at zero), per candidate ``(candidates, ...)``."""
    parts = (x[..., 1:, :] - x[..., :-1, :], x[..., 1:] - x[..., :-1])
    return torch.stack([(p.square() + _SMOOTH**2).sqrt().flatten(1).mean(1) for p in parts]).sum(0)


class ImageSearch:
    """One attack on one observation; candidates ``x`` are ``(restarts, batch, channels, height, width)``."""

    def __init__(
        self, settings: Settings, work: Work, seen: Observation, gradients: ImageGradients, size: int,
        labels: Tensor | None, rng: Generator,
    ) -> None:  # fmt: skip
        self.settings, self.work, self.seen, self.gradients = settings, work, seen, gradients
        self.labels = torch.zeros(size, dtype=torch.long) if labels is None else labels
        self.open = labels is None
        config: Any = seen.model.config
        self.classes = int(config.num_labels)
        self.shape = (size, config.num_channels, config.image_size, config.image_size)
        self.rng = torch.Generator().manual_seed(child(rng))
        self.observed = {n: seen.gradients[n] * seen.visible.get(n, torch.ones(())) for n in gradients.names}
        self.norm = torch.cat([g.flatten() for g in self.observed.values()]).norm()
        self.course: list[float] = []
        self.inputs: dict[str, LayerInput] = {}
        if settings.features and size == 1:
            for name, layer in gradients.layers.items():
                keys = f"{name}.weight", f"{name}.bias"
                if isinstance(layer, nn.Linear) and all(k in self.observed for k in keys):
                    entries = [self.observed[k] for k in keys]
                    masks = [seen.visible.get(k, torch.ones_like(g, dtype=torch.bool)) for k, g in zip(keys, entries)]
                    found = layer_input(entries[0], entries[1], (masks[0], masks[1]))
                    if found is not None:
                        self.inputs[name] = found

    def __call__(self) -> Reconstruction:
        polish = self.work.polish
        x = (0.5 + 0.2 * torch.randn(self.work.restarts, *self.shape, generator=self.rng)).clamp(0, 1)
        if self.inputs:
            # From grey, which has no structure that the features would have to undo.
            x[:1] = self._refined(torch.full_like(x[:1], 0.5), FEATURES_ALONE, False, polish)
        if self.open:
            self.labels = self._likeliest(x[:1])
        images = x[:1]
        if not self.inputs or self._informative():
            x, misfit = self._signed(x)
            images = x[misfit.argmin()][None]
            if self.settings.polish:
                images = self._refined(images, WITH_GRADIENT, True, polish)
        factors, _ = self.gradients(images.requires_grad_(True), self._loss)
        gradient = {n: f.explicit()[0].detach().reshape(self.observed[n].shape) for n, f in factors.items()}
        details: dict[str, Parameter] = {
            "restarts": self.work.restarts, "steps": self.work.steps, "layer_inputs": len(self.inputs), **self._course(),
        }  # fmt: skip
        return Reconstruction(
            (), "matched", labels=tuple(int(y) for y in self.labels), details=details, images=images[0].detach(),
            residual=relative_error(gradient, self.observed, self.seen.visible),
        )  # fmt: skip

    def _course(self) -> dict[str, str]:
        """The least loss after the first step and every twentieth part of the others; nothing without signed steps."""
        steps = len(self.course)
        at = sorted({1 + (steps - 1) * k // POINTS for k in range(POINTS + 1)}) if steps else []
        told = {"losses_at": " ".join(map(str, at)), "losses": " ".join(f"{self.course[s - 1]:.4g}" for s in at)}
        return told if at else {}

    def _informative(self) -> bool:
        """Whether the convolutions show as many entries as there are pixel values.

        With fewer, matching the gradient only blurs the image that the linear layers' inputs gave.
        """
        seen = 0
        for name, gradient in self.observed.items():
            if gradient.dim() == 4:
                seen += int(self.seen.visible[name].sum()) if name in self.seen.visible else gradient.numel()
        return seen >= math.prod(self.shape)

    def _likeliest(self, x: Tensor) -> Tensor:
        """The label with which the image ``x`` has the gradient nearest to the observed one."""
        cosines = []
        for label in range(self.classes):
            self.labels = torch.full((len(x[0]),), label)
            square, inner = self._products(self.gradients(x.clone().requires_grad_(True), self._loss)[0])
            cosines.append(float((inner / square.sqrt().clamp_min(1e-30)).detach()))
        return torch.full_like(self.labels, max(range(self.classes), key=lambda label: cosines[label]))

    def _loss(self, logits: Tensor) -> Tensor:
        chosen = torch.log_softmax(logits, -1).gather(-1, self.labels.expand(len(logits), -1)[..., None])
        return -chosen.mean((1, 2))

    def _products(self, factors: Mapping[str, Factor]) -> tuple[Tensor, Tensor]:
        """Over all visible entries, each candidate's squared norm, and its inner product with what was observed."""
        squares, inners = [], []
        for name, factor in factors.items():
            target, mask = self.observed[name], self.seen.visible.get(name)
            if mask is None:
                square, inner = factor.moments(target if factor.x is not None else target.flatten())
                squares.append(square)
                inners.append(inner)
            elif factor.x is not None and factor.x.shape[1] == 1:
                # Of rank one, so the masked entries need not be formed.
                squares.append(((factor.delta.square() @ mask.to(target.dtype)) * factor.x.square()).sum((1, 2)))
                inners.append(factor.inner(target))
            else:
                own = factor.explicit().flatten(1) * mask.flatten()
                squares.append(own.square().sum(1))
                inners.append(own @ target.flatten())
        return torch.stack(squares).sum(0), torch.stack(inners).sum(0)

    def _features(self, found: Mapping[str, Tensor]) -> Tensor:
        """Squared relative error of the linear layers' inputs, averaged over layers, per candidate."""
        terms = []
        for name, target in self.inputs.items():
            own, wanted = found[name].flatten(1) * target.known, target.value * target.known
            size = wanted.square().sum()
            if target.scaled:
                terms.append((own - wanted).square().sum(1) / size)
            else:
                terms.append(1 - (own @ wanted).square() / (own.square().sum(1) * size).clamp_min(1e-30))
        return torch.stack(terms).mean(0)

    def _signed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The best that each candidate passed, and its misfit."""
        s, steps = self.settings, self.work.steps
        x = x.clone().requires_grad_(True)
        optimizer = torch.optim.Adam([x], lr=s.learning_rate)
        decay = torch.optim.lr_scheduler.MultiStepLR(optimizer, [steps * 3 // 8, steps * 5 // 8, steps * 7 // 8], 0.1)
        best, kept = torch.full((len(x),), float("inf")), x.detach().clone()
        for step in range(steps):
            factors, found = self.gradients(x, self._loss)
            square, inner = self._products(factors)
            misfit = 1 - inner / (square.sqrt() * self.norm).clamp_min(1e-30)
            misfit = misfit + s.total_variation * total_variation(x)
            if self.inputs:
                misfit = misfit + s.features * self._features(found)
            with torch.no_grad():
                better = misfit < best
                best[better], kept[better] = misfit[better], x[better]
            self.course.append(float(best.min()))
            (slope,) = torch.autograd.grad(misfit.sum(), x)
            if not bool(torch.isfinite(slope).all()):
                raise AttackFailed(f"the optimisation diverged at step {step} (gradient not finite)")
            x.grad = slope.sign()
            optimizer.step()
            decay.step()
            with torch.no_grad():
                x.clamp_(0, 1)
        return kept, best

    def _refined(self, x: Tensor, variations: Sequence[float], matched: bool, steps: int) -> Tensor:
        """L-BFGS on the squared relative error of the features, and of the gradient if ``matched``, for one candidate.

        ``variations`` are weights of the total variation, which share the ``steps``.
        """
        for weight in variations:
            x = self._descended(x, weight, matched, max(1, steps // len(variations)))
        return x.clamp(0, 1)

    def _descended(self, x: Tensor, weight: float, matched: bool, steps: int) -> Tensor:
        x = x.clone().requires_grad_(True)
        best, kept = float("inf"), x.detach().clone()

        def misfit() -> Tensor:
            nonlocal best, kept
            factors, found = self.gradients(x, self._loss if matched else None)
            total = weight * total_variation(x).sum()
            if matched:
                total = total + self._error(factors)
            if self.inputs:
                total = total + self.settings.features * self._features(found).sum()
            if float(total.detach()) < best:
                best, kept = float(total.detach()), x.detach().clone()
            (x.grad,) = torch.autograd.grad(total, x)
            return total

        optimizer = torch.optim.LBFGS(
            [x], max_iter=steps, history_size=100, tolerance_grad=0.0, tolerance_change=0.0, line_search_fn="strong_wolfe"
        )
        optimizer.step(misfit)  # type: ignore[no-untyped-call]
        return kept

    def _error(self, factors: Mapping[str, Factor]) -> Tensor:
        """Squared relative error of one candidate's gradient at the best scale, which clipping may have changed.

        Summed entry by entry: as a difference of norms it would vanish in rounding long before the image is right.
        """
        with torch.no_grad():
            square, inner = self._products(factors)
            scale = inner.clamp_min(0) / square.clamp_min(1e-30)
        total = torch.zeros(())
        for name, factor in factors.items():
            own, mask = factor.explicit().flatten() * scale, self.seen.visible.get(name)
            own = own if mask is None else own * mask.flatten()
            total = total + (own - self.observed[name].flatten()).square().sum() / self.norm.square()
        return total
