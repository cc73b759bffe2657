"""What trainings guarantee, in words: of several, the worst, and what they give together. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rasura.core.rounding import above
from rasura.report.language import recorded, tell


def promises(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The guarantee of the trainings ``results`` under one protection, from different seeds, and every warning.

    Of several trainings, the guarantee is that of the worst: one without epsilon, or else the largest epsilon. If all have
    one, a second statement is for all models together: epsilons and deltas add up (basic composition).
    """
    privacy = [r["privacy"] for r in results]
    worst = max(privacy, key=_loss)
    lines, count = [recorded(worst["statement"])], len(privacy)
    if any(p["statement"] != worst["statement"] for p in privacy):
        lines = [tell("the worst of {count} trainings: {statement}", count=count, statement=lines[0])]
    if count > 1 and all(_guaranteed(p) for p in privacy):
        epsilon, delta = (float(sum(p[name] for p in privacy)) for name in ("epsilon", "delta"))
        lines.append(
            tell(
                "together, the {count} models give ({epsilon:.4g}, {delta:.3g})-differential privacy (basic composition)",
                count=count, epsilon=float(above(epsilon)), delta=float(above(delta, 3)),
            )
        )  # fmt: skip
    return lines + _warnings(results)


def stated(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """As ``promises``; empty where each training only says that nothing is proven for its protection."""
    return promises(results) if any(len(r["privacy"]) > 1 for r in results) else []


def alone(results: Sequence[Mapping[str, Any]]) -> str:
    """A sentence for trainings on the same texts of which any has a guarantee; empty for a single training."""
    if len(results) < 2 or not any(_guaranteed(r["privacy"]) for r in results):
        return ""
    return tell(
        "{count} models were trained on the same texts. The guarantee of a training is for its model alone.",
        count=len(results),
    )


def _guaranteed(privacy: Mapping[str, Any]) -> bool:
    return privacy.get("epsilon") is not None and privacy.get("delta") is not None


def _loss(privacy: Mapping[str, Any]) -> tuple[bool, float, float]:
    """Larger for a worse guarantee."""
    epsilon, delta = (privacy["epsilon"], privacy["delta"]) if _guaranteed(privacy) else privacy.get("otherwise", (0.0, 0.0))
    return not _guaranteed(privacy), epsilon, delta


def _warnings(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each warning once, with its seeds where other trainings lack it."""
    seeds: dict[str, list[str]] = {}
    for r in results:
        for warning in dict.fromkeys(r["privacy"].get("warnings", ())):
            seeds.setdefault(warning, []).append(str(r["seed"]))
    return [
        recorded(warning)
        if len(found) == len(results)
        else tell("seed {seeds}: {warning}", seeds=", ".join(found), warning=recorded(warning))
        for warning, found in seeds.items()
    ]
