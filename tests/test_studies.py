"""Study files: all of them load, a study runs end to end, and its table says ours and the paper's apart."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from audit_setting import TEXTS, model_folder
from study_setting import notes, study_folder
from typer.testing import CliRunner

from rasura.cli import app
from rasura.core.interfaces import InputError
from rasura.core.options import known
from rasura.core.run_store import RunStore
from rasura.registry import parse_defense
from rasura.runs.audit import Audit
from rasura.runs.plans import Plan
from rasura.runs.service_plan import ServicePlan
from rasura.runs.train_plan import TrainPlan
from rasura.studies.deviations import MODELS, measured
from rasura.studies.files import CELL, load_study, names, prepared
from rasura.studies.filling import in_time, row_key, urgency
from rasura.studies.metric_values import level_of, level_text, seeds_of, values_of
from rasura.studies.plots import of_audit, write
from rasura.studies.reasons import reasons_of
from rasura.studies.tables import head, section, write_section

__all__ = ["model_folder"]

FOLDER = Path(__file__).resolve().parents[1] / "studies"
NAMES = names(FOLDER)


def test_reasons_that_differ_by_a_rank_alone_are_one_line() -> None:
    says = "the row space (rank {} of 576) accepts more tokens than it can hold: {}"
    some = [("dager", says.format(n, "noise")) for n in (12, 8, 33, 12)] + [
        ("dager", says.format(9, "rounding")),
        ("tag", "no"),
    ]
    found = reasons_of([{"attack": a, "reason": r} for a, r in [*some, ("span", "")]])
    assert found == [f"- dager: {says.format('8 to 33', 'noise')}", f"- dager: {says.format(9, 'rounding')}", "- tag: no"]


@pytest.mark.parametrize("name", NAMES)
def test_a_study_file_is_a_valid_plan_and_names_its_paper(name: str) -> None:
    study = load_study(name, FOLDER)
    plan = prepared(study)
    assert study.source and study.differs and plan.data
    if isinstance(plan, ServicePlan):
        # What is said of an attack is said of one that is run.
        assert all(name.lower() in plan.attacks for name in ("InvBert", "MLC") if name in " ".join(study.differs))
        for figure in study.figures:
            assert figure["protection"] in plan.protections
            assert figure["attack"] in {*plan.attacks, *(["training", "client"] if study.train else [])}
            assert figure.get("weights", "uploaded") in {"uploaded", *plan.weights}
        return
    for defense in plan.defenses:
        parse_defense(defense)
    # A figure that fits no cell of the plan would never be shown.
    kinds = {"attack": "attacks", "update": "updates", "defense": "defenses", "threat": "threats"}
    sides = {key: getattr(plan, name) for key, name in kinds.items() if hasattr(plan, name)}
    for figure in study.figures:
        for key, value in figure.items():
            if key in sides:
                known(f"{key} of a figure", value, sides[key])


def test_the_study_of_the_documentation_is_one(tmp_path: Path) -> None:
    page = (FOLDER.parent / "docs" / "studies.md").read_text(encoding="utf-8")
    study = load_study("one", study_folder(tmp_path, page.split("```toml\n")[1].split("```")[0]))
    assert isinstance(prepared(study), Plan) and study.figures[0]["defense"] in study.plan.defenses


def record(attack: str, values: list[float], status: str = "ok", first: int | None = None) -> dict[str, object]:
    """A record of texts from number ``first`` on, by default of texts that no other record has."""
    scores, size = {"rouge1": {"per_record": values}}, max(1, len(values))
    begin = next(FRESH) if first is None else first
    where = dict(zip(CELL, (attack, "fedsgd", "none", "honest-server", 1)))
    return {**where, "seed": 0, "status": status, "reason": "", "scores": scores if status == "ok" else {},
            "cpu_seconds": 2.0, "examples": list(range(begin, begin + size)),
            "blind": {"rouge1": {"per_record": [0.1] * size}}}  # fmt: skip


FRESH = count(1_000, 100)


BODY = """
title = "One"
source = "A paper, Table 1"
differs = ["everything"]
public_code = ["takes an hour"]
metrics = ["rouge1"]

