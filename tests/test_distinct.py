"""A text counts once, as the model sees it: in attacks on trained models, for candidates, and in calibrations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_setting import model_folder
from membership_setting import PLAN, WORDS_OF, row
from membership_setting import plan_for as membership_plan

from rasura.core.batches import Batch, ImageBatch, contents, places_of_each
from rasura.core.interfaces import InputError
from rasura.data.overlap import texts_hash
from rasura.data.text import load_examples
from rasura.report.membership import membership_findings, render_membership
from rasura.runs.calibration import Calibration
from rasura.runs.calibration_plan import CalibrationPlan
from rasura.runs.membership import MembershipAudit
from rasura.runs.membership_rows import began
from rasura.runs.plans import Plan
from rasura.victims.loading import load
from rasura.victims.recipe import Recipe

__all__ = ["model_folder"]


def written(path: Path, texts: list[str], labels: list[int] | None = None) -> str:
    rows = [{"text": t, "label": (labels or [0] * len(texts))[k]} for k, t in enumerate(texts)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def words(start: int, count: int) -> list[str]:
    return [" ".join(WORDS_OF[(k // 9**p) % 9] for p in range(4)) for k in range(start, start + count)]


def batch(ids: list[list[int]], labels: Any, mask: Any = None) -> Batch:
    held = torch.tensor(ids)
    names = tuple(map(str, range(len(ids))))
    return Batch(held, torch.ones_like(held) if mask is None else torch.tensor(mask), torch.tensor(labels), names, names)


def test_what_a_model_sees_is_ids_without_padding_and_with_labels_where_it_is_asked_for_them() -> None:
    rows = batch([[1, 5, 0], [1, 5, 9], [1, 5, 2]], [0, 1, 1], [[1, 1, 0], [1, 1, 0], [1, 1, 1]])
    assert places_of_each(contents(rows)) == [0, 2] and places_of_each(contents(rows, labels=True)) == [0, 1, 2]
    causal = batch([[1, 5], [1, 5]], [[-100, 5], [-100, 5]])
    assert places_of_each(contents(causal, labels=True)) == [0]
    images = ImageBatch(torch.tensor([0.0, 1.0, 0.0]).view(3, 1, 1, 1), torch.tensor([0, 0, 1]), ("a", "b", "c"))
    assert places_of_each(contents(images)) == [0, 1] and places_of_each(contents(images, labels=True)) == [0, 1, 2]
    assert places_of_each("abcab", "a") == [1, 2]


def test_repeated_texts_of_a_trained_model_count_once(model_folder: Path, tmp_path: Path) -> None:
    inside, outside = words(0, 6), words(40, 6)
    more: dict[str, Any] = {
        "members": written(tmp_path / "in.jsonl", [*inside, *inside, inside[0].upper(), inside[1]], [0] * 13 + [1]),
        "non_members": written(tmp_path / "out.jsonl", outside * 3),
        "reference": written(tmp_path / "more.jsonl", words(60, 3) * 2),
    }
    found = MembershipAudit(membership_plan(model_folder, tmp_path, fprs=(), **more), tmp_path / "run")
    counts = {k: found.identity.get(k) for k in ("n_members", "n_others", "n_reference", "n_repeated")}
    assert counts == {"n_members": 7, "n_others": 6, "n_reference": 3, "n_repeated": 7 + 12 + 3}
    assert len(found.rows) == len(found.examples) == len(found.members) == 13 and int(found.members.sum()) == 7
    with pytest.raises(InputError, match="7 members and 6 others are too few"):
        MembershipAudit(membership_plan(model_folder, tmp_path, fprs=(0.1,), **more), tmp_path / "run")


def test_a_text_that_is_a_member_once_it_is_cut_is_no_other_text(model_folder: Path, tmp_path: Path) -> None:
    inside = words(0, 6)
    more: dict[str, Any] = {
        "members": written(tmp_path / "in.jsonl", inside),
        "non_members": written(tmp_path / "out.jsonl", [f"{inside[0]} echo", *(f"met {t}" for t in inside)]),
        "max_length": 6, "truncate": True,
    }  # fmt: skip
    found = MembershipAudit(membership_plan(model_folder, tmp_path, fprs=(), **more), tmp_path / "run").identity
    assert (found["n_members"], found["n_others"], found["n_repeated"]) == (6, 6, 1)


@pytest.mark.parametrize("by_rows", [False, True])
def test_a_limit_leaves_no_member_among_the_others(by_rows: bool, model_folder: Path, tmp_path: Path) -> None:
    """Others that are members 7 to 12 passed with a limit of 6: only the first six members were read."""
    inside, cut = words(0, 12), {"max_length": 6, "truncate": True}
    more: dict[str, Any] = {"members": written(tmp_path / "in.jsonl", inside), "fprs": ()}
    if by_rows:
        told = {"trained": list(range(12)), "held_out": [], "texts": texts_hash(load_examples(more["members"]))}
        more["rows"] = str(tmp_path / "rows.json")
        Path(more["rows"]).write_text(json.dumps(told))

    def prepared(others: list[str], **asked: Any) -> dict[str, Any]:
        held = written(tmp_path / "out.jsonl", others)
        plan = membership_plan(model_folder, tmp_path, non_members=held, **more, **asked)
        return MembershipAudit(plan, tmp_path / "run").identity

    for limit in (None, 6):
        with pytest.raises(InputError, match=r"texts that are also members \(6\)"):
            prepared(inside[6:], limit=limit, **cut)
    longer = [f"{t} echo" for t in inside[6:10]]  # equal to members once they are cut
    found = prepared([*longer, *words(40, 6)], limit=6, **cut)
    assert (found["n_members"], found["n_others"], found["n_repeated"]) == (6, 2, 4)


def test_repeated_rows_are_named_on_the_page() -> None:
    rows = [row("blind"), row("loss")]
    plan = {**PLAN, "attacks": ["blind", "loss"]}
    assert "repeated" not in " ".join(membership_findings(rows, plan).checks)
    told = " ".join(membership_findings(rows, {**plan, "n_repeated": 22}).checks)
    assert "22 repeated rows were left out. A text counts once, as the model sees it, with its label." in told


@pytest.mark.parametrize("side", ["auc", "words", "labels", "words_and_labels", "base"])
@pytest.mark.parametrize("auc", [0.95, 0.5])
def test_where_members_and_others_differ_as_texts_nothing_is_said_of_the_model(side: str, auc: float) -> None:
    middle = {"mean": 0.5, "low": 0.37, "high": 0.63, "n": 60}
    apart = dict.fromkeys(("auc", "words", "labels", "words_and_labels", "base"), middle) | {
        side: {"mean": 0.9, "low": 0.8, "high": 0.95, "n": 60}
    }
    rows = [row(a, auc=v, defense="none", blind=apart) for a, v in (("blind", 0.5), ("loss", auc))]
    for r, (mean, low) in zip(rows, ((0.01, 0.0), (0.9, 0.5)), strict=True):
        r["scores"]["tpr@0.01"] = {"mean": mean, "low": low, "high": 0.95, "n": 60}
    plan = {**PLAN, "attacks": ["blind", "loss"], "defense": "none"}
    told = membership_findings(rows, plan).sentences
    assert "Not measured: members and others differ as texts." in told
    assert not any("guessing:" in s or "reveals" in s or "ot told" in s for s in told)
    page = " ".join(render_membership(rows, plan).split())
    assert page.count("not measured: members and others differ as texts") >= 2, "in the plot, an attack each"
    assert "above guessing" not in page and "not told from guessing" not in page


@pytest.mark.parametrize(
    ("rows", "says", "fresh"),
    [
        (words(0, 8), "other texts, other seeds", words(4, 4)),
        (words(0, 4) * 2, "the same texts, other seeds: there are fewer than 4 other texts", words(0, 4)),
        ([*words(0, 4), *words(0, 2), *words(4, 4)], "other texts, other seeds", words(4, 4)),
        ([*words(0, 4), *(t.upper() for t in words(0, 4)), *words(4, 3)], "the same texts", words(0, 4)),
        (words(0, 2) * 2 + words(4, 2), "other texts, other seeds", words(4, 2)),
    ],
)  # fmt: skip
def test_a_calibration_verifies_on_no_text_that_it_searched_with(
    rows: list[str], says: str, fresh: list[str], model_folder: Path, tmp_path: Path
) -> None:
    plan = Plan(
        str(model_folder), data=written(tmp_path / "notes.jsonl", rows), limit=4, attacks=("span",), budget="quick",
        defenses=("gaussian",), metrics=("token_recall",),
    )  # fmt: skip
    prepared = Calibration(CalibrationPlan(plan=plan, risk="token_recall"), tmp_path / "run")
    found = prepared.fresh_data
    texts = [e.text for e in found.examples] if found is not None else rows[: plan.limit]
    prepared.close()
    assert prepared.which.startswith(says) and texts == fresh
    assert prepared.n_different == len(set(rows[:4])) and f"{prepared.n_different} texts" in prepared.too_few()[0]


@pytest.mark.parametrize(
    ("recipe", "own", "chose"),
    [
        ({"keep": "best", "epochs": 3}, False, True),
        ({"keep": "best", "epochs": 3}, True, False),
        ({"keep": "best", "epochs": 1}, False, False),
        ({"keep": "last", "epochs": 3}, False, False),
        (Recipe(3, keep="last", patience=1), False, True),
        (Recipe(3, keep="last", patience=3), False, False),
        (Recipe(3, keep="best"), False, True),
    ],
)
def test_held_out_texts_that_chose_the_epoch_are_named(
    tmp_path: Path, model_folder: Path, recipe: dict[str, Any] | Recipe, own: bool, chose: bool
) -> None:
    """A recipe is what a training writes now; the others are of earlier versions, which did not write when it stops."""
    inside = words(0, 12)
    members = written(tmp_path / "in.jsonl", inside)
    rows = tmp_path / "rows.json"
    told = {"trained": list(range(6)), "held_out": list(range(6, 12)), "texts": texts_hash(load_examples(members))}
    if isinstance(recipe, Recipe):
        recipe = began(load(model_folder, "classification"), str(model_folder), recipe, {})["recipe"]
    rows.write_text(json.dumps({**told, "recipe": recipe}))
    others = written(tmp_path / "out.jsonl", words(40, 6)) if own else None
    plan = membership_plan(model_folder, tmp_path, members=members, non_members=others, rows=str(rows), fprs=())
    found = MembershipAudit(plan, tmp_path / "run").identity
    assert found.get("others_chose", False) == chose
    said = " ".join(membership_findings([row("blind"), row("loss")], {**PLAN, **found, "attacks": ["blind", "loss"]}).checks)
    assert ("The others chose which epoch's weights the model has" in said) == chose
