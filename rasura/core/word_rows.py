"""The word embedding and the output layer of a Hugging Face model, behind whatever an adapter put around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.interfaces import InputError

WRAPPED = ("base_layer", "original_module")
"""Where PEFT keeps the layer that it stands for: LoRA and trained tokens, and layers that are stored whole."""


def token_count(model: nn.Module) -> int:
    """The number of rows of the word embedding of ``model``. Raises ``InputError`` where that is not found."""
    layer = _innermost(input_layer(model))
    weight = getattr(layer, "weight", None)
    if isinstance(layer, nn.Embedding):
        return int(layer.num_embeddings)
    if isinstance(weight, Tensor) and weight.dim() == 2:
        return int(weight.shape[0])
    raise InputError(
        f"{type(model).__name__}: the size of its word embedding is not found; expected get_input_embeddings() to return a "
        f"layer with a weight (tokens, hidden), and it returned {type(layer).__name__}"
    )


def token_rows(model: nn.Module) -> Tensor:
    """The word embedding of ``model``, ``(tokens, hidden)``, without gradient; with an adapter's part, which the weight of
    the layer that the adapter stands for lacks."""
    layer = input_layer(model)
    inner = _innermost(layer)
    with torch.no_grad():
        ids = torch.arange(token_count(model), device=inner.weight.device)
        rows: Tensor = inner.weight if layer is inner else layer(ids)
    return rows.detach()


def output_layer(model: nn.Module) -> nn.Module | None:
    """The layer of a language ``model`` that gives a number to each token; None for other models."""
    layer = _said(model, "get_output_embeddings")
    return layer if isinstance(layer, nn.Module) else None


def input_layer(model: nn.Module) -> Any:
    """What ``model`` looks up words in, with what an adapter put around it; None where it does not say."""
    return _said(model, "get_input_embeddings")


def _said(model: nn.Module, method: str) -> Any:
    """What ``method`` of ``model`` returns; None without such a method, or where this kind has not written it (CANINE)."""
    try:
        return getattr(model, method, lambda: None)()
    except NotImplementedError:
        return None


def running(layer: Any) -> Any:
    """The layer that runs in place of ``layer``: the copy that a PEFT adapter trains as a whole (``modules_to_save``)."""
    copies, name = getattr(layer, "modules_to_save", None), getattr(layer, "active_adapter", None)
    return copies[name] if isinstance(copies, nn.ModuleDict) and isinstance(name, str) and name in copies else layer


def _innermost(layer: Any) -> Any:
    while not isinstance(layer, nn.Embedding):
        inner = next((one for name in WRAPPED if isinstance(one := getattr(layer, name, None), nn.Module)), None)
        if inner is None:
            break
        layer = inner
    return layer
