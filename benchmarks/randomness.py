"""What secret randomness costs beside PyTorch's: noise for all weights of MiniLM, and the masks of active dropout in a step.

python benchmarks/randomness.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from rasura.core.rng import Randomness, bernoulli, generator, laplace, normal, secret_generator
from rasura.data.text import Example, encode
from rasura.registry import parse_defense
from rasura.victims.loading import load
from rasura.victims.step import step

ENTRIES = 22_713_986
TEXT = "The patient was moved to the ward after the second blood test, and the family was told the same evening."


def timed(what: Callable[[], Any], times: int = 3) -> float:
    """The least CPU seconds of some calls."""
    found = []
    for _ in range(times):
        start = time.process_time()
        what()
        found.append(time.process_time() - start)
    return min(found)


def main() -> None:
    """Print a line for each."""
    sources: tuple[tuple[str, Callable[[], Randomness]], ...] = (
        ("seeded", lambda: generator(0)),
        ("secret", secret_generator),
    )
    for name, source in sources:
        print(f"{name}: {ENTRIES} normals, float32 {timed(lambda s=source: normal((ENTRIES,), s(), torch.float32)):.2f} s,")  # type: ignore[misc]
        print(f"  float64 {timed(lambda s=source: normal((ENTRIES,), s())):.2f} s,", end=" ")  # type: ignore[misc]
        print(f"Laplace {timed(lambda s=source: laplace((ENTRIES,), s())):.2f} s,", end=" ")  # type: ignore[misc]
        print(f"masks {timed(lambda s=source: bernoulli(0.9, (ENTRIES,), s())):.2f} s", flush=True)  # type: ignore[misc]
    victim = load("minilm", "classification")
    batch = encode(
        [Example(TEXT, None, k % 2) for k in range(8)], victim.tokenizer, "classification", max_length=64, num_labels=2
    )
    for defense in ("none", "dropout:0.1", "gaussian:0.001"):
        parts = parse_defense(defense)
        for name, source in sources:
            seconds = timed(
                lambda s=source, p=parts: step(  # type: ignore[misc]
                    victim.model, batch, p, task="classification", vocabulary=victim.vocabulary, rng=s()
                )
            )
            print(
                f"a step on 8 texts of {batch.input_ids.shape[1]} tokens, {defense}, {name}: {seconds:.2f} s CPU", flush=True
            )


if __name__ == "__main__":
    main()
