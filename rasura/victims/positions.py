"""Positions: the rows of a position embedding, what goes into block 0 at one, and the one that a head reads."""

from __future__ import annotations

import inspect
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rasura.core.interfaces import InputError, NotApplicable
from rasura.victims.models import layer_inputs, layer_output, parts
from rasura.victims.padding import padding_id

_FIRST_POSITION: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def filler(model: nn.Module) -> int:
    """A word that ``model`` does not take for padding."""
    config = getattr(model, "config", None)
    word = model.get_submodule(parts(model).word_embedding.rsplit(".", 1)[0])
    pads = {getattr(word, "padding_idx", None), getattr(config, "pad_token_id", None)}
    return next(i for i in range(1, 4) if i not in pads)


def first_position(model: nn.Module) -> int | None:
    """The row of the model's position embedding for a text's first token, or None without a position embedding.

    RoBERTa counts from its padding id plus one, OPT from 2. This is measured: the outputs of the position embedding are
    looked up in its table. Raises ``InputError`` if they are not consecutive rows.
    """
    name = parts(model).position_embedding
    if name is None:
        return None
    if model not in _FIRST_POSITION:
        _FIRST_POSITION[model] = _first_row(model, name)
    return _FIRST_POSITION[model]


def position_rows(model: nn.Module, length: int) -> Tensor | None:
    """The rows of the position embedding for ``length`` tokens, or None without one. Raises as ``first_position``."""
    first = first_position(model)
    return None if first is None else torch.arange(first, first + length, device=next(model.parameters()).device)


def positions(model: nn.Module) -> int | None:
    """The number of tokens for which the position embedding has rows, or None without one. Raises as ``first_position``."""
    name, first = parts(model).position_embedding, first_position(model)
    return None if name is None or first is None else len(model.get_parameter(name)) - first


def longest_text(model: nn.Module) -> int:
    """The maximum length in tokens. The first rows of RoBERTa's table belong to no token."""
    try:
        found = positions(model)
    except InputError:  # a model that is only trained or asked
        found = None
    if found is not None:
        return found
    text = model.config.get_text_config()  # type: ignore[operator, union-attr]  # a Hugging Face model
    return int(getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 10**9)


def _first_row(model: nn.Module, name: str) -> int:
    table = model.get_parameter(name)
    ids = torch.full((1, 3), filler(model), device=table.device)
    seen = layer_output(model, name.rsplit(".", 1)[0], input_ids=ids, attention_mask=torch.ones_like(ids))
    rows = table[:0] if seen is None else seen.reshape(-1, table.shape[1])[-3:]
    used = [(table == row).all(1).nonzero().flatten().tolist() for row in rows]
    starts = [n for n in used[0] if n + 1 in used[1] and n + 2 in used[2]] if len(used) == 3 else []
    if len(starts) != 1:
        raise InputError(
            f"{type(model).__name__}: {name} was found as the position embedding, but three tokens do not use "
            "three neighbouring rows of it; register an adapter with rasura.victims.models.register"
        )
    return int(starts[0])


def position_ids(model: nn.Module, length: int) -> Tensor | None:
    """The ``position_ids`` to pass for ``length`` tokens, or None where the model has no position embedding.

    Most models take the row itself; a table with an ``offset`` (OPT) adds it to the ids passed.
    """
    rows, name = position_rows(model, length), parts(model).position_embedding
    if rows is None or name is None:
        return None
    return rows - int(getattr(model.get_submodule(name.rsplit(".", 1)[0]), "offset", 0))


def _forward_names(model: nn.Module) -> frozenset[str]:
    base: Any = getattr(model, "get_base_model", lambda: model)()
    return frozenset(inspect.signature(base.forward).parameters)


def takes_positions(model: nn.Module) -> bool:
    """Whether the model has a position embedding and accepts ``position_ids``."""
    return parts(model).position_embedding is not None and "position_ids" in _forward_names(model)


def segment_types(model: nn.Module) -> int:
    """The number of segment types; 1 for a model without segments."""
    table = next((n for n in parts(model).embedding_names if "token_type" in n), None)
    if table is None or "token_type_ids" not in _forward_names(model):
        return 1
    return int(model.get_parameter(table).shape[0])


@torch.no_grad()
def first_inputs(model: nn.Module, tokens: Tensor, position: int, segment: int = 0) -> Tensor:
    """The input of block 0's attention for each of ``tokens`` ``(k,)`` alone at ``position``: ``(k, hidden)``.

    Nothing before it mixes tokens; ``rasura.victims.structure`` verifies this for every model that is loaded.
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
        ids = torch.cat([torch.full((len(tokens), position), filler(model), device=tokens.device), tokens[:, None]], 1)
    if "decoder_input_ids" in _forward_names(model):  # mBART makes them of the text, and cannot of padding alone
        extra["decoder_input_ids"] = ids
    if segment_types(model) > 1:
        extra["token_type_ids"] = torch.full_like(ids, segment)
    module = known.blocks[0].qkv[0].module
    return layer_inputs(model, [module], input_ids=ids, attention_mask=torch.ones_like(ids), **extra)[module][:, -1]


@torch.no_grad()
def takes_embeddings(model: nn.Module) -> bool:
    """Whether the model takes embeddings in place of tokens. The classifiers of T5 and mBART do not."""
    weight = model.get_parameter(parts(model).word_embedding)
    try:
        model(inputs_embeds=weight[None, :2], attention_mask=torch.ones(1, 2, dtype=torch.long, device=weight.device))
    except NotImplementedError:
        return False
    return True


def check_takes_embeddings(model: nn.Module) -> None:
    """Raises ``NotApplicable`` for a model that takes no embeddings in place of tokens (``takes_embeddings``)."""
    if not takes_embeddings(model):
        raise NotApplicable(f"{type(model).__name__} takes no embeddings in place of tokens")


def read_position(model: nn.Module) -> int | None:
    """The one position that a classifier's head reads: 0 for the first, -1 for the last token; None if it reads several.

    Measured on the model: the position in a short text at which the last block's output affects the logits.
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
            token = next(i for i in range(1, 3) if i != padding_id(model))
            ids = torch.full((1, 4), token, device=next(model.parameters()).device)
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            (slope,) = torch.autograd.grad(logits.square().sum(), outputs[0])
    finally:
        handle.remove()
        model.train(training)
    read = slope[0].abs().sum(-1).nonzero().flatten().tolist()
    return {(0,): 0, (ids.shape[1] - 1,): -1}.get(tuple(read))
