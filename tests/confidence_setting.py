"""Updates of a few ids, for tests of what an attack may claim."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import Message, Observation
from rasura.registry import parse_defense
from rasura.testing.tiny import CAUSAL_VOCABULARY, CLS, SEP, VOCABULARY, batch_of
from rasura.victims.step import step

TEXT = [CLS, 40, 3, 41, 9, 42, SEP]


def seen_of(model: nn.Module, rows: list[list[int]], task: str = "classification", defense: str = "none") -> Observation:
    vocabulary = CAUSAL_VOCABULARY if task == "causal" else VOCABULARY
    batch = batch_of(rows, task, [1, 0, 2][: len(rows)])
    rng = generator(0, "step")
    sent = step(model, batch, parse_defense(defense), task=task, vocabulary=vocabulary, rng=rng)  # type: ignore[arg-type]
    return observe(sent, HONEST_SERVER)


def only(seen: Observation, *names: str) -> Observation:
    return replace(seen, message=Message({n: g for n, g in seen.gradients.items() if n in names}))
