"""A run in one file: figures come back, and what is not the run's data, weights or file is refused."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import nltk
import pytest
from audit_setting import model_folder, plan_for
from typer.testing import CliRunner

from rasura.cli import app
from rasura.core.errors import InputError
from rasura.core.records import Record, canonical
from rasura.runs.audit import audit
from rasura.runs.bundles import (
    CLOSE,
    DIFFERENT,
    EQUAL,
    NOTHING,
    Reproduction,
    _place,
    bundle,
    missing,
    read_bundle,
    returned,
)

__all__ = ["model_folder"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("run")
    list(audit(plan_for(model_folder, defenses=("none", "gaussian:0.1")), out=folder))
    return bundle(folder, folder / "bundle.json")


@pytest.mark.slow
def test_every_figure_of_a_run_comes_back(file: Path) -> None:
    again = Reproduction(read_bundle(file))
    cells = again.cells()
    assert {c.attack for c in cells} == {"embedding-rows", "span"} and again.unchecked == ()
    ended = [again.records[_place(vars(c))]["status"] for c in cells]
    assert ended == ["ok", "failed"] * 6, "noise hides every text, and neither kind is left out of a few cells"
    assert again.not_run(cells) == {"guessing": 6}
    assert again.not_run(cells[:3]) == {"gave up": 5, "guessing": 6, "with a score": 4}
    assert [one.says for cell in cells if (one := again.again(cell)).word != EQUAL] == []
    assert {(c.attack, c.defense) for c in again.cells("span", "gaussian:0.1")} == {("span", "gaussian:0.1")}
    assert len(again.cells(count=2)) == 2
    assert {c.attack for c in again.cells("blind")} == {"blind"} and len(again.cells("blind")) == 6
    with pytest.raises(InputError, match="no such cell"):
        again.cells("tag")


def test_what_does_not_come_back_is_said(file: Path) -> None:
    old = next(r for r in read_bundle(file)["records"] if r["attack"] == "span" and r["defense"] == "none")
    new = Record.from_dict(old)
    score = old["scores"]["token_recall"]

    def scored(value: float | None) -> Record:
        return replace(new, scores={**old["scores"], "token_recall": {**score, "per_record": [value]}})

    (was,) = score["per_record"]
    assert returned(old, new).word == EQUAL and returned(old, scored(was - 1e-9)).word == CLOSE
    found = returned(old, scored(was - 0.01))
    assert found.word == DIFFERENT and "token_recall (scores)" in found.says
    assert returned(old, scored(None)).word == DIFFERENT
    assert returned(old, replace(new, status="failed", scores={})).says.startswith("status ok, now failed")
    assert returned(old, replace(new, scores={})).word == DIFFERENT


def test_a_metric_that_one_machine_cannot_compute_is_not_said_to_differ(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without WordNet, every cell was said to be different by its METEOR."""
    monkeypatch.setattr(nltk.data, "path", [])
    content = read_bundle(file)
    content["plan"]["metrics"] = [*content["plan"]["metrics"], "meteor"]
    for record in content["records"]:
        for side in (record["scores"], record["blind"]):
            if "token_recall" in side:
                side["meteor"] = side.pop("token_recall")
    again = Reproduction(content)
    (cell,) = again.cells("span", "none", 1)
    found = again.again(cell)
    assert found.word == EQUAL, found
    here, then = again.unchecked
    assert here.startswith("meteor was not compared: METEOR needs WordNet")
    assert then == "token_recall was not compared: no result of the run has it"
    old = again.records[_place(vars(cell))]
    assert returned(old, Record.from_dict(old), {*old["scores"], *old["blind"]}).word == NOTHING


