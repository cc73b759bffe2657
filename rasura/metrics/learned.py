"""Whether a training taught a model anything: without that, a comparison of protections compares nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rasura.metrics.intervals import proportion_interval


def majority(labels: Sequence[int]) -> float:
    """The accuracy of naming the most frequent class every time.

    >>> majority([0, 1, 1, 1])
    0.75
    """
    return max(Counter(labels).values()) / len(labels)


def accuracy_interval(result: Mapping[str, Any]) -> tuple[float, float]:
    """The 95 % interval of the accuracy of a training's ``result`` over its test texts."""
    n = int(result["n_test"])
    return proportion_interval(round(result["after"]["accuracy"] * n), n)


def learned(result: Mapping[str, Any]) -> bool | None:
    """Whether a training's ``result`` is better than chance; None if that is not known.

    A classifier must beat the most frequent class by the lower end of its interval. A language model must have a smaller
    loss than before.
    """
    if "accuracy" in result["after"]:
        return None if "majority" not in result else accuracy_interval(result)[0] > result["majority"]
    return bool(result["after"]["loss"] < result["before"]["loss"])


def unlearned(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is to be said of trainings that learned nothing, one line each, or one for all."""
    found = [r for r in results if learned(r) is False]
    if found and len(found) == len(results):
        return ["all at chance: this compares nothing. Train on more texts, for longer, or at another learning rate"]
    said = []
    for r in found:
        why = "the loss did not fall"
        if "accuracy" in r["after"]:
            low, high = accuracy_interval(r)
            alone = f"the most frequent class alone gives {r['majority']:.2f}"
            why = f"its accuracy may be anywhere from {low:.2f} to {high:.2f}; {alone}"
        said.append(f"{r['defense']}, seed {r['seed']}: not told from chance ({why})")
    return said
