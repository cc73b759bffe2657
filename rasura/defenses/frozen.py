"""Frozen lower layers: their gradients are never computed, so they cannot leave the client.

Freezing is a popular speed-up that looks like a protection. It protects little: span attacks read the text from any layer
that stays trainable.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from rasura.core.interfaces import InputError, Transform, made
from rasura.core.mechanisms import FrozenBlocks, FrozenEmbeddings
from rasura.core.rng import Randomness
from rasura.core.specs import TEXT, DefenseSpec
from rasura.core.values import Stage
from rasura.defenses.compose import stateless
from rasura.defenses.structure import embedding_parameters, stacks

Frozen = list[nn.Parameter] | None
"""The state: the parameters that were trainable before, which ``undo`` makes trainable again."""


def _freeze(
    told: FrozenEmbeddings | FrozenBlocks, select: Callable[[nn.Module], list[nn.Parameter]]
) -> Transform[nn.Module, nn.Module, Frozen]:
    def apply(model: nn.Module, state: Frozen, rng: Randomness) -> tuple[nn.Module, Frozen]:
        frozen = [p for p in select(model) if p.requires_grad]
        chosen = {id(p) for p in frozen}
        if not any(p.requires_grad and id(p) not in chosen for p in model.parameters()):
            raise InputError(f"'{told.name}' leaves nothing to train in {type(model).__name__}; freeze fewer layers")
        for p in frozen:
            p.requires_grad_(False)
        return model, frozen

    def undo(model: nn.Module, state: Frozen) -> nn.Module:
        for p in state or ():
            p.requires_grad_(True)
        return model

    return made(Stage.MODEL, told, stateless, apply, undo)


def frozen_embeddings() -> Transform[nn.Module, nn.Module, Frozen]:
    """Freeze the embeddings (words, positions, types, their norm and their projection to the width of the blocks), as in
    GRAB's practical setting (GRAB, sec. 5).

    If a causal model ties its output layer to the word embedding, that layer is frozen too, since they are one parameter.
    Under LoRA the base embeddings are already frozen, so nothing changes.
    """
    return _freeze(FrozenEmbeddings(), embedding_parameters)


def frozen_blocks(n: int) -> Transform[nn.Module, nn.Module, Frozen]:
    """Freeze the embeddings and the first ``n`` transformer blocks; ``frozen_blocks(0)`` freezes only the embeddings. Of a
    model with encoder and decoder, these are the first ``n`` of each.

    Raises ``InputError`` for a negative ``n``, and when the model has fewer than ``n`` blocks. Adapters (LoRA) inside a
    frozen block are frozen with it.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise InputError(f"frozen-blocks: n is {n!r}; expected a whole number of blocks, 0 or more")

    def select(model: nn.Module) -> list[nn.Parameter]:
        lists = stacks(model)
        if n > (count := min(map(len, lists))):
            raise InputError(f"frozen-blocks: n is {n}, but the model has {count} blocks; pass {count} or fewer")
        return embedding_parameters(model) + [p for stack in lists for block in list(stack)[:n] for p in block.parameters()]

    return _freeze(FrozenBlocks(n), select)


EMBEDDINGS = DefenseSpec(
    name="frozen-embeddings",
    about="does not train the embeddings",
    source="GRAB, sec. 5.3",
    make=frozen_embeddings,
    example="frozen-embeddings",
    tasks=TEXT,
    known_by=("span", "embedding-rows"),
)

BLOCKS = DefenseSpec(
    name="frozen-blocks",
    about="trains neither the embeddings nor the first N blocks",
    source="Rasura, after GRAB, sec. 5.3",
    make=frozen_blocks,
    example="frozen-blocks:1",
    parameter=int,
    tasks=TEXT,
    known_by=("span-matching",),
)
