"""Records of a study beside its results, so that any machine goes on where another one stopped.

``studies/records/grab/table7.jsonl`` holds one object a line: first the fingerprint of the model and the range of every
metric, then the finished cells. A cell has what the tables need and nothing that was read back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from math import nan
from pathlib import Path
from typing import Any

from rasura.core.errors import InputError
from rasura.core.files import write_whole
from rasura.core.records import Record, wrong_in
from rasura.runs.scoring import score_of

FOLDER = "records"
"""The folder, beside the results, with a file for each study."""

LEFT_OUT = ("recovered", "details", "known_by", "threat_plain", "versions")
"""Fields that no table needs."""

SIDES = ("scores", "blind")

DIGITS = 6
"""Decimal places of a kept value."""

USUAL = {f.name: f.default for f in fields(Record) if f.default is not MISSING}
"""Values that need not be written."""


def path_of(name: str, results: Path) -> Path:
    """The file of the study ``name`` beside the file ``results``."""
    return results.parent / FOLDER / f"{name}.jsonl"


def keep(path: Path, model: str, records: Iterable[Mapping[str, Any]], metrics: Sequence[str]) -> None:
    """Write ``records`` to ``path``, with the values of ``metrics``, beside those of other cells that it has of the same
    weights. ``model``: their fingerprint."""
    ranges: dict[str, Any] = {}
    lines = []
    every = {r.key: r.to_dict() for r in kept(path, model)} | {r["key"]: r for r in records}
    for _, record in sorted(every.items()):
        row = {k: v for k, v in record.items() if k not in (*LEFT_OUT, *SIDES) and USUAL.get(k) != v}
        for side in SIDES:
            told = {m: record[side][m] for m in metrics if m in record[side]}
            ranges |= {m: {k: score[k] for k in ("unit", "higher_is", "bounds")} for m, score in told.items()}
            row |= {side: {m: _rounded(score["per_record"]) for m, score in told.items()}} if told else {}
        lines.append(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in [{"model": model, "metrics": ranges}, *lines])
    write_whole(path, text, private=False)


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if v is None else round(v, DIGITS) for v in values]


def kept(path: Path, model: str) -> Iterator[Record]:
    """The Records in ``path``; none if there is no such file, or if it is of other weights than ``model``.

    Raises ``InputError`` for a damaged file.
    """
    if not path.is_file():
        return
    try:
        head, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if head["model"] != model:
            return  # of other weights
        for row in rows:
            ranges = head["metrics"]
            made = {side: {m: _score(v, **ranges[m]) for m, v in row.get(side, {}).items()} for side in SIDES}
            record = Record(**{**row, **made})
            if wrong := wrong_in(record.to_dict()):
                raise ValueError(wrong)
            yield record
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise InputError(f"{path} is damaged ({error}); restore it from a copy, or delete it") from None


def _score(values: Sequence[float | None], **about: Any) -> dict[str, Any]:
    score = score_of([nan if v is None else float(v) for v in values], **about)
    return {k: None if v != v else v for k, v in score.items()} | {"per_record": list(values)}
