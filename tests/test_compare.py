"""Two runs side by side: a change is said only beyond noise, and what cannot be compared is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rows import GUESS, MANY, READ, column

from rasura.core.errors import InputError
from rasura.core.provenance import Sitting
from rasura.report.compare import CHANGED, NOISE, SAME, UNKNOWN, Run, compared
from rasura.report.findings import findings, unfinished
from rasura.report.head import Made
from rasura.report.verdicts import READS

MADE_WITH: dict[str, Any] = {"tokenizer of the model": "t", "configuration of the model": {"act": "gelu", "heads": "2"}}


def run(rows: list[dict[str, Any]], data: str = "d", model: str | None = "m", **plan: Any) -> Run:
    rows = [{**r, "data": data} for r in rows]
    return Run(rows, plan, Made((), {} if model is None else {"model": model, **MADE_WITH}), findings(rows))


def words(first: Run, second: Run) -> dict[tuple[str, str], str]:
    return {(c.attack, c.column): c.word for c in compared(first, second).changes}


def noisy(shift: float = 0.0) -> list[float]:
    return [0.3 + 0.4 * (k % 2) + shift for k in range(MANY)]


def test_a_run_is_the_same_as_itself() -> None:
    one = run([*READ, *column("span", "bf16", noisy())])
    found = compared(one, one)
    assert {c.word for c in found.changes} == {SAME} and found.paired and found.settings == ()
    assert all(was == now for _, was, now in found.verdicts)


def test_only_a_change_beyond_noise_is_said() -> None:
    first = run([*READ, *column("span", "bf16", noisy())])
    small = [v + (0.01 if k % 2 else -0.01) for k, v in enumerate(noisy())]
    assert words(first, run([*READ, *column("span", "bf16", small)]))["span", "bf16"] == NOISE
    found = compared(first, run([*READ, *column("span", "bf16", noisy(0.25))]))
    (change,) = [c for c in found.changes if c.column == "bf16"]
    assert change.word == CHANGED and change.low is not None and change.high is not None
    assert 0 < change.low < 0.25 < change.high and change.n == (MANY, MANY)
    few = [r for r in READ if r["batch"] < 2]
    a, b = (run([*few, *column("span", "bf16", [v] * 2)]) for v in (0.3, 0.6))
    assert words(a, b)["span", "bf16"] == UNKNOWN, "two texts show nothing"


def test_other_texts_are_two_groups_and_need_a_larger_change() -> None:
    first = run(column("span", "bf16", noisy()))
    same = compared(first, run(column("span", "bf16", noisy()), data="other"))
    assert not same.paired and same.changes[0].word == NOISE and "data is different" in same.settings[0]
    assert words(first, run(column("span", "bf16", [1.0] * MANY), data="other"))["span", "bf16"] == CHANGED


def test_what_one_run_lacks_is_not_comparable() -> None:
    first = run([*READ, *column("span", "bf16", noisy())])
    found = compared(first, run([*READ, *column("span", "bf16", [None] * MANY, "crashed")]))
    assert {c.word for c in found.changes if c.column == "bf16"} == {UNKNOWN}
    half = [v if k % 2 else None for k, v in enumerate(noisy())]
    assert words(first, run([*READ, *column("span", "bf16", half, "crashed")]))["span", "bf16"] == UNKNOWN
    alone = compared(first, run(READ))
    assert words(first, run(READ))["span", "bf16"] == UNKNOWN
    assert ("bf16", None) in [(c, now) for c, _, now in alone.verdicts]


def test_what_could_not_be_compared_is_counted_and_sets_the_exit_code() -> None:
    whole = run([*READ, *column("span", "bf16", noisy())])
    same = compared(whole, whole)
    assert same.says.startswith("No change is shown, by the 95 % interval") and same.exit == 0
    crashed = compared(whole, run([*READ, *column("span", "bf16", [None] * MANY, "crashed")]))
    assert crashed.says.startswith("0 of 2 comparisons changed beyond noise; 1 could not be made, by") and crashed.exit == 4
    moved = compared(whole, run([*column("span", "none", [0.2] * MANY), *column("span", "bf16", [None], "crashed")]))
    assert moved.says.startswith("1 of 2 comparisons changed beyond noise; 1 could not be made") and moved.exit == 4
    assert compared(whole, run([*READ, *column("span", "bf16", noisy(-0.25))])).exit == 0, "a change is an answer"
    assert compared(whole, run([*READ, *column("span", "bf16", noisy(0.25))])).exit == 3, "from above guessing to reads"
    nothing = compared(run([]), run([]))
    assert nothing.exit == 4 and "the runs have no figures to compare" in nothing.says


def test_an_attack_that_applies_in_neither_run_is_the_same_in_both() -> None:
    absent = run([*READ, *column("tag", "none", [None] * MANY, "not_applicable")])
    assert words(absent, absent)["tag", "none"] == SAME and compared(absent, absent).exit == 0
    crashed = run([*READ, *column("tag", "none", [None] * MANY, "crashed")])
    assert words(absent, crashed)["tag", "none"] == words(crashed, crashed)["tag", "none"] == UNKNOWN


def test_what_differs_is_said() -> None:
    a, b = run(READ, model="aa", budget="quick", data="x"), run(READ, model="bb", budget="paper", data="x")
    assert compared(a, b).settings == ("budget: quick, then paper", "the weights of the model: aa, then bb")
    assert all("may differ" in line for line in compared(a, run(READ, model=None, data="x")).settings[1:])
    with pytest.raises(InputError, match="different things"):
        compared(a, run(READ, kind="service"))
    assert GUESS < 1


def test_what_the_names_of_a_plan_stand_for_is_compared() -> None:
    """A reference file, an own method and a package keep their names when they change."""

    def made(reference: str, own: str, torch: str) -> Run:
        sitting: Sitting = {
            "began": "",
            "command": "",
            "code": "c",
            "machine": "m",
            "packages": {"python": "3.12", "torch": torch},
        }
        about = {"model": "m", **MADE_WITH, "reference text": reference, "code of own methods": {"AttackSpec mine": own}}
        return replace(run(READ), made=Made((sitting,), about))

    one = made("aa", "bb", "2.6")
    assert compared(one, one).settings == ()
    assert compared(one, made("cc", "dd", "2.7")).settings == (
        "reference text: aa, then cc", "code of own methods: AttackSpec mine bb, then AttackSpec mine dd",
        "package torch: 2.6, then 2.7",
    )  # fmt: skip
    older = replace(one, made=replace(one.made, about={"model": "m"}))
    assert "reference text: not set, then aa" in compared(older, one).settings
    unknown = "tokenizer of the model: not recorded in one of the runs, so it may differ"
    assert all(unknown in compared(*pair).settings for pair in ((older, one), (one, older), (older, older)))
    with_prior = replace(older, plan={"language_model": "p"})
    assert any(line.startswith("language model: not recorded") for line in compared(with_prior, with_prior).settings)
    about = {
        **MADE_WITH,
        "model": "m",
        "tokenizer of the model": "u",
        "configuration of the model": {"act": "gelu", "heads": "1"},
    }
    assert compared(run(READ), replace(run(READ), made=Made((), about))).settings == (
        "tokenizer of the model: t, then u", "configuration of the model: heads 2, then heads 1",
    )  # fmt: skip


@pytest.mark.slow
def test_of_runs_that_are_alike_few_are_called_changed() -> None:
    """Pairs of runs of the same attack: the interval of the difference leaves out 0 in at most 5 %, here of 200."""
    import random

    draw, called = random.Random(0), 0
    for _ in range(200):
        a, b = ([float(draw.random() < 0.5) for _ in range(12)] for _ in range(2))
        called += words(run(column("span", "bf16", a)), run(column("span", "bf16", b)))["span", "bf16"] == CHANGED
    assert called <= 10


def test_settings_are_compared_apart() -> None:
    def both(one: float, two: float) -> list[dict[str, Any]]:
        other = [{**r, "batch_size": 2, "batch": r["batch"] + MANY} for r in column("span", "bf16", [two] * MANY)]
        return [*column("span", "bf16", [one] * MANY), *other]

    found = compared(run(both(1.0, 0.0)), run(both(0.0, 1.0)))
    told = {c.where: (c.word, c.before, c.after) for c in found.changes}
    assert told == {
        "honest-server, batch size 1": (CHANGED, 1.0, 0.0), "honest-server, batch size 2": (CHANGED, 0.0, 1.0),
    }  # fmt: skip
    missing = compared(run(both(1.0, 0.0)), run(column("span", "bf16", [1.0] * MANY)))
    assert {c.where[-1]: c.word for c in missing.changes} == {"1": SAME, "2": UNKNOWN}
    alone = compared(run(both(1.0, 0.0)[:MANY]), run(both(1.0, 0.0)[MANY:]))
    assert [(c.where, c.word) for c in alone.changes] == [("", CHANGED)], "the settings say that it differs"


def test_too_few_texts_to_show_any_change_are_not_called_unchanged() -> None:
    def few(value: float, n: int, data: str = "d") -> Run:
        return run(column("span", "bf16", [value] * n), data=data)

    for data, needed in (("d", 6), ("other", 7)):
        found = compared(few(0.0, needed - 1), few(1.0, needed - 1, data))
        (change,) = found.changes
        assert change.word == UNKNOWN and change.why == f"too few texts: at least {needed} are needed" and found.exit
        assert "No change" not in found.says and change.low is None
        assert compared(few(0.0, needed), few(1.0, needed, data)).changes[0].word == CHANGED
    assert compared(few(0.0, 2), few(0.0, 2)).exit == 4, "two equal texts show no more than two others"
    uneven = compared(few(0.0, MANY), few(0.0, 3, "other"))
    assert uneven.changes[0].word == UNKNOWN and uneven.exit == 4


def test_a_verdict_that_became_worse_is_never_called_no_change() -> None:
    quiet = [*READ, *column("span", "bf16", [GUESS] * MANY)]
    lost = [*READ, *column("span", "bf16", [GUESS] * (MANY - 1) + [None], "crashed")]
    read = [*READ, *column("span", "bf16", [GUESS] * (MANY - 1) + [1.0])]
    assert run(quiet).found.verdicts["bf16"].holds
    for was, now in ((quiet, read), (quiet, lost), (lost, read)):
        found = compared(run(was), run(now))
        assert found.worse == ("bf16",) and found.exit == 3 and found.says.startswith("The verdict became worse on bf16. ")
        back = compared(run(now), run(was))
        assert back.worse == () and back.exit in (0, 4)
    (one,) = [c for c in compared(run(quiet), run(read)).changes if c.column == "bf16"]
    assert one.word == NOISE, "one text in sixty is within the noise of the mean; the verdict is not"


def test_a_rise_is_never_passed_where_the_verdict_stays_the_same() -> None:
    first, second = (run([*READ, *column("span", "bf16", [v] * MANY)]) for v in (0.65, 0.95))
    found = compared(first, second)
    assert found.worse == () and {one.found.verdicts["bf16"].word for one in (first, second)} == {READS}
    assert found.more == ("bf16",) and found.exit == 3 and found.says.startswith("More was read than before on bf16. ")
    back = compared(second, first)
    assert back.more == () and back.exit == 0
    guessed = compared(*(run([*READ, *column("blind", "bf16", [v] * MANY)]) for v in (0.1, 0.9)))
    assert guessed.more == (), "guessing reads nothing"
    held = compared(*(run([*READ, *column("span", "bf16", [v] * MANY)]) for v in (0.02, GUESS)))
    assert held.changes[-1].word == CHANGED and held.more == () and held.exit == 0, "up to the level of guessing, it holds"


@pytest.mark.slow
@pytest.mark.parametrize(("pairs", "attacks"), [(40, 10), (100, 20)])
def test_of_many_comparisons_few_runs_that_are_alike_are_said_to_read_more(pairs: int, attacks: int) -> None:
    """A rise by chance in at most 5 % of the pairs, not of the attacks."""
    import random

    draw, called = random.Random(0), 0
    for _ in range(pairs):
        first, second = (
            run(
                [
                    r
                    for k in range(attacks)
                    for r in column(f"own{k}", "bf16", [float(draw.random() < 0.5) for _ in range(16)])
                ]
            )
            for _ in range(2)
        )
        called += bool(compared(first, second).more)
    assert called <= 0.05 * pairs


def test_an_attack_that_did_not_end_on_every_text_is_not_compared() -> None:
    crashed = run([*READ, *column("span", "bf16", [1.0] + [None] * (MANY - 1), "crashed")])
    found = compared(crashed, crashed)
    told = {c.column: (c.word, c.why) for c in found.changes}
    assert told["bf16"] == (UNKNOWN, f"first run: crashed on {MANY - 1} of {MANY}") and found.exit == 4
    most = run([*READ, *column("span", "bf16", [*noisy()[1:], None], "crashed")])
    assert words(most, most)["span", "bf16"] == UNKNOWN, "many texts, and not all"
    short = [*column("span", "bf16", noisy()), *column("tag", "bf16", noisy()[:30])]
    assert words(run(short), run(short))["tag", "bf16"] == UNKNOWN, "it was not run on what the other attack was"


def test_runs_without_any_figure_show_nothing() -> None:
    absent = run([*column("tag", "none", [None] * MANY, "not_applicable"), *column("blind", "none", [GUESS] * MANY)])
    found = compared(absent, absent)
    assert found.exit == 4 and "no figures to compare" in found.says and "No change" not in found.says


def test_runs_that_are_unfinished_are_not_compared_to_the_end() -> None:
    """What is in neither of them has no row, and nothing to tell that it is missing."""
    whole = run(READ)
    begun = replace(whole, found=unfinished(whole.found, len(READ), len(READ) + 1))
    both = compared(begun, begun)
    assert (both.exit, both.unfinished) == (4, ("first", "second"))
    assert both.says.startswith("The first run is unfinished. The second run is unfinished. 0 of ")
    one = compared(whole, begun)
    assert one.exit == 4 and one.says.startswith("The second run is unfinished. ")
