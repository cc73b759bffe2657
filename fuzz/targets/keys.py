"""Keys of obfuscated models, keys of sealed updates, and files of tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load, save

from fuzz.mutations import as_json, damaged, retyped
from fuzz.target import Target, write_shared
from rasura.defenses.homomorphic_keys import Context, make_keys
from rasura.server.limits import Tenants
from rasura.service_protections.obfuslm.key import Key

MODEL, SEALING, TOKENS = b"M", b"S", b"T"
"""The first byte of an input says which of the three it is."""


class Keys(Target):
    """``Key.load`` (with and without a right digest), ``Context.load`` and ``Tenants.read``, from files."""

    name, share = "keys", 130

    def seeds(self) -> list[bytes]:
        place = self.folder / "key"
        out = []
        for size in (3, 40):
            tokenizer = json.dumps({"model": {"vocab": {f"w{k}": k for k in range(size)}}, "added_tokens": []})
            Key(torch.randperm(size), tokenizer, {"unk_token": "[UNK]"}, "0" * 16, "1" * 16, {"k": 4}).save(place)
            out.append(MODEL + place.read_bytes())
            place.unlink()
        keys = make_keys(2)
        for one in (keys, keys.public()):
            one.save(place)
            out.append(SEALING + place.read_bytes())
            place.unlink()
        return [*out, TOKENS + b"# who may come in\nalice:0123456789abcdef\n\nbob:fedcba9876543210\n"]

    def mutated(self, rng: Random, seeds: Sequence[bytes]) -> bytes:
        seed = rng.choice(seeds)
        kind, rest = seed[:1], seed[1:]
        if kind != MODEL or rng.random() < 0.5:
            return kind + damaged(rng, rest, [s[1:] for s in seeds])
        # A header of other types, whose digest is right where it can be.
        size = int.from_bytes(rest[:8], "little")
        head = json.loads(json.loads(rest[8 : 8 + size])["__metadata__"]["rasura"])
        tensors = load(rest)
        if rng.random() < 0.3:
            tensors["tokens"] = tensors["tokens"].to(rng.choice((torch.int32, torch.float32, torch.uint8)))
        if rng.random() < 0.2:
            tensors.pop(rng.choice(list(tensors)))
        head.pop("digest")
        changed = retyped(rng, head)
        if isinstance(changed, dict) and {"tokens", "tokenizer"} <= set(tensors):
            told = json.dumps(changed, sort_keys=True).encode("utf-8", "surrogatepass")
            parts = tensors["tokens"].numpy().tobytes() + tensors["tokenizer"].numpy().tobytes()
            changed["digest"] = hashlib.sha256(told + parts).hexdigest()
        text = as_json(changed).decode("utf-8", "replace")
        return kind + save(tensors, metadata={"rasura": text})

    def read(self, data: bytes) -> None:
        file: Path = write_shared(self.folder / "given", data[1:])
        reader = {MODEL: Key.load, SEALING: Context.load}.get(data[:1], Tenants.read)
        reader(file)
