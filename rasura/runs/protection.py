"""GHOST for the texts of one model: ``GhostObfuscator``, and ``obfuscate_file`` for a whole file of them."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rasura.core.interfaces import InputError
from rasura.core.rng import generator
from rasura.data.columns import NAMES, Columns
from rasura.data.parquet import check_installed, write_rows
from rasura.data.text import Example, load_examples, place_of
from rasura.ghost.defense import ghost
from rasura.ghost.models import made_for
from rasura.ghost.selection import Selection
from rasura.ghost.table import PAPER, ShadowSettings, ShadowTable, embedding_digest, token_embedding
from rasura.victims.loading import Victim, load

CHUNK = 16
"""Rows between two points at which an interrupted protection resumes."""

POLICIES = ("keep_punctuation", "keep_numbers", "round_trip")

COLUMNS = ("text", "text_pair", "input_ids", "token_type_ids", "label", NAMES)
"""Columns of the file that is written, as far as there is something for them."""

FORMATS = (".jsonl", ".csv", ".parquet")


@dataclass(frozen=True)
class Protected:
    """What a protection came to: rows, tokens that were replaced, places that kept a weak substitute or the private token
    itself, rows resumed from an earlier run, the mean squared difference of the hidden states, and the search's settings."""

    rows: int
    tokens: int
    weak: int
    kept: int
    resumed: int
    error: float
    path: Path
    card: Path
    settings: str


