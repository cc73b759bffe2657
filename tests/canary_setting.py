"""DP-SGD of a logistic regression whose canaries have a feature each: their gradients are Dirac, and bugs can be seeded.

It is written out here, slowly and plainly, so that it can be broken in ten ways.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rasura.accounting.one_run import gaussian_run_bound, one_run_bound, right_guesses

Floats = NDArray[np.float64]

CANARIES, EXAMPLES, FEATURES = 1000, 200, 20
CLIP, SIZE = 1.0, 8.0
"""The clip, and the size of a canary's feature: its gradient is longer than the clip."""
DELTA = 1e-5

BUGS = (
    "no noise", "noise for a smaller clip", "noise divided by the batch twice", "the batch is clipped",
    "a layer is not clipped", "noise is reused", "noise of 32 bits", "shuffled batches", "no protection in eval mode",
    "merged batches",
)  # fmt: skip


def train(
    coins: NDArray[np.bool_], multiplier: float, rate: float, steps: int, rng: np.random.Generator, bug: str = ""
) -> Floats:
    """The noisy sums of gradients that are released in each step, ``(steps, FEATURES + CANARIES)``."""
    features = rng.standard_normal((EXAMPLES, FEATURES))
    labels = (features[:, 0] > 0).astype(float)
    weights = np.zeros(FEATURES + CANARIES)
    released = np.zeros((steps, len(weights)))
    deviation = multiplier * CLIP
    expected = rate * (EXAMPLES + CANARIES / 2)
    fixed = rng.standard_normal(len(weights))
    order = rng.permutation(EXAMPLES + CANARIES)
    parts = 1 / rate
    for step in range(steps):
        drawn = rng.random((2 if bug == "merged batches" else 1, EXAMPLES + CANARIES)) < rate
        if bug == "shuffled batches":
            drawn = ((order % parts).astype(int) == step % int(parts))[None]
        total = np.zeros(len(weights))
        open_step = bug == "no protection in eval mode" and step % 4 == 0
        for batch in drawn:
            errors = 1 / (1 + np.exp(-features @ weights[:FEATURES])) - labels
            rows = errors[:, None] * features
            canary = (1 / (1 + np.exp(-SIZE * weights[FEATURES:])) - 1) * SIZE
            unclipped = bug in ("the batch is clipped", "a layer is not clipped") or open_step
            norms = np.linalg.norm(rows, axis=1)
            rows *= (np.minimum(1, CLIP / norms) * batch[:EXAMPLES])[:, None]
            if not unclipped:
                canary = canary * np.minimum(1, CLIP / np.abs(canary))
            total[:FEATURES] += rows.sum(0)
            total[FEATURES:] += canary * (batch[EXAMPLES:] & coins)
        if bug == "the batch is clipped":  # the mean is at most CLIP long, and the noise fits one example of it
            total *= min(1.0, CLIP * expected / float(np.linalg.norm(total)))
        noise = fixed if bug == "noise is reused" else rng.standard_normal(len(weights))
        width = {"noise for a smaller clip": 0.1, "noise divided by the batch twice": 1 / expected, "no noise": 0.0}
        if bug == "noise of 32 bits":
            noise = noise.astype(np.float32).astype(float)
        released[step] = total + (0.0 if open_step else deviation * width.get(bug, 1.0)) * noise
        weights -= 0.01 / expected * released[step]
    return released


def bounds(along: Floats, coins: NDArray[np.bool_], guesses: int = 200, confidence: float = 0.95) -> tuple[float, float]:
    """White box: the bounds for any private training and under Gaussian noise, each the largest of three scores.

    ``along`` ``(steps, canaries)``: the updates along each canary's gradient. The scores are their sum, how much they vary,
    and how seldom they are exactly zero. Each has a third of the failures that ``confidence`` allows.
    """
    canaries, each = len(coins), 1 - (1 - confidence) / 3
    right = [right_guesses(score, coins, guesses) for score in (along.sum(0), along.var(0), -(along == 0).sum(0))]
    general = max(one_run_bound(canaries, guesses, r, DELTA, each).epsilon for r in right)
    return general, max(gaussian_run_bound(canaries, guesses, r, DELTA, each).epsilon for r in right)


def run(multiplier: float, rate: float, steps: int, seed: int, bug: str = "") -> tuple[float, float]:
    """The bounds of one training."""
    rng = np.random.default_rng(seed)
    coins = rng.random(CANARIES) < 0.5
    return bounds(-train(coins, multiplier, rate, steps, rng, bug)[:, FEATURES:], coins)
