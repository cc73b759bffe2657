"""Layers that stand in for a decoder's queries, keys and values where these do not show their inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rasura.attacks.updates.span.rows import tells_inputs, visible_gradients
from rasura.core.updates import announced_update
from rasura.core.values import Observation
from rasura.victims.models import Block, Linear, parts, recorded_inputs

QUERIES = frozenset({"query", "query_proj", "q_proj", "q_lin", "q"})
"""Names of query layers that are no keys or values as well."""


@torch.no_grad()
def stand_ins(seen: Observation) -> tuple[Block, ...]:
    """The blocks of a decoder by other layers than its queries, keys and values, where such are visible: of each block those
    with one input, of the widest row space; and last the output layer. Their inputs at a position, too, depend on the tokens
    up to it alone. Of adapters, whose inputs are few, only where nothing else tells inputs, and none of queries alone: these
    show nothing of the first token, which attends to itself whatever it asks.

    Their index counts on from the last block's: a token and its place alone tell the input of block 0's attention only.
    """
    known = parts(seen.model)
    shown = {lin: g for lin in known.linears for g in visible_gradients(seen, [lin]) if bool(g.any())}
    matrices = {lin: g for lin, g in shown.items() if tells_inputs(seen, [lin])}
    inside = {b: [lin for lin in matrices if lin.module.startswith(f"{b.module}.")] for b in known.blocks}
    if known.head in matrices and seen.task == "causal":  # a classifier's head reads one state of a text
        inside[Block(len(known.blocks), known.head.module, ())] = [known.head]
    if not any(inside.values()):
        return ()
    ids = torch.tensor([[5, 6, 7]])
    with recorded_inputs(seen.model, [lin.module for some in inside.values() for lin in some], stop=False) as inputs:
        seen.model(input_ids=ids, attention_mask=torch.ones_like(ids))
    found = []
    for block, some in inside.items():
        groups: list[list[Linear]] = []
        for lin in some:
            x = inputs.get(lin.module)
            if x is not None and x.shape[:-1] == ids.shape:  # an expert reads some of the tokens
                same = next((group for group in groups if torch.equal(inputs[group[0].module], x)), None)
                groups.append([lin]) if same is None else same.append(lin)
        if groups := [group for group in groups if not all(map(asks, group))]:
            widest = max(groups, key=lambda g: min(sum(len(matrices[lin]) for lin in g), matrices[g[0]].shape[1]))
            found.append(Block(block.index + len(known.blocks), block.module, tuple(widest)))
    return tuple([block for block in found if inputs_of(seen, block) >= known.hidden] or found)


def inputs_of(seen: Observation, block: Block) -> int:
    """How many inputs the layers have that stand for ``block``."""
    return visible_gradients(seen, block.qkv)[0].shape[1]


def asks(lin: Linear) -> bool:
    """Whether ``lin`` is a query layer, or a part of one: the first token of a text gives it no gradient."""
    return bool(QUERIES & set(lin.module.split(".")))


def hidden_by(seen: Observation, others: Sequence[Block]) -> str:
    """Why neither the blocks' queries, keys and values nor the ``others`` that stand in for them show a row space."""
    rank = announced_update(seen).lora
    width = max((inputs_of(seen, block) for block in others), default=parts(seen.model).hidden)
    most = f"more tokens than adapters of rank {rank} show" if rank else f"{width} tokens or more"
    return f"either the batch holds {most}, or rounding or noise hides it"
