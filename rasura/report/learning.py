"""What is said of trainings that are not told from chance, or did not lower the loss, and what to do. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rasura.metrics.learned import accuracy_interval, learned, one_class, too_few
from rasura.report.language import tell

Results = Sequence[Mapping[str, Any]]


def not_learned(results: Results) -> list[Mapping[str, Any]]:
    """Those of ``results`` that are not told from chance, or did not lower the loss."""
    return [r for r in results if learned(r) is False]


def unlearned(results: Results) -> list[str]:
    """What is to be said of those that did not learn, one line each, or one for all."""
    found = not_learned(results)
    if found and len(found) == len(results):
        return [" ".join(_together(found))]
    return [f"{r['defense']}, {tell('seed')} {r['seed']}: {_alone(r)}" for r in found]


def remedy(results: Results) -> str:
    """What to do about ``results``, of which none learned."""
    return _together(results)[1]


def _together(found: Results) -> tuple[str, str]:
    """What is said of trainings of which none learned, and what to do."""
    if "accuracy" not in found[0]["after"]:
        if all(map(_rose, found)):
            says = tell("The loss rose in every training, which made the model worse: this compares nothing.")
            return says, tell("Train at a lower learning rate, or on more texts.")
        return tell("The loss fell in no training: this compares nothing."), tell("Train at another learning rate.")
    if any(map(one_class, found)):
        says = tell("No training is told from chance, since the texts that judge have one class: this compares nothing.")
        return says, tell("Judge on texts of every class (--test, or a larger --holdout).")
    if any(map(too_few, found)):
        n = min(r["n_test"] for r in found)
        says = tell("No training is told from chance with {n} texts to judge on: this compares nothing.", n=n)
        return says, tell("Judge on more texts (--test, or a larger --holdout).")
    says = tell("No training is told from chance: this compares nothing.")
    return says, tell("Train on more texts, for longer, or at another learning rate.")


def _alone(r: Mapping[str, Any]) -> str:
    if _rose(r):
        return tell(
            "the loss rose from {before:.3f} to {after:.3f}: the training made the model worse",
            before=float(r["before"]["loss"]), after=float(r["after"]["loss"]),
        )  # fmt: skip
    ends = accuracy_interval(r) if "accuracy" in r["after"] else None
    if ends is None:
        return tell("the loss did not fall")
    if one_class(r):
        return tell(
            "not told from chance: the {n} texts that judge it have one class, on which accuracy, F1 and MCC say nothing",
            n=r["n_test"],
        )
    return tell(
        "not told from chance (n = {n}, accuracy {low:.2f} to {high:.2f}; the most frequent class alone gives {alone:.2f})",
        n=r["n_test"], low=ends[0], high=ends[1], alone=float(r["majority"]),
    )  # fmt: skip


def _rose(r: Mapping[str, Any]) -> bool:
    return "accuracy" not in r["after"] and bool(r["after"]["loss"] > r["before"]["loss"])
