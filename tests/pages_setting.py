"""A page of every kind of run, from figures that nobody measured. No model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rows import GUESS, MANY, READ, column, record

from rasura.core.records import MASK
from rasura.registry import DEFENSES
from rasura.report.calibration import render_calibration
from rasura.report.head import Made
from rasura.report.levels import point, yardstick
from rasura.report.membership import render_membership
from rasura.report.page import render
from rasura.report.training import render_training
from rasura.runs.plans import Plan

PLAN = {**Plan(data="my notes.jsonl").canonical(), "attacks": ["blind", "span"], "limit": MANY}
METHODS = {
    name: {"about": s.about, "guarantee": s.guarantee} | ({"figure": list(s.strength.keys)} if s.strength else {})
    for name, s in DEFENSES.items()
}
SITTING: Mapping[str, Any] = {
    "began": "2026-11-23T08:05:00.000001+00:00", "command": "rasura audit notes.jsonl --out runs/audit", "code": "c0de",
    "machine": "a laptop", "packages": {"torch": "2.6"},
}  # fmt: skip
MADE = Made((SITTING,), {"model": "0123456789abcdef", "protections": METHODS})
OPERATOR = "the server operator, who follows the protocol but inspects the updates (honest-but-curious). The operator " \
    "knows the model, the protection in use and the number of texts in an update"  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """An audit: read without protection, stopped by one, read through another, and not measured under the last."""
    told = {"sent": MASK, "read": MASK, "score": 1.0, "words": [[MASK, True, True], [MASK, False, False]]}
    some = [*READ, *column("span", "dropout:0.1", [GUESS] * MANY), *column("span", "dp-sgd:1.0", [0.9] * MANY)]
    some += [*column("span", "qsgd:16", [GUESS] * MANY), record("tag", "none", note=1, status="crashed")]
    return [
        {**r, "data": "da7a", "threat_plain": OPERATOR, "sent_bytes": 4000 + 900 * len(r["defense"]),
         "versions": {"torch": "2"},
         "recovered": [told] if r["status"] == "ok" else [], "device": "cpu", "schema": 1}
        for r in some
    ]  # fmt: skip


def audit_page() -> str:
    return render(rows(), PLAN, MADE)


def service_page() -> str:
    """The same figures as those of a service."""
    plan = {"kind": "service", "data": "notes.jsonl", "model": "minilm", "task": "classification", "limit": MANY, "seed": 0,
            "protections": ["none", "dropout:0.1"], "weights": ["fedsgd"], "attacks": ["blind", "span"], "references": 400,
            "reference": "public.jsonl"}  # fmt: skip
    sides = [
        {**r, **{side: {"bag_f1": figure, "top1": figure} for side in ("scores", "blind")
                 for figure in [r[side].get("token_recall", {"per_record": [None]})]}}
        for r in rows() if r["defense"] in ("none", "dropout:0.1")
    ]  # fmt: skip
    return render(sides, plan, MADE)


def calibration_result(at_most: float = 0.5) -> dict[str, Any]:
    """A calibration of two protections: one setting holds, the other family misses the target."""
    base, families = list(READ), []
    for name, settings, value in (("gaussian", ("gaussian:0.1", "gaussian:1"), 0.3), ("pruning", ("pruning:0.5",), 0.9)):
        points = []
        for place, setting in enumerate(settings):
            measured = [*column("span", setting, [value / (1 + place)] * MANY), *column("pursuit", setting, [GUESS] * MANY)]
            made = point(setting, measured, base, ("span", "pursuit"), "token_recall", at_most)
            points.append({**made, "position": float(place), "value": 0.1, "sent_bytes": 2e6, "seconds": 0.1})
        found: dict[str, Any] = {
            "family": name, "status": "unreached", "setting": None, "points": points, "not_verified": [], "unjudged": [],
            "yardsticks": [yardstick(a, points) for a in ("span", "pursuit")],
        }  # fmt: skip
        if name == "gaussian":
            found |= {"status": "found", "setting": points[-1]["setting"], "chosen": points[-1]}
            found["verification"] = {**points[-1], "on": "other texts, other seeds"}
            found["guarantee"] = {"statement": "no formal guarantee", "epsilon": None}
            found["utility"] = {"metric": "accuracy", "without": 0.9, "behind": 0.8, "reference": "gaussian:0.1",
                                "cost": 0.1, "n": 50, "n_train": 100, "untrained": 0.5, "tested_on": "test"}  # fmt: skip
        families.append(found)
    return {
        "risk": "token_recall", "at_most": at_most, "attacks": ["span", "pursuit"], "texts": MANY, "seeds": 1, "seed": 0,
        "batch_size": 1, "update": "fedsgd", "task": "classification", "model": "minilm", "data": "da7a",
        "threat": "honest-server", "threat_plain": OPERATOR, "budget": "quick", "utility": "accuracy", "families": families,
        "checks": [],
    }  # fmt: skip


def calibration_page() -> str:
    plan = {**PLAN, "kind": "calibration", "attacks": [], "defenses": []}
    return render_calibration(calibration_result(), plan, rows(), MADE)


def membership_page() -> str:
    """An attack that finds members, one that crashed, and the baseline."""
    plan = {"kind": "membership", "model": "runs/train/none-0/model", "members": "train.jsonl", "task": "classification",
            "n_members": 120, "n_others": 120, "shadow_models": 2, "attacks": ["blind", "lira", "rmia"], "epsilon": 2.0,
            "defense": "none"}  # fmt: skip

    def made(attack: str, auc: float, status: str = "ok") -> dict[str, Any]:
        figure = {"mean": auc, "low": auc - 0.05, "high": auc + 0.05, "n": 240}
        ok = status == "ok"
        scores = {"auc": figure, "tpr@0.01": {**figure, "mean": 0.1, "low": 0.02, "high": 0.2},
                  "leakage": {"mean": None}, "largest_leakage": {"mean": 0.3, "chance": 0.35, "n": 240}}  # fmt: skip
        return {
            "attack": attack, "status": status, "reason": "" if ok else "it crashed", "scores": scores if ok else {},
            "blind": {"auc": {**figure, "mean": 0.5, "low": 0.45, "high": 0.55},
                      "words": {**figure, "mean": 0.5, "low": 0.45, "high": 0.55}}, "data": "da7a",
            "details": {"roc": [(0.01, 0.1), (0.5, 0.8), (1.0, 1.0)]}, "threat_plain": "an adversary who can query",
            "wall_seconds": 100.0,
        }  # fmt: skip

    return render_membership([made("blind", 0.5), made("lira", 0.7), made("rmia", 0.0, "crashed")], plan, MADE)


def training_folder(folder: Path) -> Path:
    """What ``rasura train`` leaves: without protection it learns, under two protections it loses accuracy, or does not
    learn."""
    plan = {"data": "train.jsonl", "model": "minilm", "task": "classification", "recipe": {"epochs": 3}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps({"data": "da7a", "plan": plan}))
    (folder / "rows.json").write_text("{}")
    for defense, accuracy in (("none", 0.9), ("gaussian:0.001", 0.7), ("dp-sgd:1.0", 0.52)):
        result = {
            "defense": defense, "seed": 0, "task": "classification", "model": "minilm", "data": "da7a", "n_train": 300,
            "test": "7e57", "tested_on": "test", "n_holdout": 30, "n_test": 400, "before": {"accuracy": 0.5, "loss": 0.7},
            "after": {"accuracy": accuracy, "loss": 1 - accuracy}, "epochs": 3, "majority": 0.5,
            "history": [{"train_loss": 0.7 - 0.1 * k} for k in range(3)], "privacy": {"statement": "none"},
            "wall_seconds": 60.0, "sitting": dict(SITTING), "weights": "0123456789abcdef",
        }  # fmt: skip
        place = folder / f"{defense.replace(':', '-')}-0"
        (place / "model").mkdir(parents=True, exist_ok=True)
        (place / "result.json").write_text(json.dumps(result))
    return folder


def pages(folder: Path) -> dict[str, str]:
    """The page of every kind of run, by kind."""
    return {
        "audit": audit_page(), "service": service_page(), "calibration": calibration_page(), "membership": membership_page(),
        "training": render_training(training_folder(folder / "train")),
    }  # fmt: skip
