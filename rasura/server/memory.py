"""The memory that a request needs, computed from numbers before it runs. No torch.

Counts are of float32 tensors that exist at the same time; eager attention holds a square of the length for every head. They
are upper bounds: ``tests/test_service_memory.py`` compares them with what processes take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rasura.server.limits import MIB, Refused

FLOAT = 4
"""Bytes of an entry."""

SQUARES, TRAINED_SQUARES = 3, 7
"""Tensors of ``(batch, heads, length, length)`` that one layer holds at once: scores, masked and softmax; in training
dropout, what it kept, and a gradient, too, and one for what freed blocks leave between them (with six, one training of many
took 1 % more than its count)."""

TEXTS, PROMPTS = 64, 32
"""Texts of one batch, and prompts that are continued side by side, at most."""


def running(about: Mapping[str, Any], batch: int, length: int, new_tokens: int = 0) -> int:
    """Bytes that a model needs, besides its weights, for ``batch`` texts of ``length`` tokens, padded to the longest.

    ``about``: as ``rasura.server.models.checked`` describes the model. One layer is alive at a time; of generation, the
    keys and values of all layers are, and grow by ``new_tokens``.
    """
    layer = length * length * (SQUARES * about["heads"] + 2) + length * _width(about)
    logits = 3 * max(about["vocabulary"] if about["kind"] == "causal" else about["labels"], 1)
    kept = 2 * _across(about) * (about["blocks"] + 2) * (length + new_tokens) if about["kind"] == "causal" else 0
    return int(FLOAT * batch * (layer + logits + kept))


def training(about: Mapping[str, Any], batch: int, length: int) -> int:
    """Bytes that a job takes in all to train on ``batch`` texts of ``length`` tokens: the weights, their gradient, AdamW's
    two moments, the best weights so far and one more copy; every layer's activations; logits for each token of a causal
    model."""
    layer = length * length * (TRAINED_SQUARES * about["heads"] + 2) + length * _width(about)
    logits = 4 * (length * about["vocabulary"] if about["kind"] == "causal" else about["labels"])
    return int(FLOAT * (6 * about["parameters"] + batch * (about["blocks"] * layer + logits)))


def _width(about: Mapping[str, Any]) -> int:
    """Entries of a token that one layer holds: states, queries, keys, values and their like, and the feed-forward part."""
    return int(12 * _across(about) + 3 * about["inner"])


def _across(about: Mapping[str, Any]) -> int:
    """The widest of a token's states, queries and keys; older stores hold the states' width alone."""
    return int(about.get("across", about["hidden"]))


def check_text(about: Mapping[str, Any], number: int, length: int, max_bytes: int, new_tokens: int = 0) -> None:
    """Raises ``Refused`` (413) if one text alone needs more than ``max_bytes`` bytes."""
    needs = running(about, 1, length, new_tokens)
    if needs > max_bytes:
        after = f" and {new_tokens} new ones" if new_tokens else ""
        raise Refused(
            413,
            f"text {number} of {length} tokens{after} needs {_mib(needs)} MiB, but this server allows "
            f"{_mib(max_bytes)}; send a shorter text",
        )


def check_job(about: Mapping[str, Any], batch: int, longest: int, max_bytes: int) -> None:
    """Raises ``Refused`` (413) if a job on batches of ``batch`` texts, the longest of ``longest`` tokens, needs more than
    ``max_bytes`` bytes."""
    needs = training(about, batch, longest)
    if needs > max_bytes:
        raise Refused(
            413,
            f"training on {batch} texts per step, of up to {longest} tokens, needs {_mib(needs)} MiB, but this "
            f"server allows {_mib(max_bytes)}; use a smaller batch_size or shorter texts",
        )


def groups(about: Mapping[str, Any], lengths: Sequence[int], max_bytes: int) -> list[list[int]]:
    """The texts of ``lengths`` in batches of similar lengths, none of which needs more than ``max_bytes`` bytes; a text that
    needs more by itself is a separate batch. Each number occurs once."""
    out: list[list[int]] = []
    for k in sorted(range(len(lengths)), key=lengths.__getitem__):
        if out and len(out[-1]) < TEXTS and running(about, len(out[-1]) + 1, lengths[k]) <= max_bytes:
            out[-1].append(k)
        else:
            out.append([k])
    return out


def together(about: Mapping[str, Any], prompts: Sequence[tuple[int, int]], max_bytes: int) -> int:
    """How many of the first ``prompts`` (tokens, new tokens) are continued side by side; at least one where there is any."""
    length = new_tokens = count = 0
    for own, more in prompts[:PROMPTS]:
        length, new_tokens = max(length, own), max(new_tokens, more)
        if count and running(about, count + 1, length, new_tokens) > max_bytes:
            break
        count += 1
    return count


def _mib(count: int) -> int:
    return -(-count // MIB)
