"""The victim: any Hugging Face sequence classifier or causal language model, its parts found by structure.

Nothing here depends on a model family's class: word and position embeddings, blocks, Q/K/V and heads are recognised by
where they stand and by a short list of the names that the families use. A model built otherwise gets an adapter through
``register``, or from a package with the entry point ``rasura.models``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rasura.core.interfaces import InputError
from rasura.victims.plugins import plugged

QKV_NAMES = frozenset(
    {
        "query",
        "key",
        "value",
        "query_proj",
        "key_proj",
        "value_proj",
        "q_proj",
        "k_proj",
        "v_proj",
        "q_lin",
        "k_lin",
        "v_lin",
        "q",
        "k",
        "v",
    }
    | {"c_attn", "query_key_value", "qkv_proj", "Wqkv", "in_proj"}
)
"""What BERT, DeBERTa, Llama, DistilBERT, MPNet, GPT-2, GPT-NeoX, Phi, ModernBERT and MPT call attention's input layers."""


@dataclass(frozen=True)
class Linear:
    """A linear layer. ``transposed``: the weight is ``(inputs, outputs)``, as in GPT-2's Conv1D."""

    module: str
    weight: str
    bias: str | None
    transposed: bool


@dataclass(frozen=True)
class Block:
    """One transformer block. ``qkv``: the linear layers that read the attention's input (after its norm, if any)."""

    index: int
    module: str
    qkv: tuple[Linear, ...]


@dataclass(frozen=True)
class Parts:
    """Where things are in a model; names as in ``named_modules()`` and ``named_parameters()``.

    ``causal``: a position sees only what stands before it. ``tied``: the output layer is the word embedding.
    """

    word_embedding: str
    position_embedding: str | None
    embedding_names: tuple[str, ...]
    blocks: tuple[Block, ...]
    linears: tuple[Linear, ...]
    head: Linear | None
    hidden: int
    causal: bool
    tied: bool


_ADAPTERS: dict[str, Callable[[nn.Module], Parts]] = {}
_KNOWN: WeakKeyDictionary[nn.Module, Parts] = WeakKeyDictionary()
_FIRST_POSITION: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def register(model_type: str, finder: Callable[[nn.Module], Parts]) -> None:
    """Use ``finder`` for models whose ``config.model_type`` is ``model_type``, where ``parts`` cannot find its way."""
    _ADAPTERS[model_type] = finder


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _linears(model: nn.Module) -> tuple[Linear, ...]:
    known = {id(p): n for n, p in model.named_parameters(remove_duplicate=False)}
    out = []
    for name, module in model.named_modules():
        if _is_linear(module):
            weight, bias = module.weight, getattr(module, "bias", None)
            assert isinstance(weight, Tensor)
            out.append(
                Linear(
                    name,
                    f"{name}.weight",
                    f"{name}.bias" if isinstance(bias, Tensor) and id(bias) in known else None,
                    not isinstance(module, nn.Linear),
                )
            )
    return tuple(out)


def _block_list(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) > 0
        and all(any(p.split(".")[-1] in QKV_NAMES for p, _ in member.named_modules()) for member in module)
    ]
    # An outer list may hold groups of blocks (ALBERT), an inner one a block's parts (T5): the innermost list whose every
    # member holds attention is the list of blocks. Of an encoder and a decoder it is the encoder's, which comes first.
    return max(found, key=lambda item: (item[0].count("."), len(item[1])), default=None)


def parts(model: nn.Module) -> Parts:
    """The parts of ``model``, found by structure; remembered as long as the model lives.

    Raises ``InputError`` that names what was looked for when something is not found; ``register`` an adapter then.
    """
    if model not in _KNOWN:
        _KNOWN[model] = _find(model)
    return _KNOWN[model]


