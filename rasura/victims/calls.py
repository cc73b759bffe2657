"""What the layers of a model read, call by call, while it runs on one short text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.interfaces import InputError

LENGTH = 5
"""Number of tokens of the text: no number of rows of a table of distances, which are even."""


class Stop(Exception):
    """Ends a run of a model where the rest of it is not needed."""


@contextmanager
def hooked(*handles: Any) -> Iterator[None]:
    """Inside the block, the hooks of ``handles`` are there; afterwards they are removed."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def refusing(model: nn.Module, length: int) -> Iterator[None]:
    """Inside the block, which runs ``model`` on a text of ``length`` tokens, whatever its code raises becomes an
    ``InputError``."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # whatever a foreign model's code raises
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        kind = type(model).__name__
        raise InputError(f"{kind} cannot be run on a text of {length} tokens: {first}") from None


@torch.no_grad()
def reads(model: nn.Module, layers: Sequence[str], words: int, last: str) -> dict[str, list[Tensor]]:
    """What each of ``layers`` reads, call by call, for one text of ``LENGTH`` among the first ``words`` ids.

    The run ends behind the module ``last``: a head may refuse such a text, as T5's does. Raises ``InputError`` where the
    model cannot be run.
    """
    ids = torch.arange(5, 5 + LENGTH, device=next(model.parameters()).device)[None] % words
    found: dict[str, list[Tensor]] = {name: [] for name in layers}

    def record(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda _, args: found[name].extend(args[:1])

    def stop(*_: Any) -> None:
        raise Stop

    handles = [model.get_submodule(name).register_forward_pre_hook(record(name)) for name in layers]
    handles.append(model.get_submodule(last).register_forward_hook(stop))
    with hooked(*handles), refusing(model, LENGTH), suppress(Stop):
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    return found


def tokens_alone(calls: Sequence[Tensor]) -> bool:
    """Whether a layer with these ``calls`` reads one vector per token, and nothing else."""
    return bool(calls) and all(x.shape[:-1] == (1, LENGTH) for x in calls)


def tokens_and_more(calls: Sequence[Tensor]) -> bool:
    """Whether a layer with these ``calls`` reads one vector per token, and something else in a call of its own.

    DeBERTa's query and key layers read its table of distances too where they are shared (``share_att_key``).
    """
    sizes = {x.shape[:-1].numel() == LENGTH for x in calls}
    return sizes == {True, False}


def reaches(model: nn.Module, table: str, layer: str, words: int, before: Sequence[Tensor]) -> bool:
    """Whether what ``model`` looks up in ``table`` is part of the input of ``layer``, which reads ``before`` (``reads``).
    RoFormer's table turns queries and keys."""

    def move(_: nn.Module, __: tuple[Any, ...], out: Tensor) -> Tensor:
        return out + torch.arange(out.shape[-1], dtype=out.dtype, device=out.device)

    with hooked(model.get_submodule(table).register_forward_hook(move)):
        after = reads(model, [layer], words, layer)[layer]
    return not (before and after) or not torch.allclose(before[0], after[0])
