"""No text is left out silently: odd pairs, keys given twice, the splits of a data set, and what is cut off."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from audit_setting import model_folder, plan_for
from rows import sentences

from rasura.core.interfaces import InputError
from rasura.data.text import load_examples
from rasura.report.gate import outcomes
from rasura.report.machine import write_junit
from rasura.report.page import opened, write_report
from rasura.report.verdicts import Verdict
from rasura.runs.audit import audit

__all__ = ["model_folder"]


@pytest.mark.parametrize("pair", [["a secret"], 7, 0, 1.5, True, False, [], {}, {"text": "a secret"}])
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_pair_that_is_not_text_is_refused_by_its_row(tmp_path: Path, pair: Any, suffix: str) -> None:
    rows = [{"text": "one", "text_pair": "two"}, {"text": "three", "text_pair": pair}]
    path = tmp_path / f"notes{suffix}"
    path.write_text("\n".join(map(json.dumps, rows)) if suffix == ".jsonl" else json.dumps(rows))
    with pytest.raises(InputError, match="row 2: the second text is not a text") as caught:
        load_examples(path)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("row", [{}, {"text_pair": None}, {"text_pair": ""}])
def test_an_empty_pair_is_no_pair(tmp_path: Path, row: dict[str, Any]) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in ({"text": "one", "text_pair": "two"}, {"text": "three", **row})))
    assert [e.text_pair for e in load_examples(path)] == ["two", None]


@pytest.mark.parametrize("key", ["text", "label", "text_pair"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_key_given_twice_is_refused_by_its_row(tmp_path: Path, key: str, suffix: str) -> None:
    rows = ['{"text": "one", "label": 0}', f'{{"text": "two", "label": 1, "{key}": 0, "{key}": "a secret"}}']
    path = tmp_path / f"notes{suffix}"
    path.write_text("\n".join(rows) if suffix == ".jsonl" else f"[{', '.join(rows)}]")
    with pytest.raises(InputError, match=r"(line|row) 2: a key is given twice") as caught:
        load_examples(path)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("splits", "read"), [(["test", "train"], "train"), (["train"], "train"), (["test"], "test"), (["dev", "test"], None)]
)
def test_the_split_of_a_data_set_is_named(
    splits: list[str], read: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    datasets = pytest.importorskip("datasets")
    found = datasets.DatasetDict({s: datasets.Dataset.from_dict({"text": [f"a text of {s}"]}) for s in splits})
    monkeypatch.setattr(datasets, "load_dataset", lambda name: found)  # the download
    caplog.set_level(logging.INFO, "rasura.data")
    if read is None:
        with pytest.raises(InputError, match="has the splits dev, test, and none is called train"):
            load_examples("someone/notes")
        return
    assert [e.text for e in load_examples("someone/notes")] == [f"a text of {read}"]
    assert caplog.messages == [f"someone/notes: split {read}"]


@pytest.mark.parametrize("cut", [True, False])
def test_everything_said_of_texts_that_were_cut_says_so(tmp_path: Path, model_folder: Path, cut: bool) -> None:
    """Of a long note that was cut to two words it said that it was read nearly whole, and no more."""
    only = {"attacks": ("blind", "embedding-rows"), "defenses": ("none",), "limit": 2}
    texts = {"texts": ("Alpha met Bravo in Delta .", "Carol paid")}
    plan = plan_for(model_folder, **only, **texts, **({"truncate": True, "max_length": 4} if cut else {}))
    assert [r.scores["token_recall"]["mean"] for r in audit(plan, out=tmp_path) if r.attack != "blind"] == [1.0, 1.0]
    page, found = sentences(write_report(tmp_path).read_text(encoding="utf-8")), opened(tmp_path).found
    write_junit(tmp_path / "junit.xml", found, None, 0.0)
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    said = "1 of 2 notes were cut to 4 tokens before they were sent, the longest from 8"
    junit = (tmp_path / "junit.xml").read_text(encoding="utf-8")
    everywhere = [page, " ".join(summary["sentence"]), summary["verdicts"]["none"]["says"], junit]
    assert [said in one for one in everywhere] == [cut] * 4


@pytest.mark.parametrize("limit", [0.2, 0.99])
def test_a_gate_says_that_texts_were_cut(limit: float) -> None:
    """Whether it passes or not: what was cut off was not sent, and not read."""
    risk = 0.5 if limit < 0.5 else 0.1
    one = Verdict(
        "above guessing", "pruning:0.5", 100, risk, 0.9, 0.6, "span", counted=("span",), cut="9 of 100 notes were cut"
    )
    (line,) = [says for _, says in outcomes({"pruning:0.5": one}, limit).values()]
    assert line.endswith("; 9 of 100 notes were cut")
