"""The one-liners of people who train: ``protect`` for a file of texts or for a training loop, and ``Obfuscator``."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, overload

from torch import nn

from rasura.data.text import Example, load_examples
from rasura.interfaces import Defense, InputError
from rasura.private import Private, protect_training
from rasura.recipes import token_obfuscation
from rasura.rng import generator
from rasura.shadows.models import made_for
from rasura.shadows.table import PAPER, ShadowSettings, ShadowTable, embedding_digest, token_embedding
from rasura.victims.loading import Victim, load

CHUNK = 256
"""Rows between two points at which an interrupted protection resumes."""

POLICIES = ("keep_punctuation", "keep_numbers", "round_trip")

FORMATS = (".jsonl", ".csv", ".parquet")


@dataclass(frozen=True)
class Protected:
    """What a protection came to: rows, tokens that were replaced, places that kept a weak substitute or the private token
    itself, rows resumed from an earlier run, and the mean squared difference of the hidden states."""

    rows: int
    tokens: int
    weak: int
    kept: int
    resumed: int
    error: float
    path: Path
    card: Path


class Obfuscator:
    """GHOST for the texts of one model: ``data.map(Obfuscator(load("minilm", "classification")), batched=True)``.

    ``table``: a file of shadow tokens, which is written where it does not exist; a table of another model is refused.
    """

    def __init__(
        self, victim: Victim, *, table: str | Path | None = None, shadows: ShadowSettings = PAPER, beam: int = 1
    ) -> None:
        self.victim = victim
        made: ShadowTable | None = None
        if table is not None and Path(table).exists():
            made = ShadowTable.load(table, embedding_digest(token_embedding(victim.model)))
            shadows = made.settings
        self.table = made or made_for(victim.model, victim.vocabulary, shadows)
        if table is not None and made is None:
            self.table.save(table)
        self.selector = token_obfuscation(self.table, shadows, beam).init((victim.model, victim.vocabulary))

    def __call__(self, rows: Mapping[str, Sequence[Any]], *, seed: int = 0, name: str = "map") -> dict[str, list[Any]]:
        """The columns ``text`` (and ``text_pair``) of ``rows`` obfuscated, with ``input_ids`` of the text beside them."""
        out: dict[str, list[Any]] = {}
        for column in ("text", "text_pair"):
            if column in rows:
                done = self.texts([t or "" for t in rows[column]], seed, f"{name}/{column}")
                out[column] = [d["text"] for d in done]
                if column == "text":
                    out["input_ids"] = [d["input_ids"] for d in done]
        return out

    def texts(self, texts: Sequence[str], seed: int, name: str) -> list[dict[str, Any]]:
        """Each text as a dictionary: ``text``, ``input_ids``, ``weak`` (place: what was given up), ``kept``, ``error``."""
        tokenizer, most = self.victim.tokenizer, self.victim.max_length
        coded = [tokenizer(text)["input_ids"] if text else [] for text in texts]
        for number, ids in enumerate(coded, 1):
            if len(ids) > most:
                raise InputError(f"{name}, text {number} has {len(ids)} tokens, the model takes {most}; shorten or split it")
        done = self.selector([ids for ids in coded if ids], generator(seed, "ghost", name))
        found = iter(done)
        out = []
        for ids in coded:
            one = next(found) if ids else None
            read = list(one.ids) if one else []
            out.append({
                "text": self.victim.vocabulary.text(read), "input_ids": read, "weak": dict(one.weak) if one else {},
                "kept": list(one.kept) if one else [], "error": one.error if one else 0.0,
                "tokens": sum(i not in self.victim.vocabulary.special_ids for i in ids),
            })  # fmt: skip
        return out


@overload
def protect(model: nn.Module, optimizer: Any, loader: Any, defense: str | Defense, **options: Any) -> Private: ...
@overload
def protect(source: str | Path, target: str | Path, **options: Any) -> Protected: ...
def protect(*what: Any, **options: Any) -> Private | Protected:
    """Protect a training loop, ``protect(model, optimizer, loader, "dp-sgd:1.0", epochs=3)``, or a file of training texts,
    ``protect("notes.jsonl", "hidden.jsonl")``. The options are those of ``private.protect_training`` and ``protect_file``.
    """
    first = what[0] if what else options.get("source", options.get("model"))
    return (protect_training if isinstance(first, nn.Module) else protect_file)(*what, **options)


def protect_file(
    source: str | Path,
    target: str | Path,
    *,
    model: str = "minilm",
    table: str | Path | None = None,
    shadows: ShadowSettings = PAPER,
    beam: int = 1,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Protected:
    """Obfuscate a data set with GHOST for training ``model``: ``protect_file("notes.jsonl", "hidden.jsonl")``.

    Writes ``target`` (JSONL, CSV or Parquet by its name: ``text``, ``input_ids``, ``label``), a report of every row beside
    it (``.report.jsonl``) and a data card (``.card.md``). Interrupted, the same call goes on where it stopped. Raises
    ``InputError`` for bad input, for a target that exists, and for one that other settings began.
    """
    path = Path(target)
    if path.suffix not in FORMATS:
        raise InputError(f"{path}: unknown file type {path.suffix or '(none)'}; expected {', '.join(FORMATS)}")
    if path.exists():
        raise InputError(f"{path} exists already; remove it or choose another name")
    examples = load_examples(source)
    obfuscator = Obfuscator(load(model, "classification", attacked=False), table=table, shadows=shadows, beam=beam)
    about = {
        "model": model, "embedding": obfuscator.table.model, "shadows": asdict(obfuscator.table.settings), "beam": beam,
        "seed": seed, "data": _digest(examples),
    }  # fmt: skip
    part = path.with_suffix(path.suffix + ".part")
    done = _resumed(part, about)
    resumed = len(done)
    with part.open("a", encoding="utf-8") as file:
        for start in range(resumed, len(examples), CHUNK):
            rows = _chunk(obfuscator, examples[start : start + CHUNK], seed, start)
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            file.flush()
            done += rows
            if progress is not None:
                progress(len(done), len(examples))
    _write(path, done)
    report = path.with_suffix(".report.jsonl")
    report.write_text("".join(json.dumps(_reported(n, row)) + "\n" for n, row in enumerate(done)), encoding="utf-8")
    card = path.with_suffix(".card.md")
    found = Protected(
        len(done), sum(r["tokens"] for r in done), sum(len(r["weak"]) for r in done), sum(len(r["kept"]) for r in done),
        resumed, sum(r["error"] for r in done) / len(done), path, card,
    )  # fmt: skip
    card.write_text(_card(found, about), encoding="utf-8")
    part.unlink()
    return found


def _digest(examples: Sequence[Example]) -> str:
    return hashlib.sha256(json.dumps([asdict(e) for e in examples]).encode()).hexdigest()


def _chunk(obfuscator: Obfuscator, examples: Sequence[Example], seed: int, start: int) -> list[dict[str, Any]]:
    rows = obfuscator.texts([e.text for e in examples], seed, f"text/{start}")
    if any(e.text_pair for e in examples):
        pairs = obfuscator.texts([e.text_pair or "" for e in examples], seed, f"text_pair/{start}")
        for row, pair in zip(rows, pairs):
            row["text_pair"] = pair["text"]
            row["kept_pair"], row["weak_pair"] = pair["kept"], pair["weak"]
    for row, example in zip(rows, examples):
        if example.label is not None:
            row["label"] = example.label
    return rows


def _resumed(part: Path, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of whole chunks that an earlier run left; starts the file where there is none."""
    first = json.dumps(about, sort_keys=True)
    if not part.exists():
        part.write_text(first + "\n", encoding="utf-8")
        return []
    lines = part.read_text(encoding="utf-8").split("\n")
    if lines[0] != first:
        raise InputError(f"{part} was begun with other data or settings; remove it to start anew")
    whole = lines[1:-1]  # behind the last line break stands nothing, or half a row
    keep = len(whole) // CHUNK * CHUNK
    part.write_text("\n".join([first, *whole[:keep]]) + "\n", encoding="utf-8")
    return [json.loads(line) for line in whole[:keep]]


