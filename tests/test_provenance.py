"""Where a run comes from: the command, the code and the model are stored with it, and two models are never mixed."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from audit_setting import model_folder, plan_for

from rasura.core.errors import InputError
from rasura.core.provenance import command, sitting
from rasura.core.records import MASK
from rasura.core.run_store import RunStore
from rasura.runs.audit import Audit, audit
from rasura.testing.tiny import tiny
from rasura.victims.fingerprint import fingerprint

__all__ = ["model_folder"]


def test_a_run_says_when_and_with_what_it_was_made(model_folder: Path, tmp_path: Path) -> None:
    plan = plan_for(model_folder, attacks=("blind",), defenses=("none", "gaussian:0.1"), limit=1)
    before = datetime.now(UTC)
    list(audit(plan, out=tmp_path))
    with closing(RunStore(tmp_path)) as store:
        (found,), about = store.sittings, store.about
    assert before <= datetime.fromisoformat(str(found["began"])) <= datetime.now(UTC)
    packages = found["packages"]
    assert not isinstance(packages, str) and packages["torch"] == version("torch")
    assert found["code"] == sitting()["code"] and len(str(found["code"])) == 16
    assert about["model"] == fingerprint(Audit(plan).victim.model)
    assert about["protections"]["gaussian"]["about"].startswith("clips the update to norm 1")
    assert set(about["attacks"]) == {"blind"}


def test_a_sitting_is_stored_only_if_it_added_results(model_folder: Path, tmp_path: Path) -> None:
    plan = plan_for(model_folder, attacks=("blind",), defenses=("none",), limit=2)
    prepared = Audit(plan)
    with closing(RunStore(tmp_path, prepared.plan.canonical())) as store:
        next(prepared.run(store))
    for _ in range(2):
        list(audit(plan, out=tmp_path))
    with closing(RunStore(tmp_path)) as store:
        assert len(store.sittings) == 2 and len(store) == 2
        assert [one["began"] for one in store.sittings] == sorted(str(one["began"]) for one in store.sittings)


def test_a_run_never_mixes_two_models(model_folder: Path, tmp_path: Path) -> None:
    plan = plan_for(model_folder, attacks=("blind",), defenses=("none",), limit=2)
    first = Audit(plan)
    with closing(RunStore(tmp_path, first.plan.canonical())) as store:
        next(first.run(store))
        with torch.no_grad():
            next(first.victim.model.parameters()).view(-1)[0] += 1e-6
        with pytest.raises(InputError, match="holds the results of another model"):
            list(first.run(store))
        assert len(store) == 1


def test_the_fingerprint_sees_every_bit_and_nothing_else() -> None:
    model = tiny("bert", "classification", num_labels=2)
    same = fingerprint(model)
    assert fingerprint(tiny("bert", "classification", num_labels=2).to(torch.float32)) == same
    assert fingerprint(model.half()) != same
    other = tiny("bert", "classification", num_labels=2)
    weight = next(iter(other.parameters()))
    weight.data.view(torch.int32).view(-1)[0] ^= 1
    assert fingerprint(other) != same


def test_a_changed_entry_about_a_run_is_refused(model_folder: Path, tmp_path: Path) -> None:
    list(audit(plan_for(model_folder, attacks=("blind",), defenses=("none",), limit=1), out=tmp_path))
    with closing(sqlite3.connect(tmp_path / "run.sqlite")) as db, db:
        db.execute("UPDATE meta SET value = replace(value, 'began', 'ended') WHERE name LIKE 'sitting%'")
        db.execute("UPDATE meta SET value = '{}' WHERE name = 'about'")
    with closing(RunStore(tmp_path)) as store:
        with pytest.raises(InputError, match="damaged"):
            _ = store.sittings
        with pytest.raises(InputError, match="damaged"):
            _ = store.about


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["/x/bin/rasura", "audit", "my notes.csv", "--limit", "3"], "rasura audit 'my notes.csv' --limit 3"),
        (["/x/rasura/__main__.py", "audit"], "rasura audit"),
        (["rasura", "audit", "--text", "Lena Brandt owes 7", "--limit", "1"], f"rasura audit --text {MASK} --limit 1"),
        (["rasura", "audit", "--text=Lena", "--text", "--text", "--seed", "1"], None),
        (["/home/lena/my_loop.py", "secret"], "from Python (my_loop.py)"),
        ([""], "from Python"),
    ],
)
def test_the_command_is_stored_without_private_texts(argv: list[str], said: str | None) -> None:
    found = command(argv)
    assert "Lena" not in found and (said is None or found == said)
    assert said is not None or found == f"rasura audit --text={MASK} --text {MASK} --seed 1"
