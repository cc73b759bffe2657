"""What the modules of a model keep in plain attributes, beside their weights and buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

OWN = frozenset(vars(nn.Module()))
"""Names of what every module has: its weights, buffers, hooks and mode."""

SEVERAL = (list, tuple, set, frozenset, deque, dict)


class Attributes:
    """The plain attributes of the modules of ``model`` as they were: numbers, text, tensors and arrays, and lists, tuples,
    sets, deques and dictionaries of them. Deeper ones and other objects are not looked at."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._were = {at: {n: (value, _copied(value)) for n, value in own.items()} for at, own in self._now()}

    def _now(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for at, module in self.model.named_modules():
            yield at, {n: value for n, value in vars(module).items() if n not in OWN}

    def put_back(self, *, whole: bool) -> list[str]:
        """Every changed attribute that could be read in the next pass is as it was; the names of those with tensors, arrays
        or fractions. Without ``whole``, those are left."""
        told = []
        for at, own in self._now():
            were, held = self._were.get(at, {}), vars(self.model.get_submodule(at))
            for name in {**were, **own}:
                old, copy = were.get(name, (None, None))
                new = own.get(name)
                if name in were and name in own and _same(new, copy):
                    continue
                figures = any(_figure(part) for value in (copy, new) for part in _parts(value))
                plain = all(_plain(part) for value in (copy, new) for part in _parts(value))
                if figures:
                    told.append(f"{at}.{name}" if at else name)
                if not (plain or figures) or (figures and not whole):
                    continue
                if name in were:
                    held[name] = _restored(old, copy)
                else:
                    del held[name]
        return told


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, SEVERAL) else [value]


def _figure(part: Any) -> bool:
    """Whether ``part`` can hold a statistic of texts. Weights are watched elsewhere."""
    tensor = isinstance(part, Tensor) and not isinstance(part, nn.Parameter)
    return tensor or isinstance(part, np.ndarray | np.generic | float | complex)


def _plain(part: Any) -> bool:
    return part is None or isinstance(part, int | str | bytes) or _figure(part)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _copied_part(v) for k, v in value.items()}
    if isinstance(value, list | deque):
        return [_copied_part(v) for v in value]
    return set(value) if isinstance(value, set) else _copied_part(value)


def _copied_part(part: Any) -> Any:
    if not _figure(part):
        return part
    return part.detach().clone() if isinstance(part, Tensor) else np.copy(part) if isinstance(part, np.ndarray) else part


def _same(now: Any, copy: Any) -> bool:
    """Whether ``now`` is what it was when ``copy`` was made of it."""
    if isinstance(copy, dict) and isinstance(now, dict):
        return list(now) == list(copy) and all(_same_part(now[k], copy[k]) for k in copy)
    if isinstance(copy, list | tuple) and isinstance(now, list | tuple | deque):
        return len(now) == len(copy) and all(map(_same_part, now, copy))
    return _same_part(now, copy)


def _same_part(now: Any, copy: Any) -> bool:
    if isinstance(copy, Tensor) and _figure(copy):
        return isinstance(now, Tensor) and same_values(now, copy)
    if isinstance(copy, np.ndarray):
        like = isinstance(now, np.ndarray) and (now.shape, now.dtype) == (copy.shape, copy.dtype)
        return like and now.tobytes() == copy.tobytes()
    if _plain(copy) or isinstance(copy, set | frozenset):
        return type(now) is type(copy) and bool(now == copy or (now != now and copy != copy))
    # Another object is as it was, unless something that can be compared took its place.
    return now is copy or not (_plain(now) or isinstance(now, SEVERAL))


def _restored(old: Any, copy: Any) -> Any:
    """``old`` with the content of ``copy``."""
    if _same(old, copy):
        return old
    if isinstance(old, Tensor) and _figure(old):
        old.data = copy
    elif isinstance(old, np.ndarray):
        old[...] = copy
    elif isinstance(old, list | deque):
        old.clear()
        old.extend(copy)
    elif isinstance(old, dict | set):
        old.clear()
        old.update(copy)
    return old


def same_values(found: Tensor, before: Tensor) -> bool:
    """Whether two tensors are equal in shape, type, place and every value, where one NaN equals another."""
    if found.shape != before.shape or found.dtype != before.dtype or found.device != before.device:
        return False
    return torch.equal(found, before) or bool(((found == before) | ((found != found) & (before != before))).all())