[plan]
attacks = ["blind", "span"]
defenses = ["none"]

[[figures]]
attack = "span"
paper = "12.3"
"""


def test_the_notes_of_a_study_are_not_said_of_another_model_or_other_texts(tmp_path: Path) -> None:
    study = load_study("one", study_folder(tmp_path, BODY.replace("[plan]", '[plan]\nmodel = "small"\ndata = "a.parquet"')))
    plan = study.plan
    assert isinstance(plan, Plan)

    def said(**other: Any) -> str:
        return "\n".join(head(study, replace(plan, **other), "about", ["a"]))

    its_own = said(model="runs/models/small", data="elsewhere/a.parquet")
    assert "the notes below" not in its_own and "--data" not in its_own and "--model" not in its_own
    assert "the notes below" not in said(model="small/trained/none-0/model"), "as a script trains it"
    assert "another model and other texts than the study: the notes below" in said(model="large", data="b.parquet")
    assert "one --model large`" in said(model="large") and "one --data b.parquet`" in said(data="x/b.parquet")
    assert "- everything" in said(data="b.parquet") and "other texts than the study" in said(data="b.parquet")


def test_fewer_than_five_values_have_a_mean_and_no_interval() -> None:
    def text(values: list[float], metric: str) -> str:
        return level_text(level_of(values, metric), metric)

    assert text([0.5] * 4, "rouge1") == "50.0" and text([0.5] * 5, "rouge1").startswith("50.0 [")
    assert text([], "rouge1") == "–" and text([3.0] * 9, "loss") == "3.00"


def test_the_table_holds_our_means_the_blind_level_and_the_paper_s_figure(tmp_path: Path) -> None:
    study = load_study("one", study_folder(tmp_path, BODY))
    records = [record("span", [1.0]), record("span", [0.5]), record("blind", [0.1]), record("span", [], "failed")]
    records += [record("span", [], "not_applicable")] * 2 + [record("span", [], "crashed")]
    plan = prepared(study)
    assert isinstance(plan, Plan)
    text = section(study, plan, records)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[1].startswith("| blind | none, honest-server | 1 | 1 | 1 | 10.0 | ")
    assert "| 53.3 | " in rows[2] and "| 1 / 1 / 2 of 6 |" in rows[2] and rows[2].endswith("| 12.3 |")
    assert (
        rows[1].endswith("| – |")
        and "A paper, Table 1" in text
        and "- everything" in text
        and "- public code: takes an hour" in text
    )


def test_a_text_counts_once_whatever_the_number_of_seeds() -> None:
    seeds = [record("span", [0.5], first=1), record("span", [0.1], first=1), record("span", [], "failed", first=2)]
    assert values_of(seeds, "rouge1", "scores") == (pytest.approx([0.3, 0.1]), 2)
    assert values_of(seeds, "rouge1", "blind") == (pytest.approx([0.1, 0.1]), 2)
    for side in ("scores", "blind"):  # a level of guessing beside a figure is that of the same texts
        assert values_of([record("span", [], "crashed")], "rouge1", side) == ([], 0)
        assert values_of([record("span", [], "not_applicable")], "rouge1", side) == ([], 0)


def test_the_texts_of_one_update_count_once_in_an_interval(tmp_path: Path) -> None:
    updates = [record("span", [1.0, 1.0], first=1), record("span", [0.0, 0.5], first=3), record("span", [0.5, 0.0], first=3)]
    assert values_of(updates, "rouge1", "scores") == ([1.0, 0.25], 4)
    study = load_study("one", study_folder(tmp_path, BODY))
    plan = prepared(study)
    assert isinstance(plan, Plan)
    four, five = ([record("span", [1.0, 0.0], first=2 * k) for k in range(n)] for n in (4, 5))
    assert "| 8 | 1 | 50.0 | " in section(study, plan, four), "eight texts in four updates: too few for an interval"
    (told,) = re.findall(r"\| 10 \| 1 \| (50.0 \[.*?\]) \|", section(study, plan, five))
    assert (
        told == level_text(level_of([0.5] * 5, "rouge1"), "rouge1") != level_text(level_of([0.5] * 10, "rouge1"), "rouge1")
    )


def test_cpu_seconds_are_of_cells_without_a_gpu_where_there_are_any(tmp_path: Path) -> None:
    study = load_study("one", study_folder(tmp_path, BODY))
    plan = prepared(study)
    assert isinstance(plan, Plan)
    there = {**record("span", [0.5]), "device": "cuda", "cpu_seconds": 40.0}
    told = [section(study, plan, rows) for rows in ([there, record("span", [1.0])], [there])]
    assert "| 2 |" in told[0] and "| 40 |" not in told[0] and "| 40 |" in told[1]


def test_a_row_has_as_many_seeds_as_the_text_that_was_tried_the_least() -> None:
    rows = [{**record("span", [0.5, 0.5], first=1), "seed": 0}, {**record("span", [], "failed", first=1), "seed": 1}]
    assert seeds_of(rows) == 1  # the second text has a value with one seed only
    rows.append({**record("span", [0.5], first=2), "seed": 7})
    assert seeds_of(rows) == 2 and seeds_of([*rows, record("span", [], "crashed", first=3)]) == 2
    assert seeds_of([record("span", [], "not_applicable")]) == 0


def test_a_plot_shows_each_attack_over_the_strength_beside_guessing(tmp_path: Path) -> None:
    body = BODY.replace(
        'defenses = ["none"]', 'defenses = ["none", "frozen-embeddings+dropout:0.1", "frozen-embeddings+dropout:0.4"]'
    )
    study = load_study("one", study_folder(tmp_path, body))
    plan = prepared(study)
    assert isinstance(plan, Plan)
    defenses = plan.defenses
    rows = [{**record(a, [v]), "defense": d} for a, values in (("span", (0.9, 0.8, 0.3)), ("blind", (0.1, 0.1, 0.1)))
            for d, v in zip(defenses, values)]  # fmt: skip
    rows.append({**record("span", [], "not_applicable"), "defense": defenses[2]})
    plot = of_audit(study, plan, rows)
    assert plot is not None and plot.across == "dropout"
    told = {c.name: [(x, round(y, 6)) for x, y, _, _ in c.points] for c in plot.curves}
    assert told["span"] == [(0.1, 80.0), (0.4, 30.0)] and told["guessing"] == [(0.1, 10.0), (0.4, 10.0)]
    first = write(plot, tmp_path / "plots" / "one.svg").read_bytes()
    assert b"<svg" in first and b"span" in first
    assert write(plot, tmp_path / "again.svg").read_bytes() == first
    assert of_audit(study, plan, rows[:1]) is None  # one point is no curve

    def ends(rows: list[dict[str, Any]]) -> list[float]:
        plot = of_audit(study, plan, rows)
        assert plot is not None
        return [end for curve in plot.curves for point in curve.points for end in point]

    five = [
        {**record("span", [v], first=k), "defense": d} for d in defenses[1:] for k, v in enumerate((0.1, 0.3, 0.5, 0.7, 0.9))
    ]
    assert ends(five)[2] < 50 < ends(five)[3]
    assert ends([{**r, "seed": seed} for r in five for seed in range(3)]) == pytest.approx(ends(five)), "a text counts once"


def test_a_section_replaces_its_older_self_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    for text in ("## b: B\n\nold\n", "## a: A\n\nfirst\n", "## b: B\n\nnew\n"):
        write_section(text, path)
    found = path.read_text()
    assert found.startswith("# Results") and "old" not in found
    assert found.index("## a: A") < found.index("## b: B") and "first" in found and "new" in found


def test_bad_studies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no study found"):
        load_study("one", tmp_path)
    folder = study_folder(tmp_path, BODY + '\n[[figures]]\nmodel = "x"\n')
    with pytest.raises(InputError, match="key of a figure"):
        load_study("one", folder)
    with pytest.raises(InputError, match="unknown study"):
        load_study("two", folder)


def test_the_command_runs_a_study_and_writes_its_table(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study_folder(tmp_path, BODY.replace("[plan]", f'[plan]\nmodel = "{model_folder}"\ndata = "missing.csv"'))
    (tmp_path / "notes.csv").write_text("text,label\nw40 the w41,0\nthe w50 w51,1\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    arguments = ["study", "one", "--data", "notes.csv", "--limit", "2", "--budget", "quick", "--batch-size", "2"]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    found = (tmp_path / "studies" / "RESULTS.md").read_text()
    assert "## one: One" in found and "| span |" in found and "--limit 2 --budget quick --batch-size 2`" in found
    trained = tmp_path / "small" / "none-0" / "model"
    shutil.copytree(model_folder, trained)
    shutil.rmtree(tmp_path / "runs")
    other = [*arguments, "--model", str(trained), "--out", "other", "--results", "OTHER.md"]
    assert CliRunner().invoke(app, other, catch_exceptions=False).exit_code == 0
    found = (tmp_path / "OTHER.md").read_text()
    assert f"Model {tmp_path.name}/small/none-0/model" in found and "one --model " in found and str(tmp_path) not in found
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    again = (tmp_path / "studies" / "RESULTS.md").read_text()
    assert again.count("## one: One") == 1


def test_a_study_whose_model_a_script_makes_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study_folder(tmp_path, BODY.replace("[plan]", 'command = "python make.py FOLDER"\n\n[plan]'))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"made by a script; run: python make\.py FOLDER"):
        CliRunner().invoke(app, ["study", "one"], catch_exceptions=False)


@pytest.mark.parametrize("name", NAMES)
def test_the_script_of_a_study_is_there(name: str) -> None:
    command = load_study(name, FOLDER).command.split()
    assert not command or (command[0] == "python" and (FOLDER.parent / command[1]).is_file())


def test_rows_without_an_interval_come_first_then_cheap_ones_that_are_short_then_the_widest() -> None:
    def sized(low: float, high: float, seeds: int = 3) -> list[dict[str, object]]:
        texts = [record("span", [value]) for _ in range(8) for value in (low, high)]
        return [{**r, "seed": seed} for r in texts for seed in range(seeds)]

    rows = {
        "none": [],
        "few": [record("span", [0.5]) for _ in range(4)],
        "nearly": sized(0.5, 0.5)[1:],
        "texts": sized(0.0, 1.0)[3:],
        "seeds": sized(0.5, 0.5, seeds=2),
        "wide": sized(0.0, 1.0),
        "narrow": [{**r, "cpu_seconds": 60.0} for r in sized(0.5, 0.5, seeds=1)],
        "never": [{**record("span", [], "crashed"), "cpu_seconds": 60.0}] * 5,
    }
    assert sorted(sorted(rows), key=lambda name: urgency(rows[name], "rouge1")) == list(rows)
    four = [{**record("span", [0.5] * 4), "batch_size": 4, "seed": seed} for seed in range(3)] * 4
    of_four = [{**r, "examples": [4 * k + n for n in range(4)]} for k, r in enumerate(four)]
    assert urgency(of_four, "rouge1")[0] == 1, "16 texts with three seeds, and four updates: no interval yet"


@pytest.mark.slow
def test_a_study_in_parts_stops_in_time_and_is_the_whole_study(tmp_path: Path, model_folder: Path) -> None:
    notes(tmp_path / "notes.jsonl", TEXTS[:8])
    plan = Plan(
        data=str(tmp_path / "notes.jsonl"), model=str(model_folder), attacks=("blind", "span"), defenses=("none", "sign"),
        batch_sizes=(1,), budget="quick", metrics=("rouge1",),
    )  # fmt: skip
    audit = Audit(plan, baseline=False)
    whole, parts = (RunStore(tmp_path / name, audit.plan.canonical()) for name in ("whole", "parts"))
    expected = {r.key: (r.status, r.scores) for r in audit.run(whole)}
    now = 0.0

    def taken(_: object) -> None:
        nonlocal now
        now += 100.0

    first = list(in_time(audit, parts, 750.0, "rouge1", taken, lambda: now))
    assert len(first) == 8 and now == 800.0
    rows = [row_key(r) for r in first]  # type: ignore[arg-type]  # a Record has the names of a Cell
    assert all(rows.count(row) == 2 for row in rows)
    now = 0.0
    rest = list(in_time(audit, parts, 1e9, "rouge1", taken, lambda: now))
    assert {r.key: (r.status, r.scores) for r in [*first, *rest]} == expected
    assert list(in_time(audit, parts, 1e9, "rouge1", taken)) == []
    assert list(in_time(audit, RunStore(tmp_path / "none", audit.plan.canonical()), 0.0, "rouge1", taken)) == []
    # A cell that another machine ran says nothing of the seconds that one takes here.
    fast = RunStore(tmp_path / "kept", audit.plan.canonical())
    audit.describe(fast)
    for record in first:
        fast.add(replace(record, wall_seconds=0.0))
    assert list(in_time(audit, fast, 1e-3, "rouge1", taken, lambda: 0.0)) == []
    # Nor does what an attack learned once for all cells.
    once = RunStore(tmp_path / "once", audit.plan.canonical())
    audit.describe(once)
    for record in first:
        once.add(replace(record, wall_seconds=3600.5, details={**record.details, "learning_seconds": 3600.0}))
    assert len(list(in_time(audit, once, 1.0, "rouge1", lambda _: None, lambda: 0.0))) == len(rest)


def test_hours_end_a_study_and_are_refused_where_nothing_can_be_left_out(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study_folder(tmp_path, BODY.replace("[plan]", f'[plan]\nmodel = "{model_folder}"\ndata = "missing.csv"'))
    (tmp_path / "notes.csv").write_text("text,label\nw40 the w41,0\nthe w50 w51,1\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    arguments = ["study", "one", "--data", "notes.csv", "--limit", "2", "--budget", "quick", "--batch-size", "1", "--hours"]
    for wrong in ("0", "-1", "nan", "inf"):
        found = CliRunner().invoke(app, [*arguments, wrong])
        assert isinstance(found.exception, InputError) and "--hours" in str(found.exception)
    says = "cells were run so far, so rows may be missing; the same command goes on"
    written = tmp_path / "studies" / "RESULTS.md"
    assert CliRunner().invoke(app, [*arguments, "1e-9"], catch_exceptions=False).exit_code == 0
    assert f"\n\n- 0 of 4 {says}\n" in written.read_text() and "| span |" not in written.read_text()
    assert CliRunner().invoke(app, [*arguments, "1"], catch_exceptions=False).exit_code == 0
    text = written.read_text()
    assert "| span | none, honest-server | 1 | 2 |" in text and says not in text
    (tmp_path / "studies" / "one.toml").write_text(TRAINING, encoding="utf-8")
    found = CliRunner().invoke(app, ["study", "one", "--hours", "1"])
    assert isinstance(found.exception, InputError) and "run to their end" in str(found.exception)


TRAINING = """
title = "Two"
source = "A paper, Table 2"
differs = ["everything"]

