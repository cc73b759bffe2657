"""Files of updates and of hidden entries, as ``rasura read`` takes them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from fuzz.mutations import as_json, damaged, retyped
from fuzz.target import Target, write_shared
from rasura.runs.update_files import load_hidden, load_update

SHAPES = {"weight": (3, 4), "bias": (3,)}
UPDATE, HIDDEN, ARCHIVE = b"U", b"H", b"Z"


class Updates(Target):
    """``load_update`` and ``load_hidden`` for a model of two parameters; an archive of numpy is refused."""

    name, share = "updates", 20

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.victim: Any = SimpleNamespace(model=torch.nn.Linear(4, 3))

    def seeds(self) -> list[bytes]:
        out = []
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            out.append(UPDATE + save({n: torch.ones(s, dtype=dtype) for n, s in SHAPES.items()}))
        out.append(UPDATE + save({"weight": torch.ones(3, 4)}, metadata={"format": "pt"}))
        out.append(HIDDEN + save({n: torch.ones(s, dtype=torch.bool) for n, s in SHAPES.items()}))
        return out

    def mutated(self, rng: Random, seeds: Sequence[bytes]) -> bytes:
        seed = rng.choice(seeds)
        kind, rest = seed[:1], seed[1:]
        if rng.random() < 0.05:
            archive = io.BytesIO()
            np.savez(archive, weight=np.ones((3, 4)))
            return kind + damaged(rng, archive.getvalue(), ())
        if rng.random() < 0.4:
            return kind + damaged(rng, rest, [s[1:] for s in seeds])
        size = int.from_bytes(rest[:8], "little")
        told = json.loads(rest[8 : 8 + size])
        if rng.random() < 0.5:
            one = told[rng.choice([n for n in told if n != "__metadata__"])]
            one["dtype"] = rng.choice(("F8_E4M3", "F8_E5M2", "I64", "U8", "BOOL", "F16", "F32", "F64", "C64", "F4", "x"))
        if rng.random() < 0.7:
            told = retyped(rng, told)
        head = as_json(told)
        return kind + len(head).to_bytes(8, "little") + head + rest[8 + size :]

    def read(self, data: bytes) -> None:
        file = write_shared(self.folder / "given.safetensors", data[1:])
        found = (load_hidden if data[:1] == HIDDEN else load_update)(file, self.victim)
        assert all(tuple(t.shape) == SHAPES[n] and bool(torch.isfinite(t).all()) for n, t in found.items())
