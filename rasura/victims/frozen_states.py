"""What frozen lower blocks make of the texts of a training: computed once, since no step changes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import takewhile
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.batches import Batch
from rasura.victims.batching import joined

LIMIT = 1 << 30
"""Most bytes of states that are kept; of more texts, none are."""

INPUTS = {"input_ids", "attention_mask", "token_type_ids", "labels"}
"""What a model may be given for its states to be those of its tokens alone."""

Key = tuple[tuple[int, ...], tuple[int, ...]]
"""The tokens of a text, and their types."""


@dataclass
class _Memory:
    """The state ``(length, width)`` of every text behind the block ``last``, and those of the batch ``now``, if all of its
    texts are known. ``tupled``: the length of the tuple that a block returns; 0, if it returns the state itself."""

    last: int
    tupled: int
    known: dict[Key, Tensor] = field(default_factory=dict)
    now: Tensor | None = None

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.now = None
        if args or not {"input_ids", "attention_mask"} <= {k for k, v in kwargs.items() if v is not None} <= INPUTS:
            return
        ids, places = kwargs["input_ids"], kwargs["attention_mask"].bool()
        found = [self.known.get(key) for key in _keys(ids, places, kwargs.get("token_type_ids"))]
        if found and all(one is not None for one in found):
            some = [one for one in found if one is not None]
            self.now = some[0].new_zeros(*ids.shape, some[0].shape[1])
            self.now[places] = torch.cat(some)

    def end(self, *_: Any) -> None:
        self.now = None


def _keys(ids: Tensor, places: Tensor, types: Tensor | None) -> list[Key]:
    return [
        (tuple(row[here].tolist()), () if types is None else tuple(types[k][here].tolist()))
        for k, (row, here) in enumerate(zip(ids, places))
    ]


def kept_states(model: nn.Module, rows: Sequence[Batch], pad: int, together: int) -> AbstractContextManager[None]:
    """A context in which ``model`` looks up what its frozen lower blocks make of ``rows``, one text each, padded by ``pad``.
    They are computed here, ``together`` texts at a time.

    Blocks are frozen here if no trained parameter takes part in what they return, by autograd. Other texts are computed as
    ever, and so is everything where states are not those of the tokens alone: with dropout, with adapters, and in models of
    encoder and decoder. States differ by rounding from those of another padding. They take ``LIMIT`` bytes at most. Before
    they are used, a batch of ``rows`` must have the same outputs with them and without.
    """
    if not rows or not _deterministic(model):
        return nullcontext()
    blocks, device = _blocks(model), next(model.parameters()).device
    by_length = sorted(rows, key=lambda row: row.input_ids.shape[1])
    with torch.enable_grad():
        passed = _passed(model, blocks, by_length[0].to(device))
    frozen = list(takewhile(lambda one: not one.state.requires_grad, passed))
    tupled = {one.tupled for one in frozen}
    if [one.number for one in passed] != list(range(len(blocks))) or len(tupled) != 1:
        return nullcontext()
    state = frozen[-1].state
    if sum(row.input_ids.shape[1] for row in rows) * state.shape[-1] * state.element_size() > LIMIT:
        return nullcontext()
    memory = _Memory(len(frozen) - 1, tupled.pop())
    for start in range(0, len(rows), together):
        batch = joined(by_length[start : start + together], pad).to(device)
        with torch.no_grad():
            states = _passed(model, blocks, batch)[memory.last].state
        places = batch.attention_mask.bool()
        keys = _keys(batch.input_ids, places, batch.token_type_ids)
        memory.known |= {key: states[k][places[k]].clone() for k, key in enumerate(keys)}
    trial = joined([by_length[0], by_length[len(rows) // 2], by_length[-1]], pad).to(device)
    plain = _output(model, trial)
    with _looked_up(model, blocks, memory):
        same = torch.allclose(_output(model, trial), plain, rtol=1e-3, atol=1e-4)
    return _looked_up(model, blocks, memory) if same else nullcontext()


def _deterministic(model: nn.Module) -> bool:
    """Whether the states of a text depend on its tokens alone, as far as the model tells."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    return not any(m.training or "lora_dropout" in name for name, m in model.named_modules())


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The largest list of modules: the transformer blocks. None where one of them has a ``forward`` of its own."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    found = list(max(lists, key=lambda one: sum(p.numel() for p in one.parameters()), default=[]))
    return [] if any("forward" in vars(block) for block in found) else found


def _output(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**batch.inputs()).logits
    return found[batch.attention_mask.bool()] if found.dim() == 3 else found


@dataclass(frozen=True)
class _Return:
    """What a block returned: its ``state`` ``(batch, length, width)``, and the length of the tuple around it, or 0."""

    number: int
    state: Tensor
    tupled: int


def _passed(model: nn.Module, blocks: Sequence[nn.Module], batch: Batch) -> list[_Return]:
    """What the ``blocks`` return on ``batch``, call by call, up to the first that returns more than a state."""
    found: list[_Return | None] = []

    def seen(number: int) -> Callable[..., None]:
        def hook(block: nn.Module, args: Any, output: Any) -> None:
            first, *others = output if isinstance(output, tuple) and output else (output,)
            alone = isinstance(first, Tensor) and first.dim() == 3 and first.shape[:2] == batch.input_ids.shape
            kept = alone and all(other is None for other in others)
            found.append(_Return(number, first, len(output) if isinstance(output, tuple) else 0) if kept else None)

        return hook

    hooks = [block.register_forward_hook(seen(k)) for k, block in enumerate(blocks)]
    try:
        model(**batch.inputs())
    finally:
        for one in hooks:
            one.remove()
    return [one for one in takewhile(lambda one: one is not None, found) if one is not None]


@contextmanager
def _looked_up(model: nn.Module, blocks: Sequence[nn.Module], memory: _Memory) -> Iterator[None]:
    def instead(number: int) -> Callable[..., Any]:
        def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            given = args[0] if args else kwargs.get("hidden_states")
            if memory.now is None or not isinstance(given, Tensor) or given.dtype != memory.now.dtype:
                return type(block).forward(block, *args, **kwargs)
            state = memory.now if number == memory.last else given
            return (state, *[None] * (memory.tupled - 1)) if memory.tupled else state

        return forward

    hooks: list[Any] = [
        model.register_forward_pre_hook(memory.begin, with_kwargs=True),
        model.register_forward_hook(memory.end, always_call=True),
    ]
    some = blocks[: memory.last + 1]
    try:
        for number, block in enumerate(some):
            block.forward = MethodType(instead(number), block)
        yield
    finally:
        for block in some:
            vars(block).pop("forward", None)
        for hook in hooks:
            hook.remove()
