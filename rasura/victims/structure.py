"""Checks that a model works as its parts suggest, by running it on one short text before anything relies on it.

Parts are found by names and places, and these can mislead: a layer that was found may not run, may run twice, or may read
something else. An attack on such a model fails or returns nonsense, and a protection would look good because of it. So every
property that attacks rely on is computed once, and a model for which one does not hold is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rasura.core.interfaces import InputError
from rasura.core.values import Task, Vocabulary
from rasura.victims.calls import refusing
from rasura.victims.models import Parts, evaluating, parts
from rasura.victims.positions import first_inputs, first_position

LENGTH = 8
"""Number of tokens of the text on which a model is checked."""

SAME = 1e-3
"""Relative difference up to which two inputs count as the same: float32 leaves 1e-6."""


def verify_parts(model: nn.Module, vocabulary: Vocabulary | None = None, task: Task | None = None) -> Parts:
    """The parts of ``model``, each checked to do what attacks assume, and that it is one for the ``task``.

    - the word embedding is asked for the text's own ids, and the position embedding for one row after the other;
    - every query, key and value layer runs once per run of its block;
    - the query, key and value layers of a block read the same input, of the width found;
    - the input of block 0 at a position depends only on the token there and on the position;
    - the logits are the output of the head;
    - a causal loss compares the logits at a place with the next token.

    A network without blocks is checked as far as it has parts: model services protect and attack its embedding alone.
    ``check_blocks`` refuses it where updates are attacked.

    The text has the frame that ``vocabulary`` puts around every text. Raises ``InputError`` with what was expected and what
    was found instead.
    """
    known = parts(model)
    kind = type(model).__name__
    ids = _text(model, known, vocabulary)
    watched = _Watched(model, known)
    with evaluating(model), watched, refusing(model, ids.shape[1]):
        own = {"labels": ids} if task == "causal" else {}
        out = model(input_ids=ids, attention_mask=torch.ones_like(ids), **own)
    logits: Any = getattr(out, "logits", None)
    if other := _another(task, logits, known):
        raise InputError(f"{kind} {other}; expected a classifier with one label a text, or a causal language model")
    wrong = (
        _embeddings(watched, known, ids)
        or (task == "causal" and _loss(getattr(out, "loss", None), ids, logits))
        or _attention(watched, known, ids.shape[1])
        or (known.blocks and _first_block(model, watched, known, ids))
        or _head(watched, known, logits)
    )
    if wrong:
        raise InputError(
            f"{kind} does not work as its parts suggest: {wrong}. Attacks would fail, and every protection "
            "would look good; register an adapter with rasura.victims.models.register"
        )
    return known


def check_blocks(model: nn.Module) -> None:
    """Raises ``InputError`` for a model without transformer blocks: the attacks on updates read the gradients of these."""
    if not parts(model).blocks:
        raise InputError(f"{type(model).__name__} has no transformer blocks, whose gradients the attacks on updates read")


def _text(model: nn.Module, known: Parts, vocabulary: Vocabulary | None) -> Tensor:
    """Different ordinary ids within the frame, ``(1, length)``."""
    size = len(model.get_parameter(known.word_embedding))
    frame = ((), ()) if vocabulary is None else (vocabulary.prefix, vocabulary.suffix)
    config: Any = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    named = [getattr(text, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "sep", "cls", "decoder_start")]
    special = {i for found in named for i in (found if isinstance(found, (list, tuple)) else (found,))}
    special |= set(frame[0]) | set(frame[1]) | (set() if vocabulary is None else set(vocabulary.special_ids))
    # From all over the table: neighbouring ids may be unused and equal.
    step = max(1, size // (3 * LENGTH))
    words = [i for i in range(size // 5, size, step) if i not in special][:LENGTH] or [size - 1]
    device = next(model.parameters()).device
    return torch.tensor([[*frame[0], *words, *frame[1]]], device=device)


class _Watched:
    """Records what goes into the parts of a model, call by call, while it runs inside the block."""

    def __init__(self, model: nn.Module, known: Parts) -> None:
        self.model = model
        # BART looks its tokens up in modules of their own, which share the table.
        table = model.get_parameter(known.word_embedding)
        self.embeddings = [
            n for n, m in model.named_modules() if isinstance(m, nn.Embedding) and m.weight.data_ptr() == table.data_ptr()
        ]
        names = [*self.embeddings, *(lin.module for b in known.blocks for lin in b.qkv)]
        names += [b.module for b in known.blocks] + ([known.head.module] if known.head is not None else [])
        self.inputs: dict[str, list[Any]] = {name: [] for name in names}
        self.last: dict[str, Tensor] = {}

    def __enter__(self) -> None:
        self._handles = []
        for name in self.inputs:
            module = self.model.get_submodule(name)
            self._handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._behind(name)))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, name: str) -> Callable[..., None]:
        def record(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.inputs[name].append(args[0] if args else next(iter(named.values()), None))

        return record

    def _behind(self, name: str) -> Callable[..., None]:
        def record(_: nn.Module, __: tuple[Any, ...], out: Any) -> None:
            if isinstance(out, Tensor):
                self.last[name] = out

        return record


def _another(task: Task | None, logits: Any, known: Parts) -> str:
    """What a model does that is not one for the ``task``. The step of an audit would be none of its training."""
    if not isinstance(logits, Tensor):
        return "gives no logits"
    if task == "classification" and logits.dim() != 2:
        return "answers for each token, and not once for a text"
    if task == "causal" and known.blocks and not known.causal:
        return "sees the tokens that a causal language model has to predict"
    return ""


def _embeddings(watched: _Watched, known: Parts, ids: Tensor) -> str:
    asked = [x for name in watched.embeddings for x in watched.inputs[name]]
    if not any(isinstance(x, Tensor) and x.shape == ids.shape and torch.equal(x, ids) for x in asked):
        length, tokens = ids.shape[1], [x for x in asked if isinstance(x, Tensor) and x.dim() == 2]
        if padded := [x.shape[1] for x in tokens if x.shape[1] > length and torch.equal(x[:, :length], ids)]:
            return f"it pads a text of {length} tokens by itself and looks up {padded[0]}"
        return (
            f"{known.word_embedding} was found as the word embedding, but the model does not look up the text's tokens in it"
        )
    return ""


def _loss(loss: Any, ids: Tensor, logits: Tensor) -> str:
    """What a causal ``loss`` compares. BART's decoder alone, and those like it, leave it to the caller to shift labels."""
    if not isinstance(loss, Tensor) or logits.dim() != 3:
        return ""
    own, following = functional.cross_entropy(logits[0], ids[0]), functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    if torch.isclose(loss, own, rtol=SAME) and not torch.isclose(loss, following, rtol=SAME):
        return "its loss compares the logits at a place with the token there, and not with the next one"
    return ""


