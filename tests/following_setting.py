"""Updates of small causal models of two texts, read by ``pursuit``."""

from __future__ import annotations

from rasura.attacks.updates.pursuit import Pursuit
from rasura.core.interfaces import Budget
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import Observation, Reconstruction
from rasura.registry import parse_defense, parse_update
from rasura.testing.tiny import CAUSAL_VOCABULARY, batch_of, tiny
from rasura.victims.step import step

TEXT, OTHER = [5, 9, 12, 7, 30, 22, 41], [6, 33, 18, 9, 27]


def seen_of(family: str, defense: str, texts: list[list[int]], update: str = "fedsgd", seed: int = 0) -> Observation:
    local, wire = parse_update(update)
    truth = step(
        tiny(family, "causal"), batch_of(texts, "causal", [0] * len(texts)), (*parse_defense(defense), *wire),
        task="causal", vocabulary=CAUSAL_VOCABULARY, rng=generator(seed, "step"), local=local,
    )  # fmt: skip
    return observe(truth, HONEST_SERVER)


def read(seen: Observation) -> Reconstruction:
    return Pursuit()(seen, rng=generator(0), budget=Budget())
