"""Where the embeddings and the blocks of a language model are, found with plain torch: what the MODEL defenses act on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from rasura.core.interfaces import InputError


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def blocks(model: nn.Module) -> nn.ModuleList:
    """The transformer blocks: the ``ModuleList`` with the most parameters. Raises ``InputError`` when there is none."""
    # Of nested lists (experts inside blocks) the outer one is the larger; named_modules() gives it first on a tie.
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise InputError(f"{type(model).__name__} has no ModuleList of blocks; expected a transformer language model")
    return max(lists, key=_size)


def _embedding_modules(model: nn.Module) -> Iterator[nn.Module]:
    getter: Any = getattr(model, "get_input_embeddings", lambda: None)
    word = getter()
    if not isinstance(word, nn.Module):
        raise InputError(f"{type(model).__name__} has no get_input_embeddings(); expected a Hugging Face language model")
    yield word
    stack = blocks(model)
    inside = {id(m) for m in stack.modules()}
    for module in model.modules():
        children = list(module.children())
        if any(child is word for child in children) and not any(m is stack for m in module.modules()):
            # BERT keeps word, position, type and their LayerNorm in a module of their own: all of it is the embedding.
            yield module
        yield from (c for c in children if isinstance(c, nn.Embedding) and id(c) not in inside)


def embedding_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Every parameter of the embeddings, each once: words, positions, types, and the norm that BERT keeps among them.

    An output layer that is tied to the word embedding *is* that parameter, so it is part of the result.
    """
    found = {id(p): p for module in _embedding_modules(model) for p in module.parameters()}
    return list(found.values())
