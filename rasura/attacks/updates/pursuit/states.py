"""The law of the states that go into a causal model's output layer: their mean, and the directions in which they differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rasura.attacks.shared.dummies import ordinary_ids
from rasura.core.interfaces import InputError
from rasura.core.values import Observation
from rasura.priors.ngram import Unigram
from rasura.victims.models import layer_inputs

TEXTS, LENGTH = 64, 16
"""Texts of random common words, and their length, in which the states of the model are taken."""

DIRECTIONS = 64
"""Directions of the states' covariance that are kept apart; the others count as one."""


@dataclass(frozen=True)
class States:
    """The law of the states before an output layer: ``mean`` ``(width,)``, ``directions`` ``(k, width)`` with their
    ``variances`` ``(k,)``, and the variance ``rest`` of every other direction."""

    mean: Tensor
    directions: Tensor
    variances: Tensor
    rest: float

    @property
    def size(self) -> float:
        """Root mean square of a state's norm."""
        others = self.rest * (len(self.mean) - len(self.variances))
        return math.sqrt(float(self.mean.square().sum() + self.variances.sum()) + others)


def frequencies_of(seen: Observation) -> Tensor:
    """The chance of every token of the vocabulary: of common English, where it has any of it."""
    with suppress(InputError):
        return Unigram.english(seen.vocabulary).probabilities
    ordinary = ordinary_ids(seen.vocabulary)
    flat = torch.zeros(seen.vocabulary.size, dtype=torch.float64)
    flat[ordinary] = 1 / len(ordinary)
    return flat


def output_of(model: nn.Module) -> str:
    """The name of the output layer of a Hugging Face model."""
    output: Any = model.get_output_embeddings()  # type: ignore[operator]
    names: list[str] = [name for name, one in model.named_modules() if one is output]
    return names[0]


@torch.no_grad()
def states_of(seen: Observation, module: str, frequencies: Tensor, rng: torch.Generator) -> States:
    """The law of the states that go into the output layer ``module``, in texts of random words of these ``frequencies``
    ``(vocabulary,)``."""
    drawn = torch.multinomial(frequencies, TEXTS * LENGTH, replacement=True, generator=rng).view(TEXTS, LENGTH)
    frame: Sequence[int] = seen.vocabulary.prefix
    ids = torch.cat([torch.tensor(frame, dtype=torch.long).expand(TEXTS, len(frame)), drawn], 1)
    inputs = layer_inputs(seen.model, [module], input_ids=ids, attention_mask=torch.ones_like(ids))[module]
    states = inputs[:, len(frame) :].flatten(0, 1).float().cpu()
    mean = states.mean(0)
    _, values, directions = torch.linalg.svd(states - mean, full_matrices=False)
    variances = values.square() / len(states)
    kept = min(DIRECTIONS, len(variances))
    rest = float(variances[kept:].sum()) / max(1, states.shape[1] - kept)
    return States(mean, directions[:kept], variances[:kept], rest)
