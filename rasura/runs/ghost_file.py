"""GHOST for a whole file of texts, with a report and a data card. An interrupted run can be resumed."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from rasura.core.files import appended, check_writable, make_private, write_whole
from rasura.core.interfaces import InputError
from rasura.data.columns import NAMES, Columns
from rasura.data.parquet import check_installed, write_rows
from rasura.data.text import Example, load_examples
from rasura.ghost.selection_settings import DEFAULT
from rasura.ghost.table import PAPER, SCHEMA, ShadowSettings
from rasura.registry import adversaries
from rasura.report.commands import PUBLIC, command
from rasura.runs.ghost_obfuscator import PLACES, GhostObfuscator
from rasura.victims.fingerprint import fingerprint
from rasura.victims.loading import load

CHUNK = 16
"""Number of rows between the points at which an interrupted run can resume."""

POLICIES = ("keep_punctuation", "keep_numbers", "round_trip")

COLUMNS = ("text", "text_pair", "input_ids", "token_type_ids", "label", NAMES)
"""Columns of the written file, if there is data for them."""

FORMATS = (".jsonl", ".csv", ".parquet")


@dataclass(frozen=True)
class Protected:
    """The result of a run: rows, their tokens, how many of them have a weak substitute, are ``unchanged``, and of these have
    no substitute (``kept``); rows resumed from an earlier run, the mean squared difference of the hidden states (in groups,
    from those of the groups' means), and the settings of the search."""

    rows: int
    tokens: int
    weak: int
    unchanged: int
    kept: int
    resumed: int
    error: float
    path: Path
    card: Path
    settings: str


def obfuscate_file(
    source: str | Path,
    target: str | Path,
    *,
    model: str = "minilm",
    table: str | Path | None = None,
    shadows: ShadowSettings | Mapping[str, Any] | None = None,
    beam: int = 1,
    seed: int = 0,
    columns: Columns | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Protected:
    """Obfuscate a file of texts for training ``model``, with GHOST: ``obfuscate_file("notes.jsonl", "hidden.jsonl")``.

    Writes ``target`` (JSONL, CSV or Parquet by its name) with the columns ``text``, ``input_ids`` and ``label``; for pairs
    also ``text_pair`` and ``token_type_ids``; and ``label_text`` if labels are text. Beside it, it writes a report on every
    row (``.report.jsonl``) and a data card (``.card.md``), which confirm a guess of the text unless tokens are in groups.
    ``columns``: unusual column names of the source. Every ``CHUNK`` rows are saved: after an interruption, the same call
    resumes. ``progress(rows done, rows)`` is also called before the first row. Raises ``InputError`` for bad input, a target
    that exists or was begun with other settings, and a ``table`` made with settings other than those requested.
    """
    path = Path(target)
    if path.suffix not in FORMATS:
        raise InputError(f"{path}: unknown file type {path.suffix or '(none)'}; expected {', '.join(FORMATS)}")
    if path.suffix == ".parquet":
        check_installed()
    part, report, card = (path.with_suffix(end) for end in (f"{path.suffix}.part", ".report.jsonl", ".card.md"))
    _check_free(path, (report, card), begun=part.exists())
    check_writable(path)
    examples = load_examples(source, columns=columns)
    obfuscator = GhostObfuscator(load(model, "classification", attacked=False), table=table, shadows=shadows, beam=beam)
    obfuscator.check(examples)
    about = {
        "model": model, "weights": fingerprint(obfuscator.victim.model), "shadows": asdict(obfuscator.table.settings),
        "beam": beam, "seed": seed, "data": _digest(examples), "places": PLACES, "table": SCHEMA,
        "tokenizer": obfuscator.table.tokenizer, "control": sorted(obfuscator.victim.vocabulary.control_ids),
    }  # fmt: skip
    with appended(part) as file:
        # Another run may have written them while this one began.
        _check_free(path, (report, card), begun=part.stat().st_size > 0)
        done = _resumed(file, part, about)
        resumed = len(done)
        if progress is not None:
            progress(resumed, len(examples))
        for start in range(resumed, len(examples), CHUNK):
            done += _chunk(obfuscator, examples[start : start + CHUNK], seed, start, examples.label_names or ())
            file.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in done[start:])
            file.flush()
            if progress is not None:
                progress(len(done), len(examples))
        write_whole(report, "".join(json.dumps(_reported(n, row)) + "\n" for n, row in enumerate(done)))
        found = Protected(
            len(done), sum(r["tokens"] for r in done), _count(done, "weak"), _count(done, "unchanged"),
            _count(done, "kept"), resumed, sum(r["error"] for r in done) / len(done), path, card, _criteria(about),
        )  # fmt: skip
        write_whole(card, _card(found, about, _audited(source, model, columns or Columns())))
        make_private(path, partial(_write, done, path.suffix))  # last: where it is, all is
    part.unlink()
    return found


def _check_free(path: Path, others: Sequence[Path], begun: bool) -> None:
    for taken in (path, *others):
        # It may be the source, or belong to another target; an interrupted run may have written all but the target.
        if taken.exists() and (taken == path or not begun):
            raise InputError(f"{taken} already exists; remove it or choose another name")


def _audited(source: str | Path, model: str, named: Columns) -> dict[str, Any]:
    """The plan of an audit of the file, as far as a command names it."""
    columns = {"text_column": named.text, "pair_column": named.pair, "label_column": named.label}
    return {"data": str(source), "model": model, **columns}


def _count(rows: Sequence[Mapping[str, Any]], what: str) -> int:
    return sum(len(row[what]) + len(row.get(f"{what}_pair", ())) for row in rows)


def _digest(examples: Sequence[Example]) -> str:
    rows = [{k: v for k, v in asdict(e).items() if k not in ("source", "row")} for e in examples]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _chunk(
    obfuscator: GhostObfuscator, examples: Sequence[Example], seed: int, start: int, label_names: Sequence[str]
) -> list[dict[str, Any]]:
    rows = obfuscator.examples(examples, seed, (f"text/{start}", f"text_pair/{start}"))
    for row, example in zip(rows, examples):
        if example.label is not None:
            row["label"] = example.label
            if label_names:
                row[NAMES] = label_names[example.label]
    return rows


def _resumed(file: BinaryIO, part: Path, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of complete chunks from an earlier run in the ``file`` of ``part``, which then ends behind them; without any
    whole line it is begun."""
    first = json.dumps(about, sort_keys=True).encode()
    lines = file.read().split(b"\n")
    if len(lines) == 1 and first.startswith(lines[0]):
        file.truncate(0)
        file.write(first + b"\n")
        return []
    if lines[0] != first:
        raise InputError(f"{part} was begun with other data or settings; remove it to start over")
    whole = lines[1:-1]  # behind the last line break stands nothing, or half a row
    kept = whole[: len(whole) // CHUNK * CHUNK]
    file.truncate(sum(len(line) + 1 for line in (first, *kept)))
    return [json.loads(line) for line in kept]


def _columns(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in COLUMNS if name in row}


def _filled(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}


def _reported(number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    told = ("tokens", "error", *PLACES, *(f"{name}_pair" for name in PLACES))
    return {"row": number, **{name: row[name] for name in told if name in row}}


def _write(rows: Sequence[Mapping[str, Any]], suffix: str, path: Path) -> None:
    columns = [_columns(row) for row in rows]
    names = [name for name in COLUMNS if any(name in row for row in columns)]
    columns = [{name: row.get(name) for name in names} for row in columns]
    if "token_type_ids" in names:  # texts alone stand in the first segment
        columns = [{**row, "token_type_ids": row["token_type_ids"] or [0] * len(row["input_ids"])} for row in columns]
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(_filled(row), ensure_ascii=False) + "\n" for row in columns), encoding="utf-8")
    elif suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            for row in columns:
                writer.writerow({n: " ".join(map(str, v)) if isinstance(v, list) else v for n, v in row.items()})
    else:
        write_rows(path, columns)


def _criteria(about: Mapping[str, Any]) -> str:
    shadows = about["shadows"]
    lemmas = f"lemmas of the language {shadows['language']!r}" if shadows["language"] else "no lemmas"
    criteria = f"k {shadows['k']} up to {shadows['max_k']}, overlap {shadows['overlap']}, beam {about['beam']}, {lemmas}"
    criteria += f", balanced in groups of {shadows['group']}" if shadows["group"] > 1 else ""
    return criteria + "".join(f", {name.replace('_', ' ')}" for name in POLICIES if shadows[name])


def _defense(shadows: Mapping[str, Any], beam: int) -> str:
    """The protection as an audit takes it."""
    usual = {**asdict(PAPER), **asdict(DEFAULT)}
    others = {name: value for name, value in {**shadows, "beam": beam}.items() if value != usual[name]}
    words = {None: "none", True: "true", False: "false"}
    said = "/".join(f"{name}={words.get(v, v) if v is None or isinstance(v, bool) else v}" for name, v in others.items())
    return f"ghost:{said}" if said else "ghost"


MEASURED = {"ghost": ("as published", 52, 72), "ghost:group=8": ("in groups of 8", 13, 42),
            "ghost:group=16": ("in groups of 16", 8, 34)}  # fmt: skip
"""Settings of which docs/ghost.md says how many percent of the tokens came back: by word frequencies, and with text of the
same kind."""


def _risk(defense: str) -> Iterator[str]:
    """What was measured of ``defense``; of other settings than the measured ones, that it was not."""
    how, words, same_kind = MEASURED.get(defense, MEASURED["ghost"])
    yield "which tokens a substitute may stand for, and choose by word order."
    if defense not in MEASURED:
        yield "How much comes back so was not measured with these settings."
    yield f"With GHOST {how}, of 64 sentences on this package's default model {words} % of the tokens came back by word"
    yield f"frequencies, {same_kind} % with text of the same kind."


def _card(found: Protected, about: Mapping[str, Any], audit: Mapping[str, Any]) -> str:
    return "\n".join(_lines(found, about, audit)) + "\n"


def _lines(found: Protected, about: Mapping[str, Any], audit: Mapping[str, Any]) -> Iterator[str]:
    yield f"# {found.path.name}: training text obfuscated with GHOST"
    yield ""
    yield f"{found.rows} texts, {found.tokens} tokens, only for training the model `{about['model']}`."
    yield ""
    yield "| what | |"
    yield "|---|---|"
    yield f"| method | GHOST (Feng et al. 2026): {found.settings} |"
    yield f"| tokens whose substitute broke a criterion | {found.weak} (which: the report beside this file) |"
    yield f"| tokens left unchanged | {found.unchanged}, of which {found.kept} have no substitute (which: the same report) |"
    grouped = about["shadows"]["group"] > 1
    goal = " from those of the groups' means" if grouped else ""
    yield f"| mean squared difference of the hidden states{goal} | {found.error:.4f} |"
    yield ""
    if found.unchanged == found.tokens:
        yield "Protects nothing: no token was replaced, and this is the private text."
    else:
        replaced = f"{found.tokens - found.unchanged} of {found.tokens} tokens"
        yield f"Protects {replaced}: an attack on the gradient recovers the substitutes, if the adversary does no more."
    yield ""
    yield "Does not protect: the substitution is not secret. Anyone who knows the method and the public model can compute"
    defense = _defense(about["shadows"], about["beam"])
    yield from _risk(defense)
    yield "Labels and lengths are unchanged. No formal guarantee."
    yield ""
    if grouped:
        yield "What the report and this card say of a token depends on its group alone, as the sent text does."
    else:
        yield "The report and this card confirm a guess: they are measured on the private tokens. Keep both private."
    yield ""
    yield f"To measure this on your texts, put public texts of the same kind into `{PUBLIC}`, and run:"
    yield ""
    attacks = list(adversaries(defense).attacks)
    yield f"    {command('audit', audit, attacks=attacks, defenses=[defense], reference=PUBLIC)}"
    yield ""
    yield "Train on `input_ids`: tokenizing the text again may give different ids."
