"""The curve of reading against the number of clients in a sum, and the least number that it names."""

from __future__ import annotations

from typing import Any

import pytest
from rows import GUESS, MANY, record

from rasura.core.errors import InputError
from rasura.report.sums import checked_clients, curve, curve_lines, least
from rasura.report.verdicts import NOT_MEASURED, NOT_TOLD, READS

METRIC = "token_recall"


def sums(size: int, value: float | None, attack: str = "span", **more: Any) -> list[dict[str, Any]]:
    """``MANY`` sums of ``size``, of each of which an attack reads the share ``value``; of one example each, enough for all
    sums here."""
    out = []
    for batch, start in enumerate(range(0, 20 * MANY if size == 1 else size * MANY, size)):
        some = list(range(start, start + size))
        given: dict[str, Any] = {"batch": batch, "batch_size": size, "examples": some, **more}
        given["scores"] = {} if value is None else {METRIC: {"per_record": [value] * size}}
        given["blind"] = {METRIC: {"per_record": [GUESS] * size}}
        out.append(record(attack, status="ok" if value is not None else "crashed", **given))
    return out


def test_the_least_number_is_that_from_which_on_nothing_is_read() -> None:
    records = [*sums(1, 1.0), *sums(2, 1.0), *sums(4, 0.6), *sums(12, GUESS), *sums(20, GUESS)]
    found = curve(records, (1, 2, 4, 12, 20))
    assert [found[k].word for k in (1, 2, 4, 12, 20)] == [READS, READS, READS, NOT_TOLD, NOT_TOLD]
    assert least(found) == 12
    lines = curve_lines(found)
    assert lines[0].startswith("sum of 1 client: reads") and lines[-1].startswith("At least 12 clients")
    assert "(12, 20)" in lines[-1] and "within 10 points" in lines[-1], "no number that was not tested"
    assert "not a guarantee" in lines[-1] and "subtract their own" in lines[-1]


def test_no_number_is_named_where_a_larger_one_is_read_or_was_not_measured() -> None:
    assert least(curve([*sums(1, 1.0), *sums(2, GUESS), *sums(4, 0.6)], (1, 2, 4))) is None
    failed = curve([*sums(1, 1.0), *sums(2, GUESS), *sums(4, None)], (1, 2, 4))
    assert failed[4].word == NOT_MEASURED and least(failed) is None
    missing = curve([*sums(1, 1.0), *sums(2, GUESS)], (1, 2, 4))
    assert missing[4].word == NOT_MEASURED and least(missing) is None
    assert curve_lines(missing)[-1].startswith("No tested number of clients holds")
    # An attack that reads nothing of single clients either says nothing about sums.
    blunt = curve([*sums(1, GUESS), *sums(2, GUESS)], (1, 2))
    assert blunt[2].word == NOT_MEASURED and least(blunt) is None
    # A sum of fewer than it should be is not one of so many.
    short = [{**r, "examples": r["examples"][:1]} for r in sums(2, GUESS)]
    assert "no 2 examples" in curve([*sums(1, 1.0), *short], (1, 2))[2].says


def test_few_examples_name_nothing() -> None:
    records = [r for r in [*sums(1, 1.0), *sums(2, GUESS)] if max(r["examples"]) < 10]
    found = curve(records, (1, 2))
    assert found[2].word == NOT_TOLD and least(found) is None and "too few" in found[2].says


def test_one_client_must_be_among_them() -> None:
    assert checked_clients((4, 1, 2, 2)) == (1, 2, 4)
    for wrong in ((1,), (2, 4), (0, 1, 2), ()):
        with pytest.raises(InputError, match="the yardstick"):
            checked_clients(wrong)