def _find(model: nn.Module) -> Parts:
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", "")
    finder = _ADAPTERS.get(kind) or plugged(kind)
    if finder is not None:
        found: Parts = finder(model)
        return found
    word, embedding = _word_embedding(model)
    listed = _block_list(model)
    if listed is None:
        raise InputError(
            f"{type(model).__name__}: no transformer blocks found (looked for a ModuleList whose members hold one of "
            f"{', '.join(sorted(QKV_NAMES))}); register an adapter with rasura.victims.models.register"
        )
    list_name, modules = listed
    position = _position_embedding(model, word)
    linears = _linears(model)
    blocks = tuple(_block(model, index, f"{list_name}.{index}", linears) for index in range(len(modules)))
    outside = [lin for lin in linears if not lin.module.startswith(list_name + ".") and lin.weight != f"{word}.weight"]
    output: Any = getattr(model, "get_output_embeddings", lambda: None)()
    first = blocks[0].qkv[0]
    weight = model.get_submodule(first.module).weight
    assert isinstance(weight, Tensor)
    return Parts(
        f"{word}.weight",
        f"{position}.weight" if position else None,
        _embedding_names(model, word, position, list_name),
        blocks,
        linears,
        outside[-1] if outside else None,
        int(weight.shape[0] if first.transposed else weight.shape[1]),
        _sees_only_the_past(model, blocks[-1].module, embedding.num_embeddings),
        output is not None and getattr(output, "weight", None) is embedding.weight,
    )


def _word_embedding(model: nn.Module) -> tuple[str, nn.Embedding]:
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    if not isinstance(embedding, nn.Embedding):
        raise InputError(
            f"{type(model).__name__}: no word embedding found (looked for get_input_embeddings() returning an "
            "nn.Embedding); register an adapter with rasura.victims.models.register"
        )
    names = {id(m): n for n, m in model.named_modules()}
    return names[id(embedding)], embedding


def _position_embedding(model: nn.Module, word: str) -> str | None:
    tables = (n for n, m in model.named_modules() if isinstance(m, nn.Embedding) and n != word)
    return next((n for n in tables if "position" in n.split(".")[-1] or n.endswith("wpe")), None)


def _embedding_names(model: nn.Module, word: str, position: str | None, blocks: str) -> tuple[str, ...]:
    # BERT keeps its embeddings under one module; GPT-2 and Llama keep them beside the blocks.
    parent = word.rsplit(".", 1)[0]
    if not parent.endswith("embeddings"):
        return tuple(f"{n}.weight" for n in (word, position) if n is not None)
    names = (n for n, _ in model.named_parameters())
    return tuple(n for n in names if n.startswith(parent + ".") and not n.startswith(blocks + "."))


def _block(model: nn.Module, index: int, name: str, linears: Sequence[Linear]) -> Block:
    prefix = f"{name}."
    qkv = tuple(
        lin
        for lin in linears
        if lin.module.startswith(prefix)
        and QKV_NAMES & set(lin.module[len(prefix) :].split("."))
        and "lora_B" not in lin.module
    )
    if not qkv:
        kind = type(model).__name__
        raise InputError(f"{kind}: block {name} has no query, key or value layer among {sorted(QKV_NAMES)}")
    return Block(index, name, qkv)


class _Stop(Exception):
    pass


@contextmanager
def recorded_inputs(model: nn.Module, modules: Sequence[str], *, stop: bool = True) -> Iterator[dict[str, Tensor]]:
    """Record what goes into ``modules`` while the model runs inside the block.

    With ``stop``, the forward pass ends at the last of them (``run`` catches that), so that the rest costs nothing.
    """
    found: dict[str, Tensor] = {}
    handles = []
    last = modules[-1]

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def record(_: nn.Module, args: tuple[Any, ...]) -> None:
            found[name] = args[0]
            if stop and name == last:
                raise _Stop

        return record

    try:
        for name in modules:
            handles.append(model.get_submodule(name).register_forward_pre_hook(hook(name)))
        yield found
    finally:
        for handle in handles:
            handle.remove()