[train]
data = "notes.jsonl"
test = "test.jsonl"
defenses = ["none", "sign"]
epochs = 1
batch_size = 4

[[figures]]
defense = "sign"
paper = "50 / 40"
"""


def test_a_training_study_ends_in_a_table_of_utility(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study_folder(tmp_path, TRAINING.replace("[train]", f'[train]\nmodel = "{model_folder}"'))
    monkeypatch.chdir(tmp_path)
    for start, name in ((0, "notes.jsonl"), (50, "test.jsonl")):
        notes(tmp_path / name, [f"{t} w{k}" for k, t in enumerate(3 * TEXTS, start)])
    done = CliRunner().invoke(app, ["study", "one", "--data", str(tmp_path), "--seeds", "2"])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "studies" / "RESULTS.md").read_text()
    assert (
        "| sign | 2 |" in text and "| 50 / 40 |" in text and "judged on" in text and "`rasura study one --seeds 2`" in text
    )
    assert str(tmp_path) not in text.split("Command")[1]
    wrong = CliRunner().invoke(app, ["study", "one", "--attack", "span"])
    assert isinstance(wrong.exception, InputError) and "option of a training study" in str(wrong.exception)


TRADEOFF = """
title = "Three"
source = "A paper, Figure 4"
differs = ["everything"]
metrics = ["accuracy", "rougeL"]

