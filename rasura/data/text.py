"""Private texts from files: JSONL, CSV, Parquet or a Hugging Face data set, and how they become batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch

from rasura.interfaces import InputError, MissingExtra
from rasura.values import Batch, Task

E = TypeVar("E")


@dataclass(frozen=True)
class Example:
    """One text (or pair of texts), with its label where the task has one.

    ``input_ids``: its tokens, special ones included, where a protection chose them; the text alone may give others.
    """

    text: str
    text_pair: str | None = None
    label: int | None = None
    input_ids: tuple[int, ...] | None = None


def demo_examples() -> list[Example]:
    """The short fictional notes that the package brings: a clinic, a bank, e-mails; label 1 asks for action."""
    lines = resources.files("rasura.data").joinpath("examples.jsonl").read_text(encoding="utf-8").splitlines()
    return [Example(**json.loads(line)) for line in lines]


def load_examples(source: str | Path, *, limit: int | None = None) -> list[Example]:
    """Read ``text``, ``text_pair`` and ``label`` from a ``.jsonl``, ``.csv`` or ``.parquet`` file, or a data set id.

    Raises ``InputError`` for a missing or empty file, a missing ``text`` column, an empty text or a bad label, with its row.
    """
    path = Path(source)
    readers = {".jsonl": _jsonl, ".json": _jsonl, ".csv": _csv, ".parquet": _parquet}
    if path.is_file():
        if path.suffix not in readers:
            raise InputError(f"{path}: unknown file type {path.suffix or '(none)'}; expected .jsonl, .csv or .parquet")
        if path.stat().st_size == 0:
            raise InputError(f"{path} is empty; expected rows with a column text")
        rows = readers[path.suffix](path)
    elif path.suffix in readers or path.is_absolute() or str(source).startswith(".") or path.exists():
        raise InputError(f"{source} does not exist or is not a file; expected a .jsonl, .csv or .parquet file")
    else:
        rows = _hub(str(source))
    examples = [_example(row, number, str(source)) for number, row in enumerate(islice(rows, limit), 1)]
    if not examples:
        raise InputError(f"{source} holds no rows; expected at least one with a column text")
    return examples


def _jsonl(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"{path}, line {number}: not JSON ({error.msg}); expected one object a line") from None
            if not isinstance(row, dict):
                raise InputError(f"{path}, line {number}: found {type(row).__name__}, expected one object a line")
            yield row


def _csv(path: Path) -> Iterator[Mapping[str, Any]]:
    import csv

    with path.open(encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file):
            yield {k: v for k, v in row.items() if not (k != "text" and v == "")}


def _parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    import pyarrow.parquet as parquet

    try:
        table = parquet.ParquetFile(path)
    except Exception as error:
        raise InputError(f"{path} cannot be read as Parquet ({str(error).splitlines()[0]})") from None
    for batch in table.iter_batches(1024):
        yield from batch.to_pylist()


def _hub(name: str) -> Iterator[Mapping[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise MissingExtra(f"{name} is no file; to read it as a data set id, run: pip install 'rasura[datasets]'") from None
    try:
        found = datasets.load_dataset(name)
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{name} is neither a file nor a data set that can be loaded here ({first})") from None
    split = next(iter(found.values())) if hasattr(found, "values") else found
    yield from split


def _example(row: Mapping[str, Any], number: int, source: str) -> Example:
    if "text" not in row:
        found = ", ".join(sorted(map(str, row))) or "none"
        raise InputError(f"{source}, row {number}: no column text (found: {found}); rename the column that holds the text")
    text, pair, label = row["text"], row.get("text_pair"), row.get("label")
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{source}, row {number}: the text is empty; remove the row or fill it")
    if label is not None:
        try:
            if float(label) != int(label):
                raise ValueError
            label = int(label)
        except (TypeError, ValueError):
            raise InputError(f"{source}, row {number}: label {label!r} is no whole number; expected 0, 1, ...") from None
    return Example(text, pair if isinstance(pair, str) and pair else None, label, _ids(row.get("input_ids"), number, source))


def _ids(found: Any, number: int, source: str) -> tuple[int, ...] | None:
    if found is None or found == "":
        return None
    try:
        return tuple(int(i) for i in (found.split() if isinstance(found, str) else found))
    except (TypeError, ValueError):
        raise InputError(f"{source}, row {number}: input_ids {found!r} are no whole numbers; expected token ids") from None


def encode(
    examples: Sequence[Example], tokenizer: Any, task: Task, *, max_length: int, num_labels: int, truncate: bool = False
) -> Batch:
    """Tokenize ``examples`` as one batch, padded on the right to the longest.

    Causal labels are the ids themselves, -100 at padding. Raises ``InputError`` for a text longer than ``max_length`` tokens
    (unless ``truncate``), a missing label, or a label outside ``0 .. num_labels - 1``.
    """
    paired = any(e.text_pair for e in examples)
    first = [e.text for e in examples]
    second = [e.text_pair or "" for e in examples] if paired else None
    coded = tokenizer(first, second, truncation=truncate, max_length=max_length if truncate else None)
    rows: list[list[int]] = coded["input_ids"]
    for k, e in enumerate(examples):
        if e.input_ids is not None and not paired:
            if not all(0 <= i < len(tokenizer) for i in e.input_ids):
                raise InputError(f"the text {e.text[:30]!r}... has ids outside the model's 0 .. {len(tokenizer) - 1}")
            rows[k] = list(e.input_ids[: max_length if truncate else None])
    longest = max(map(len, rows))
    if longest > max_length:
        worst = max(range(len(rows)), key=lambda k: len(rows[k]))
        raise InputError(
            f"the text {first[worst][:30]!r}... has {longest} tokens but the model takes {max_length}; "
            "pass --truncate to cut it"
        )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    ids = torch.tensor([r + [pad] * (longest - len(r)) for r in rows])
    mask = torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in rows])
    types = None
    if paired and "token_type_ids" in coded:
        types = torch.tensor([t + [0] * (longest - len(t)) for t in coded["token_type_ids"]])
    if task == "causal":
        labels = ids.masked_fill(mask == 0, -100)
    else:
        for e in examples:
            if e.label is None:
                raise InputError(f"the text {e.text[:30]!r}... has no label; classification needs a column label")
            if not 0 <= e.label < num_labels:
                raise InputError(
                    f"label {e.label} is outside the head's 0 .. {num_labels - 1}; pass --num-labels {e.label + 1} or more"
                )
        labels = torch.tensor([e.label for e in examples])
    texts = tuple(e.text if not e.text_pair else f"{e.text} {e.text_pair}" for e in examples)
    special = frozenset(tokenizer.all_special_ids)
    seen = tuple(str(tokenizer.decode([i for i in r if i not in special])) for r in rows)
    return Batch(ids, mask, labels, texts, seen, types, special)


def groups(examples: Sequence[E], size: int) -> list[list[E]]:
    """``examples`` in order, ``size`` at a time; an incomplete last group is left out unless it is the only one."""
    whole = [list(examples[k : k + size]) for k in range(0, len(examples) - size + 1, size)]
    return whole or [list(examples)]


def data_hash(examples: Sequence[Example]) -> str:
    """Sixteen hex digits that name the data, independent of the file's format."""
    plain = ({k: v for k, v in asdict(e).items() if k != "input_ids" or v is not None} for e in examples)
    lines = (json.dumps(e, sort_keys=True, ensure_ascii=False) for e in plain)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
