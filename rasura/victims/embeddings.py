"""The tables in which a model looks up words and positions, found by structure (``rasura.victims.models``)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from rasura.core.interfaces import InputError
from rasura.core.word_rows import input_layer, running


def word_embedding(model: nn.Module) -> tuple[str, nn.Embedding]:
    """The name of the table of words, and the table. Raises ``InputError`` if there is none."""
    embedding = running(input_layer(model))
    names = {id(m): n for n, m in model.named_modules()}
    if type(embedding).__module__.startswith("peft."):
        raise InputError(
            f"{names[id(embedding)]}, the word embedding, is inside an adapter ({type(embedding).__name__}), which is not "
            "supported; train it as a whole (modules_to_save), or adapt other layers alone"
        )
    if not isinstance(embedding, nn.Embedding):
        raise InputError(
            f"{type(model).__name__}: no word embedding found (looked for get_input_embeddings() returning an "
            "nn.Embedding); register an adapter with rasura.victims.models.register"
        )
    return names[id(embedding)], embedding


def position_tables(model: nn.Module, word: str) -> Iterator[str]:
    """The names of the tables that may be the one of positions."""
    tables = (n for n, m in model.named_modules() if isinstance(m, nn.Embedding) and n != word)
    return (n for n in tables if "position" in n.split(".")[-1] or n.endswith("wpe"))


def embedding_names(model: nn.Module, word: str, position: str | None, blocks: str) -> tuple[str, ...]:
    """The names of all parameters of the embeddings, outside ``blocks``."""
    # BERT keeps its embeddings under one module; GPT-2 and Llama keep them beside the blocks.
    parent = word.split(".modules_to_save.")[0].rsplit(".", 1)[0]
    if not parent.endswith("embeddings"):
        return tuple(f"{n}.weight" for n in (word, position) if n is not None)
    names = (n for n, _ in model.named_parameters())
    return tuple(n for n in names if n.startswith(parent + ".") and not n.startswith(blocks + "."))
