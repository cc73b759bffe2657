"""Files of texts: CSV, JSON lines, Parquet, and what calls itself so."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from random import Random

import pyarrow
import pyarrow.parquet

from fuzz.mutations import as_json, damaged, retyped
from fuzz.target import Target, write_shared
from rasura.data.text import load_examples

ROWS = [
    {"text": "Ann sat by the old river.", "label": 0}, {"text": "Grüße aus Köln; bis bald", "label": 1},
    {"text": 'He said "no", twice', "label": 1},
]  # fmt: skip
SUFFIXES = {b"J": ".jsonl", b"C": ".csv", b"P": ".parquet", b"T": ".txt"}


class Data(Target):
    """``load_examples``; every text that is read is a text."""

    name, share = "data", 40

    def seeds(self) -> list[bytes]:
        lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
        pairs = "\n".join(json.dumps({**row, "text_pair": "x y"}) for row in ROWS)
        table = 'text,label\nAnn sat by the old river.,0\n"Grüße aus Köln, bis bald",1\n"He said ""no""",1\n'
        out = [b"J" + lines.encode(), b"J" + pairs.encode(), b"C" + table.encode()]
        for row in (ROWS, [{**row, "text_pair": "x"} for row in ROWS]):
            file = io.BytesIO()
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(row), file)
            out.append(b"P" + file.getvalue())
        return out

    def mutated(self, rng: Random, seeds: Sequence[bytes]) -> bytes:
        german = "text;label\nGrüße aus Köln;1\nAnn sat;0\n"
        more = [b"C" + german.encode(code) for code in ("latin-1", "utf-16", "utf-8-sig")] + [b"T" + german.encode()]
        seed = rng.choice([*seeds, *more])
        kind, rest = seed[:1], seed[1:]
        if kind == b"J" and rng.random() < 0.5:
            rows = [json.loads(line) for line in rest.decode().splitlines()]
            changed = retyped(rng, rows)
            rest = b"\n".join(as_json(row) for row in (changed if isinstance(changed, list) else [changed]))
            return kind + rest
        return kind + damaged(rng, rest, [s[1:] for s in seeds])

    def read(self, data: bytes) -> None:
        file = write_shared(self.folder / f"given{SUFFIXES.get(data[:1], '')}", data[1:])
        found = load_examples(file)
        assert all(isinstance(e.text, str) and e.text.strip() for e in found)
