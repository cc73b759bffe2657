"""The victim: any Hugging Face sequence classifier or causal language model, its parts found by structure.

Word and position embeddings, blocks, Q/K/V layers and heads are found by their place in the model and a short list of names.
Another structure needs an adapter: ``register``, or the entry point ``rasura.models`` of a package.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rasura.core.interfaces import InputError
from rasura.core.word_rows import output_layer, running
from rasura.victims.calls import Stop, hooked, reaches, reads, refusing, tokens_alone, tokens_and_more
from rasura.victims.embeddings import embedding_names, position_tables, word_embedding
from rasura.victims.plugins import plugged

QKV_NAMES = frozenset(
    {"query", "key", "value", "query_proj", "key_proj", "value_proj", "q_proj", "k_proj", "v_proj"}
    | {"q_lin", "k_lin", "v_lin", "q", "k", "v", "c_attn", "query_key_value", "qkv_proj", "Wqkv", "in_proj"}
)
"""Names of the attention's input layers in BERT, DeBERTa, Llama, DistilBERT, MPNet, GPT-2, GPT-NeoX, Phi, ModernBERT and
MPT."""


ADAPTER = (".lora_A.", ".lora_B.")
"""In the names of PEFT: what marks the first and the second matrix of an adapter."""


@dataclass(frozen=True)
class Linear:
    """A linear layer. ``transposed``: the weight is ``(inputs, outputs)``, as in GPT-2's Conv1D."""

    module: str
    weight: str
    bias: str | None
    transposed: bool


@dataclass(frozen=True)
class Block:
    """One transformer block. ``qkv``: the linear layers that take the attention's input alone (after its norm, if any)."""

    index: int
    module: str
    qkv: tuple[Linear, ...]


@dataclass(frozen=True)
class Parts:
    """The parts of a model, with names as in ``named_modules()`` and ``named_parameters()``.

    ``causal``: a position sees only itself and earlier positions. ``tied``: the output layer is the word embedding.
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


def register(model_type: str, finder: Callable[[nn.Module], Parts]) -> None:
    """Use ``finder`` for models whose ``config.model_type`` is ``model_type`` and whose parts ``parts`` cannot find."""
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
    """The parts of ``model``, found by structure and cached for the model's lifetime.

    Raises ``InputError`` if a part is not found, with what was looked for; ``register`` an adapter then.
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
    word, embedding = word_embedding(model)
    listed = _block_list(model)
    if listed is None:
        raise InputError(
            f"{type(model).__name__}: no transformer blocks found (looked for a ModuleList whose members hold one of "
            f"{', '.join(sorted(QKV_NAMES))}); register an adapter with rasura.victims.models.register"
        )
    list_name, modules = listed
    linears = _linears(model)
    blocks = tuple(_block(model, index, f"{list_name}.{index}", linears) for index in range(len(modules)))
    words = embedding.num_embeddings
    with evaluating(model):
        calls = reads(model, [lin.module for lin in blocks[0].qkv], words, blocks[0].module)
    more = {name.removeprefix(blocks[0].module) for name, xs in calls.items() if tokens_and_more(xs)}
    blocks = tuple(replace(b, qkv=_without(b, more) or b.qkv) for b in blocks)
    outside = [lin for lin in linears if not lin.module.startswith(list_name + ".") and lin.weight != f"{word}.weight"]
    output = running(output_layer(model))
    first = blocks[0].qkv[0]
    tables = position_tables(model, word)
    with evaluating(model):
        position = next((n for n in tables if reaches(model, n, first.module, words, calls[first.module])), None)
    weight = model.get_submodule(first.module).weight
    assert isinstance(weight, Tensor)
    return Parts(
        f"{word}.weight",
        f"{position}.weight" if position else None,
        embedding_names(model, word, position, list_name),
        blocks,
        linears,
        outside[-1] if outside else None,
        int(weight.shape[0] if first.transposed else weight.shape[1]),
        _sees_only_the_past(model, blocks[-1].module, words),
        output is not None and getattr(output, "weight", None) is embedding.weight,
    )


def _block(model: nn.Module, index: int, name: str, linears: Sequence[Linear]) -> Block:
    prefix = f"{name}."
    qkv = tuple(
        lin
        for lin in linears
        if lin.module.startswith(prefix)
        and QKV_NAMES & set(lin.module[len(prefix) :].split("."))
        and ADAPTER[1] not in lin.weight
    )
    if not qkv:
        kind = type(model).__name__
        raise InputError(f"{kind}: block {name} has no query, key or value layer among {sorted(QKV_NAMES)}")
    return Block(index, name, qkv)


