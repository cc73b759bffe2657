"""Bodies of uploads to the service, and the files in them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from safetensors.torch import load, save

from fuzz.mutations import as_json, damaged, retyped
from fuzz.target import Target
from rasura.server import data as jobs
from rasura.server.container import CONFIG, DATA, WEIGHTS, Incoming, checked_name, header_bytes
from rasura.server.limits import Limits
from rasura.server.models import checked

ABOUT = {
    "kind": "classification", "vocabulary": 100, "max_length": 20, "labels": 2, "pad": 0, "ends": [2], "hidden": 16,
    "blocks": 2, "heads": 2, "inner": 32, "parameters": 10_000, "pair": None,
}  # fmt: skip
JOB, MODEL, CAUSAL = b"J", b"M", b"C"


class Containers(Target):
    """The header and the files of a body (``Incoming``), and the settings of a job that stand in it."""

    name, share = "containers", 228

    def seeds(self) -> list[bytes]:
        settings: list[dict[str, Any]] = [
            {}, {"method": "lora", "rank": 8, "epochs": 2}, {"batch_size": 4, "learning_rate": 0.1, "holdout": 0.5},
        ]  # fmt: skip
        tensors = save({"ids": torch.ones(4, dtype=torch.int32)})
        out = [header_bytes({"output": "new", "settings": s}, {DATA: len(tensors)}) + tensors for s in settings]
        return [*out, header_bytes({"output": "a"}, {DATA: 17}) + bytes([9, 0, 0, 0, 0, 0, 0, 0]) + b'{"a": 1} ']

    def mutated(self, rng: Random, seeds: Sequence[bytes]) -> bytes:
        seed = rng.choice(seeds)
        if rng.random() < 0.4:
            return damaged(rng, seed, seeds)
        size = int.from_bytes(seed[:8], "little")
        head = as_json(retyped(rng, json.loads(seed[8 : 8 + size])))
        return len(head).to_bytes(8, "little") + head + seed[8 + size :]

    def read(self, data: bytes) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(data), 100):
                yield data[start : start + 100]

        async def taken() -> None:
            body = Incoming(chunks(), len(data))
            head = await body.header(frozenset({DATA}), {DATA: 1 << 20})
            checked_name(head.get("output"), "output")
            jobs.JobSettings.read(head.get("settings", {}), ABOUT)
            await body.save(head["files"], self.folder)

        _finished(taken())


def _finished(what: Any) -> None:
    """Run what never waits, without a loop."""
    try:
        what.send(None)
    except StopIteration:
        return
    raise RuntimeError("it waits")


class Uploads(Target):
    """What the service makes of a model's config and weights (``checked``) and of a job's data (``data.check``)."""

    name, share = "uploads", 20

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        transformers.logging.set_verbosity(transformers.logging.CRITICAL)

    def seeds(self) -> list[bytes]:
        common = {"vocab_size": 40, "num_attention_heads": 2, "num_hidden_layers": 1, "max_position_embeddings": 16}
        bert = transformers.BertConfig(hidden_size=8, intermediate_size=16, **common)
        llama = transformers.LlamaConfig(hidden_size=8, intermediate_size=16, **common)
        out = []
        for made in (transformers.BertForSequenceClassification(bert), transformers.LlamaForCausalLM(llama)):
            made.save_pretrained(self.folder / "made")
            config = (self.folder / "made" / CONFIG).read_bytes()
            out.append(MODEL + len(config).to_bytes(4, "big") + config + (self.folder / "made" / WEIGHTS).read_bytes())
        data = {
            "ids": torch.arange(3, 13, dtype=torch.int32), "lengths": torch.tensor([3, 5, 2], dtype=torch.int32),
            "labels": torch.tensor([0, 1, 1], dtype=torch.int32), "types": torch.zeros(10, dtype=torch.uint8),
        }  # fmt: skip
        return [*out, JOB + save(data), CAUSAL + save({"ids": data["ids"], "lengths": data["lengths"]})]

    def mutated(self, rng: Random, seeds: Sequence[bytes]) -> bytes:
        seed = rng.choice(seeds)
        kind, rest = seed[:1], seed[1:]
        if kind == MODEL:
            size = int.from_bytes(rest[:4], "big")
            config, weights = rest[4 : 4 + size], rest[4 + size :]
            if rng.random() < 0.7:
                config = as_json(retyped(rng, json.loads(config)))
            elif rng.random() < 0.5:
                config = damaged(rng, config, ())
            else:
                weights = damaged(rng, weights, ())
            return kind + len(config).to_bytes(4, "big") + config + weights
        if rng.random() < 0.5:
            return kind + damaged(rng, rest, ())
        tensors = load(rest)
        name = rng.choice(list(tensors))
        values = tensors[name].clone()
        what = rng.random()
        if what < 0.5 and len(values):
            values[rng.randrange(len(values))] = rng.choice((0, 1, 2, 19, 20, 99, 100, 255))
        elif what < 0.7:
            values = values[: rng.randrange(len(values) + 1)]
        elif what < 0.9:
            values = values.to(rng.choice((torch.int64, torch.float32, torch.int32, torch.uint8)))
        else:
            values = values[:, None]
        return kind + save({**tensors, name: values})

    def read(self, data: bytes) -> None:
        kind, rest = data[:1], data[1:]
        if kind == MODEL:
            size = int.from_bytes(rest[:4], "big")
            (self.folder / CONFIG).write_bytes(rest[4 : 4 + size])
            (self.folder / WEIGHTS).write_bytes(rest[4 + size :])
            checked(self.folder)
            return
        (self.folder / DATA).write_bytes(rest)
        about = ABOUT if kind == JOB else {**ABOUT, "kind": "causal", "labels": 0}
        jobs.check(self.folder, about, jobs.JobSettings.read({}, about), Limits())
        jobs.read(self.folder, kind == CAUSAL)