def _columns(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("text", "text_pair", "input_ids", "label") if name in row}


def _reported(number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    told = ("tokens", "error", "weak", "kept", "weak_pair", "kept_pair")
    return {"row": number, **{name: row[name] for name in told if name in row}}


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    columns = [_columns(row) for row in rows]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in columns), encoding="utf-8")
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(name for row in columns for name in row)))
            writer.writeheader()
            writer.writerows({**row, "input_ids": " ".join(map(str, row["input_ids"]))} for row in columns)
    else:
        import pyarrow as pa
        import pyarrow.parquet as parquet

        parquet.write_table(pa.Table.from_pylist(columns), path)


def _card(found: Protected, about: Mapping[str, Any]) -> str:
    return "\n".join(_lines(found, about)) + "\n"


def _lines(found: Protected, about: Mapping[str, Any]) -> Iterator[str]:
    shadows = about["shadows"]
    lemmas = f"lemmas of the language {shadows['language']!r}" if shadows["language"] else "no lemmas"
    yield f"# {found.path.name}: training text obfuscated with GHOST"
    yield ""
    yield f"{found.rows} texts, {found.tokens} tokens, for training the model `{about['model']}` and no other."
    yield ""
    yield "| what | |"
    yield "|---|---|"
    criteria = f"k {shadows['k']} up to {shadows['most']}, overlap {shadows['overlap']}, beam {about['beam']}, {lemmas}"
    criteria += f", balanced in groups of {shadows['group']}" if shadows["group"] > 1 else ""
    criteria += "".join(f", {name.replace('_', ' ')}" for name in POLICIES if shadows[name])
    yield f"| method | GHOST (Feng et al. 2026): {criteria} |"
    yield f"| tokens whose substitute broke a criterion | {found.weak} (which: the report beside this file) |"
    yield f"| tokens that stayed as they were, for want of any substitute | {found.kept} |"
    yield f"| mean squared difference of the hidden states | {found.error:.4f} |"
    yield ""
    yield "Protects: what a gradient gives back is this text, not the original, from an adversary who stops there."
    yield ""
    yield "Does not protect: the substitution is no secret. Whoever knows the method and the public model can compute"
    yield "which tokens a substitute may stand for, and language does the rest: of 64 sentences on this package's default"
    words, same_kind = (13, 42) if shadows["group"] > 1 else (52, 72)
    balanced = ", balanced in groups of 8," if shadows["group"] > 1 else ""
    yield f"model{balanced} {words} % of the tokens came back by word frequencies, {same_kind} % with text of the same kind."
    yield "On yours, `rasura audit --defense ghost --attack ghost-lattice --reference TEXTS` measures it. Labels and lengths"
    yield "are unchanged. No formal guarantee."
    yield "Train on `input_ids`: the text, tokenized again, may give other ids."