def layer_inputs(model: nn.Module, modules: Sequence[str], **inputs: Any) -> dict[str, Tensor]:
    """Run ``model`` on ``inputs`` up to the last of ``modules`` (in forward order); returns what went into each.

    Shapes are those of the layers: ``(batch, length, hidden)`` inside blocks.
    """
    with recorded_inputs(model, modules) as found, suppress(_Stop):
        model(**inputs)
    return found


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off and no graph inside the block; the model's mode as it was behind it."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def _sees_only_the_past(model: nn.Module, last: str, size: int) -> bool:
    """Whether what leaves the ``last`` block at a place stays the same when a later token changes."""
    outputs: list[Tensor] = []

    def keep(_: nn.Module, __: tuple[Any, ...], out: Any) -> None:
        outputs.append(out if isinstance(out, Tensor) else out[0])
        raise _Stop

    handle = model.get_submodule(last).register_forward_hook(keep)
    try:
        with evaluating(model), suppress(_Stop):
            device = next(model.parameters()).device
            ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]], device=device) % size
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
    finally:
        handle.remove()
    if not outputs:
        raise InputError(f"{type(model).__name__}: the block {last} was found, but the model does not run it")
    seen = outputs[0]
    if not bool(torch.isfinite(seen).all()):
        raise InputError(f"{type(model).__name__}: the block {last} gives NaN or infinity on a text of four tokens")
    return torch.allclose(seen[0, :3], seen[1, :3], rtol=1e-6, atol=1e-6 * float(seen.abs().max()))


def read_position(model: nn.Module) -> int | None:
    """The one position that a classifier's head reads: 0 for the first, -1 for the last token; None if it reads several.

    Asked of the model: the place in a short text where the last block's output matters to the logits.
    """
    known = parts(model)
    module = model.get_submodule(known.blocks[-1].module)
    outputs: list[Tensor] = []

    def keep(_: nn.Module, __: tuple[Any, ...], out: Any) -> Any:
        whole = out if isinstance(out, Tensor) else out[0]
        outputs.append(whole.detach().requires_grad_(True))
        return outputs[0] if isinstance(out, Tensor) else (outputs[0], *out[1:])

    training = model.training
    model.eval()
    handle = module.register_forward_hook(keep)
    try:
        with torch.enable_grad():
            pad = getattr(getattr(model, "config", None), "pad_token_id", None)
            token = next(i for i in range(1, 3) if i != pad)
            ids = torch.full((1, 4), token, device=next(model.parameters()).device)
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            (slope,) = torch.autograd.grad(logits.square().sum(), outputs[0])
    finally:
        handle.remove()
        model.train(training)
    read = slope[0].abs().sum(-1).nonzero().flatten().tolist()
    return {(0,): 0, (ids.shape[1] - 1,): -1}.get(tuple(read))


def is_eager(model: nn.Module) -> bool:
    """Whether attention can be differentiated twice; fused attention cannot, and fails only at the first step."""
    return getattr(getattr(model, "config", None), "_attn_implementation", "eager") == "eager"


def _filler(model: nn.Module) -> int:
    """A token that the model does not take for padding."""
    config = getattr(model, "config", None)
    word = model.get_submodule(parts(model).word_embedding.rsplit(".", 1)[0])
    pads = {getattr(word, "padding_idx", None), getattr(config, "pad_token_id", None)}
    return next(i for i in range(1, 4) if i not in pads)


def first_position(model: nn.Module) -> int | None:
    """The row of its position embedding that the model uses for a text's first token, or None where it has none.

    RoBERTa counts from its padding id plus one, OPT from 2. The model is asked: what leaves the position embedding is
    looked up in its table. Raises ``InputError`` where that is not one row after the other.
    """
    name = parts(model).position_embedding
    if name is None:
        return None
    if model not in _FIRST_POSITION:
        _FIRST_POSITION[model] = _first_row(model, name)
    return _FIRST_POSITION[model]


def position_rows(model: nn.Module, length: int) -> Tensor | None:
    """The rows of its position embedding for ``length`` tokens, or None where it has none. Raises as ``first_position``."""
    first = first_position(model)
    return None if first is None else torch.arange(first, first + length, device=next(model.parameters()).device)


