"""Dropout masks as variables: GRAB learns the masks of the client's step together with its text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Dropouts(TorchFunctionMode):
    """Inside the block, every call of ``F.dropout`` is answered by ``answer(number of the call, input)``.

    Modules and functions alike come by here (models of transformers 5 drop attention weights by the function), in eval mode
    too. ``entered``: how many such blocks are open.
    """

    entered: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        Dropouts.entered += 1
        return self

    def __exit__(self, *error: object) -> None:
        Dropouts.entered -= 1
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if f is not nn.functional.dropout:
            return f(*args, **(kwargs or {}))
        self.calls += 1
        return self.answer(self.calls - 1, args[0] if args else kwargs["input"])

    def answer(self, call: int, x: Tensor) -> Tensor:
        raise NotImplementedError


class _Shapes(Dropouts):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Size] = []

    def answer(self, call: int, x: Tensor) -> Tensor:
        self.found.append(x.shape)
        return x


class Masked(Dropouts):
    """Multiplies by ``masks``, one for each dropout of the model in the order of its forward, over ``1 - rate``.

    Each mask is ``(candidates, batch, ...)`` where the dropout's input is ``(candidates * batch, ...)``.
    """

    def __init__(self, masks: Sequence[Tensor], rate: float) -> None:
        super().__init__()
        self.masks, self.rate = masks, rate

    def answer(self, call: int, x: Tensor) -> Tensor:
        return x * (self.masks[call].flatten(0, 1) / (1 - self.rate))


def shapes(model: nn.Module, batch: int, length: int) -> list[tuple[int, ...]]:
    """The shapes of ``model``'s dropout masks for one candidate of ``batch`` texts of ``length`` tokens."""
    ids = torch.ones(batch, length, dtype=torch.long, device=next(model.parameters()).device)
    with _Shapes() as seen, torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    return [tuple(s) for s in seen.found]
