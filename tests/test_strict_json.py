"""What commands print with ``--json`` is JSON: no parser meets NaN or infinity, which JSON does not have."""

from __future__ import annotations

import json
import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from audit_setting import NAMES, model_folder
from commands import rasura_command
from hypothesis import given
from hypothesis import strategies as some

from rasura.core.strict_json import strict_json

__all__ = ["model_folder"]

VALUES = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(),
    lambda inner: some.lists(inner) | some.dictionaries(some.text(), inner),
)


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def strictly(text: str) -> Any:
    return json.loads(text, parse_constant=refuse)


def expected(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: expected(v) for k, v in value.items()}
    if isinstance(value, list):
        return [expected(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@given(VALUES)
def test_what_is_not_finite_is_null_and_all_else_comes_back(value: Any) -> None:
    assert strictly(strict_json(value)) == expected(value)


def test_a_tuple_is_a_list_and_keys_can_be_sorted() -> None:
    assert strict_json({"b": (1.5, math.inf), "a": math.nan}, sort=True) == '{"a": null, "b": [1.5, null]}'


@pytest.mark.slow
def test_a_command_prints_json_where_a_model_gives_no_numbers(model_folder: Path, tmp_path: Path) -> None:
    """The weights are finite, and so large that states overflow."""
    folder, data = tmp_path / "model", tmp_path / "texts.jsonl"
    shutil.copytree(model_folder, folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight.fill_(3e38)
    model.save_pretrained(folder)
    rows = [{"text": f"{a} met {b}", "label": k % 2} for k, (a, b) in enumerate(pairwise(NAMES))]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    common = ["--examples", 1000, "--batch-size", 50, "--target-epsilon", 1, "--public"]
    done = rasura_command("diagnose", data, "--model", folder, "--texts", 6, *common, "--json")
    told = strictly(done.stdout)
    assert told["norms"] == [None] * 6 and "6 of 6 texts are not finite" in " ".join(told["findings"])
