"""Untrusted update files of any framework: checked before use, and never executed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor, nn

from rasura.core.interfaces import InputError
from rasura.runs.update_files.before import check_update, holding, of_round, subtracted
from rasura.runs.update_files.entries import FLOATS, Entry, refusing
from rasura.runs.update_files.names import Matched, listed, matched, targets, usual_orders
from rasura.runs.update_files.sources import opened
from rasura.victims.loading import Victim

__all__ = ["MAX_ENTRY", "Update", "holding", "load_hidden", "load_update", "of_round", "open_update"]

MAX_ENTRY = 1e14
"""Maximum absolute value of an entry, so that the squared norm of 10^10 entries is finite in float32."""

HIDDEN = "bool, true where an entry is hidden"


@dataclass(frozen=True)
class Update:
    """The tensors in a file by parameter of the model, in float32. ``before``: the weights before the round, if they were
    given. ``notes``: the recognised format and how names were matched, one line each, for people.
    """

    entries: Mapping[str, Tensor]
    before: Mapping[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def load_hidden(path: str | Path, victim: Victim) -> dict[str, Tensor]:
    """Which entries are visible, by parameter, from a file of bool tensors that are true where an entry is hidden.

    Raises ``InputError`` for a missing or damaged file, unknown names, wrong shapes, and tensors that are not bool.
    """
    found = _matched(Path(path), victim.model, None)
    return {n: ~t for n, t in _read(found, victim.model, Path(path), ("bool",), HIDDEN).items()}


def load_update(path: str | Path, victim: Victim) -> dict[str, Tensor]:
    """The tensors of an update file in float32, as returned by ``open_update``."""
    return dict(open_update(path, victim).entries)


def open_update(
    path: str | Path, victim: Victim, *, before: str | Path | None = None, names_from: str | Path | None = None
) -> Update:
    """The update in a file or folder of any framework, checked against the model.

    ``before``: the weights before the round; the update is the weights in ``path`` minus these. ``names_from``: an adapter
    or model whose weights are in a list without names. Raises ``InputError`` for a missing or damaged file, names and shapes
    that the model does not have, integers, NaN, infinity, entries above ``MAX_ENTRY``, weights where an update was expected,
    and everything that could run code.
    """
    file, model = Path(path), victim.model
    names = None if names_from is None else _names(Path(names_from), model)
    found = _matched(file, model, names)
    entries = _floats(found, model, file)
    if before is None:
        check_update(entries, model, str(file))
        trained, more = _trained(entries)
        return Update(trained, notes=(*found.notes, *more))
    earlier = _matched(Path(before), model, names)
    weights = _floats(earlier, model, Path(before))
    held = {n: (one.dtype, earlier.entries[n].dtype) for n, one in found.entries.items() if n in earlier.entries}
    changes, rounding = subtracted(entries, weights, str(file), held)
    trained, more = _trained(changes)
    return Update(trained, weights, (*found.notes, *rounding, *more, *(f"before: {note}" for note in earlier.notes)))


def _trained(entries: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """``entries`` without the tensors that are zero throughout, unless all are, and a note of how many these are.

    Whole state dicts hold frozen weights, whose change is zero: as a gradient it would say that no text can be there. Of
    LoRA's matrices one is zero in the first step, which says something.
    """
    changed = {n for n, t in entries.items() if bool(t.any())}
    kept = {n: t for n, t in entries.items() if n in changed or "lora_" in n}
    left = len(entries) - len(kept)
    if not left or not changed:
        return dict(entries), ()
    return kept, (f"{left} of {len(entries)} tensors did not change and count as not trained",)


def _matched(file: Path, model: nn.Module, names: Sequence[str | None] | None) -> Matched:
    with refusing(file):
        source = opened(file)
        return matched(source, model) if source.named else listed(source, model, names)


def _names(path: Path, model: nn.Module) -> Sequence[str | None]:
    """The parameters of the adapter or model in ``path``, in the order in which a list of its weights is sent.

    A file without an order, such as safetensors, only says which weights; the order is then that of the model.
    """
    with refusing(path):
        source = opened(path)
        found, _ = targets(source, model) if source.named else ([], ())
    if not source.named:
        raise InputError(f"{path} has no names either; pass the adapter or model whose weights are in the list")
    if source.ordered:
        return found
    held = set(found) - {None}
    orders = usual_orders(model)
    exact = next((order for order in orders.values() if set(order) - {None} == held), None)
    return exact or tuple(n for n in orders["the state dict"] if n in held)


def _floats(found: Matched, model: nn.Module, file: Path) -> dict[str, Tensor]:
    out = {}
    for name, tensor in _read(found, model, file, FLOATS, "gradients or weights: float64, 32, 16, bfloat16, float8").items():
        # float8 knows no comparison, and float64 overflows float32: both are looked at in a type that holds them.
        wide = tensor if tensor.dtype == torch.float64 else tensor.float()
        # NaN is the least and the largest of whatever holds one.
        least, largest = (float(x) for x in wide.aminmax()) if wide.numel() else (0.0, 0.0)
        if not (isfinite(least) and isfinite(largest)):
            raise InputError(f"{file}: {name} holds NaN or infinity; expected finite gradients")
        if max(-least, largest) > MAX_ENTRY:
            raise InputError(
                f"{file}: {name} holds entries above {MAX_ENTRY:g} in size; expected gradients of a smaller scale"
            )
        out[name] = wide.float()
    return out


def _read(found: Matched, model: nn.Module, file: Path, dtypes: Sequence[str], expected: str) -> dict[str, Tensor]:
    """The tensors by parameter. All shapes and types are checked before the first is read."""
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    for name, entry in found.entries.items():
        if entry.shape != shapes[name]:
            raise InputError(
                f"{file}: {name} has shape {entry.shape}, but the model's is {shapes[name]}; pass the model "
                "that the update was computed with"
            )
        if entry.dtype not in dtypes:
            raise InputError(f"{file}: {name} is {entry.dtype[:60]}; expected {expected}")
    with refusing(file):
        return {name: _whole(entry, file, name) for name, entry in found.entries.items()}


def _whole(entry: Entry, file: Path, name: str) -> Tensor:
    tensor = entry.read()
    if tuple(tensor.shape) != entry.shape:
        raise InputError(f"{file}: the shape of {name} differs from the one that the file states")
    return tensor