[plan]
data = "notes.jsonl"
attacks = ["embedding-rows"]
defenses = ["none", "gaussian:1.0"]

[train]
data = "notes.jsonl"
defenses = ["frozen-embeddings", "frozen-embeddings+gaussian:1.0"]
epochs = 1
batch_size = 4
seeds = 2
"""


@pytest.mark.slow
def test_utility_stands_beside_the_risk_of_the_same_protection(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study_folder(tmp_path, TRADEOFF.replace("[plan]", f'[plan]\nmodel = "{model_folder}"'))
    monkeypatch.chdir(tmp_path)
    notes(tmp_path / "notes.jsonl", [f"{t} w{k}" for k, t in enumerate(3 * TEXTS)])
    results = tmp_path / "studies" / "RESULTS.md"
    found = CliRunner().invoke(app, ["study", "one", "--limit", "2"], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    table = [line.split(" | ") for line in results.read_text().splitlines() if line.startswith("| frozen-embeddings")]
    assert [(r[0], r[1], r[2]) for r in table] == [
        ("| frozen-embeddings", "none", "2"), ("| frozen-embeddings+gaussian:1.0", "gaussian:1.0", "2"),
    ]  # fmt: skip
    plain = float(table[0][4].split()[0])
    assert "(2)" in table[0][4] and plain > 0
    # One protection alone keeps its pair.
    arguments = ["study", "one", "--limit", "2", "--defense", "gaussian:1.0", "--out", "again"]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    assert "| frozen-embeddings+gaussian:1.0 | gaussian:1.0 |" in results.read_text()
    wrong = CliRunner().invoke(app, ["study", "one", "--limit", "2", "--defense", "none,sign", "--out", "other"])
    assert isinstance(wrong.exception, InputError) and "none of them" in str(wrong.exception)


def test_a_study_names_the_noise_of_its_protections(tmp_path: Path) -> None:
    """A target epsilon renamed them, so that the table of a finished study ended in a traceback."""
    folder = study_folder(tmp_path, '[train]\ndata = "a.jsonl"\ndefenses = ["none", "dp-sgd"]\ntarget_epsilon = 3.0\n')
    with pytest.raises(InputError, match=r"target_epsilon.*write the noise into its name, as dp-sgd:1.0"):
        load_study("one", folder)


def test_a_tradeoff_whose_protections_do_not_pair_is_refused(tmp_path: Path) -> None:
    body = TRADEOFF.replace('["none", "gaussian:1.0"]', '["none"]')
    with pytest.raises(InputError, match="expected pairs"):
        load_study("one", study_folder(tmp_path, body))


MEMBERSHIP = """
title = "Five"
source = "A paper, Table 1"
differs = ["everything"]

