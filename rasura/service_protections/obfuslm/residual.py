"""Which weights of a model touch the residual stream, and ObfusLM+ on all of them (ObfusLM, sec. 4.4, equation 2).

The new hidden dimension i is the mean, by row i of W*, of the dimensions of its cluster. The paper writes the product with
W* on the right, which would weigh by columns that do not sum to one; here every weight that reads or writes the stream has
its hidden axis multiplied by the rows of W*, then permuted. With ``hidden_k = 1`` that is an exact permutation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from rasura.core.interfaces import InputError
from rasura.victims.models import QKV_NAMES, Linear, evaluating, parts

READS = frozenset(
    QKV_NAMES | {"gate_proj", "up_proj", "gate_up_proj", "c_fc", "lin1", "intermediate.dense", "fc1", "dense_h_to_4h", "Wi"}
)
WRITES = frozenset(
    {"attn.o", "o_proj", "down_proj", "out_lin", "lin2", "output.dense", "c_proj", "fc2", "dense_4h_to_h", "Wo"}
    | {"attention.dense", "self_attention.dense", "self_attn.dense", "self_attn.out_proj", "attn.out_proj"}
)
"""Names, in the model families, of the layers that read the stream and of those whose outputs are added to it. What they
lack, ``check_stream`` finds."""

SAME = 1e-4
"""Relative difference of answers up to which they are the same: float32 leaves 1e-6."""


def _named(module: str, names: frozenset[str]) -> bool:
    *_, before, last = ("", *module.split("."))
    return last in names or f"{before}.{last}" in names


def stream_axes(model: nn.Module) -> Iterator[tuple[Tensor, int]]:
    """Every parameter that touches the residual stream, once, with its axis of that dimension.

    Raises ``InputError``, with the name of the layer, if it is not known whether a layer reads or writes the stream.
    """
    known = parts(model)
    seen: set[int] = set()

    def once(parameter: object, axis: int) -> Iterator[tuple[Tensor, int]]:
        if isinstance(parameter, Tensor) and id(parameter) not in seen:
            seen.add(id(parameter))
            yield parameter, axis

    def linear(lin: Linear, reads: bool) -> Iterator[tuple[Tensor, int]]:
        module = model.get_submodule(lin.module)
        # nn.Linear keeps (outputs, inputs), GPT-2's Conv1D (inputs, outputs).
        yield from once(module.weight, int(reads) if not lin.transposed else int(not reads))
        if not reads:
            yield from once(module.bias, 0)

    inside = tuple(block.module + "." for block in known.blocks)
    outside = []
    for lin in known.linears:
        if not lin.module.startswith(inside):
            outside.append(lin)
        elif _named(lin.module, READS):
            yield from linear(lin, True)
        elif _named(lin.module, WRITES):
            yield from linear(lin, False)
        else:
            raise InputError(
                f"{type(model).__name__}: it is not known whether {lin.module} reads the residual "
                "stream, which --plus needs; leave out --plus"
            )
    if model_head(model) is not None and len(outside) > 1:
        raise InputError(
            f"{type(model).__name__}: its head has more than one layer ({outside[0].module}); --plus supports "
            "classifiers, and causal models like GPT-2 and Llama"
        )
    behind = outside[0].module.rpartition(".")[0] + "." if outside and "." in outside[0].module else None
    for name, module in model.named_modules():
        if behind is not None and name.startswith(behind):
            continue  # ModernBERT normalises what the first layer of its head gives
        if isinstance(module, nn.Embedding) and module.embedding_dim == known.hidden:
            yield from once(module.weight, 1)
        elif _is_norm(module) and not name.endswith(("q_norm", "k_norm")) and len(module.weight) == known.hidden:
            yield from once(module.weight, 0)
            yield from once(getattr(module, "bias", None), 0)
    # The first layer behind the blocks reads the stream; what follows has dimensions of its own.
    for lin in outside[:1]:
        yield from linear(lin, True)


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm") and isinstance(getattr(module, "weight", None), Tensor)


def model_head(model: nn.Module) -> nn.Module | None:
    """The layer that turns hidden states into scores of tokens; None for a classifier."""
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    return head if isinstance(head, nn.Module) else None


@torch.no_grad()
def check_stream(model: nn.Module, ids: Tensor) -> None:
    """Raise ``InputError`` unless all weights on the stream are known: with its dimensions in another order, ``model`` must
    give the same answers to ``ids`` ``(texts, tokens)``. A weight that is left out would keep the public order, and tell it.
    """
    known = parts(model)
    words = model.get_parameter(known.word_embedding)
    if words.dtype not in (torch.float32, torch.float64):
        raise InputError(
            f"{type(model).__name__}: its weights are {words.dtype}, too coarse to try whether --plus knows all of them; "
            "load them as float32"
        )
    if words.shape[1] != known.hidden:
        raise InputError(
            f"{type(model).__name__}: its word embedding has {words.shape[1]} dimensions and the model {known.hidden}, "
            "which --plus cannot mix together; leave out --plus"
        )

    def answers() -> Tensor:
        out: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.double()
        return out - out.mean(-1, keepdim=True) if out.shape[-1] > 1 else out

    list(stream_axes(model))  # some models that are refused there take no such text
    with evaluating(model):
        before = answers()
        change_stream(model, lambda x: x.flip(0))
        try:
            after = answers()
        finally:
            change_stream(model, lambda x: x.flip(0))
    size = float(before.norm())
    if not (size > 0 and float((after - before).norm()) <= SAME * size):
        raise InputError(
            f"{type(model).__name__}: its answers do not show that all of its weights on the residual stream are known, "
            "which --plus needs; leave out --plus"
        )


@torch.no_grad()
def change_stream(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Apply ``change``, ``(hidden, ...) -> (hidden, ...)``, to the hidden axis of all weights on the stream, in place."""
    for parameter, axis in list(stream_axes(model)):
        parameter.copy_(change(parameter.movedim(axis, 0)).movedim(0, axis))
