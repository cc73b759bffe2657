"""Texts, plans and Records of membership runs, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rasura.core.records import Record
from rasura.registry import membership_adversaries
from rasura.runs.membership_plan import MembershipPlan
from rasura.victims.recipe import Recipe

PLAN: dict[str, Any] = {"kind": "membership", "model": "m", "members": "a.jsonl", "task": "classification", "n_members": 30,
                        "n_others": 30, "shadow_models": 2, "defense": "dp-sgd:1.0"}  # fmt: skip
MIDDLE = {"mean": 0.5, "low": 0.37, "high": 0.63, "n": 60}


def row(attack: str, status: str = "ok", auc: float = 0.5, defense: str = "dp-sgd:1.0", **more: Any) -> dict[str, Any]:
    scores = {"auc": {"mean": auc, "low": auc - 0.1, "high": auc + 0.1, "n": 60}, "leakage": {"mean": None},
              "largest_leakage": {"mean": 0.1, "chance": 0.2, "level": 0.975, "n": 60}}  # fmt: skip
    known = membership_adversaries(defense)
    return {
        "attack": attack, "status": status, "reason": "" if status == "ok" else "it broke",
        "blind": {"auc": MIDDLE, "words": MIDDLE},
        "scores": scores if status == "ok" else {}, "details": {"roc": [(0.1, 0.1), (1.0, 1.0)]}, "data": "d",
        "known_by": {"attacks": list(known.attacks), "unknown": [], "protection_readers": []}, "threat_plain": "someone",
        "wall_seconds": 1.0, **more,
    }  # fmt: skip


WORDS_OF = ["alpha", "bravo", "carol", "delta", "echo", "the", "met", "in", "paid"]


def write(path: Path, start: int, count: int) -> Path:
    """Texts that occur once each: numbers in words of the tiny vocabulary."""
    lines = []
    for k in range(start, start + count):
        said = [WORDS_OF[(k // 9**p) % 9] for p in range(4)]
        lines.append(json.dumps({"text": " ".join(said), "label": k % 2}))
    path.write_text("\n".join(lines) + "\n")
    return path


def plan_for(folder: Path, data: Path, **more: Any) -> MembershipPlan:
    fields: dict[str, Any] = {
        "model": str(folder), "base": str(folder), "members": str(write(data / "members.jsonl", 0, 24)),
        "non_members": str(write(data / "others.jsonl", 24, 24)), "shadow_models": 2, "fprs": (0.1,),
        "recipe": Recipe(epochs=2, learning_rate=1e-3, batch_size=8),
    }  # fmt: skip
    return MembershipPlan(**{**fields, **more})


def plain(records: list[Record]) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.to_dict().items() if k not in ("wall_seconds", "cpu_seconds", "peak_mb")} for r in records]
