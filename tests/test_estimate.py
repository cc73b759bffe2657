"""Time is told truly: what an estimate depends on, and what a bar shows. How close it comes: ``benchmarks/estimate.py``."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from audit_setting import TEXTS, model_folder, plan_for
from commands import rasura_command
from rich.console import Console
from rich.progress import Progress

from rasura.cli import progress, shared
from rasura.core.run_store import RunStore
from rasura.registry import ATTACKS, DEFENSES, REGISTERED, Adversaries, adversaries
from rasura.runs.audit import Audit
from rasura.runs.calibration import Calibration
from rasura.runs.calibration_plan import CalibrationPlan
from rasura.runs.cells import Cell
from rasura.runs.estimate import FIRST, REFERENCE_SECONDS, Load, StepTime, all_seconds, cell_seconds, load_of, measured_step

__all__ = ["model_folder"]

STEP = StepTime(0.05, 0.001)
NOBODY = Adversaries((), (), ())


def seconds(
    attack: str,
    tokens: int = 11,
    level: str = "default",
    step: StepTime = STEP,
    known: Adversaries = NOBODY,
    *,
    texts: int = 1,
    causal: bool = False,
    inputs: int = 0,
    width: int | None = None,
    update: str = "fedsgd",
    frozen: bool = False,
) -> float:
    defense = "ghost" if ATTACKS[attack].protection else "none"
    cell = Cell(attack, update, defense, "honest-server", texts, 0, 0, "key")
    return cell_seconds(cell, Load(tokens, tokens, inputs, width, frozen), level, step, ATTACKS, known, causal=causal)


@pytest.mark.parametrize("attack", ATTACKS)
def test_every_attack_costs_more_with_longer_texts_larger_models_and_more_effort(attack: str) -> None:
    assert seconds(attack) > 0
    assert seconds(attack, 300) > seconds(attack, 11)
    assert seconds(attack, step=StepTime(0.5, 0.01)) > 5 * seconds(attack)
    assert seconds(attack, level="quick") <= seconds(attack) <= seconds(attack, level="paper")


def test_a_portfolio_runs_to_its_end_where_no_exact_attack_knows_the_protection() -> None:
    noise = Adversaries(("pursuit", "lamp-weighted"), (), ())
    assert seconds("best", known=noise) > seconds("pursuit") + seconds("lamp-weighted") - 1
    assert seconds("best", known=Adversaries(("span",), (), ())) == seconds("best")


def test_a_portfolio_ends_with_what_its_specification_names() -> None:
    portfolio = ATTACKS["best"].portfolio
    assert portfolio is not None
    assert {*portfolio.always, portfolio.last, portfolio.instead, portfolio.causal, portfolio.signs} <= set(ATTACKS)
    noise = Adversaries(("pursuit", portfolio.instead), (), ())
    for level in ("quick", "default"):
        members = sum(seconds(a, level=level) - seconds("blind", level=level) for a in ("pursuit", portfolio.instead))
        assert seconds("best", level=level, known=noise) == pytest.approx(seconds("best", level=level) + members, rel=0.01)


def test_no_gradient_matching_is_counted_on_causal_models() -> None:
    """Of a decoder of 135 million parameters, 238 minutes were announced for what takes ten."""
    noise = adversaries("gaussian:0.1", task="causal")
    more = seconds("best", known=noise, causal=True) - seconds("best", causal=True)
    members = sum(seconds(a, causal=True) - seconds("blind", causal=True) for a in ("pursuit", "span-matching"))
    assert more == pytest.approx(members, rel=0.01)
    assert seconds("best", known=noise, causal=True) < seconds("lamp-weighted")


def test_signs_of_a_decoders_adapters_are_read_to_the_end() -> None:
    """The portfolio was announced with 5 s of a decoder's text behind AdamW, and took as many minutes."""
    adamw, own = "fedavg-adamw:4:5e-5", seconds("prefix-matching", causal=True) - seconds("blind", causal=True)
    quick = seconds("best", causal=True)
    for update, frozen in (("local:lora=16", False), (adamw, True)):
        assert seconds("best", causal=True, update=update, frozen=frozen) == pytest.approx(quick + own, rel=0.01)
        assert seconds("best", update=update, frozen=frozen) == pytest.approx(seconds("best"))
        assert seconds("best", causal=True, update=update, frozen=frozen, texts=4) < quick + own / 2
    for update, frozen in ((adamw, False), ("local:lora=16/optimizer=sgd", False), ("fedsgd", True)):
        assert seconds("best", causal=True, update=update, frozen=frozen) == pytest.approx(quick)


