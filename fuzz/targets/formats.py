"""Update files of frameworks: archives of torch and numpy, buffers, distributed checkpoints, indexes, quantised tensors."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

from fuzz.mutations import as_json, damaged, retyped
from fuzz.target import Target, write_shared
from rasura.runs.reading import load_update

SHAPES = {"weight": (3, 4), "bias": (3,)}
FILE, INDEX, CHECKPOINT = b"F", b"I", b"C"


class Formats(Target):
    """``load_update`` for a model of two parameters. An input is one file, an index beside a sound shard, or the metadata
    and the one part of a distributed checkpoint."""

    name, share = "formats", 30

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.victim: Any = SimpleNamespace(model=torch.nn.Linear(4, 3))

    def seeds(self) -> list[bytes]:
        update = {n: torch.ones(s) for n, s in SHAPES.items()}
        half = {n: t.half() for n, t in update.items()}
        states = {n: {"absmax": torch.ones(1), "code": torch.linspace(-1, 1, 256)} for n in SHAPES}
        four = {"quant_type": "nf4", "absmax": torch.ones(1), "quant_map": torch.ones(16), "blocksize": 64, "shape": (3, 4)}
        codes = {n: torch.zeros(s, dtype=torch.uint8) for n, s in SHAPES.items()}
        packed = {"weight": torch.zeros(6, 1, dtype=torch.uint8), "quant_state": {"weight": four}}
        saved: list[object] = [
            update, half, {"model": {f"model.{n}": t for n, t in update.items()}, "round": 3}, list(update.values()),
            {"data": codes, "meta": {"quant_state": states}}, packed,
        ]  # fmt: skip
        flat = {**codes, **{f"{n}.{k}": t for n, s in states.items() for k, t in s.items()}}
        out = [FILE + _bytes(torch.save, value) for value in saved]
        out += [FILE + save(flat), FILE + _bytes(lambda v, f: np.savez(f, **v), {n: t.numpy() for n, t in update.items()})]
        out += [FILE + _bytes(lambda v, f: np.savez_compressed(f, *v), [t.numpy() for t in update.values()])]
        out += [FILE + b"".join(_bytes(lambda v, f: np.save(f, v), t.numpy()) for t in update.values())]
        out += [INDEX + as_json({"metadata": {}, "weight_map": dict.fromkeys(SHAPES, "shard.safetensors")})]
        place = self.folder / "made"
        save_checkpoint({"model": update}, checkpoint_id=place, no_dist=True)
        described = (place / ".metadata").read_bytes()
        out += [CHECKPOINT + len(described).to_bytes(4, "little") + described + (place / "__0_0.distcp").read_bytes()]
        shutil.rmtree(place)
        return out

    def mutated(self, rng: Random, seeds: Sequence[bytes]) -> bytes:
        seed = rng.choice(seeds)
        kind, rest = seed[:1], seed[1:]
        if kind == INDEX and rng.random() < 0.7:
            return kind + as_json(retyped(rng, json.loads(rest)))
        if kind == CHECKPOINT:
            size = int.from_bytes(rest[:4], "little")
            head, part = rest[4 : 4 + size], rest[4 + size :]
            head, part = (damaged(rng, head, ()), part) if rng.random() < 0.7 else (head, damaged(rng, part, ()))
            return kind + len(head).to_bytes(4, "little") + head + part
        if rest.startswith(b"PK") and rng.random() < 0.7:
            return kind + _damaged_member(rng, rest)
        return kind + damaged(rng, rest, [s[1:] for s in seeds])

    def read(self, data: bytes) -> None:
        found = load_update(self._written(data[:1], data[1:]), self.victim)
        assert all(tuple(t.shape) == SHAPES[n] and bool(torch.isfinite(t).all()) for n, t in found.items())

    def _written(self, kind: bytes, rest: bytes) -> Path:
        if kind == INDEX:
            place = self.folder / "shards"
            place.mkdir(exist_ok=True)
            write_shared(place / "shard.safetensors", save({n: torch.ones(s) for n, s in SHAPES.items()}))
            write_shared(place / "model.safetensors.index.json", rest)
            return place
        if kind == CHECKPOINT:
            place = self.folder / "checkpoint"
            place.mkdir(exist_ok=True)
            size = int.from_bytes(rest[:4], "little")
            write_shared(place / ".metadata", rest[4 : 4 + size])
            write_shared(place / "__0_0.distcp", rest[4 + size :])
            return place
        return write_shared(self.folder / "given", rest)


def _bytes(write: Callable[[Any, Any], object], value: object) -> bytes:
    out = io.BytesIO()
    write(value, out)
    return out.getvalue()


def _damaged_member(rng: Random, archive: bytes) -> bytes:
    """One member of an archive damaged, in an archive that is sound: else most damage would end at a checksum."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as given, zipfile.ZipFile(out, "w") as made:
        infos = given.infolist()
        chosen = next((i for i in infos if i.filename.endswith("data.pkl")), infos[0])
        chosen = chosen if rng.random() < 0.7 else rng.choice(infos)
        for info in infos:
            data = given.read(info)
            made.writestr(info, damaged(rng, data, ()) if info is chosen else data)
    return out.getvalue()
