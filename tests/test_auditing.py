"""The audit end to end on a tiny model: the same Records whatever interrupts it, and what people see of them."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from audit_setting import TEXTS, comparable, model_folder, plan_for
from torch import OutOfMemoryError, nn

from rasura.cli.audit import _planned, run_audit
from rasura.cli.outcome import Ending
from rasura.core.interfaces import InputError
from rasura.core.run_store import RunStore
from rasura.core.values import Grant
from rasura.report.findings import findings, summarise
from rasura.report.gate import gate
from rasura.report.page import write_report
from rasura.runs.audit import Audit, audit
from rasura.runs.audit_data import load_data
from rasura.runs.plans import Plan, from_toml
from rasura.victims.fingerprint import fingerprint

__all__ = ["model_folder"]


def test_reference_text_is_granted_and_may_not_hold_the_audited_texts(model_folder: Path, tmp_path: Path) -> None:
    reference = tmp_path / "reference.jsonl"
    reference.write_text('{"text": "Echo met the echo .", "label": 0}\n')
    plan = plan_for(model_folder, attacks=("blind",), defenses=("none",), reference=str(reference))
    with_text, without = Audit(plan), Audit(plan_for(model_folder, attacks=("blind",), defenses=("none",)))
    assert {c.key for c in with_text.cells}.isdisjoint(c.key for c in without.cells)
    store = RunStore(tmp_path / "run", plan.canonical())
    assert {r.details["prior"] for r in with_text.run(store)} == {"reference text"}
    store.close()
    reference.write_text(json.dumps({"text": TEXTS[1], "label": 0}))
    with pytest.raises(InputError, match="audited texts in 1 of its rows"):
        Audit(plan)


def test_matrix_is_whole_and_says_what_happened(tmp_path: Path, model_folder: Path) -> None:
    records = list(audit(plan_for(model_folder, batch_sizes=(1, 2)), out=tmp_path))
    assert len(records) == 3 * 3 * (3 + 1)
    by = {(r.attack, r.defense, r.batch_size, r.batch): r for r in records}
    assert by["span", "none", 1, 0].confidence == "verified"
    assert by["span", "none", 1, 0].scores["token_recall"]["mean"] == 1.0
    assert by["embedding-rows", "frozen-embeddings", 1, 0].status == "not_applicable"
    noisy = by["span", "gaussian:0.1", 1, 0]
    assert noisy.status == "failed" and noisy.reason and not noisy.scores, "a failure is a status, not a zero"
    assert all(r.blind["rouge1"]["n"] == r.batch_size for r in records)
    assert not any(re.search(r"[A-Za-z]{3}", t["sent"]) for r in records for t in r.recovered), "masked"


def test_an_audit_counts_words_that_the_tokenizer_does_not_know_as_not_read(tmp_path: Path, model_folder: Path) -> None:
    texts = ("☂ Alpha ☀", "Carol paid the echo .", "Bravo · ☀")
    metrics = ("rouge1", "rouge2", "rougeL", "jaccard", "token_recall")
    plan = plan_for(model_folder, texts=texts, attacks=("embedding-rows", "span"), defenses=("none",), metrics=metrics)
    by = {(r.attack, r.batch): r for r in audit(replace(plan, show_text=True), out=tmp_path)}
    some, whole, marks = (by["embedding-rows", batch] for batch in range(3))
    values = {name: some.scores[name]["mean"] for name in metrics}
    # Read "alpha" of three words: precision 1, recall 1/3. The two unknown words are one in a set.
    assert values == pytest.approx({"rouge1": 0.5, "rouge2": 0.0, "rougeL": 0.5, "jaccard": 0.5, "token_recall": 1 / 3})
    assert whole.scores["rouge1"]["mean"] == whole.scores["token_recall"]["mean"] == 1.0
    assert by["span", 0].scores["rouge1"]["mean"] <= 0.5, "an order of the words does not name them"
    assert some.recovered[0]["score"] == pytest.approx(0.5) and "·" in some.recovered[0]["read"]
    assert [hit for _, hit, _ in marks.recovered[0]["words"]] == [True, False, False], "the mark hits no word"


@pytest.mark.slow
def test_the_report_of_an_interrupted_run_says_that_it_is_unfinished(tmp_path: Path, model_folder: Path) -> None:
    prepared = Audit(plan_for(model_folder))
    store = RunStore(tmp_path, prepared.plan.canonical())
    for _ in zip(range(2), prepared.run(store)):
        pass
    done = len(store)
    page = write_report(tmp_path).read_text()
    assert f"{done} of {len(prepared.cells)} results are here" in page and done < len(prepared.cells)
    list(prepared.run(store))
    assert "results are here" not in write_report(tmp_path).read_text()
    store.close()


@pytest.mark.slow
def test_an_audit_hashes_the_weights_once(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []

    def counted(model: nn.Module, **how: Any) -> str:
        hashed.append(fingerprint(model))
        return hashed[-1]

    monkeypatch.setattr("rasura.victims.fingerprint.fingerprint", counted)
    run_audit(plan_for(model_folder), tmp_path, "cpu", Ending(as_json=True), workers=1)
    store = RunStore(tmp_path)
    assert len(store) and hashed == [store.about["model"]]
    store.close()


def test_resuming_gives_the_same_records(tmp_path: Path, model_folder: Path) -> None:
    plan = plan_for(model_folder)
    list(audit(plan, out=tmp_path / "whole"))
    stopped = audit(plan, out=tmp_path / "parts")
    for _ in range(5):
        next(stopped)
    stopped.close()  # type: ignore[attr-defined]  # a generator
    assert len(list(audit(plan, out=tmp_path / "parts"))) == 27 - 5
    assert comparable(tmp_path / "parts") == comparable(tmp_path / "whole")
    assert list(audit(plan, out=tmp_path / "parts")) == []


def run_and_kill(arguments: list[str], folder: Path, more: int) -> None:
    """Kill the run when it has stored ``more`` records."""

    def stored() -> int:
        try:
            with closing(RunStore(folder)) as store:
                return len(store)
        except InputError:  # not begun
            return 0

    wanted = stored() + more
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while stored() < wanted and process.poll() is None:
        time.sleep(0.01)
    assert process.poll() is None, "it ended before it was killed"
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize(("times", "seeds"), [(1, 1), pytest.param(10, 3, marks=pytest.mark.slow)])
def test_killed_runs_resume_to_the_same_records(tmp_path: Path, model_folder: Path, times: int, seeds: int) -> None:
    plan, cells = plan_for(model_folder, seeds=seeds), 27 * seeds
    config = tmp_path / "plan.toml"
    fields = {k: v for k, v in plan.canonical().items() if v is not None}
    config.write_text("\n".join(f"{k} = {json.dumps(v)}" for k, v in fields.items()))
    folder = tmp_path / "killed"
    command = [sys.executable, "-m", "rasura", "audit", "--config", str(config), "--out", str(folder)]
    chance = random.Random(times)
    for _ in range(times):
        run_and_kill(command, folder, chance.randint(1, (cells - 3) // times))
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    list(audit(plan, out=tmp_path / "whole"))
    assert comparable(folder) == comparable(tmp_path / "whole")
    lines = (folder / "records.jsonl").read_text().splitlines()
    assert len(lines) == cells and len({json.loads(line)["key"] for line in lines}) == cells


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attacks": ("spam",)}, r"unknown attack 'spam'; did you mean span"),
        ({"defenses": ("dropuot:0.1",)}, "unknown defense 'dropuot'; did you mean dropout"),
        ({"defenses": ("dropout",)}, "defense dropout needs a number"),
        ({"defenses": ("none:3",)}, "takes no parameter"),
        ({"threats": ("honest",)}, "unknown threat 'honest'; did you mean honest-server"),
        ({"metrics": ("rouge",)}, "unknown metric"),
        ({"texts": ("x", " ")}, "--text is empty"),
        ({"batch_sizes": (0,)}, "batch size is 0"),
        ({"num_labels": 1}, "1 outputs"),
        ({"texts": ("alpha " * 80,)}, "pass --truncate"),
    ],
)
def test_a_bad_plan_is_refused_before_anything_runs(model_folder: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        Audit(plan_for(model_folder, **change))
    assert "\n" not in str(caught.value)


def test_more_texts_add_cells_and_keep_the_others(model_folder: Path, tmp_path: Path) -> None:
    def keys(texts: Sequence[str], **change: Any) -> list[str]:
        wanted = {"attacks": ("blind",), "defenses": ("none",), "batch_sizes": (1,), "model": str(model_folder)} | change
        return [c.key for c in Audit(replace(Plan(texts=tuple(texts), limit=len(texts)), **wanted)).cells]

    few, more = keys(TEXTS[:2]), keys(TEXTS[:3])
    assert more[:2] == few and len(more) == 3
    assert keys((TEXTS[0], TEXTS[2]))[0] == few[0] != keys(TEXTS[2:3])[0], "by its own text"
    assert not {*keys(TEXTS[:2], num_labels=3)} & {*few}, "another head"
    moved = shutil.copytree(model_folder, tmp_path / model_folder.name)
    assert keys(TEXTS[:2], model=str(moved)) == few


def test_a_maximum_length_refuses_or_cuts_and_makes_other_cells(model_folder: Path) -> None:
    whole, short = (plan_for(model_folder, texts=TEXTS[:2], max_length=n) for n in (None, 4))
    with pytest.raises(InputError, match="at most 4 are allowed"):
        Audit(short)
    cut = Audit(replace(short, truncate=True))
    assert {b.input_ids.shape[1] for some in cut.batches.values() for b in some} == {4}
    assert not {c.key for c in cut.cells} & {c.key for c in Audit(replace(whole, truncate=True)).cells}
    assert "max_length" not in whole.canonical() and short.canonical()["max_length"] == 4


def test_plan_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('attacks = ["span"]\nlimit = 3\n')
    assert from_toml(path) == Plan(attacks=("span",), limit=3)
    path.write_text("attakcs = []\n")
    with pytest.raises(InputError, match="did you mean attacks"):
        from_toml(path)
    path.write_text('limit = "three"\n')
    with pytest.raises(InputError, match="limit is the text 'three'; expected a whole number"):
        from_toml(path)
    path.write_text("limit = = 3\n")
    with pytest.raises(InputError, match="is not valid TOML"):
        from_toml(path)
    with pytest.raises(InputError, match="does not exist"):
        from_toml(tmp_path / "none.toml")


def test_the_texts_that_are_given_are_those_that_are_audited(model_folder: Path, tmp_path: Path) -> None:
    """A file or texts replace what the plan has of either; nothing is audited in place of no texts."""
    file, config = tmp_path / "notes.jsonl", tmp_path / "plan.toml"
    file.write_text('{"text": "Carol paid the echo .", "label": 0}\n')
    of_texts = plan_for(model_folder, attacks=("blind",), defenses=("none",))
    of_file = replace(of_texts, texts=(), data=str(file))
    for plan, given, places in (
        (of_texts, {"data": str(file)}, 1), (of_file, {"data": TEXTS}, 3), (of_texts, {"data": TEXTS[:2]}, 2),
    ):  # fmt: skip
        assert len(list(audit(plan, out=tmp_path / f"of {places}", **given))) == places
    for nothing in (list[str](), tuple[str, ...]()):
        with pytest.raises(InputError, match="no texts were given"):
            audit(of_file, data=nothing, limit=1, out=tmp_path / "nothing")
    for wrong, said in (
        ([None, "x"], r"data\[0\] is NoneType"),
        (["x", math.nan], r"data\[1\] is float"),
        ({"x": 1}, "a list"),
    ):
        with pytest.raises(InputError, match=said):
            audit(of_file, data=wrong, out=tmp_path / "nothing")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="limit is 0"):
        audit(of_file, data=TEXTS, limit=0, out=tmp_path / "nothing")
    with pytest.raises(InputError, match="both a data file and texts"):
        replace(of_file, texts=TEXTS).checked()
    config.write_text(f'texts = ["Alpha met Bravo ."]\nmodel = {json.dumps(str(model_folder))}\n')
    assert _planned(config, None, {"data": str(file)}).texts == ()
    config.write_text(f"data = {json.dumps(str(file))}\nmodel = {json.dumps(str(model_folder))}\n")
    assert _planned(config, None, {"texts": TEXTS}).data is None


def test_all_texts_of_a_plan_are_audited(tmp_path: Path) -> None:
    texts, config = tuple(f"Alpha paid {k} ." for k in range(10)), tmp_path / "plan.toml"
    config.write_text(f"texts = {json.dumps(texts)}\n")
    assert len(load_data(_planned(config, None, {})).examples) == 10
    assert len(load_data(_planned(config, None, {"limit": 7})).examples) == 7
    assert len(load_data(_planned(config, None, {"texts": texts[:5]})).examples) == 5
    config.write_text(f"texts = {json.dumps(texts)}\nlimit = 3\n")
    assert len(load_data(from_toml(config)).examples) == 3
    assert len(load_data(Plan(texts=texts)).examples) == 10
    assert len(load_data(Plan(texts=texts, limit=3)).examples) == 3 and Plan().limit == 4
    config.write_text("texts = []\n")
    with pytest.raises(InputError, match="texts is empty"):
        from_toml(config)


# --- the report


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("run")
    defenses = ("none", "frozen-embeddings+dropout:0.1", "gaussian:0.001", "gaussian:0.1")
    list(audit(plan_for(model_folder, defenses=defenses, show_text=True), out=folder))
    return folder


def test_the_sentence_agrees_with_the_data(run: Path) -> None:
    store = RunStore(run)
    records, plan = list(store), store.plan
    store.close()
    found = findings(records, plan)
    ok = [r for r in records if r["attack"] == "span" and r["defense"] == "none"]
    assert found.matrix["span", "none"].level is not None
    mean = sum(r["scores"]["token_recall"]["mean"] for r in ok) / len(ok)
    assert found.matrix["span", "none"].level.mean == pytest.approx(mean) == 1.0
    assert found.sentence[0].startswith("From one update of a single note with no protection, the server read back 100 %")
    assert found.matrix["span", "gaussian:0.1"].mark == "·", "it looked and gave up"
    assert found.matrix["embedding-rows", "frozen-embeddings+dropout:0.1"].mark == "–"
    summary = summarise(records, plan)
    assert summary["verdicts"]["none"]["verdict"] == "reads" and json.dumps(summary)
    assert summary["judged"] == [d for d in found.columns if d != "none"], "the baseline is not what a run is judged by"
    assert summary["verdicts"]["gaussian:0.1"]["says"] == (
        "not measured against an adversary who knows it: add --attack pursuit,lamp-weighted"
    )


def test_nothing_scored_is_said(run: Path) -> None:
    store = RunStore(run)
    failed = [{**r, "status": "failed", "scores": {}, "blind": {}, "recovered": []} for r in store]
    store.close()
    assert findings(failed).sentence[0] == "Every attack on the updates gave up: none gave a guess at the notes."
    assert {v.word for v in findings(failed).verdicts.values()} == {"not measured"}
    assert findings([]).cells == 0


# --- what breaks


class Broken:
    """An attack that raises whatever it is given."""

    name = "broken"
    needs: frozenset[Grant] = frozenset()
    uses: frozenset[Grant] = frozenset()

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, seen: Any, *, rng: Any, budget: Any) -> Any:
        raise self.error


@pytest.mark.parametrize(
    "error", [InputError("no attention found"), KeyError(), IndexError("x\ny"), AssertionError(), SystemExit(0)]
)
def test_an_attack_that_breaks_is_no_protection(model_folder: Path, tmp_path: Path, error: BaseException) -> None:
    plan = plan_for(model_folder, attacks=("blind", "span"), defenses=("frozen-embeddings",))
    prepared = Audit(plan)
    prepared.attacks["span"] = Broken(error)
    store = RunStore(tmp_path, plan.canonical())
    records = [r.to_dict() for r in prepared.run(store)]
    store.close()
    broken = [r for r in records if r["attack"] == "span"]
    assert len(broken) == 2 * 3 and {r["status"] for r in broken} == {"crashed"}
    assert all(r["reason"].startswith(type(error).__name__) and "\n" not in r["reason"] for r in broken)
    found = findings(records, plan.canonical())
    assert {v.word for v in found.verdicts.values()} == {"not measured"} and "frozen-embeddings" not in found.best
    assert "holds against" not in found.recommendation
    assert gate(found.verdicts, 0.5).exit == 4


def test_a_gpu_without_free_memory_ends_the_run_and_leaves_no_record(model_folder: Path, tmp_path: Path) -> None:
    plan = plan_for(model_folder, attacks=("span",), defenses=("none",), limit=1)
    prepared = Audit(plan)
    prepared.attacks["span"] = Broken(OutOfMemoryError("no space left on the GPU"))
    store = RunStore(tmp_path, plan.canonical())
    with pytest.raises(OutOfMemoryError):
        list(prepared.run(store))
    assert not list(store)


def test_what_a_step_cannot_do_is_no_protection(model_folder: Path, tmp_path: Path) -> None:
    plan = plan_for(model_folder, attacks=("span",), defenses=("none",), limit=1)
    prepared = Audit(plan)
    prepared.batches["none", 1] = [None]
    (record,) = prepared.run(RunStore(tmp_path, plan.canonical()))
    assert record.status == "crashed" and record.reason.startswith("the training step failed: ")


def test_an_update_that_is_not_finite_is_no_protection(model_folder: Path, tmp_path: Path) -> None:
    plan = plan_for(model_folder, attacks=("blind", "pursuit", "span"), defenses=("none", "gaussian:1e39"))
    records = [r.to_dict() for r in audit(plan, out=tmp_path)]
    behind = [r for r in records if r["defense"] == "gaussian:1e39"]
    assert {(r["status"], r["reason"].partition(",")[0]) for r in behind} == {
        ("not_applicable", "what is sent holds values that are not finite")
    }
    found = findings(records, plan.canonical())
    assert found.verdicts["gaussian:1e39"].word == "not measured" and "gaussian:1e39" not in found.best


@pytest.mark.slow
def test_the_baseline_is_run_with_a_plan_that_lacks_it(model_folder: Path, tmp_path: Path) -> None:
    plan = plan_for(model_folder, attacks=("blind", "span"), defenses=("frozen-embeddings",))
    assert [c.defense for c in Audit(plan, baseline=False).cells] == ["frozen-embeddings"] * 6
    records = list(audit(plan, out=tmp_path))
    assert {(r.defense, r.attack) for r in records} == set(product(("none", "frozen-embeddings"), ("blind", "span")))
    named = Audit(plan_for(model_folder, attacks=("blind", "span"), defenses=("none",)))
    assert {c.key for c in named.cells} == {r.key for r in records if r.defense == "none"}, "as if it were named"
    found = findings([r.to_dict() for r in records], plan.canonical())
    assert found.columns == ("none", "frozen-embeddings") and found.judged == ("frozen-embeddings",)
    assert found.verdicts["none"].says == "reads (span: 3 of 3 notes nearly whole)"
    page = write_report(tmp_path).read_text()
    assert "<small>(baseline)</small>" in page and found.verdicts["frozen-embeddings"].says in re.sub(r"<[^>]*>", "", page)


def test_records_say_which_texts_they_hold(model_folder: Path, tmp_path: Path) -> None:
    texts = (TEXTS[0], TEXTS[1], TEXTS[0], TEXTS[2])
    plan = plan_for(model_folder, texts=texts, limit=4, attacks=("blind",), defenses=("accumulate:9",), batch_sizes=(1, 2))
    held = {(r.defense, r.batch_size, r.batch): r.examples for r in audit(plan, out=tmp_path)}
    assert [held["none", 1, k] for k in range(4)] == [[0], [1], [0], [2]], "the same text has the same number"
    assert [held["none", 2, k] for k in range(2)] == [[0, 1], [0, 2]]
    assert held["accumulate:9", 1, 0] == [0, 1], "what is sent as one"


def test_the_report_masks_and_escapes(run: Path) -> None:
    html = write_report(run).read_text()
    names = ("alpha", "bravo", "carol", "delta")
    assert not any(n in html.lower() for n in names) and "█" in html
    assert any(n in write_report(run, show_text=True).read_text().lower() for n in names)
    assert not re.search(r"""(?:src|href)=["'](?!#|notes/\d+\.html")|url\(|@import|https?://""", html), "nothing is fetched"
    assert "<script" not in html and "This file is personal data" in html
    assert "Why an attack has no result" in html  # span fails in noise
    assert "not measured against an adversary who knows it: add --attack pursuit,lamp-weighted" in re.sub(
        r"<[^>]*>", "", html
    )


@pytest.mark.slow
def test_the_report_shows_what_sealing_costs_and_at_which_strengths_it_was_tried(tmp_path: Path, model_folder: Path) -> None:
    defenses = ("none", "sealing:grad=0.01", "sealing:grad=0.6", "sealing:param=0.5/scheme=bfv", "sealing:all/scheme=bfv")
    plan = plan_for(model_folder, defenses=defenses, limit=1, texts=TEXTS[:1])
    records = list(audit(plan, out=tmp_path))
    sizes = {r.defense: r.sent_bytes for r in records}
    assert sizes["none"] == sizes["sealing:grad=0.6"] < sizes[defenses[3]] < sizes[defenses[4]]
    assert all(r.defense_seconds > 0 for r in records if "bfv" in r.defense)
    page = write_report(tmp_path).read_text()
    assert ("Why an attack has no result" in page) == any(r.reason for r in records)
    assert "Risk against the strength of sealing:grad" in page and "Risk against the bytes of an update" in page
    bytes_of = page[page.index("Risk against the bytes") :]
    assert bytes_of[: bytes_of.index("</svg>")].count("<circle") == len(defenses) - 1
    assert findings([r.to_dict() for r in records]).verdicts[defenses[4]].risk is None, "nothing in the clear to attack"


@pytest.mark.parametrize("width", [1280, 400])
def test_the_report_in_a_browser_overflows_nowhere(run: Path, tmp_path: Path, width: int) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    page = write_report(run).read_text()
    # Headless windows have a least width, so the page is measured inside a frame of the wanted one.
    frame = tmp_path / "frame.html"
    (tmp_path / "page.html").write_text(page)
    frame.write_text(
        f'<iframe id="f" src="page.html" style="width:{width}px;height:900px;border:0"></iframe><p id="out"></p><script>'
        "f.onload = () => { const d = f.contentDocument.documentElement;"
        'out.textContent = "W" + d.scrollWidth + "/" + d.clientWidth; }</script>'
    )
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    flags += "--disable-component-update --disable-sync --allow-file-access-from-files --virtual-time-budget=3000"
    done = subprocess.run(
        [browser, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", frame.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    measured = re.search(r"W(\d+)/(\d+)", done.stdout)
    assert measured, done.stderr[-500:]
    assert int(measured[1]) <= int(measured[2]), "the page is wider than its window"
    assert width - 20 <= int(measured[2]) <= width, "a scroll bar's width aside"
