"""Reference text that holds private texts is refused at every door, and shared texts are counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from audit_setting import TEXTS, model_folder

from rasura.core.interfaces import InputError
from rasura.data.overlap import refuse_shared, shared, wording
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
    with pytest.raises(InputError, match="file contains 3 of the audited texts"):
        refuse_shared(private, public, "file")


def test_an_audit_refuses_and_caps_reference_text(tmp_path: Path) -> None:
    data = rows(tmp_path / "data.jsonl", "The first text.", "the second text")
    plan = Plan(data=data, reference=rows(tmp_path / "same.jsonl", "other", "the FIRST text"))
    with pytest.raises(InputError, match=r"same\.jsonl contains 1 of the audited texts"):
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
    with pytest.raises(InputError, match=r"other\.jsonl contains 1 of the audited texts.*drop_shared"):
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
