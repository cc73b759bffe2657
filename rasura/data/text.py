"""Private texts from files: JSONL, CSV, Parquet or a Hugging Face data set, and how they become batches."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch

from rasura.core.batches import Batch
from rasura.core.interfaces import InputError
from rasura.core.values import Task
from rasura.core.vocabulary import readable, unknown_ids
from rasura.data.classes import model_classes
from rasura.data.columns import NAMES, Chosen, Columns, Labels, person, taken
from rasura.data.given_ids import with_usable_ids
from rasura.data.rows import MAX_CELL, Source, shown

_LOG = logging.getLogger("rasura.data")

MAX_TEXT, MAX_ROWS = 1 << 30, 10_000_000
"""Maximum characters and rows read from one file."""

E = TypeVar("E")


@dataclass(frozen=True)
class Example:
    """One text (or pair of texts), with its label where the task has one.

    ``input_ids``: its tokens, special ones included, from a file; used if a protection chose them (``given_ids``).
    ``token_type_ids``: for a pair, the text to which each token belongs. ``source`` and ``row``: where it was read, for
    messages, which never quote the text itself. ``unit``: whose it is, where the file was asked for that.
    """

    text: str
    text_pair: str | None = None
    label: int | None = None
    input_ids: tuple[int, ...] | None = None
    token_type_ids: tuple[int, ...] | None = None
    source: str = field(default="", compare=False)
    row: int | None = field(default=None, compare=False)
    unit: str | None = None


class Examples(list[Example]):
    """The examples of one file. ``label_names``: the names of their labels; empty for numbers, None without labels."""

    label_names: tuple[str, ...] | None = None


def demo_examples() -> list[Example]:
    """The short fictional notes in the package: a clinic, a bank, e-mails. Label 1 means that action is needed."""
    lines = resources.files("rasura.data").joinpath("examples.jsonl").read_text(encoding="utf-8").splitlines()
    return [Example(**json.loads(line), source="the demo notes", row=n) for n, line in enumerate(lines, 1)]


def load_examples(
    source: str | Path,
    *,
    limit: int | None = None,
    columns: Columns | None = None,
    label_names: Sequence[str] | None = None,
    model: str | None = None,
    classes: Sequence[str] = (),
) -> Examples:
    """Read texts and labels from a ``.jsonl``, ``.json``, ``.csv``, ``.tsv`` or ``.parquet`` file, or a data set id.

    Encoding and separator of a CSV file are detected; ``columns`` gives unusual column names. Labels that are text are
    numbered in the order of their first rows, by ``label_names`` (from another file; empty for numbers), or as the
    ``classes`` of the model, by default those that the folder ``model`` names. A log line says how the file was read, unless
    everything is default. At most ``limit`` rows are read. Raises ``InputError`` for a missing, empty or damaged file, a
    missing column, an empty text or a bad label, with its row; the message never quotes a text.
    """
    chosen = Chosen(columns or Columns(), str(source))
    rows = Source(source, chosen.wanted)
    labels = Labels(str(source), label_names, classes or (model_classes(model) if model else ()))
    examples = Examples()
    size = 0
    for number, row in islice(rows, limit):
        if chosen.text is None:
            chosen.wanted(tuple(map(str, row)))
        else:
            chosen.also(row)
        examples.append(example := _example(row, number, chosen, labels))
        size += len(example.text) + len(example.text_pair or "")
        if size > MAX_TEXT or len(examples) > MAX_ROWS:
            raise InputError(
                f"{source}: more than {MAX_TEXT >> 20} million characters or {MAX_ROWS} rows; split it, or pass --limit "
                "where the command has it"
            )
    if not examples:
        raise InputError(f"{source} holds no rows; expected at least one with a column text")
    settled = labels.settled([e.label for e in examples])
    for k, label in enumerate(settled):
        if label != examples[k].label:
            examples[k] = replace(examples[k], label=label)
    examples.label_names = labels.names
    encoding = [] if rows.encoding in (None, "ASCII", "UTF-8") else [f"read as {rows.encoding}"]
    if (line := taken(chosen, labels, encoding + rows.taken)) is not None:
        _LOG.info(line)
    return examples


def load_labelled(
    source: str | Path, classes: Sequence[str], model: str, advice: str = "give the numbers of its classes", *, count: int
) -> Examples:
    """Texts with the ``classes`` of a trained ``model`` as labels, of which it has ``count``. A log line says which classes
    numbers are of, where some have none: they may be counted from 1.

    Raises ``InputError`` as ``check_named`` does, and for numbers of no class. It ends in ``advice``."""
    found = load_examples(source, classes=classes)
    check_named(found, source, classes, model, advice)
    numbers = {e.label: e.row for e in reversed(found) if e.label is not None}
    if wrong := [n for n in numbers if not 0 <= n < count]:
        place = f"{source}, row {numbers[wrong[-1]]}"
        raise InputError(f"{place}: label {wrong[-1]} is none of the classes 0 .. {count - 1} of {model}; {advice}")
    if not found.label_names and 0 < len(numbers) < count:
        few = ", ".join(map(str, sorted(numbers)[:20])) + (", ..." if len(numbers) > 20 else "")
        told = f"{source}: labels {few} of the classes 0 .. {count - 1} of {model}, and no others"
        _LOG.warning(f"{told}; each number must mean the class of the model that has it")
    return found


def check_named(found: Examples, source: str | Path, classes: Sequence[str], model: str, advice: str) -> None:
    """Raises ``InputError`` where the labels of ``found`` are text, and not the names of the ``classes`` of a trained
    ``model`` with their numbers: numbers that the file alone gives could exchange the classes. It ends in ``advice``."""
    known, given = dict(enumerate(classes)), dict(enumerate(found.label_names or ()))
    if given and any(e.label is not None and known.get(e.label) != given[e.label] for e in found):
        fault = "are text" if not set(given.values()) <= set(classes) else "have other numbers than their names"
        names = f"has the classes {', '.join(classes)}" if classes else "does not name its classes"
        raise InputError(f"{source}: the labels {fault}, and {model} {names}; {advice}")


def columns_of(plan: Any) -> Columns:
    """The columns named by the fields ``text_column``, ``pair_column`` and ``label_column`` of ``plan``."""
    return Columns(plan.text_column, plan.pair_column, plan.label_column)


def load_reference(source: str | Path, columns: Columns) -> Examples:
    """The texts of a second file, from the same columns as the first if it has them, otherwise found by their usual names.
    Its labels are not read."""
    try:
        return load_examples(source, columns=replace(columns, label="none"))
    except InputError:
        if columns.text is None:
            raise
        return load_examples(source, columns=Columns(label="none"))


def _example(row: Mapping[str, Any], number: int, chosen: Chosen, labels: Labels) -> Example:
    source, place = chosen.source, f"{chosen.source}, row {number}"
    if chosen.text is None or chosen.text not in row:
        raise InputError(f"{place}: no column {chosen.text} (found: {shown(row)}); every row needs it")
    text, pair = row[chosen.text], row.get(chosen.pair) if chosen.pair else None
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{place}: the text is empty or not a text; remove the row or fill it")
    if pair is not None and not isinstance(pair, str):
        raise InputError(f"{place}: the second text is not a text; expected text, or nothing where there is no pair")
    pair = pair or None
    for one in (text, pair or ""):
        if len(one) > MAX_CELL:
            raise InputError(f"{place}: the text has {len(one)} characters; expected at most {MAX_CELL}. Split it")
        if not _encodable(one):
            raise InputError(f"{place}: the text contains half a character (a lone surrogate); remove it")
    label = None
    if chosen.label is not None:
        label = labels.add(row.get(chosen.label), row.get(NAMES) if chosen.label == "label" else None, number)
    ids, types = (_ids(row.get(name), name, place) for name in ("input_ids", "token_type_ids"))
    if types is not None and (ids is None or len(types) != len(ids)):
        raise InputError(f"{place}: token_type_ids and input_ids differ in length")
    unit = None if chosen.asked.unit is None else _unit(row.get(chosen.asked.unit), chosen.asked.unit, place)
    return Example(text, pair, label, ids, types, source, number, unit)


def _unit(found: Any, column: str, place: str) -> str:
    """Whose a row is. A row without a person would be one of its own, to whom more is promised than holds."""
    if isinstance(found, bool) or not isinstance(found, (str, int)) or not str(found).strip():
        raise InputError(f"{place}: the column {column} names no person; expected text or a whole number in every row")
    return person(found)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _ids(found: Any, name: str, place: str) -> tuple[int, ...] | None:
    if found is None or found == "":
        return None
    try:
        ids = tuple(int(i) for i in (found.split() if isinstance(found, str) else found))
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{place}: {name} are not whole numbers; expected token ids") from None
    if not all(0 <= i < 1 << 31 for i in ids):
        raise InputError(f"{place}: {name} are below 0 or too large; expected token ids")
    return ids


def place_of(example: Example, number: int) -> str:
    """Where ``example`` was read, or its ``number`` in the list."""
    return f"text {number}" if example.row is None else f"{example.source}, row {example.row}"


def encode(
    examples: Sequence[Example], tokenizer: Any, task: Task, *, max_length: int, num_labels: int, truncate: bool = False
) -> Batch:
    """Tokenize ``examples`` as one batch, padded on the right to the longest.

    Causal labels are the ids themselves, -100 at padding. Raises ``InputError`` for a text longer than ``max_length`` tokens
    (unless ``truncate``), a missing label, or a label outside ``0 .. num_labels - 1``. With ``truncate``, the texts of the
    batch end where a fast tokenizer cut them.
    """
    examples = with_usable_ids(examples, place_of, tokenizer)
    paired = any(e.text_pair for e in examples)
    first = [e.text for e in examples]
    second = [e.text_pair or "" for e in examples] if paired else None
    coded = tokenizer(first, second, truncation=truncate, max_length=max_length if truncate else None, verbose=False)
    rows: list[list[int]] = coded["input_ids"]
    types: list[list[int]] | None = coded["token_type_ids"] if paired and "token_type_ids" in coded else None
    for k, e in enumerate(examples):
        if e.input_ids is None:
            continue
        if types is not None and e.token_type_ids is None and e.text_pair:
            raise InputError(f"{place_of(e, k + 1)}: input_ids of a pair, but no token_type_ids; protect the file again")
        cut = max_length if truncate else None
        rows[k] = list(e.input_ids[:cut])
        if types is not None:
            types[k] = list(e.token_type_ids or (0,) * len(e.input_ids))[:cut]
    longest = max(map(len, rows))
    if longest > max_length:
        worst = max(range(len(rows)), key=lambda k: len(rows[k]))
        raise InputError(
            f"{place_of(examples[worst], worst + 1)}: the text has {longest} tokens, but at most "
            f"{max_length} are allowed; pass --truncate to cut it"
        )
    if not all(rows):
        empty = next(k for k, row in enumerate(rows) if not row)
        raise InputError(f"{place_of(examples[empty], empty + 1)}: the text has no token; remove the row or fill it")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    ids = torch.tensor([r + [pad] * (longest - len(r)) for r in rows])
    mask = torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in rows])
    segments = None if types is None else torch.tensor([t + [0] * (longest - len(t)) for t in types])
    if task == "causal":
        labels = ids.masked_fill(mask == 0, -100)
    else:
        for k, e in enumerate(examples):
            if e.label is None:
                raise InputError(f"{place_of(e, k + 1)} has no label; classification needs a column label")
            if e.label < 0:
                raise InputError(f"{place_of(e, k + 1)}: label {e.label} is below 0; expected 0 .. {num_labels - 1}")
            if e.label >= num_labels:
                raise InputError(
                    f"{place_of(e, k + 1)}: label {e.label} is outside the head's 0 .. {num_labels - 1}; "
                    f"pass --num-labels {e.label + 1} or more"
                )
        labels = torch.tensor([e.label for e in examples])
    pieces = coded.encodings if truncate and tokenizer.is_fast else [None] * len(examples)
    texts = tuple(map(_in_rows, examples, pieces))
    special = frozenset(tokenizer.all_special_ids)
    unknown = unknown_ids(tokenizer)
    seen = tuple(readable(r, lambda some: str(tokenizer.decode(list(some))), special - unknown, unknown) for r in rows)
    return Batch(ids, mask, labels, texts, seen, segments, special)


def _in_rows(example: Example, encoding: Any) -> str:
    """The text of ``example``, both of a pair; without what the tokenizer cut off, where its ``encoding`` is given: what is
    not in the update cannot be read, and does not count as kept."""
    parts = [example.text, *([example.text_pair] if example.text_pair else [])]
    if encoding is not None and encoding.overflowing and example.input_ids is None:
        places = list(zip(encoding.sequence_ids, encoding.offsets))
        parts = [part[: max((end for n, (_, end) in places if n == k), default=0)] for k, part in enumerate(parts)]
    return " ".join(parts)


def groups(examples: Sequence[E], size: int) -> list[list[E]]:
    """``examples`` in order, ``size`` at a time; an incomplete last group is left out unless it is the only one."""
    whole = [list(examples[k : k + size]) for k in range(0, len(examples) - size + 1, size)]
    return whole or [list(examples)]


def data_hash(examples: Sequence[Example]) -> str:
    """Sixteen hex digits that identify the data, independent of the file format."""
    late = ("input_ids", "token_type_ids", "unit")
    plain = (
        {k: v for k, v in asdict(e).items() if k not in ("source", "row") and (k not in late or v is not None)}
        for e in examples
    )
    lines = (json.dumps(e, sort_keys=True, ensure_ascii=False) for e in plain)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
