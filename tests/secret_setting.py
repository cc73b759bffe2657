"""Everything that draws, and an operating system whose numbers a test chooses."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rasura.core.rng import (
    Randomness,
    bernoulli,
    gamma,
    generator,
    integers,
    laplace,
    normal,
    permutation,
    uniform,
)
from rasura.core.threat import service_transcript
from rasura.core.wire import from_bytes
from rasura.defenses.von_mises_fisher import one_minus_cosine, summed, summed_by_draws, unit
from rasura.integrations.flower.agreement import agree
from rasura.integrations.flower.rounds import Ticket, opened, protected
from rasura.registry import DEFENSES, parse_defense
from rasura.service_protections.obfuslm.model import obfuscate
from rasura.service_protections.obfuslm.settings import ObfuscationSettings
from rasura.testing.tiny import VOCABULARY, batch_for, tiny
from rasura.victims.step import step

LIKE = torch.ones((), dtype=torch.float64)

UNITS = nn.functional.normalize(torch.randn(3, 40, generator=generator(0), dtype=torch.float64))
TEXTS = [[1, *range(20, 40), 2], [1, *range(30, 45), 2]]

Draw = Callable[[Randomness], Any]

DISTRIBUTIONS: dict[str, Draw] = {
    "uniform": lambda rng: uniform((4,), rng),
    "normal": lambda rng: normal((4,), rng),
    "normal float32": lambda rng: normal((2, 2), rng, torch.float32),
    "laplace": lambda rng: laplace((4,), rng),
    "gamma": lambda rng: gamma(torch.tensor([0.4, 3.0, 50.0], dtype=torch.float64), rng),
    "integers": lambda rng: integers(1 << 40, (3,), rng),
    "permutation": lambda rng: permutation(60, rng),
    "bernoulli": lambda rng: bernoulli(0.5, (90,), rng),
    "von Mises-Fisher, cosines": lambda rng: one_minus_cosine(3.0, 9, 4, rng),
    "von Mises-Fisher, line": lambda rng: one_minus_cosine(0.01, 1, 90, rng),
    "von Mises-Fisher, one by one": lambda rng: summed_by_draws(UNITS, 3.0, rng),
    "von Mises-Fisher, together": lambda rng: summed(UNITS, 3.0, rng),
    "a direction": lambda rng: unit(torch.zeros(9), rng),
}


def sent(defense: str, rng: Randomness, family: str = "bert", attention: str = "eager") -> list[Tensor]:
    model = tiny(family, "classification", hidden=16, blocks=1)
    model.config._attn_implementation = attention
    found = step(
        model, batch_for("classification"), parse_defense(defense), task="classification", vocabulary=VOCABULARY, rng=rng
    ).message
    return [*found.gradients.values(), *found.visible.values()]


SETTINGS = {
    "sealing": ("sealing:random=0.5",),
    "dp-sgd": ("dp-sgd:1.0", "dp-sgd:1.0/noise=laplace"),
    "directional": ("directional:10", "directional:10/blocks=parameters"),
    "ghost": ("ghost:start=random/sweeps=0/lemma=false/k=9",),
}
"""Protections in other settings than their example: those that draw, each way in which they do."""

NOISY = {name: SETTINGS.get(name, (spec.example,)) for name, spec in DEFENSES.items() if spec.draws}
QUIET = {name: spec.example for name, spec in DEFENSES.items() if not spec.draws}

PUBLIC = tiny("bert", "classification", hidden=16, blocks=1)
NAMES = [n for n, _ in PUBLIC.named_parameters()]


def key(plus: bool, rng: Randomness) -> list[Tensor]:
    made = obfuscate(PUBLIC, ObfuscationSettings(k=4, plus=plus, hidden_k=4), VOCABULARY.special_ids, rng)
    return [made.tokens, *made.model.state_dict().values()]


def federated(rng: Randomness) -> list[Tensor]:
    """What a client of a federation sends; its randomness is not to be chosen."""
    agreement = agree("gaussian:0.1", PUBLIC)
    before = opened(agreement, agreement.start, b"")
    data, _ = protected(agreement, Ticket(1, "nonce", 0, 1.0), before, agreement.start, 3)
    return list(from_bytes(data, agreement.limits).gradients.values())


def states(service: Any, rng: Randomness) -> Any:
    return service_transcript(service, [tuple(t) for t in TEXTS], rng).vectors


def flat(found: Any) -> bytes:
    if isinstance(found, Tensor):
        return found.detach().contiguous().numpy().tobytes()
    if isinstance(found, int | float):
        return repr(found).encode()
    return b"".join(map(flat, found))


def system(monkeypatch: pytest.MonkeyPatch, *words: int) -> None:
    """The operating system gives these 64-bit numbers."""
    left = list(words)

    def urandom(count: int) -> bytes:
        out = left[: count // 8]
        del left[: count // 8]
        return np.array(out, dtype=np.uint64).tobytes()

    monkeypatch.setattr(os, "urandom", urandom)
