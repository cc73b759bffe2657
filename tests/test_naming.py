"""Who names every word names the right ones, too: that reads nothing, is no yardstick and no evidence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from audit_setting import NAMES, TEXTS, model_folder
from rows import GUESS, MANY, READ, column, of, record

import rasura
from rasura.core.records import Record
from rasura.core.values import Grant, Reconstruction
from rasura.report.findings import findings
from rasura.report.scores import NAMED, NAMED_BLIND
from rasura.report.verdicts import ABOVE, NOT_MEASURED, NOT_TOLD, READS
from rasura.testing.tiny import tiny, tokenizer_folder

__all__ = ["model_folder"]


def naming(rows: list[dict[str, Any]], here: float | None, blind: float | None = 0.2) -> list[dict[str, Any]]:
    return [{**r, "details": {**r["details"], NAMED: [here], NAMED_BLIND: [blind]}} for r in rows]


def test_a_guess_at_everything_reads_nothing() -> None:
    found = of(naming(column("all", "bf16", [1.0] * MANY), 0.01), "bf16")
    assert (found.word, found.whole, found.risk) == (NOT_MEASURED, 0, None)
    assert found.missing[0] == "all names more words than guessing, and fewer of them are right"
    assert of(naming(column("all", "bf16", [1.0] * MANY), 0.5), "bf16").word == READS
    assert of(naming(column("all", "bf16", [1.0] * MANY), None), "bf16").word == READS, "not known"
    assert of(naming(column("all", "bf16", [0.7] * MANY), 0.3), "bf16").word == ABOVE, "more than guessing, not mostly right"
    proved = [record("all", "bf16", 1.0, confidence="verified", note=k) for k in range(MANY)]
    assert of(naming(proved, 0.01), "bf16").word == NOT_MEASURED


def test_a_guess_at_everything_is_no_yardstick_and_speaks_for_no_protection() -> None:
    quiet = naming(column("all", "bf16", [GUESS] * MANY), 0.2)
    assert of([*naming(column("all", "none", [1.0] * MANY), 0.9), *quiet], "bf16").word == NOT_TOLD
    for value, share in ((1.0, 0.01), (0.6, 0.3)):
        found = of([*naming(column("all", "none", [value] * MANY), share), *quiet], "bf16")
        assert (found.word, found.counted) == (NOT_MEASURED, ())


def test_one_attack_that_names_everything_leaves_a_column_unmeasured_that_another_would_have_held() -> None:
    held = [*READ, *column("span", "bf16", [GUESS] * MANY)]
    assert of(held, "bf16").holds
    assert of([*held, *naming(column("all", "bf16", [1.0] * MANY), 0.01)], "bf16").word == NOT_MEASURED


def test_an_older_record_is_judged_by_its_precisions() -> None:
    def rows(precision: float) -> list[dict[str, Any]]:
        scores = {"token_recall": {"per_record": [1.0, 1.0]}, "token_precision": {"per_record": [precision] * 2}}
        blind = {"token_recall": {"per_record": [GUESS] * 2}}
        more: dict[str, Any] = {"examples": [0, 1], "scores": scores, "blind": blind, "batch_size": 2}
        return [record("all", "bf16", **more)]

    assert of(rows(0.01), "bf16").word == NOT_MEASURED
    found = of(rows(0.25), "bf16")
    assert (found.word, found.whole, found.mixed) == (READS, 2, 2), "a bag of the words of both"


class Own:
    name = "own"
    needs = frozenset({Grant.BASE_MODEL})
    uses: frozenset[Grant] = frozenset()

    def __init__(self, guess: Callable[[], Reconstruction]) -> None:
        self.guess = guess

    def __call__(self, seen: Any, *, rng: Any, budget: Any) -> Reconstruction:
        return self.guess()


FIRST = 5  # the first word of the tiny vocabulary
BAG = tuple(range(FIRST, FIRST + len(NAMES) + 10))


@pytest.mark.parametrize(
    ("size", "bag", "word"),
    [(1, tuple(range(FIRST, 295)), NOT_MEASURED), (2, tuple(range(FIRST, 295)), NOT_MEASURED), (2, BAG[:10], READS)],
)
def test_an_audit_says_how_much_of_what_was_named_stands_in_the_batch(
    size: int, bag: tuple[int, ...], word: str, model_folder: Path, tmp_path: Path
) -> None:
    plan = rasura.Plan(batch_sizes=(size,))
    own = Own(lambda: Reconstruction((bag,) * size, ordered=False))
    given: dict[str, Any] = {"metrics": ["token_recall"], "data": TEXTS[:2], "budget": "quick"}
    records = list(rasura.audit(plan, model=model_folder, out=tmp_path, attacks=[own], defenses=["none"], **given))
    here = [r for r in records if r.attack == "own"]
    assert {len(r.details[NAMED]) for r in here} == {size} and all(v <= 1 for r in here for v in r.details[NAMED])
    found = findings([r.to_dict() for r in records], {}).verdicts["none"]
    assert found.word == word, found.says
    said = findings([r.to_dict() for r in records], {}).sentence[0]
    assert ("read back" in said) == (word == READS)


def of_a_decoder(folder: Path, texts: list[str], attack: str) -> tuple[Record, list[dict[str, Any]]]:
    """The attack's Record of one batch of ``texts``, and those of the run."""
    tiny_model = tiny("llama", "causal")
    tiny_model.save_pretrained(folder / "model")  # type: ignore[operator]
    model = tokenizer_folder(tiny_model, folder / "model")
    records = list(
        rasura.audit(
            rasura.Plan(batch_sizes=(2,)), model=model, task="causal", data=texts, budget="quick", out=folder / "run",
            attacks=[attack], defenses=["none"], metrics=["token_recall"],
        )
    )  # fmt: skip
    (here,) = [r for r in records if r.attack == attack]
    return here, [r.to_dict() for r in records]


def test_bags_of_a_decoder_still_read_a_batch(tmp_path: Path) -> None:
    bag, records = of_a_decoder(tmp_path, ["w20 w31 w42 w53", "w64 w75 w86 w97"], "embedding-rows")
    assert bag.status == "ok", bag.reason
    assert all(v >= 0.5 for v in bag.details[NAMED])
    assert findings(records, {}).verdicts["none"].word == READS


def test_a_note_that_an_update_holds_twice_is_read_as_one(tmp_path: Path) -> None:
    span, records = of_a_decoder(tmp_path, ["w20 w31 w42 w53"] * 2, "span")
    assert span.scores["token_recall"]["per_record"] == [1.0, 1.0]
    found = findings(records, {}).verdicts["none"]
    assert (found.word, found.risk, found.proven) == (READS, 1.0, 0), found.says
