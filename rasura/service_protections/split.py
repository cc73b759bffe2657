"""Split inference: the client computes a model's first states, changes them, and sends these; the server goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.interfaces import InputError
from rasura.victims.models import parts


class Change(nn.Module):
    """What the client does to its states before it sends them."""

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Other states for ``states`` ``(batch, length, hidden)``; ``mask`` is 0 at padding."""
        raise NotImplementedError

    def loss(self, states: Tensor, changed: Tensor, ids: Tensor, mask: Tensor) -> Tensor | None:
        """What training adds to the task's loss, if anything; ``states`` as they were before the change."""
        return None


class _Sent(Exception):
    pass


class Split(nn.Module):
    """``model`` in two: the client's word embedding (``depth`` 0) or first ``depth`` blocks, ``change``, the server's rest.

    Called like ``model``, with the change in between, for training and evaluation: noise is drawn in every pass, from
    torch's global generator. At depth 0 the client's table is the public one and is not trained.
    """

    def __init__(self, model: nn.Module, depth: int, change: Change) -> None:
        super().__init__()
        known = parts(model)
        if not 0 <= depth < len(known.blocks):
            raise InputError(f"depth is {depth}; expected 0 (the word embedding) to {len(known.blocks) - 1} blocks")
        self.model, self.depth, self.change = model, depth, change
        self._place = known.word_embedding.rsplit(".", 1)[0] if depth == 0 else known.blocks[depth - 1].module
        if depth == 0:
            model.get_parameter(known.word_embedding).requires_grad_(False)

    @property
    def config(self) -> Any:
        """The model's own."""
        return self.model.config

    def get_input_embeddings(self) -> nn.Module:
        """The word embedding of the client's half."""
        found: nn.Module = self.model.get_input_embeddings()  # type: ignore[operator]  # a Hugging Face model
        return found

    @contextmanager
    def _instead(self, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
        def hook(_: nn.Module, __: Any, out: Any) -> Any:
            return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

        handle = self.model.get_submodule(self._place).register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **inputs: Any
    ) -> Any:
        """The model's output; its loss with what ``change`` adds, where there are labels."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        passed: list[Tensor] = []

        def change(states: Tensor) -> Tensor:
            passed.extend((states, self.change(states, mask)))
            return passed[1]

        with self._instead(change):
            out = self.model(input_ids=input_ids, attention_mask=mask, labels=labels, **inputs)
        if labels is not None:
            added = self.change.loss(passed[0], passed[1], input_ids, mask)
            if added is not None:
                out.loss = out.loss + added
        return out

    @torch.no_grad()
    def sent(self, input_ids: Tensor, attention_mask: Tensor, **inputs: Any) -> Tensor:
        """What the client sends for a batch: ``(batch, length, hidden)``."""
        found: list[Tensor] = []

        def keep(states: Tensor) -> Tensor:
            found.append(self.change(states, attention_mask))
            raise _Sent

        try:
            with self._instead(keep):
                self.model(input_ids=input_ids, attention_mask=attention_mask, **inputs)
        except _Sent:
            pass
        return found[0]

    @torch.no_grad()
    def states(self, vectors: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """What the server computes from the sent ``vectors``: these states, and the states after each block."""
        known, out = parts(self.model), []
        rest = [self.model.get_submodule(block.module) for block in known.blocks[self.depth :]]

        def keep(_: nn.Module, __: Any, made: Any) -> None:
            out.append(made[0] if isinstance(made, tuple) else made)

        handles = [block.register_forward_hook(keep) for block in rest]
        try:
            with self._instead(lambda _: vectors):
                ids = torch.zeros(vectors.shape[:2], dtype=torch.int64)
                self.model(input_ids=ids, attention_mask=attention_mask)
        finally:
            for handle in handles:
                handle.remove()
        return (vectors, *out)