[train]
data = "notes.jsonl"
test = "test.jsonl"
defenses = ["frozen-embeddings", "frozen-embeddings+dp-sgd:1.0"]
epochs = 2
batch_size = 4
holdout = 0.5
keep = "last"

[membership]
attacks = ["loss", "rmia"]
shadow_models = 2
reference = "more.jsonl"

[[figures]]
attack = "rmia"
defense = "frozen-embeddings"
paper = "60.8 / .0811"
"""


@pytest.mark.slow
def test_membership_is_told_of_every_model_of_a_training(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study_folder(tmp_path, MEMBERSHIP.replace("[train]", f'[train]\nmodel = "{model_folder}"'))
    monkeypatch.chdir(tmp_path)
    for name, word in (("notes", "w8"), ("test", "w9"), ("more", "w7")):
        notes(tmp_path / f"{name}.jsonl", [f"{t} {word} w{k}" for k, t in enumerate(2 * TEXTS)])
    arguments = ["study", "one", "--data", str(tmp_path)]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    text = (tmp_path / "studies" / "RESULTS.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| frozen")]
    assert [(r[0], r[3]) for r in rows] == [
        (d, a) for d in ("frozen-embeddings", "frozen-embeddings+dp-sgd:1.0") for a in ("loss", "rmia")
    ]
    assert rows[1][-1] == "60.8 / .0811" and rows[0][1] == "–"
    # A study's noise is seeded, so that no epsilon holds for it; the cell says what secret noise would make of it.
    assert float(rows[2][1].removesuffix(" (were the noise secret)")) > 0 and "secret" in rows[2][1]
    assert rows[0][-2] == "100.0" and float(rows[2][-2]) < 100  # what differential privacy permits
    models = sorted(p.parent.name for p in (tmp_path / "runs").rglob("membership"))
    assert len(models) == 2 and CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    assert (tmp_path / "studies" / "RESULTS.md").read_text() == text


DEVIATIONS = """
title = "Six"
source = "A paper, section 5.2"
differs = ["everything"]

