"""Whether a training taught a model anything: without that, a comparison of protections compares nothing."""

from __future__ import annotations

import math
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


def has_figures(result: Mapping[str, Any], when: str = "after") -> bool:
    """Whether all figures of a training's ``result`` are finite; others stand for what was not measured, as None does."""
    return all(value is not None and math.isfinite(value) for value in result[when].values())


def epochs_compared(result: Mapping[str, Any]) -> int | None:
    """How many epochs the texts that judge a training's ``result`` chose among; None for a result that does not say."""
    found: int | None = 1 if result.get("tested_on") == "test" else result.get("epochs_compared")
    return found


def accuracy_interval(result: Mapping[str, Any], seeds: int = 1) -> tuple[float, float] | None:
    """The 95 % interval of the accuracy of a training's ``result`` over the texts that judge it; None where there is none.

    Where these texts chose the epoch among several, the best of several figures is stated. Each of them then has an interval
    at the level ``1 - 0.05 / epochs``, so that with 95 % all of them cover, and with them the one that was chosen.
    ``seeds``: with 95 % together with others, so many in all, that chose on the same texts.
    """
    compared = epochs_compared(result)
    if not has_figures(result) or compared is None:
        return None
    n = int(result["n_test"])
    return proportion_interval(
        round(result["after"]["accuracy"] * n), n, 1 - 0.05 / (compared * seeds if compared > 1 else 1)
    )


def learned(result: Mapping[str, Any]) -> bool | None:
    """Whether a training's ``result`` is better than chance; None if that is not known.

    A classifier must beat the most frequent class by the lower end of its interval. A language model must have a smaller
    loss than before.
    """
    if "accuracy" in result["after"]:
        found = accuracy_interval(result)
        return None if found is None or "majority" not in result else found[0] > result["majority"]
    if not (has_figures(result) and has_figures(result, "before")):
        return None
    return bool(result["after"]["loss"] < result["before"]["loss"])


def one_class(result: Mapping[str, Any]) -> bool:
    """Whether all texts that judge a classifier have one class: then no accuracy is told from naming it."""
    return result.get("majority") == 1.0


def too_few(result: Mapping[str, Any]) -> bool:
    """Whether a classifier that did not learn may have, and the texts that judge it are too few to tell: its accuracy is
    above the most frequent class, or not even a model that is always right would be told from it."""
    right = {**result, "after": {**result["after"], "accuracy": 1.0}}
    return result["after"]["accuracy"] > result["majority"] or learned(right) is False


def without_figures(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is to be said of trainings whose figures are not numbers, one line each."""
    why = "the model's output is not a number; lower the learning rate"
    return [f"{r['defense']}, seed {r['seed']}: not measured ({why})" for r in results if not has_figures(r)]