def test_an_attack_that_gave_up_is_compared(file: Path) -> None:
    """Its figure is that of guessing, and verdicts rest on it."""
    records = [r for r in read_bundle(file)["records"] if r["attack"] == "span"]
    read, silent = (next(r for r in records if r["status"] == status) for status in ("ok", "failed"))
    found = returned(silent, Record.from_dict(silent))
    assert found.word == EQUAL and found.says.startswith("it gave up again (failed: the gradients show no row space")
    other = returned(silent, replace(Record.from_dict(silent), reason="it is another"))
    assert other.word == EQUAL and other.says.endswith("now: failed: it is another)")
    here = {name: silent[name] for name in ("attack", "defense", "key", "examples")}
    for was, now, says in (
        (silent, {**read, **here}, "status failed, now ok"), ({**read, **here}, silent, "status ok, now failed"),
        (silent, {**silent, "status": "crashed"}, "status failed, now crashed"),
        (silent, {**silent, "blind": {}}, r"rouge1 \(blind\)"),
    ):  # fmt: skip
        found = returned(was, Record.from_dict(now))
        assert found.word == DIFFERENT and re.search(says, found.says)


@pytest.mark.parametrize("status", ["crashed", "not_applicable"])
def test_a_cell_without_a_score_has_nothing_to_compare(file: Path, status: str) -> None:
    scored = next(r for r in read_bundle(file)["records"] if r["attack"] == "span" and r["defense"] == "none")
    old = {**scored, "status": status, "reason": "it ran out of memory", "scores": {}, "confidence": "none"}
    found = returned(old, replace(Record.from_dict(old), reason="a tensor is missing"))
    assert found.word == NOTHING
    assert found.says == f"no score ({status}: it ran out of memory; now: {status}: a tensor is missing)"
    blank = {**scored, "scores": {"token_recall": {**scored["scores"]["token_recall"], "per_record": [None]}}}
    assert returned(blank, Record.from_dict(blank)).word == NOTHING
    assert returned(old, Record.from_dict(scored)).word == returned(scored, Record.from_dict(old)).word == DIFFERENT