def positions(model: nn.Module) -> int | None:
    """How many tokens the position embedding has rows for, or None where there is none. Raises as ``first_position``."""
    name, first = parts(model).position_embedding, first_position(model)
    return None if name is None or first is None else len(model.get_parameter(name)) - first


def _first_row(model: nn.Module, name: str) -> int:
    found: list[Tensor] = []

    def keep(_: nn.Module, __: tuple[Any, ...], out: Tensor) -> None:
        found.append(out)
        raise _Stop

    table = model.get_parameter(name)
    handle = model.get_submodule(name.rsplit(".", 1)[0]).register_forward_hook(keep)
    try:
        with evaluating(model), suppress(_Stop):
            ids = torch.full((1, 3), _filler(model), device=table.device)
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
    finally:
        handle.remove()
    rows = found[0].reshape(-1, table.shape[1])[-3:] if found else table[:0]
    used = [(table == row).all(1).nonzero().flatten().tolist() for row in rows]
    starts = [n for n in used[0] if n + 1 in used[1] and n + 2 in used[2]] if len(used) == 3 else []
    if len(starts) != 1:
        raise InputError(
            f"{type(model).__name__}: {name} was found as the position embedding, but three tokens do not take three "
            "neighbouring rows of it; register an adapter with rasura.victims.models.register"
        )
    return int(starts[0])


def position_ids(model: nn.Module, length: int) -> Tensor | None:
    """What to pass as ``position_ids`` for ``length`` tokens, or None where the model has no position embedding.

    Most models take the row itself; one whose table has an ``offset`` (OPT) adds it to what it is passed.
    """
    rows, name = position_rows(model, length), parts(model).position_embedding
    if rows is None or name is None:
        return None
    return rows - int(getattr(model.get_submodule(name.rsplit(".", 1)[0]), "offset", 0))


def _forward_names(model: nn.Module) -> frozenset[str]:
    base: Any = getattr(model, "get_base_model", lambda: model)()
    return frozenset(inspect.signature(base.forward).parameters)


def takes_positions(model: nn.Module) -> bool:
    """Whether the model has a position embedding and can be told ``position_ids``."""
    return parts(model).position_embedding is not None and "position_ids" in _forward_names(model)


def segment_types(model: nn.Module) -> int:
    """How many segment types the model knows; 1 where it takes none."""
    table = next((n for n in parts(model).embedding_names if "token_type" in n), None)
    if table is None or "token_type_ids" not in _forward_names(model):
        return 1
    return int(model.get_parameter(table).shape[0])


@torch.no_grad()
def first_inputs(model: nn.Module, tokens: Tensor, position: int, segment: int = 0) -> Tensor:
    """What goes into block 0's attention for each of ``tokens`` ``(k,)`` alone at ``position``: ``(k, hidden)``.

    Nothing mixes tokens before it, which ``rasura.victims.structure`` verifies of every model that is loaded.
    """
    known = parts(model)
    extra: dict[str, Tensor] = {}
    if known.position_embedding is None or takes_positions(model):
        ids = tokens[:, None]
        if takes_positions(model):
            places = position_ids(model, position + 1)
            assert places is not None
            extra["position_ids"] = places[-1].expand_as(ids)
    else:  # the model counts positions itself: put the token behind fillers
        ids = torch.cat([torch.full((len(tokens), position), _filler(model), device=tokens.device), tokens[:, None]], 1)
    if segment_types(model) > 1:
        extra["token_type_ids"] = torch.full_like(ids, segment)
    module = known.blocks[0].qkv[0].module
    return layer_inputs(model, [module], input_ids=ids, attention_mask=torch.ones_like(ids), **extra)[module][:, -1]


def parameter_shapes(model: nn.Module) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of all parameters, each once."""
    return {n: tuple(p.shape) for n, p in model.named_parameters()}