class GhostObfuscator:
    """GHOST for the texts of one model: ``data.map(GhostObfuscator(load("minilm", "classification")), batched=True)``.

    ``shadows``: the settings asked for, or some of them by their names; None for those of ``table``, else the paper's.
    ``table``: a file of shadow tokens, which is written where it does not exist. Raises ``InputError`` for a table of
    another model, and for one of other settings than asked.
    """

    def __init__(
        self,
        victim: Victim,
        *,
        table: str | Path | None = None,
        shadows: ShadowSettings | Mapping[str, Any] | None = None,
        beam: int = 1,
    ) -> None:
        self.victim = victim
        asked = asdict(shadows) if isinstance(shadows, ShadowSettings) else dict(shadows or {})
        made: ShadowTable | None = None
        if table is not None and Path(table).exists():
            made = ShadowTable.load(table, embedding_digest(token_embedding(victim.model)))
            if differs := made.differs(asked):
                raise InputError(f"{table} was made with other settings ({differs}); ask for its own, or name another file")
        shadows = replace(PAPER, **asked) if made is None else made.settings
        self.table = made or made_for(victim.model, victim.vocabulary, shadows)
        if table is not None and made is None:
            self.table.save(table)
        self.selector = ghost(self.table, shadows, Selection(beam=beam)).init((victim.model, victim.vocabulary))

    def __call__(self, rows: Mapping[str, Sequence[Any]], *, seed: int = 0, name: str = "map") -> dict[str, list[Any]]:
        """The columns ``text`` (and ``text_pair``) of ``rows`` obfuscated, with ``input_ids`` beside them: of a pair
        those of both texts as the model takes them, and ``token_type_ids`` where it tells them apart by these."""
        pairs = rows.get("text_pair")
        examples = [Example(t or "", p) for t, p in zip(rows["text"], pairs or [None] * len(rows["text"]))]
        done = self.examples(examples, seed, (f"{name}/text", f"{name}/text_pair"))
        names = ["text", "input_ids", *(["text_pair"] if pairs is not None else [])]
        names += ["token_type_ids"] if any("token_type_ids" in d for d in done) else []
        return {n: [d.get(n) for d in done] for n in names}

    def examples(self, examples: Sequence[Example], seed: int, names: tuple[str, str]) -> list[dict[str, Any]]:
        """Each example as a dictionary: ``text``, ``input_ids``, ``weak`` (place: what was given up), ``kept``, ``error``;
        of pairs ``text_pair``, ``weak_pair``, ``kept_pair``, too, and ids of both. ``names``: of the random draws."""
        self.check(examples)
        rows = self.texts([e.text for e in examples], seed, names[0])
        if not any(e.text_pair for e in examples):
            return rows
        seconds = self.texts([e.text_pair or "" for e in examples], seed, names[1])
        for example, row, second in zip(examples, rows, seconds):
            ids, types = self._together(example, row["input_ids"], second["input_ids"])
            row["input_ids"] = ids
            if types is not None:
                row["token_type_ids"] = types
            if example.text_pair:
                row |= {"text_pair": second["text"], "kept_pair": second["kept"], "weak_pair": second["weak"]}
                row["tokens"] += second["tokens"]
                row["error"] = (row["error"] + second["error"]) / 2
        return rows

    def check(self, examples: Sequence[Example]) -> None:
        """Raises ``InputError`` for an example that the model cannot take, a pair as a whole, with its row."""
        most = self.victim.max_length
        for number, e in enumerate(examples, 1):
            ids = self.victim.tokenizer(e.text, e.text_pair or None)["input_ids"]
            if len(ids) > most:
                raise InputError(
                    f"{place_of(e, number)}: the text has {len(ids)} tokens, the model takes {most}; shorten or split it"
                )

    def _together(self, example: Example, first: Sequence[int], second: Sequence[int]) -> tuple[list[int], list[int] | None]:
        """Substitutes of both texts of a pair in the places of their tokens, as the model takes the two together."""
        tokenizer, words = self.victim.tokenizer, self.victim.vocabulary
        coded = tokenizer(example.text, example.text_pair or None)
        ids, types = list(coded["input_ids"]), coded.get("token_type_ids")
        if not example.text_pair:
            return list(first), types
        start = 0
        for text, new in ((example.text, first), (example.text_pair, second)):
            inner = slice(len(words.prefix), len(new) - len(words.suffix))
            old, chosen = list(tokenizer(text)["input_ids"])[inner], list(new)[inner]
            places = [k for k in range(start, len(ids) - len(old) + 1) if ids[k : k + len(old)] == old]
            if not places:
                raise InputError(f"{place_of(example, 1)}: the pair has other tokens than its texts alone; split it")
            start = places[0] + len(old)
            ids[places[0] : start] = chosen
        return ids, types

    def texts(self, texts: Sequence[str], seed: int, name: str) -> list[dict[str, Any]]:
        """Each text as a dictionary: ``text``, ``input_ids``, ``weak`` (place: what was given up), ``kept``, ``error``."""
        tokenizer = self.victim.tokenizer
        coded = [tokenizer(text)["input_ids"] if text else [] for text in texts]
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

    Writes ``target`` (JSONL, CSV or Parquet by its name: ``text``, ``input_ids``, ``label``; of pairs ``text_pair`` and
    ``token_type_ids``; ``label_text`` where labels are text), a report of every row beside it (``.report.jsonl``) and a
    data card (``.card.md``). ``columns``: where the source has unusual names. Every ``CHUNK`` rows are kept: interrupted,
    the same call goes on there. ``progress(rows done, rows)`` is called before the first row, too. Raises ``InputError``
    for bad input, a target that exists or that other settings began, and a ``table`` of other settings than asked.
    """
    path = Path(target)
    if path.suffix not in FORMATS:
        raise InputError(f"{path}: unknown file type {path.suffix or '(none)'}; expected {', '.join(FORMATS)}")
    if path.suffix == ".parquet":
        check_installed()
    if path.exists():
        raise InputError(f"{path} exists already; remove it or choose another name")
    examples = load_examples(source, columns=columns)
    obfuscator = GhostObfuscator(load(model, "classification", attacked=False), table=table, shadows=shadows, beam=beam)
    obfuscator.check(examples)
    about = {
        "model": model, "embedding": obfuscator.table.model, "shadows": asdict(obfuscator.table.settings), "beam": beam,
        "seed": seed, "data": _digest(examples),
    }  # fmt: skip
    part = path.with_suffix(path.suffix + ".part")
    done = _resumed(part, about)
    resumed = len(done)
    if progress is not None:
        progress(resumed, len(examples))
    with part.open("a", encoding="utf-8") as file:
        for start in range(resumed, len(examples), CHUNK):
            rows = _chunk(obfuscator, examples[start : start + CHUNK], seed, start, examples.label_names or ())
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
        len(done), sum(r["tokens"] for r in done), _count(done, "weak"), _count(done, "kept"),
        resumed, sum(r["error"] for r in done) / len(done), path, card,
        _criteria(about),
    )  # fmt: skip
    card.write_text(_card(found, about), encoding="utf-8")
    part.unlink()
    return found


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
    return {name: row[name] for name in COLUMNS if name in row}


def _filled(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}


def _reported(number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    told = ("tokens", "error", "weak", "kept", "weak_pair", "kept_pair")
    return {"row": number, **{name: row[name] for name in told if name in row}}


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    columns = [_columns(row) for row in rows]
    names = [name for name in COLUMNS if any(name in row for row in columns)]
    columns = [{name: row.get(name) for name in names} for row in columns]
    if "token_type_ids" in names:  # texts alone stand in the first segment
        columns = [{**row, "token_type_ids": row["token_type_ids"] or [0] * len(row["input_ids"])} for row in columns]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(_filled(row), ensure_ascii=False) + "\n" for row in columns), encoding="utf-8")
    elif path.suffix == ".csv":
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
    criteria = f"k {shadows['k']} up to {shadows['most']}, overlap {shadows['overlap']}, beam {about['beam']}, {lemmas}"
    criteria += f", balanced in groups of {shadows['group']}" if shadows["group"] > 1 else ""
    return criteria + "".join(f", {name.replace('_', ' ')}" for name in POLICIES if shadows[name])


def _card(found: Protected, about: Mapping[str, Any]) -> str:
    return "\n".join(_lines(found, about)) + "\n"


def _lines(found: Protected, about: Mapping[str, Any]) -> Iterator[str]:
    shadows = about["shadows"]
    yield f"# {found.path.name}: training text obfuscated with GHOST"
    yield ""
    yield f"{found.rows} texts, {found.tokens} tokens, for training the model `{about['model']}` and no other."
    yield ""
    yield "| what | |"
    yield "|---|---|"
    yield f"| method | GHOST (Feng et al. 2026): {found.settings} |"
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
