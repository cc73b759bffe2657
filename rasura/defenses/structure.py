"""Where the embeddings and the blocks of a language model are, found with plain torch: what the MODEL defenses act on."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from rasura.core.interfaces import InputError
from rasura.core.word_rows import input_layer


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def stacks(model: nn.Module) -> list[nn.ModuleList]:
    """The lists of transformer blocks, in the order of the model: one in most models, those of encoder and decoder in T5 and
    BART, and one for each kind of layer in XLM. Raises ``InputError`` when there is none.

    They are the outermost lists with at least a tenth of the parameters of the largest, and the lists beside these.
    """
    outer: list[nn.ModuleList] = []
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inside and _size(module):
            outer.append(module)  # of nested lists, such as experts inside blocks, the outer one comes first
            inside |= {id(m) for m in module.modules()}
    if not outer:
        raise InputError(f"{type(model).__name__} has no ModuleList of blocks; expected a transformer language model")
    least = max(map(_size, outer)) / 10
    groups = [[one for one in outer if any(one is child for child in module.children())] for module in model.modules()]
    found = {id(one) for group in groups if any(_size(one) >= least for one in group) for one in group}
    return [one for one in outer if id(one) in found]


def up_to_the_blocks(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the blocks and of all that the model lists before the end of these: all but norms and head."""
    last = list(stacks(model)[-1].parameters())[-1]
    every = list(model.parameters())
    return every[: 1 + next(k for k, p in enumerate(every) if p is last)]


def _embedding_modules(model: nn.Module) -> Iterator[nn.Module]:
    word = input_layer(model)
    if not isinstance(word, nn.Module):
        raise InputError(f"{type(model).__name__} has no get_input_embeddings(); expected a Hugging Face language model")
    yield word
    lists = stacks(model)
    inside = {id(m) for stack in lists for m in stack.modules()}
    before = {id(p) for p in up_to_the_blocks(model)}
    width = word.weight.shape[1] if isinstance(word, nn.Embedding) else 0
    for module in model.modules():
        children = list(module.children())
        if any(child is word for child in children) and not any(m is stack for m in module.modules() for stack in lists):
            # BERT keeps word, position, type and their LayerNorm in a module of their own: all of it is the embedding.
            yield module
        yield from (c for c in children if isinstance(c, nn.Embedding) and id(c) not in inside)
        # Narrow embeddings, as ELECTRA's, are projected to the width of the blocks.
        linears = (c for c in children if isinstance(c, nn.Linear) and id(c) not in inside and id(c.weight) in before)
        yield from (c for c in linears if c.in_features == width != c.out_features)


def embedding_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Every parameter of the embeddings, each once: words, positions, types, the norm that BERT keeps among them, and the
    projection to the width of the blocks in ELECTRA and ALBERT.

    An output layer that is tied to the word embedding *is* that parameter, so it is part of the result.
    """
    found = {id(p): p for module in _embedding_modules(model) for p in module.parameters()}
    return list(found.values())