[train]
data = "notes.jsonl"
defenses = ["none", "ghost:k=4/max_k=8/lemma=false/indirect=false/overlap=1.0"]
epochs = 1
batch_size = 4

[deviations]
texts = 3

[[figures]]
model = "as it was"
paper = "0.04 / 8.45"
"""


@pytest.mark.slow
def test_deviations_of_substitutes_are_those_of_the_trained_models(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study_folder(tmp_path, DEVIATIONS.replace("[train]", f'[train]\nmodel = "{model_folder}"'))
    monkeypatch.chdir(tmp_path)
    notes(tmp_path / "notes.jsonl", [f"{t} w{k}" for k, t in enumerate(3 * TEXTS)])
    done = CliRunner().invoke(app, ["study", "one", "--data", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0
    plan = prepared(load_study("one", tmp_path / "studies"), data=str(tmp_path))
    assert isinstance(plan, TrainPlan)
    found = measured(plan, tmp_path / "runs" / "studies" / "one", 3)
    assert found.drift[MODELS[0]] == 0 < min(found.drift[m] for m in MODELS[1:])
    for name in MODELS:  # by the triangle inequality, and on substitutes the difference is one
        for p in found.pairs[name]:
            assert abs(p.norms[0] - p.norms[1]) <= p.difference <= sum(p.norms)
    text = (tmp_path / "studies" / "RESULTS.md").read_text()
    assert "| as it was | 0 |" in text and "| 0.04 / 8.45 |" in text and "](plots/one.svg)" in text
    assert (tmp_path / "studies" / "plots" / "one.svg").read_text().startswith("<?xml")


def test_deviations_need_a_training_with_and_one_without_substitutes(tmp_path: Path) -> None:
    body = DEVIATIONS.replace('["none", ', "[")
    with pytest.raises(InputError, match="compare two trainings"):
        load_study("one", study_folder(tmp_path, body))


def test_membership_without_a_training_is_refused(tmp_path: Path) -> None:
    body = MEMBERSHIP.replace("[train]", "[plan]").split("defenses")[0] + "[membership]\n"
    with pytest.raises(InputError, match="models of a training"):
        load_study("one", study_folder(tmp_path, body))
