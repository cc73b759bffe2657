"""Ways to hide updates: the table's figures are those of the benchmark, and the audit of a secure sum is that of the sum."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pages_setting import MADE, PLAN, rows
from rows import GUESS, MANY, READ, column, record

from rasura.core.batches import Batch
from rasura.core.errors import InputError, NotApplicable
from rasura.core.rng import generator, secret_generator
from rasura.core.wire import to_bytes
from rasura.registry import DEFENSES, parse_defense
from rasura.report.findings import findings
from rasura.report.head import Made
from rasura.report.language import LANGUAGES, written_in
from rasura.report.page import render
from rasura.report.protections import protection_rows
from rasura.report.ways import SOURCE, VALUES, WAYS, way_lines, way_of
from rasura.runs.scoring import sent_bytes
from rasura.testing.tiny import CLS, SEP, VOCABULARY, batch_of, tiny
from rasura.victims.step import message_for, step

TABLE = Path(__file__).resolve().parents[1] / SOURCE.partition(",")[0]
NAMES = {
    "plain": "plain float32", "BFV for a tenth of the entries": "BFV for 1 of 10", "BFV for all entries": "BFV",
    "secure aggregation": "SecAgg+, 16 bits a value, 19 sent",
    "secure aggregation with noise": "SecAgg+ with noise, 24 bits a value, 27 sent",
}  # fmt: skip


def test_every_figure_of_the_table_stands_in_the_benchmark() -> None:
    text = TABLE.read_text(encoding="utf-8").partition("## Secure aggregation")[2].partition("\n## ")[0]
    assert f"{VALUES:,} values" in text
    found = {c[0]: c[1:] for c in (re.split(r"\s*\|\s*", line.strip("| ")) for line in text.splitlines() if line[:1] == "|")}
    for way in WAYS:
        if way.measured is None:
            assert way.setting.endswith("threshold")
            continue
        each, _, client, server, opening, *_ = found[NAMES[way.name]]
        seconds = [float(client), float(server)]
        seconds[0 if "bfv" in way.setting else 1] += float(opening)  # who opens the sum
        assert way.measured.each == float(each)
        assert (way.measured.client, way.measured.server) == pytest.approx(seconds)


def test_a_way_is_known_by_its_setting() -> None:
    for way in WAYS:
        if way.measured is not None and "param" not in way.setting:
            assert way_of(way.setting) == way.setting
    assert way_of("sealing:all/scheme=bfv") == "sealing:all/by=bfv"
    assert way_of("sealing:all/by=secagg/noise=0.0") == "sealing:all/by=secagg"
    for other in (
        "sealing:all",
        "sealing:param=0.5/by=bfv",
        "dropout:0.1",
        "sealing:all/by=bfv+bf16",
        "sealing:all/by=ckks",
        "sealing:all/by=bfv/embeddings=clear",
        "sealing:all/embeddings=clear/by=secagg",
    ):
        assert way_of(other) is None


def test_sizes_of_this_run_are_told_from_those_that_are_computed() -> None:
    some = [{**r, "sent_bytes": 8_000_000} for r in READ]
    some += [{**r, "sent_bytes": 17_000_000} for r in column("span", "sealing:all/by=bfv", [None] * MANY, "not_applicable")]
    lines = {line.setting: line for line in way_lines(findings(some))}
    assert lines["none"].size == "8 MB in this run" and lines["none"].each == "4.00"
    assert lines["sealing:all/by=bfv"].size == "17 MB in this run" and lines["sealing:all/by=bfv"].each == "8.50"
    assert lines["sealing:all/by=secagg"].size.endswith("MB computed")
    assert lines["sealing:all/by=threshold"].each == "not measured"
    unsent = {line.setting: line for line in way_lines(findings(READ))}
    assert unsent["none"].size == "" and unsent["none"].each == "4.00"


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_has_the_table_and_the_curve_of_the_run(language: str) -> None:
    sums = column("span", "none", [1.0] * 4 * MANY)
    for number in range(MANY):
        some = list(range(4 * number, 4 * number + 4))
        guessed = {"token_recall": {"per_record": [GUESS] * 4}}
        given: dict[str, Any] = {"batch": number, "batch_size": 4, "examples": some, "scores": guessed, "blind": guessed}
        sums.append(record("span", "none", **given))
    kept = ("data", "threat_plain", "sent_bytes", "versions", "device", "schema")
    sums = [{**r, **{name: rows()[0][name] for name in kept}} for r in sums]
    made = Made(MADE.sittings, {**MADE.about, "clients": [1, 4]})
    with written_in(language):
        page, plain = render(sums, PLAN, made), render(rows(), PLAN, MADE)
    assert 'id="sums"' in page and 'id="ways"' in page
    assert 'id="sums"' not in plain and 'id="ways"' in plain
    said = {"en": "At least 4 clients", "de": "Mindestens 4 Clients", "fr": "Au moins 4 clients"}
    assert said[language] in page
    assert "sealing:all/by=secagg" in page.replace(" / ", "/")


@pytest.mark.parametrize(
    ("setting", "promised", "private"),
    [
        ("all", "none by scheme=none, which encrypts nothing", False),
        ("grad=0.1/embeddings=sealed", "none by scheme=none, which encrypts nothing", False),
        ("all/by=bfv", "security of the encryption scheme", False),
        ("param=0.1/scheme=ckks", "security of the encryption scheme", False),
        ("all/by=secagg", "none for the sum", False),
        ("all/noise=0.0/by=secagg", "none for the sum", False),
        ("all/by=secagg/noise=1.0/clip=0.1", "differential privacy for the sum", True),
    ],
)
def test_the_promise_of_sealing_is_that_of_its_setting(setting: str, promised: str, private: bool) -> None:
    """A report called the sealed entries encrypted where nothing was, and secret where the server learns their sum."""
    defense = f"frozen-embeddings+sealing:{setting}"
    some = findings([*READ, *column("span", defense, [None] * MANY, "not_applicable")])
    row = next(r for r in protection_rows(some, PLAN, [], MADE) if r.name == defense)
    guarantee = dict(row.costs)["guarantee"]
    assert promised in guarantee and row.private is private
    assert ("encryption scheme" in guarantee) is ("bfv" in setting or "ckks" in setting)


@pytest.mark.parametrize(
    ("setting", "is_", "sent", "advised"),
    [
        ("all", "scheme=none encrypts nothing", "(without encryption, which adds to it)", False),
        ("structural/scheme=none", "scheme=none encrypts nothing", "(without encryption, which adds to it)", False),
        ("grad=0.1/scheme=", "scheme=none encrypts nothing", "(without encryption, which adds to it)", True),
        ("grad=0.1", "scheme=none encrypts nothing", "(without encryption, which adds to it)", True),
        ("all/by=bfv", "encrypts the most sensitive entries", "(as many as without protection)", False),
        ("all/by=secagg", "shows the server the sum", "(as many as without protection)", False),
    ],
)
def test_a_report_says_what_a_setting_of_sealing_does_and_advises_what_can_apply(
    setting: str, is_: str, sent: str, advised: bool
) -> None:
    """It called entries encrypted that were only left out, and advised an attack that can never apply there."""
    defense = f"sealing:{setting}"
    some = [{**r, "sent_bytes": 8_000_000} for r in [*READ, *column("span", defense, [None] * MANY, "not_applicable")]]
    about = {"sealing": {"about": DEFENSES["sealing"].about, "guarantee": "stored"}}
    found = findings(some)
    row = next(r for r in protection_rows(found, PLAN, some, Made([], {"protections": about})) if r.name == defense)
    assert is_ in dict(row.about)["sealing"] and sent in dict(row.costs)["bytes"]
    assert row.verdict.word == "not measured"
    assert ("add --attack mask-positions" in row.verdict.says) is advised
    assert ("mask-positions cannot apply" in row.verdict.says) is not advised
    assert ("mask-positions" in row.step.command) is advised


def batch(count: int) -> Batch:
    texts = [[CLS, 20 + k, 40 + k, 60 + k, SEP] for k in range(count)]
    return batch_of(texts, "classification", [k % 3 for k in range(count)])


def test_an_audit_of_secure_aggregation_shows_the_sum_in_whole_steps() -> None:
    model, some = tiny("bert", "classification", hidden=8, blocks=1), batch(4)
    defense = parse_defense("sealing:all/by=secagg")
    plain, _, _ = message_for(model, some.inputs(), 4, (), generator(0, "x"))
    seen, _, _ = message_for(model, some.inputs(), 4, defense, generator(0, "x"))
    for name, g in plain.gradients.items():
        largest = float(g.abs().max())
        step = 2.0 ** np.ceil(np.log2(2 * largest)) / ((1 << 15) - 1) if largest else 0.0
        assert float((seen.gradients[name] - g).abs().max()) <= step / 2 * (1 + 1e-6)
    assert any(not torch.equal(seen.gradients[n], g) for n, g in plain.gradients.items())
    entries = sum(g.numel() for g in plain.gradients.values())
    assert seen.sealed == {} and 18 / 8 * entries < int(str(seen.header["sent_bytes"])) < 18 / 8 * entries + 64


@pytest.mark.parametrize(
    ("defense", "count", "why"),
    [
        (
            "sealing:all/by=secagg",
            1,
            "does not tell what can be read. A sum of 1 is opened only where it was asked for by name",
        ),
        ("sealing:all/by=secagg", 2, "A sum of 2 is opened only where it was asked for"),
        ("sealing:all/by=secagg/noise=1.0", 4, "noise in the sum has a guarantee"),
        ("sealing:param=0.1/by=secagg", 4, "entries that stay clear"),
        ("sealing:all/by=secagg/embeddings=clear", 4, "entries that stay clear"),
        ("gaussian:0.1+sealing:all/by=secagg", 4, "each client does gaussian to its own update"),
        ("pruning:0.9+qsgd:4+sealing:all/by=secagg", 4, "each client does pruning, qsgd to its own update"),
    ],
)
def test_what_is_no_opened_sum_is_not_applicable_in_words(defense: str, count: int, why: str) -> None:
    model = tiny("bert", "classification", hidden=8, blocks=1)
    for kind in (NotApplicable, InputError):  # an audit records it, a training stops with one line
        with pytest.raises(kind, match=re.escape(why)):
            message_for(model, batch(count).inputs(), count, parse_defense(defense), generator(0, "x"))


def test_what_an_audit_shows_of_a_sum_is_never_sent() -> None:
    """It is the gradient in the clear, and a client that took it for a message sent its batch in the open."""
    model, defense = tiny("bert", "classification", hidden=8, blocks=1), parse_defense("sealing:all/by=secagg")
    with pytest.raises(InputError, match=r"in the clear.*rasura new federated.*secure_aggregation\.client\.Client"):
        step(model, batch(4), defense, task="classification", vocabulary=VOCABULARY, rng=secret_generator())
    taken = step(model, batch(4), defense, task="classification", vocabulary=VOCABULARY, rng=generator(0, "x"))
    assert sent_bytes(taken.message) > 0
    with pytest.raises(InputError, match="an audit shows in place of a secure sum"):
        to_bytes(taken.message)