@pytest.mark.slow
def test_a_run_without_a_score_is_not_said_to_come_back(tmp_path: Path, model_folder: Path) -> None:
    plan = plan_for(model_folder, attacks=("blind", "mask-positions"), defenses=("none",))
    list(audit(plan, out=tmp_path / "run"))
    made = bundle(tmp_path / "run", tmp_path / "b.json")
    assert {c.attack for c in Reproduction(read_bundle(made)).cells()} == {"mask-positions"}
    asked = ["reproduce", str(made), "--device", "cpu"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 1 and "nothing to compare: mask-positions under none" in " ".join(done.output.split())
    assert "0 of 0 cells came back; 3 more have no score" in " ".join(done.output.split())
    told = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert (told["compared"], told["different"]) == (0, 0)


def test_other_data_or_weights_are_refused(file: Path) -> None:
    content = read_bundle(file)
    with pytest.raises(InputError, match="data here is not that of the run"):
        Reproduction({**content, "plan": {**content["plan"], "texts": ["another text"], "limit": 1}})
    about = content["about"]
    for name, other in (
        ("model", "0" * 16), ("tokenizer of the model", "0" * 16), ("configuration of the model", {"hidden_act": '"relu"'})
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"the {name} here is not that of the run"):
            Reproduction({**content, "about": {**about, name: other}})
    assert "did not store a fingerprint" in Reproduction({**content, "about": {}}).unchecked[0]
    with pytest.raises(InputError, match="only audits of updates"):
        Reproduction({**content, "plan": {**content["plan"], "kind": "service"}})


def test_other_reference_text_is_refused(tmp_path: Path, model_folder: Path) -> None:
    """A changed file gave "different", and no reason."""
    public = tmp_path / "public.jsonl"
    public.write_text(json.dumps({"text": "the harbour opens at noon"}) + "\n")
    plan = plan_for(model_folder, attacks=("blind",), defenses=("none",), reference=str(public))
    list(audit(plan, out=tmp_path / "run"))
    made = bundle(tmp_path / "run", tmp_path / "b.json")
    moved = str(shutil.copy(public, tmp_path / "moved.jsonl"))
    public.write_text(json.dumps({"text": "a different text about ships"}) + "\n")
    with pytest.raises(InputError, match="the reference text here is not that of the run"):
        Reproduction(read_bundle(made))
    asked = ["reproduce", str(made), "--device", "cpu", "--attack", "blind", "--cells", "1"]
    assert CliRunner().invoke(app, [*asked, "--reference", moved]).exit_code == 0


def test_other_methods_of_a_researcher_are_refused(file: Path) -> None:
    content = read_bundle(file)
    about = {**content["about"], "code of own methods": "0" * 16}
    with pytest.raises(InputError, match="the code of own methods here is not that of the run"):
        Reproduction({**content, "about": about})


def test_a_changed_file_is_refused(file: Path, tmp_path: Path) -> None:
    changed = tmp_path / "bundle.json"
    for text, why in (
        (file.read_text().replace("honest-server", "honest-servex"), "was changed"), ("{}", "not a bundle"),
        ("[1]", "not a bundle"), ("no JSON", "not a bundle"),
    ):  # fmt: skip
        changed.write_text(text)
        with pytest.raises(InputError, match=why):
            read_bundle(changed)
    assert file.stat().st_mode & 0o077 == 0, "a bundle is personal data"


def test_the_commands_bundle_reproduce_and_compare(file: Path, tmp_path: Path) -> None:
    run = CliRunner()
    made = run.invoke(app, ["bundle", str(file.parent), "--out", str(tmp_path / "b.json")])
    assert made.exit_code == 0 and "personal data" in " ".join(made.output.split())
    assert (tmp_path / "b.json").read_text() == file.read_text()
    done = run.invoke(app, ["reproduce", str(tmp_path / "b.json"), "--attack", "span", "--cells", "2", "--json"])
    told = json.loads(done.stdout)
    assert done.exit_code == 0 and [one["word"] for one in told["cells"]] == [EQUAL, EQUAL]
    assert told["not_run"] == {"gave up": 5, "guessing": 6, "with a score": 5}
    same = run.invoke(app, ["compare", str(file.parent), str(file.parent), "--json"])
    assert same.exit_code == 4 and {c["word"] for c in json.loads(same.stdout)["changes"]} == {"not comparable"}
    shown = run.invoke(app, ["compare", str(file.parent), str(file.parent)])
    told_of = " ".join(shown.output.split())
    assert shown.exit_code == 4 and "could not be made" in told_of and "No change" not in told_of


def test_a_cell_that_did_not_give_up_is_noticed(file: Path, tmp_path: Path) -> None:
    """All cells were said to come back, and those in which an attack gave up were never run."""
    content = read_bundle(file)
    hit = next(r for r in content["records"] if r["attack"] == "span" and r["status"] == "ok")
    hit |= {"status": "failed", "reason": "nothing was found", "scores": {}, "recovered": [], "confidence": "none"}
    text = canonical(content)
    changed = tmp_path / "b.json"
    changed.write_text(canonical({"digest": hashlib.sha256(text.encode()).hexdigest(), "content": text}))
    asked = ["reproduce", str(changed), "--device", "cpu", "--attack", "span", "--cells", "0"]
    for defense, code, came, left in (
        ("none", 1, 2, "6 gave up, 6 guessing, 3 with a score"),
        ("gaussian:0.1", 0, 3, "4 gave up, 6 guessing, 5 with a score"),
    ):  # fmt: skip
        done = CliRunner().invoke(app, [*asked, "--defense", defense])
        says = f"{came} of 3 cells came back not run: 15 of the bundle's 18 cells ({left})"
        assert done.exit_code == code and says in " ".join(done.output.split())


def test_the_bundle_of_an_unfinished_run_says_so(file: Path, model_folder: Path, tmp_path: Path) -> None:
    begun = audit(plan_for(model_folder), out=tmp_path / "run")
    next(record for record in begun if record.scores)
    del begun
    run, gap = CliRunner(), "the run is unfinished: 1 of its 27 results are here"
    made = run.invoke(app, ["bundle", str(tmp_path / "run"), "--out", str(tmp_path / "b.json")])
    assert made.exit_code == 0 and gap in " ".join(made.output.split())
    done = run.invoke(app, ["reproduce", str(tmp_path / "b.json"), "--attack", "blind"])
    assert "1 of 1 cells came back" in done.stdout and gap in " ".join(done.stdout.split())
    told = run.invoke(app, ["reproduce", str(tmp_path / "b.json"), "--json"])
    assert json.loads(told.stdout)["missing"] == gap
    content = read_bundle(file)
    assert missing(content) == ""
    assert "may be unfinished" in missing({**content, "about": {}})
