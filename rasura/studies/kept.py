"""Records of a study beside its results, so that any machine goes on where another one stopped.

``studies/records/grab/table7.jsonl`` holds one object a line: first what tells the model from others, the range of every
metric and what all cells have in common, then the finished cells. A cell has what the tables need and nothing that was read
back.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from math import nan
from pathlib import Path
from typing import Any

from rasura.core.errors import InputError
from rasura.core.files import write_whole
from rasura.core.records import Record, wrong_in
from rasura.core.run_store import changed
from rasura.runs.scoring import score_of

FOLDER = "records"
"""The folder, beside the results, with a file for each study."""

Facts = Mapping[str, str | Mapping[str, str]]

OF_MODEL = ("model", "tokenizer of the model", "configuration of the model")
"""What tells a model from others, as a run stores it about itself. ``model`` is the fingerprint of the weights; files of
older versions state that alone."""

LEFT_OUT = ("recovered", "details", "known_by", "threat_plain", "versions", "wall_seconds", "peak_mb")
"""Fields that no table needs."""

SIDES = ("scores", "blind")

DIGITS = 4
"""Decimal places of a kept number."""

USUAL = {f.name: f.default for f in fields(Record) if f.default is not MISSING}
"""Values that need not be written."""


def path_of(name: str, results: Path) -> Path:
    """The file of the study ``name`` beside the file ``results``."""
    return results.parent / FOLDER / f"{name}.jsonl"


def facts_of(about: Mapping[str, Any]) -> dict[str, Any]:
    """What a run says ``about`` its model."""
    return {name: about[name] for name in OF_MODEL if name in about}


def keep(path: Path, model: Facts, said: Facts, records: Iterable[Mapping[str, Any]], metrics: Sequence[str]) -> None:
    """Write ``records`` to ``path``, with the values of ``metrics``, beside those of other cells that it has of the same
    ``model``. ``said``: what of it is known for all ``records``; of older cells in ``path`` it may be less, and no more than
    that is stated. A cell that crashed is left out: the next run tries it again."""
    older = list(kept(path, model))
    said = _in_both(said, _head(path)) if older else said
    ranges: dict[str, Any] = {}
    lines: list[dict[str, Any]] = []
    every = {r.key: r.to_dict() for r in older} | {r["key"]: r for r in records}
    for _, record in sorted((key, r) for key, r in every.items() if r["status"] != "crashed"):
        row = {k: _rounded(v) for k, v in record.items() if k not in (*LEFT_OUT, *SIDES) and USUAL.get(k) != v}
        for side in SIDES:
            told = {m: record[side][m] for m in metrics if m in record[side]}
            ranges |= {m: {k: score[k] for k in ("unit", "higher_is", "bounds")} for m, score in told.items()}
            row |= {side: {m: [_rounded(v) for v in score["per_record"]] for m, score in told.items()}} if told else {}
        lines.append(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    common = {k: v for k, v in lines[0].items() if all(row.get(k, row) == v for row in lines)} if lines else {}
    head = {**said, "metrics": ranges, "common": common}
    rows = [head, *({k: v for k, v in row.items() if k not in common} for row in lines)]
    write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), private=False)


def _rounded(value: Any) -> Any:
    return round(value, DIGITS) if isinstance(value, float) else value


def _in_both(one: Facts, other: Facts) -> Facts:
    """What both state of a model; of a configuration, the entries that both have."""
    found: dict[str, str | Mapping[str, str]] = {}
    for name, value in one.items():
        also = other.get(name)
        if isinstance(value, Mapping) and isinstance(also, Mapping):
            found[name] = {k: v for k, v in value.items() if k in also}
        elif also is not None:
            found[name] = value
    return found


def beside(
    path: Path, results: Path, model: Facts, cells: Container[str], metrics: Sequence[str] = ()
) -> tuple[list[Record], Facts]:
    """As ``kept``, of every study beside ``results``: two tables of a paper share cells. Those in ``path`` come first. Also
    what of ``model`` all files state that have such cells."""
    found, said = list[Record](), model
    for one in (path, *sorted({*(results.parent / FOLDER).rglob("*.jsonl")} - {path})):
        if taken := list(kept(one, model, metrics, cells)):
            found, said = found + taken, _in_both(said, _head(one))
    return found, said


def _head(path: Path) -> dict[str, Any]:
    """What the first line of ``path`` states of the model."""
    with path.open(encoding="utf-8") as file:
        return facts_of(json.loads(file.readline()))


def kept(path: Path, model: Facts, metrics: Sequence[str] = (), cells: Container[str] | None = None) -> Iterator[Record]:
    """The Records in ``path`` with values of all ``metrics``, or without a guess; none if there is no such file, or if what
    it states of its model is not so of ``model``. ``cells``: the keys of those that are wanted; None, all.

    Raises ``InputError`` for a damaged file.
    """
    if not path.is_file():
        return
    try:
        head, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if head["model"] != model["model"] or any(changed(fact, model.get(n, "")) for n, fact in facts_of(head).items()):
            return
        for row in rows:
            whole, ranges = {**head["common"], **row}, head["metrics"]
            if cells is not None and whole["key"] not in cells:
                continue
            made = {side: {m: _score(v, **ranges[m]) for m, v in whole.get(side, {}).items()} for side in SIDES}
            record = Record(**{**whole, **made})
            if wrong := wrong_in(record.to_dict()):
                raise ValueError(wrong)
            if {*metrics} <= (record.scores if record.status == "ok" else record.blind).keys():
                yield record
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise InputError(f"{path} is damaged ({error}); restore it from a copy, or delete it") from None


def _score(values: Sequence[float | None], **about: Any) -> dict[str, Any]:
    score = score_of([nan if v is None else float(v) for v in values], **about)
    return {k: None if v != v else v for k, v in score.items()} | {"per_record": list(values)}