def _without(block: Block, more: Container[str]) -> tuple[Linear, ...]:
    """The attention layers of ``block`` but those with a name in ``more``, which read more than tokens: so does their row
    space hold more."""
    return tuple(lin for lin in block.qkv if lin.module.removeprefix(block.module) not in more)


def reading_tokens(model: nn.Module, layers: Sequence[Linear]) -> list[Linear]:
    """Those of ``layers`` that the model runs and that read one vector per token, ``(batch, length, width)``, alone."""
    known = parts(model)
    words = len(model.get_parameter(known.word_embedding))
    with evaluating(model):
        calls = reads(model, [lin.module for lin in layers], words, known.blocks[-1].module)
    return [lin for lin in layers if tokens_alone(calls[lin.module])]


@contextmanager
def recorded_inputs(model: nn.Module, modules: Sequence[str], *, stop: bool = True) -> Iterator[dict[str, Tensor]]:
    """Record the inputs of ``modules`` while the model runs inside the block.

    With ``stop``, the forward pass ends at the last of them (``run`` catches that), so the rest costs nothing.
    """
    found: dict[str, Tensor] = {}
    handles = []
    last = modules[-1]

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def record(_: nn.Module, args: tuple[Any, ...]) -> None:
            found[name] = args[0]
            if stop and name == last:
                raise Stop

        return record

    try:
        for name in modules:
            handles.append(model.get_submodule(name).register_forward_pre_hook(hook(name)))
        yield found
    finally:
        for handle in handles:
            handle.remove()


def layer_inputs(model: nn.Module, modules: Sequence[str], **inputs: Any) -> dict[str, Tensor]:
    """Run ``model`` on ``inputs`` up to the last of ``modules`` (in forward order) and return the input of each.

    Shapes are those of the layers: ``(batch, length, hidden)`` inside blocks.
    """
    with recorded_inputs(model, modules) as found, suppress(Stop):
        model(**inputs)
    return found


def key_value_cache(model: nn.Module) -> Any:
    """An empty cache in which a decoder keeps the keys and values of what it ran (``past_key_values``)."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config.get_text_config())  # type: ignore[union-attr,operator]  # a Hugging Face config


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside the block, dropout is off and no graph is kept; afterwards the model's mode is restored."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def layer_output(model: nn.Module, module: str, **inputs: Any) -> Tensor | None:
    """What leaves ``module`` when ``model`` runs on ``inputs``; no layer behind it runs. None where none runs it. Raises
    ``InputError`` where the model cannot be run."""
    outputs: list[Tensor] = []

    def keep(_: nn.Module, __: tuple[Any, ...], out: Any) -> None:
        outputs.append(out if isinstance(out, Tensor) else out[0])
        raise Stop

    length = inputs["input_ids"].shape[1]
    hook = model.get_submodule(module).register_forward_hook(keep)
    with hooked(hook), evaluating(model), refusing(model, length), suppress(Stop):
        model(**inputs)
    return outputs[0] if outputs else None


def _sees_only_the_past(model: nn.Module, last: str, size: int) -> bool:
    """Whether the output of the ``last`` block at a position stays the same when a later token changes."""
    device = next(model.parameters()).device
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]], device=device) % size
    seen = layer_output(model, last, input_ids=ids, attention_mask=torch.ones_like(ids))
    if seen is None:
        raise InputError(f"{type(model).__name__}: block {last} was found, but the model does not run it")
    if not bool(torch.isfinite(seen).all()):
        raise InputError(f"{type(model).__name__}: block {last} returns NaN or infinity for a text of four tokens")
    return torch.allclose(seen[0, :3], seen[1, :3], rtol=1e-6, atol=1e-6 * float(seen.abs().max()))


def attention_heads(model: nn.Module) -> int:
    """The number of attention heads of a block, as the model's configuration has it; 1 where it does not say."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    return int(getattr(text, "num_attention_heads", 1))


def is_eager(model: nn.Module) -> bool:
    """Whether attention can be differentiated twice. Fused attention cannot, and fails only at the first step."""
    return getattr(getattr(model, "config", None), "_attn_implementation", "eager") == "eager"


def one_class_each(model: nn.Module) -> bool:
    """Whether a text of the classifier has one class of two or more. A regression's or several labels are no classes."""
    kind = getattr(model.config, "problem_type", None)
    return kind in (None, "single_label_classification") and int(getattr(model.config, "num_labels", 2)) > 1
