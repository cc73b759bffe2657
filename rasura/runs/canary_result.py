"""What a training with gradient canaries writes down: its guarantee, and the bounds beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rasura.accounting import Ledger
from rasura.runs.gradient_canaries import GradientCanaries


def measured(canaries: GradientCanaries | None, ledger: Ledger, uncovered: Sequence[str] = ()) -> dict[str, Any]:
    """Of a result: what the canaries show, and the guarantee. If they refute it, its warnings say so. ``uncovered``: what
    else to say beside it, where there is one."""
    promised = ledger.spent().to_dict()
    if uncovered and ("epsilon" in promised or "otherwise" in promised):
        promised["warnings"] = [*promised.get("warnings", ()), *uncovered]
    if canaries is None:
        return {"privacy": promised}
    found = canaries.measure(ledger)
    if found.refuted:
        promised["warnings"] = [*promised.get("warnings", ()), f"canaries refute it: {found.statement}"]
    bounds = {"bound": asdict(found.bound), "gaussian": asdict(found.gaussian)}
    told = {**bounds, "stated": found.stated, "refuted": found.refuted, "statement": found.statement}
    return {"privacy": promised, "canaries": told}
