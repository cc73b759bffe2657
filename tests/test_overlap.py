"""Reference text that holds private texts is refused at every door, and shared texts are counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from audit_setting import TEXTS, model_folder

from rasura.core.interfaces import InputError
from rasura.data.overlap import holding, refuse_shared, shared, texts_hash, wording
from rasura.data.text import Example
from rasura.runs.audit_data import load_data
from rasura.runs.membership import MembershipAudit
from rasura.runs.membership_plan import MembershipPlan
from rasura.runs.plans import Plan
from rasura.runs.service_plan import ServicePlan
from rasura.runs.services import ServiceAudit
from tools import overlap

__all__ = ["model_folder"]


def rows(path: Path, *texts: str) -> str:
    lines = (json.dumps({"text": text, "label": k % 2}) for k, text in enumerate(texts))
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_case_spaces_and_punctuation_do_not_tell_texts_apart() -> None:
    assert wording("It 's a CHARMING , affecting journey .") == wording("it's a charming, affecting journey. ")
    assert wording("Straße") == wording("STRASSE") and wording("ﬁne") == wording("fine")
    assert wording("one two") != wording("one too") and wording("?!") != wording("!")
    private = [Example("One two."), Example("three", "of a pair")]
    public = [Example("four"), Example("one  two"), Example("five", "THREE!"), Example("Of a pair?")]
    assert shared(private, public) == [1, 2, 3]
    refuse_shared(private, public[:1], "file")
    with pytest.raises(InputError, match="file holds audited texts in 3 of its rows"):
        refuse_shared(private, public, "file")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("काम बंद है", "कम बंद है"), ("மலை", "மாலை"), ("กิน", "กัน"), ("5 > 3", "5 < 3"), ("1.5 mg", "15 mg"), (".5 mg", "5 mg"),
        ("1,5 mg", "15 mg"), ("-40 °C", "40 °C"), ("at 12:30", "at 1230"), ("C++ and C", "C and C"), ("x̂ is y", "x is y"),
    ],
)  # fmt: skip
def test_vowel_signs_mathematical_signs_and_what_belongs_to_a_number_tell_texts_apart(one: str, other: str) -> None:
    assert wording(one) != wording(other) and wording(one) == wording(f" {one.upper()} !")
    assert shared([Example(one)], [Example(other)]) == [] and texts_hash([Example(one)]) != texts_hash([Example(other)])


def test_a_plain_text_keeps_its_name() -> None:
    plain = [Example("It 's a CHARMING , affecting journey ."), Example("Call me at 5 pm, (or) not: $40!", "a_b")]
    assert texts_hash(plain) == "cc26dbe3df487456", "rows.json of a training holds it"
    assert wording("I paid 40.") == wording("i paid 40") and wording("pre-2000") == wording("pre 2000")
    assert wording("İZMİR") == wording("izmir") and wording("−40") == wording("-40")


def test_a_text_within_a_longer_one_is_found_from_five_words_on() -> None:
    owes, pin, bank = "Anna doesn't owe us 40 euros.", "the pin of the door is 4412", "我们明天去银行"
    private = [Example(owes), Example("call me back", pin), Example(bank)]
    within = ["Note: anna does n't owe us 40 euros . Best, Ann", "Sav" + owes.lower(), "Please, call me back.",
              f"So {pin.upper()} (today).", f"他说{bank}。", "Anna doesn't owe us 400 euros.", "Anna doesn't owe us",
              "Anna doesn't owe us 40 eurosceptics"]  # fmt: skip
    public = [Example("a pair", text) for text in within]
    assert holding(private, public) == [0, 3, 4] and holding(private, private) == [0, 1, 2] and holding([], public) == []
    with pytest.raises(InputError, match="file holds audited texts in 3 of its rows, as a whole or within a longer text"):
        refuse_shared(private, public, "file")


def test_reference_text_that_holds_a_text_within_a_longer_one_is_refused_or_left_out(
    tmp_path: Path, model_folder: Path
) -> None:
    texts = ["w1 w2 w3 w4 w5", "w9 w8 w7, w6 w5 w4!"]
    data = rows(tmp_path / "data.jsonl", *texts)
    longer = rows(tmp_path / "longer.jsonl", "w5 w4 w3 w2 w1", *(f"w9 {text} w8" for text in texts))
    with pytest.raises(InputError, match=f"holds audited texts in {len(texts)} of its rows"):
        load_data(Plan(data=data, reference=longer))
    plan = ServicePlan(data, longer, model=str(model_folder), limit=len(texts))
    with pytest.raises(InputError, match="drop_shared"):
        ServiceAudit(plan)
    assert ServiceAudit(replace(plan, drop_shared=True)).reference == ("w5 w4 w3 w2 w1",)


def test_an_audit_refuses_and_caps_reference_text(tmp_path: Path) -> None:
    data = rows(tmp_path / "data.jsonl", "The first text.", "the second text")
    plan = Plan(data=data, reference=rows(tmp_path / "same.jsonl", "other", "the FIRST text"))
    with pytest.raises(InputError, match=r"same\.jsonl holds audited texts in 1 of its rows"):
        load_data(plan)
    others = rows(tmp_path / "others.jsonl", "a", "b", "c")
    assert load_data(replace(plan, reference=others)).reference == ("a", "b", "c")
    assert load_data(replace(plan, reference=others, references=2)).reference == ("a", "b")
    with pytest.raises(InputError, match="references is 0"):
        replace(plan, references=0).checked()
    assert "references" not in plan.canonical() and replace(plan, references=2).canonical()["references"] == 2


def test_a_service_refuses_reference_text_or_leaves_it_out(tmp_path: Path, model_folder: Path) -> None:
    data = rows(tmp_path / "data.jsonl", *TEXTS)
    other = rows(tmp_path / "other.jsonl", "w1 w2 w3 w4 w5", TEXTS[0].upper() + " !", "w6 w7 w8")
    plan = ServicePlan(data, other, model=str(model_folder), limit=len(TEXTS))
    with pytest.raises(InputError, match=r"other\.jsonl holds audited texts in 1 of its rows.*drop_shared"):
        ServiceAudit(plan)
    assert ServiceAudit(replace(plan, drop_shared=True)).reference == ("w1 w2 w3 w4 w5", "w6 w7 w8")


def test_membership_refuses_candidates_among_reference_text(tmp_path: Path, model_folder: Path) -> None:
    inside, outside = (rows(tmp_path / f"{n}.jsonl", *(f"{n} w{k}" for k in range(4))) for n in ("w8", "w9"))
    plan = MembershipPlan(str(model_folder), inside, non_members=outside, base=str(model_folder))
    given = rows(tmp_path / "other.jsonl", "w7 w1", "W8, w2")
    with pytest.raises(InputError, match=r"other\.jsonl contains texts that are also members or candidates \(1\)"):
        MembershipAudit(replace(plan, reference=given), tmp_path / "run")


def test_the_table_counts_shared_texts(tmp_path: Path) -> None:
    studies, data = tmp_path / "studies", tmp_path / "data"
    studies.mkdir()
    data.mkdir()
    body = 'title = "x"\nsource = "x"\ndiffers = ["x"]\n[plan]\ndata = "a.jsonl"\nreference = "b.jsonl"\n'
    (studies / "one.toml").write_text(body, encoding="utf-8")
    rows(data / "a.jsonl", "one", "Two", "three")
    rows(data / "b.jsonl", "two!", "three", "four", "five")
    assert overlap.table(data, studies).splitlines()[2] == "| a.jsonl | b.jsonl | reference | 2 of 3 | 1 |"
    assert ("sst2.validation.parquet", "sst2.train.parquet", "reference") in set(overlap.pairs())