def _attention(watched: _Watched, known: Parts, length: int) -> str:
    for block in known.blocks:
        runs = len(watched.inputs[block.module])
        if not runs:
            return f"{block.module} was found as a block, but the model does not run it"
        inputs = []
        for lin in block.qkv:
            seen = watched.inputs[lin.module]
            if len(seen) != runs:
                return (
                    f"{lin.module} was found as an attention layer, but runs {len(seen)} times where its block runs {runs}"
                )
            x = seen[0]
            if not isinstance(x, Tensor) or x.numel() != length * known.hidden:
                shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                return f"{lin.module} reads {shape}; expected {length} tokens of width {known.hidden}"
            if not bool(torch.isfinite(x).all()):
                return f"{lin.module} reads NaN or infinity"
            inputs.append(x.reshape(length, known.hidden))
        if any(_apart(x, inputs[0]) > SAME for x in inputs[1:]):
            return f"the query, key and value layers of {block.module} read different inputs"
    return ""


def _first_block(model: nn.Module, watched: _Watched, known: Parts, ids: Tensor) -> str:
    whole = watched.inputs[known.blocks[0].qkv[0].module][0].reshape(ids.shape[1], known.hidden)
    try:
        first_position(model)
    except InputError as error:
        return str(error).split(": ", 1)[-1].split("; register")[0]
    for place in range(ids.shape[1]):
        alone = first_inputs(model, ids[0, place : place + 1], place)
        if alone.shape != (1, known.hidden) or _apart(alone, whole[place : place + 1]) > SAME:
            return (
                f"the input of {known.blocks[0].module} at position {place} does not depend on the token there "
                "and its position alone, as expected"
            )
    distance = torch.cdist(whole.double(), whole.double()) + torch.eye(len(whole), device=whole.device) * 1e30
    if float(distance.min()) <= 1e-6 * float(whole.norm(dim=1).max()):
        return f"different tokens give {known.blocks[0].module} the same input"
    return ""


def _head(watched: _Watched, known: Parts, logits: Tensor) -> str:
    if not bool(torch.isfinite(logits).all()):
        return "its logits for a text are NaN or infinity"
    if known.head is None:
        return "no output layer was found (looked for a linear layer after the blocks)" if known.blocks else ""
    name = known.head.module
    out = watched.last.get(name)
    if out is None or out.shape[-1] != logits.shape[-1]:
        found = "does not run" if out is None else f"has {out.shape[-1]} outputs, but there are {logits.shape[-1]} logits"
        return f"{name} was found as the output layer, but it {found}"
    return ""


def _apart(x: Tensor, y: Tensor) -> float:
    """The largest relative difference of a row."""
    return float(((x - y).norm(dim=-1) / y.norm(dim=-1).clamp_min(1e-12)).max())