def test_several_texts_of_a_classifier_cost_more_than_one_of_their_length() -> None:
    assert seconds("span", 256, texts=16) > 10 * seconds("span", 256)
    assert seconds("span", 256, texts=16, causal=True) == seconds("span", 256)
    assert seconds("tag", 256, texts=16) == seconds("tag", 256)


def test_texts_that_no_layer_can_tell_apart_are_not_searched_for() -> None:
    """A sum of 64 clients' texts holds more tokens than MiniLM is wide: ``span`` ends early."""
    apart, together = (seconds("span", tokens, texts=32, width=384) for tokens in (383, 385))
    assert together < apart / 20
    assert together == pytest.approx(seconds("span", 385), rel=0.01)
    wider = seconds("span", 385, texts=32, width=768)
    assert wider > apart and wider == seconds("span", 385, texts=32)


def test_an_attack_that_block_0_tells_no_word_costs_what_the_width_allows_however_long_the_texts_are() -> None:
    short, long = (seconds("span", n, texts=64, width=384, inputs=400) - STEP(n) for n in (600, 6000))
    assert short == pytest.approx(long) and 60 < long < 600


def test_what_reads_only_the_word_embedding_costs_the_same_for_any_batch() -> None:
    beyond = [seconds("embedding-rows", tokens) - STEP(tokens) for tokens in (11, 1200)]
    assert beyond[0] == pytest.approx(beyond[1])


def test_a_portfolio_runs_to_its_end_where_texts_cannot_be_told_apart() -> None:
    more = seconds("best", 385, texts=32, width=384) - seconds("best", 385)
    assert more == pytest.approx(seconds("dlg", 385) - seconds("blind", 385), rel=0.1)


def test_the_load_of_a_batch_leaves_padding_out(model_folder: Path) -> None:
    plan = plan_for(model_folder, texts=TEXTS[:2], limit=2, defenses=("none",), batch_sizes=(2,))
    audit = Audit(plan)
    (batch,) = audit.batches["none", 2]
    load = load_of(batch, audit.victim.model)
    assert load.padded == batch.input_ids.numel() > load.tokens == sum(batch.lengths)
    ids = {t for row in range(2) for t in batch.ids(row)}
    assert load.inputs == len(ids) + max(batch.lengths) and load.width == audit.victim.model.config.hidden_size


def test_a_calibration_counts_what_is_read_once_only_once(tmp_path: Path, model_folder: Path) -> None:
    plan = plan_for(model_folder, attacks=("blind", "span"), defenses=("dropout", "gaussian"))
    prepared = Calibration(CalibrationPlan(plan, at_most=0.5, steps=1), tmp_path)
    try:
        settings = sum(one.strength.points for one in prepared.families)
        assert FIRST < prepared.estimate() < FIRST + 10 * settings
    finally:
        prepared.close()


def test_the_step_is_measured_on_the_shortest_and_the_longest_batch(model_folder: Path) -> None:
    plan = plan_for(model_folder, texts=("the echo", "the echo paid in Delta . " * 8), limit=2, defenses=("none",))
    batches = [batch for _, some in sorted(Audit(plan).batches.items()) for batch in some]
    taken: list[int] = []
    found = measured_step(lambda batch: taken.append(int(batch.input_ids.numel())), batches)
    assert taken == [min(taken), min(taken), max(taken)] and max(taken) > 40
    assert found.start >= 0 and found.per_token >= 0


def test_a_single_batch_is_measured_beside_the_beginning_of_one_of_its_texts(model_folder: Path) -> None:
    """Else a short step would seem to take as long as that of the whole sum."""
    plan = plan_for(
        model_folder, texts=("the echo paid in Delta . " * 8,) * 4, limit=4, defenses=("none",), batch_sizes=(4,)
    )
    audit = Audit(plan)
    taken: list[tuple[int, ...]] = []
    measured_step(lambda batch: taken.append(tuple(batch.input_ids.shape)), audit.batches["none", 4])
    assert taken[:2] == [(1, 11)] * 2 and taken[2][0] == 4 and taken[2][1] > 40
    assert set(audit.estimate()) == {c.key for c in audit.cells}


