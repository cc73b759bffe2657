"""Intervals over keys and texts cover, exactly counted and by simulation, where a bootstrap does not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from audit_setting import TEXTS, model_folder
from scipy.stats import binom
from study_setting import notes, study_folder
from typer.testing import CliRunner

from rasura.cli import app
from rasura.core.errors import InputError
from rasura.core.run_store import RunStore
from rasura.metrics.intervals import crossed_interval, mean_interval
from rasura.registry.services import parse_service_protection
from rasura.runs.service_plan import ServicePlan
from rasura.runs.services import ServiceAudit
from rasura.studies.files import load_study
from rasura.studies.metric_values import keyed_level, level_text
from rasura.testing.tiny import VOCABULARY, tiny

__all__ = ["model_folder"]

SHARES = [0.003, 0.02, 0.1, 0.3, 0.5, 0.77, 0.96, 0.999]


def bootstrap(values: Sequence[Sequence[float]], draws: int = 400) -> tuple[float, float]:
    """The percentile bootstrap over rows and columns (Owen 2007), which the interval is compared with."""
    table, rng = np.array(values), np.random.default_rng(0)
    keys, texts = table.shape
    found = [table[rng.integers(keys, size=keys)][:, rng.integers(texts, size=texts)].mean() for _ in range(draws)]
    return float(np.quantile(found, 0.025)), float(np.quantile(found, 0.975))


@pytest.mark.parametrize("keys", [2, 5, 9])
def test_keys_that_are_read_whole_or_not_at_all(keys: int) -> None:
    ends = [crossed_interval([[float(k < count)] * 12 for k in range(keys)])[1:] for count in range(keys + 1)]
    for share in SHARES:
        chance = sum(binom.pmf(count, keys, share) for count, (low, high) in enumerate(ends) if low <= share <= high)
        assert chance >= 0.95


@pytest.mark.parametrize(("keys", "texts"), [(5, 4), (3, 8)])
def test_texts_that_are_read_behind_every_key_or_none(keys: int, texts: int) -> None:
    ends = [crossed_interval([[float(k < count) for k in range(texts)]] * keys)[1:] for count in range(texts + 1)]
    for share in SHARES:
        chance = sum(binom.pmf(count, texts, share) for count, (low, high) in enumerate(ends) if low <= share <= high)
        assert chance >= 0.95


def test_a_bootstrap_of_few_keys_does_not_cover() -> None:
    # One key in ten is read whole; of five keys none is with a chance of .59, and then the bootstrap is a point.
    nothing = [[0.0] * 30] * 5
    assert bootstrap(nothing) == (0.0, 0.0) and 0.9**5 > 0.59
    assert crossed_interval(nothing)[2] > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("law", ["both", "keys", "rare key"])
def test_coverage_by_simulation(law: str) -> None:
    rng, samples, covered, by_bootstrap = np.random.default_rng(7), 400, 0, 0
    keys, texts = 5, 20
    for _ in range(samples):
        if law == "rare key":
            values, truth = np.where(rng.random((keys, 1)) < 0.2, 0.9, 0.1) * np.ones((keys, texts)), 0.26
        else:  # the chance of a token: a key's part and a text's, and noise of the cell
            text = rng.beta(2, 2, (1, texts)) if law == "both" else np.full((1, texts), 0.5)
            chance, truth = rng.beta(1, 2, (keys, 1)) * text, 1 / 6
            values = rng.binomial(15, chance) / 15
        _, low, high = crossed_interval(values.tolist())
        covered += low <= truth <= high
        ends = bootstrap(values.tolist(), 200)
        by_bootstrap += ends[0] <= truth <= ends[1]
    assert covered / samples >= 0.95 - 2 * math.sqrt(0.05 * 0.95 / samples)
    assert by_bootstrap < covered


def test_one_text_or_one_key_says_as_much_as_one_value() -> None:
    for values in ([[0.3], [0.4], [0.2]], [[0.3, 0.4, 0.2]]):
        mean, low, high = crossed_interval(values)
        _, alone, other = mean_interval([0.3])
        assert mean == pytest.approx(0.3) and low <= alone + 1e-4 and high >= other - 1e-4


def test_more_keys_are_narrower_and_ranges_are_kept() -> None:
    rng = np.random.default_rng(3)
    widths = []
    for keys in (3, 6, 12, 24):
        values = rng.beta(3, 6, (keys, 40))
        mean, low, high = crossed_interval(values.tolist())
        assert low <= mean <= high and mean == pytest.approx(values.mean())
        widths.append(high - low)
        scaled = crossed_interval((5 * values - 1).tolist(), low=-1, high=4)
        assert scaled == pytest.approx((5 * mean - 1, 5 * low - 1, 5 * high - 1))
    assert widths == sorted(widths, reverse=True)


def test_what_cannot_be_is_refused() -> None:
    assert all(map(math.isnan, crossed_interval([[math.nan], [0.5]])))
    for values in ([], [[0.1], [0.1, 0.2]], [[1.2]]):
        with pytest.raises(ValueError, match=r"expected a row|outside"):
            crossed_interval(values)
    with pytest.raises(ValueError, match="range"):
        crossed_interval([[0.5]], low=1, high=1)


def test_a_key_does_not_hang_on_how_a_setting_is_spelled() -> None:
    model = tiny("bert", "classification", seed=0)
    same = ["obfuslm:k=4/epsilon=1.0", "obfuslm:epsilon=1/k=4", "obfuslm:k=4/epsilon=1.00/plus=false"]
    made = [parse_service_protection(text).service(model, VOCABULARY, 3) for text in same]
    for other in made[1:]:
        assert bool((other.tokens == made[0].tokens).all())
        for a, b in zip(made[0].served.parameters(), other.served.parameters()):
            assert bool((a == b).all())
    # Settings are compared behind one key, too; another seed is another key.
    for text, seed, one_key in (("obfuslm:k=4/epsilon=0.1", 3, True), (same[0], 4, False)):
        other = parse_service_protection(text).service(model, VOCABULARY, seed)
        assert bool((other.tokens == made[0].tokens).all()) == one_key


def test_the_same_texts_are_read_behind_each_key(tmp_path: Path, model_folder: Path) -> None:
    data, other = tmp_path / "data.jsonl", tmp_path / "other.jsonl"
    notes(data, TEXTS)
    notes(other, [" ".join([f"w{k}", *reversed(t.split())]) for k, t in enumerate(TEXTS)])
    plan = ServicePlan(
        str(data), str(other), model=str(model_folder), protections=("obfuslm:k=4",), attacks=("knn",), limit=len(TEXTS)
    )
    audits = [ServiceAudit(replace(plan, key=key), baseline=False) for key in (0, 1)]
    assert audits[0].ids == audits[1].ids and audits[0].identity != audits[1].identity
    records = []
    for number, audit in enumerate(audits):
        store = RunStore(tmp_path / f"key-{number}", audit.identity)
        records += list(audit.run(store))
        store.close()
    assert [r.seed for r in records] == [0, 1]
    rows, behind = [r.scores["top1"]["per_record"] for r in records], [r.to_dict() for r in records]
    mean, low, high = crossed_interval(rows)
    assert level_text(keyed_level(behind, "top1"), "top1") == f"{100 * mean:.1f} [{100 * low:.0f}, {100 * high:.0f}]"
    assert level_text(keyed_level([behind[0], {"scores": {}}], "top1"), "top1") == "–"  # read behind one key only
    with pytest.raises(InputError, match="key is -1"):
        replace(plan, key=-1).checked()
    both = ServiceAudit(replace(plan, keys=2))
    store = RunStore(tmp_path / "both", both.identity)
    run = both.run(store)
    first = [next(run), next(run)]  # ended behind the first key
    found = [*first, *both.run(store)]
    store.close()
    assert [(r.defense, r.seed) for r in found] == [("none", 0), ("obfuslm:k=4", 0), ("obfuslm:k=4", 1)]
    assert [r.scores["top1"]["per_record"] for r in found[1:]] == rows, "as two audits with the same keys"
    with pytest.raises(InputError, match="keys is 0"):
        replace(plan, keys=0).checked()


def test_an_audit_of_updates_has_no_keys(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["audit", "--text", "a b", "--keys", "2", "--out", str(tmp_path / "run")])
    assert isinstance(found.exception, InputError) and "--keys needs --service" in str(found.exception)


def test_keys_of_a_study_are_those_of_a_service_alone(tmp_path: Path) -> None:
    body = 'title = "x"\nsource = "x"\ndiffers = ["x"]\nkeys = 5\n'
    service = '[service]\ndata = "a.jsonl"\nreference = "b.jsonl"\n'
    for name in "abcd":
        (tmp_path / name).mkdir()
    for name, beside in (("a", ""), ("b", "[train]\n")):
        assert load_study("one", study_folder(tmp_path / name, body + service + beside)).keys == 5
    for name, wrong in (("c", body + "[plan]\n"), ("d", body.replace("5", "0") + service)):
        with pytest.raises(InputError, match="keys apply to a service"):
            load_study("one", study_folder(tmp_path / name, wrong))
