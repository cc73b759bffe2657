"""What to do after attacks on a trained model. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rasura.core.options import names_of
from rasura.report.commands import OF_TRAINING, Step, command
from rasura.report.language import tell
from rasura.report.membership_verdict import above, off, untrained

FORMAL = frozenset({"dp-sgd", "dp-ftrl", "normalised", "directional"})
"""Protections of Rasura under which a training has an epsilon, also for records that do not say so."""


def membership_step(records: Sequence[Mapping[str, Any]], plan: Mapping[str, Any], missing: Sequence[str]) -> Step:
    """What to do next, from the ``records`` of one run. ``missing``: why nothing can be said for the model, in words."""
    done = [r for r in records if r["status"] == "ok"]
    real = [r for r in done if r["attack"] != "blind"]
    if not real:
        return Step(tell("Read below why an attack has no result."))
    if off(done):
        return Step(tell("Draw members and others at random from the same source, and measure again."))
    if untrained(plan):
        return Step(
            tell("Pass the model as it was after training, with the public one on which it began, and measure again.")
        )
    if any(above(r["scores"]) for r in real):
        if {*names_of(str(plan.get("defense", "none")))} & FORMAL:
            return Step(
                tell(
                    "The training was to have a formal guarantee. Train with a smaller epsilon (for dp-sgd, "
                    "--target-epsilon), or check that training: its noise, its epsilon, and repeated rows."
                )
            )
        told = {**plan, "data": plan["members"], "model": plan.get("base") or plan["model"]}
        again = command("train", told, OF_TRAINING, defenses=["none", "dp-sgd:1.0"])
        return Step(tell("Train with a formal guarantee, and measure the trained model again."), again)
    if any(r["status"] != "ok" for r in records):
        return Step(tell("Read below why an attack has no result."))
    if missing:
        return Step(tell("Add the attacks that know this protection."))
    return Step(tell("Measure with more texts and more shadow models before you rely on this."))
