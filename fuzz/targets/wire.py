"""Messages of federated clients."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from random import Random

import torch

from fuzz.mutations import as_json, damaged, retyped
from fuzz.target import Target
from rasura.core.values import Message
from rasura.core.wire import DTYPES, START, from_bytes, to_bytes


class Wire(Target):
    """``rasura.core.wire.from_bytes``; what is read must be finite, and written again be the same."""

    name, share = "wire", 360

    def seeds(self) -> list[bytes]:
        rng = torch.Generator().manual_seed(1)
        out = [to_bytes(Message({}))]
        for shape in ((), (0, 4), (3,), (5, 7), (2, 2, 2)):
            for dtype in DTYPES.values():
                gradient = torch.randn(shape, generator=rng).to(dtype)
                visible = torch.rand(shape, generator=rng) > 0.5
                sealed = {"bfv/0": b"cipher", "bfv/1": b""}
                out.append(to_bytes(Message({"a.weight": gradient, "b": torch.ones(2)})))
                told: dict[str, float | int | str | bool | None] = {"round": 1, "nonce": "ab", "scales": "[1, -2]"}
                masks = {"a.weight": visible, "c": torch.zeros(9, dtype=torch.bool)}
                out.append(to_bytes(Message({"a.weight": gradient, "c": torch.zeros(9)}, masks, sealed, "fedavg-sgd", told)))
        return out

    def mutated(self, rng: Random, seeds: Sequence[bytes]) -> bytes:
        seed = rng.choice(seeds)
        if rng.random() < 0.4:
            return damaged(rng, seed, seeds)
        (size,) = struct.unpack(">I", seed[START - 4 : START])
        head = as_json(retyped(rng, json.loads(seed[START : START + size])))
        return seed[: START - 4] + struct.pack(">I", len(head)) + head + seed[START + size :]

    def read(self, data: bytes) -> None:
        found = from_bytes(data)
        assert all(bool(torch.isfinite(g.reshape(-1)[:100]).all()) for g in found.gradients.values() if g.numel() < 1 << 20)
        again = from_bytes(to_bytes(found)) if sum(g.numel() for g in found.gradients.values()) < 1 << 20 else found
        assert again.gradients.keys() == found.gradients.keys() and again.header == found.header
