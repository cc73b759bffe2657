"""Attacks on trained models and on services share nothing that one of them could change for the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_setting import TEXTS, model_folder
from membership_setting import plain, plan_for
from study_setting import notes

from rasura import registry
from rasura.core.answers import Membership
from rasura.core.unchanged import CHANGED
from rasura.core.values import Grant
from rasura.runs.membership import infer_membership
from rasura.runs.service_plan import ServicePlan
from rasura.runs.services import audit_service

__all__ = ["model_folder"]


def zero(*tensors: Any) -> None:
    for t in tensors:
        t.data.zero_()


CANDIDATES: dict[str, tuple[Callable[[Any], object], str]] = {
    "the candidates": (lambda seen: zero(seen.granted[Grant.CANDIDATES][3].input_ids), "crashed"),
    "the reference": (lambda seen: zero(*(row.input_ids for row in seen.granted[Grant.REFERENCE_TEXT])), "crashed"),
    "the public model": (lambda seen: zero(*seen.granted[Grant.BASE_MODEL][0].parameters()), "crashed"),
    "answers": (lambda seen: zero(seen.granted[Grant.MODEL](seen.granted[Grant.CANDIDATES]).losses), "ok"),
    "shadow models": (lambda seen: zero(*(m.answers.losses for m in seen.granted[Grant.TRAINING]())), "ok"),
}


@pytest.mark.parametrize("what", CANDIDATES)
def test_an_attack_on_a_trained_model_changes_nothing_for_the_next(
    what: str, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    does, status = CANDIDATES[what]
    own = registry.MEMBERSHIP["loss"]

    class Writing:
        name, needs, uses = "loss", frozenset({Grant.CANDIDATES}), frozenset({Grant.BASE_MODEL})

        def __call__(self, seen: Any, *, rng: torch.Generator) -> Membership:
            does(seen)
            return Membership(torch.arange(48.0))

    def run(to: str) -> dict[str, Any]:
        more = tmp_path / "more.jsonl"
        notes(more, [f"{w} echo echo echo echo" for w in ("met", "paid", "in")])
        plan = plan_for(model_folder, tmp_path, attacks=("loss", "mia-n", "lira"), reference=str(more))
        return {r["attack"]: r for r in plain(infer_membership(plan, out=tmp_path / to))}

    before = run("before")
    monkeypatch.setitem(registry.MEMBERSHIP.specs, "loss", replace(own, make=Writing))
    after = run("after")
    assert after["loss"]["status"] == status and (after["loss"]["reason"] == CHANGED) == (status == "crashed")
    for attack in ("mia-n", "lira"):
        assert after[attack]["scores"] == before[attack]["scores"] and after[attack]["status"] == "ok"


@pytest.mark.parametrize("model", ["public", "served"])
def test_an_attack_on_a_service_changes_nothing_for_the_next(
    model: str, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, texts in (("notes", TEXTS), ("more", [f"{t} w9 w8" for t in TEXTS])):
        notes(tmp_path / f"{name}.jsonl", texts)
    plan = ServicePlan(
        str(tmp_path / "notes.jsonl"), str(tmp_path / "more.jsonl"), str(model_folder), protections=("obfuslm:k=2",),
        attacks=("knn", "decipherment"), limit=2, budget="quick",
    )  # fmt: skip

    def run(to: str) -> dict[tuple[str, str], Any]:
        return {(r.attack, r.defense): (r.status, r.reason, r.scores) for r in audit_service(plan, out=tmp_path / to)}

    before = run("before")
    knn = registry.SERVICE_ATTACKS["knn"].make()

    class Writing:
        name = "knn"

        def __call__(self, seen: Any, **more: Any) -> Any:
            made = knn(seen, **more)
            zero(*getattr(seen, model).parameters())
            return made

    monkeypatch.setitem(registry.SERVICE_ATTACKS.specs, "knn", replace(registry.SERVICE_ATTACKS["knn"], make=Writing))
    after = run("after")
    assert {v[:2] for k, v in after.items() if k[0] == "knn"} == {("crashed", CHANGED)}
    assert [v for k, v in after.items() if k[0] != "knn"] == [v for k, v in before.items() if k[0] != "knn"]