def test_what_an_attack_learns_once_counts_once_for_each_protection(model_folder: Path) -> None:
    plan = plan_for(model_folder, attacks=("blind", "ghost-generation"), defenses=("ghost", "ghost:group=4"))
    audit = Audit(plan)
    found = audit.estimate(first=0.0)
    spec, long = ATTACKS["ghost-generation"], [c for c in audit.cells if found[c.key] > 20 * min(found.values())]
    assert [(c.attack, c.defense, c.batch) for c in long] == [("ghost-generation", d, 0) for d in plan.defenses]
    assert spec.once > 100 * spec.seconds
    (idle,) = {found[c.key] for c in audit.cells if c.defense == "none" and c.attack == "ghost-generation" and c.batch == 0}
    assert idle < 1, "it does not run without a protection"


def test_a_protection_that_takes_long_counts_once_for_each_step() -> None:
    cells = [Cell(a, "fedsgd", "ghost", "honest-server", 1, 0, b, f"{a} {b}") for b in (0, 1) for a in ("blind", "span")]
    loads = {c.key: Load(22, 22, 0) for c in cells}
    found = all_seconds(cells, loads, "default", STEP, REGISTERED, {"ghost": NOBODY})
    taken = 2 * DEFENSES["ghost"].seconds * STEP(11) / REFERENCE_SECONDS
    for cell in cells:
        more = found[cell.key] - cell_seconds(cell, loads[cell.key], "default", STEP, ATTACKS, NOBODY)
        assert more == pytest.approx(taken if cell.attack == "blind" else 0) and taken > 1


def test_only_cells_that_are_left_are_estimated(tmp_path: Path, model_folder: Path) -> None:
    audit = Audit(plan_for(model_folder, attacks=("blind",), defenses=("none",)))
    store = RunStore(tmp_path, audit.plan.canonical())
    try:
        assert set(audit.estimate(store)) == {c.key for c in audit.cells}
        first = next(audit.run(store))
        assert set(audit.estimate(store)) == {c.key for c in audit.cells} - {first.key}
    finally:
        store.close()


def test_what_is_left_follows_the_speed_so_far() -> None:
    assert progress.remaining(elapsed=0.0, done=0.0, left=100.0, processes=2) == 50.0
    assert progress.remaining(elapsed=40.0, done=20.0, left=80.0, processes=2) == 160.0


def test_the_bar_fits_a_terminal_and_shows_the_current_cell() -> None:
    cells = progress.Cells({"a": 7200.0, "b": 40000.0}, 1)
    cells.began -= 36000
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None)
    with Progress(*progress.columns(), console=console) as bar:
        bar.add_task("ghost-generation / frozen-embeddings+dropout:0.1", total=1200, completed=118, told=cells)
    shown = [line for line in re.split(r"[\r\n]|\x1b\[2K", file.getvalue()) if "left" in line][-1]
    assert "10:00:00, ~13:06:40 left, cell 0:0" in shown and len(shown) <= 80, shown
    assert "118/1200" in shown and "ghost-generation" in shown


@pytest.mark.slow
def test_a_long_run_says_that_a_smaller_budget_takes_less(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rasura.cli import audit

    words = ["audit", "--text", TEXTS[0], "--model", model_folder, "--attack", "blind", "--defense", "none"]
    assert "takes a fraction" not in rasura_command(*words, "--out", tmp_path / "short").stderr
    monkeypatch.setattr(audit, "LONG", 0.0)
    assert "CPU time on 1 process; --budget quick takes" in rasura_command(*words, "--out", tmp_path / "long").stderr
    quick = rasura_command(*words, "--budget", "quick", "--out", tmp_path / "quick").stderr
    assert "takes a fraction" not in quick


@pytest.mark.slow
def test_without_a_terminal_lines_say_how_far_it_is(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "EVERY", 0.01)
    assert not shared.err.is_terminal
    words = [word for text in TEXTS for word in ("--text", text)]
    common = ("--model", model_folder, "--attack", "blind", "--defense", "none", "--out", tmp_path / "run")
    done = rasura_command("audit", *words, *common)
    assert (
        re.search(r"\d of 3 cells, \d+:\d\d, ", done.stderr) and "3 cells (0 done before), 3 texts; roughly" in done.stderr
    )
    notes = tmp_path / "notes.jsonl"
    notes.write_text("".join(json.dumps({"text": text, "label": 0}) + "\n" for text in TEXTS))
    done = rasura_command(
        "protect", "ghost", notes, tmp_path / "hidden.jsonl", "--model", model_folder, "--language", "none"
    )
    line = r"(minutes left|starting|substitutes).*, \d+:\d\d(, ~[\d:]+ left)?$"
    assert re.search(line, done.stderr, re.MULTILINE), done.stderr
