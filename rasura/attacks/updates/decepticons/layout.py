"""Where a model can be crafted: its layers, and which coordinates hold what."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rasura.core.interfaces import NotApplicable
from rasura.core.values import Task
from rasura.victims.models import Linear, Parts, evaluating, layer_inputs, parts
from rasura.victims.positions import filler, first_position

DIRECTIONS = 3
"""Directions in which every token is measured: one that shares its step in one of them mostly has it alone in another."""


@dataclass(frozen=True)
class Layout:
    """Where crafted weights are, and which coordinates hold what.

    ``code``: what a text has in common; ``place`` and ``word``: the token's; the last coordinate carries the loss.
    ``first``: the linear layer that measures, ``second`` the one behind it, ``norm`` the norm whose output is measured.
    ``before``: norms come before attention and feed-forward layers (GPT-2), not after (BERT).
    """

    found: Parts
    before: bool
    attention: tuple[Linear, ...]
    first: Linear
    second: Linear
    norm: str
    code: slice
    place: slice
    word: slice
    rows: int

    @property
    def steps(self) -> int:
        """Steps a direction."""
        return self.rows // DIRECTIONS


def matrix(model: nn.Module, layer: Linear) -> Tensor:
    """The layer's weight as ``(outputs, inputs)``, a view."""
    weight = model.get_parameter(layer.weight)
    return weight.T if layer.transposed else weight


def norms_in(model: nn.Module, prefix: str) -> list[str]:
    """Names of the layer normalisations below ``prefix``."""
    return [n for n, m in model.named_modules() if n.startswith(prefix) and isinstance(m, nn.LayerNorm)]


def linears_in(found: Parts, block: int) -> list[Linear]:
    """The linear layers of one block."""
    return [lin for lin in found.linears if lin.module.startswith(found.blocks[block].module + ".")]


def query_key_value(found: Parts, block: int) -> tuple[Linear, ...]:
    """The layers that make a block's queries, keys and values, in this order; or the one that makes all three.

    Raises ``NotApplicable`` where their names do not tell them apart.
    """
    layers = found.blocks[block].qkv
    if len(layers) == 1:
        return layers
    named = {lin.module.rpartition(".")[2][:1]: lin for lin in layers}  # OPT has its keys first, and its queries last
    if len(layers) != 3 or named.keys() != {*"qkv"}:
        raise NotApplicable(f"{', '.join(lin.module for lin in layers)}: not told which of them makes the values")
    return tuple(named[letter] for letter in "qkv")


def layout(model: nn.Module, task: Task) -> Layout:
    """Where ``model`` can be crafted. Raises ``NotApplicable`` where its blocks are not those of BERT or GPT-2."""
    found = parts(model)
    inside = linears_in(found, 0)
    behind = [lin for lin in inside if lin not in found.blocks[0].qkv]
    norms = norms_in(model, found.blocks[0].module + ".")
    kind = type(model).__name__
    if len(behind) != 3 or len(norms) != 2 or found.position_embedding is None or any(lin.bias is None for lin in inside):
        raise NotApplicable(f"{kind} has no blocks with two norms and two feed-forward layers with biases, as in BERT")
    if task != "causal" and len(found.blocks) < 2:
        raise NotApplicable(f"{kind} has one block; a second one is needed to bring every token to the head")
    word = model.get_parameter(found.word_embedding)
    if word.shape[1] != found.hidden:
        raise NotApplicable(f"{kind} has embeddings of another width than its blocks")
    ids = torch.full((1, 3), filler(model), device=word.device)
    with evaluating(model):  # the order in which OPT names its norms is not that in which they run
        run = layer_inputs(model, [norms[0], found.blocks[0].qkv[0].module], input_ids=ids)
    before = norms[0] in run
    width = found.hidden
    code, place = max(8, width // 8), width // 4
    return Layout(
        found, before, (*query_key_value(found, 0), behind[0]), behind[1], behind[2], norms[1] if before else norms[0],
        slice(0, code), slice(code, code + place), slice(code + place, width - 1), matrix(model, behind[1]).shape[0],
    )  # fmt: skip


def value(model: nn.Module, where: Layout) -> Tensor:
    """What the first block's attention writes into the code's coordinates, by its input: ``(code, width)``."""
    inner = matrix(model, where.attention[-2])[-where.found.hidden :]
    return matrix(model, where.attention[-1])[where.code] @ inner


def first_place(model: nn.Module) -> int:
    """The row of the position embedding that a text begins with."""
    found = first_position(model)
    assert found is not None
    return found
