"""What a caller passes from Python: tables, names of files and names of models in place of what is expected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
from audit_setting import TEXTS, model_folder

import rasura
from rasura.core.given import given_texts
from rasura.data.text import load_examples
from rasura.runs.candidates import read_candidates

__all__ = ["model_folder"]

TABLE = pandas.DataFrame({"text": TEXTS, "label": [0, 1, 0]})


class Columns(list[str]):
    """A table like those of ``datasets``."""

    column_names = ("text",)


@pytest.mark.parametrize("table", [TABLE, {"text": list(TEXTS)}, Columns(TEXTS)])
def test_the_names_of_columns_are_no_private_texts(tmp_path: Path, model_folder: Path, table: Any) -> None:
    with pytest.raises(rasura.InputError, match=r"data is a table .*; pass its column of texts"):
        rasura.audit(data=table, model=model_folder, attacks=("blind",), out=tmp_path / "run")
    with pytest.raises(rasura.InputError, match=r"texts is a table .*; pass its column of texts"):
        rasura.Plan(texts=table)
    for source in (table, [*TEXTS]):
        with pytest.raises(rasura.InputError, match=r"texts were given as .*; expected the name of a file"):
            load_examples(source)  # type: ignore[arg-type]  # on purpose
    assert not (tmp_path / "run").exists()


def test_a_column_of_a_table_is_a_list_of_texts() -> None:
    assert given_texts(TABLE["text"]) == given_texts(list(TEXTS)) == TEXTS == rasura.Plan(texts=list(TEXTS)).texts  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("one text", "data is str; expected a list of texts"), (iter(TEXTS), "data is tuple_iterator; expected a list"),
        ([], "no texts were given"), (["a", None], r"data\[1\] is NoneType; expected a text"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_texts_is_refused(given: Any, says: str) -> None:
    with pytest.raises(rasura.InputError, match=says):
        given_texts(given)


FILE: Any = "notes.jsonl"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda out: rasura.audit(FILE, out=out), 'plan is str; expected Plan: a file or texts are data="notes.jsonl"'),
        (lambda out: rasura.train(FILE, out=out), 'plan is str; expected TrainPlan: a file is TrainPlan'),
        (lambda out: rasura.calibrate(FILE, out=out), "wanted is str; expected CalibrationPlan: a file is"),
        (lambda out: rasura.calibrate(rasura.CalibrationPlan(FILE), out=out), "plan is str; expected Plan: a file is Plan"),
        (lambda out: rasura.infer_membership(FILE, out=out), "plan is str; expected MembershipPlan: a model and its files"),
        (lambda out: rasura.audit_service(FILE, out=out), "plan is str; expected ServicePlan: files are ServicePlan"),
        (lambda out: rasura.read_update("u.safetensors", FILE), r"victim is str; expected Victim: .*rasura.load\("),
        (lambda out: rasura.read_update("u.safetensors", FILE, FILE), "request is str; expected ReadRequest"),
        (lambda out: read_candidates("u.safetensors", "c.jsonl", FILE), r"victim is str; expected Victim: .*rasura.load\("),
        (lambda out: rasura.GhostObfuscator(FILE), r"victim is str; expected Victim: .*rasura.load\("),
    ],
)  # fmt: skip
def test_a_name_in_place_of_an_object_is_refused_in_words(tmp_path: Path, call: Callable[[Path], object], says: str) -> None:
    """Each ended in an AttributeError of a text."""
    with pytest.raises(rasura.InputError, match=says):
        call(tmp_path / "run")
    assert not (tmp_path / "run").exists()
