"""The weights before a round, which turn the weights after it into an update."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from rasura.core.interfaces import InputError

ROUND = re.compile(r"(?:round|peft|server|global)\D{0,8}?(\d+)", re.IGNORECASE)
"""Names with a round number: ``round-3``, ``peft_3``, ``round-3-weights.npz``, ``model_round_3.pth``."""

LEVELS = 2
"""Number of folders above the update in which the weights are searched for."""

NEAR = 0.25
"""Squared distance from the model's weights, relative to their squared norm, below which tensors are weights and not an
update."""

SHORT = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""Types of numbers with fewer than 32 bits."""

ALIKE, LEAST = 0.5, 64
"""A matrix of at least so many entries is weights, too, if its cosine with the model's own is above this and its norm is
within a factor of five: no gradient is like that by chance."""


def of_round(update: Path, number: int) -> Path:
    """The file or folder with the global weights of round ``number``, beside the update or above it. It is searched for by
    names with the round, such as ``round-3``, ``peft_3`` or ``round-3-weights.npz``; if a folder found has a folder
    ``model``, that is used. Raises ``InputError`` if there is none, or several.
    """
    update = update.resolve()
    folders = [update.parent, *update.parents[1 : 1 + LEVELS]]
    for folder in folders:
        found = []
        for place in sorted(folder.iterdir()):
            told = ROUND.search(place.name)
            if told is not None and int(told.group(1)) == number and place != update:
                found.append(place / "model" if (place / "model").is_dir() else place)
        found = [place for place in found if not place.name.endswith(".json")]
        if len(found) > 1:
            names = ", ".join(place.name for place in found[:3])
            raise InputError(f"round {number}: {folder} holds {len(found)} candidates ({names}); pass one as --before")
        if found:
            return found[0]
    raise InputError(f"round {number}: no file or folder near {update} has this round in its name; pass it as --before")


def subtracted(
    after: Mapping[str, Tensor], before: Mapping[str, Tensor], where: str, held: Mapping[str, tuple[str, str]]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The weights after minus the weights before, in float32, and notes. ``held``: the types in which files hold each tensor
    after and before.

    Weights before are rounded as those after are: a client that trains in 16 bits rounds what it is given. Raises
    ``InputError`` if a tensor is missing before, and if nothing changed, or nothing but the type of the same weights.
    """
    lacking = [name for name in after if name not in before]
    if lacking:
        raise InputError(f"the weights before the round lack {len(lacking)} of the tensors after it ({lacking[0]})")
    rounded = {name for name in after if held[name][0] in SHORT and held[name][0] != held[name][1]}
    first = {name: _rounded(before[name], held[name][0]) if name in rounded else before[name] for name in after}
    out = {name: (tensor.double() - first[name].double()).float() for name, tensor in after.items()}
    finer = {name: t for name, t in after.items() if held[name][1] in SHORT}
    if not any(bool(t.any()) and (n not in finer or _apart(finer[n], first[n], held[n][1])) for n, t in out.items()):
        raise InputError(f"{where}: the weights before and after the round are the same; there is nothing to read")
    said = []
    if kinds := ", ".join(sorted({held[name][0] for name in rounded})):
        said.append(f"the weights before were rounded to {kinds}, as those after are; only steps above the rounding show")
    if kinds := ", ".join(sorted({held[name][1] for name in finer if held[name][0] not in SHORT})):
        said.append(f"the weights before are in {kinds}, those after in finer numbers; if training began with finer ones, "
                    "the difference is mostly rounding")  # fmt: skip
    return out, tuple(said)


def _rounded(tensor: Tensor, kind: str) -> Tensor:
    return tensor.to(getattr(torch, kind)).float()


def _apart(after: Tensor, before: Tensor, kind: str) -> bool:
    """Whether ``after`` is more than ``before`` in finer numbers."""
    return not torch.equal(_rounded(after, kind), before.float())


def check_update(found: Mapping[str, Tensor], model: nn.Module, where: str) -> None:
    """Raises ``InputError`` if the supposed update equals the model's own weights or is near them, all together or one
    matrix: in a trained adapter B, which began at zero, may outgrow all others."""
    own = {n: p.detach().cpu() for n, p in model.named_parameters() if n in found}
    squares = {n: (_square(t), _square(own[n]), _square(t - own[n])) for n, t in found.items()}
    matrices = [n for n, t in found.items() if t.dim() >= 2 and t.numel() >= LEAST]
    norm, apart = (sum(one[place] for one in squares.values()) for place in (1, 2))
    if (norm > 0 and apart < NEAR * norm) or any(_are_weights(*squares[n]) for n in matrices):
        raise InputError(
            f"{where} holds weights, not an update: they are near the model's own. Pass the weights before the "
            "round with --before, and how they were trained with --update"
        )


def _are_weights(size: float, norm: float, apart: float) -> bool:
    """Whether a matrix is near the model's own, or points the same way at a like size, by the squared norms of both and of
    their difference."""
    along = (size + norm - apart) / 2
    alike = along > ALIKE * math.sqrt(size * norm) and norm / 25 < size < 25 * norm
    return norm > 0 and (apart < NEAR * norm or alike)


def _square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


@contextmanager
def holding(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside the block, ``model`` has other ``weights`` for the parameters named there."""
    own = dict(model.named_parameters())
    kept: dict[str, Tensor] = {}
    try:
        with torch.no_grad():
            for name, tensor in weights.items():
                value = tensor.to(own[name])
                if not torch.equal(own[name], value):
                    kept[name] = own[name].detach().clone()
                    own[name].copy_(value)
        yield
    finally:
        with torch.no_grad():
            for name, tensor in kept.items():
                own[name].copy_(tensor)
