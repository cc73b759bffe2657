"""Made-up texts, on which it is tried whether the texts of a model can be processed together.

They are made from the model alone, so what is found does not depend on any real text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.exact import half, norm, widened
from rasura.core.interfaces import InputError
from rasura.core.updates import by_token, mini_batch
from rasura.core.word_rows import token_count
from rasura.victims.padding import padding_id, takes_mask
from rasura.victims.weights import first_line

LENGTHS = ((5, 9, 3), (6, 6, 6), (4,))
"""Lengths of the texts of each batch: a padded one, one of equal lengths, and one of a single text."""

TOLERANCE = 1e-5
"""Error of a tensor's gradient against the loop, relative to its norm, above which the rules are not used for a model. On
MiniLM in float32 the two ways differ by 4e-6 at most."""

ROUNDING = 1e-6
"""Share of the largest gradient of a text, below which an error of a tensor counts as rounding. Some tensors have a gradient
of rounding alone, as the biases of keys, which the softmax does not see."""


def in_float32(model: nn.Module) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    """``model`` as a call without half precision, and its trained parameters in that call. The model itself is unchanged."""
    held = [*model.named_parameters(), *model.named_buffers()]
    wide = {n: widened(t.detach()).requires_grad_(t.requires_grad) for n, t in held if half(t)}
    trained: dict[str, Tensor] = {n: wide.get(n, p) for n, p in model.named_parameters() if p.requires_grad}

    def run(**inputs: Tensor) -> Any:
        return torch.func.functional_call(model, wide, (), inputs) if wide else model(**inputs)

    return run, trained


def left_padded(inputs: Mapping[str, Tensor]) -> bool:
    """Whether a batch has padding before a text."""
    mask = inputs.get("attention_mask")
    return mask is not None and mask.dim() == 2 and mask.shape[1] > 0 and not bool(mask[:, 0].all())


def trial_batches(
    model: nn.Module, run: Callable[..., Any], inputs: Mapping[str, Tensor]
) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Batches of made-up texts and their sizes, with the names and types of ``inputs`` and padding on the same side.

    Of ``inputs`` no value is used. The labels are the classes that the model ``run`` holds to be least likely, so that
    gradients are large. Raises ``InputError`` where the model gives no loss.
    """
    for row, lengths in enumerate(LENGTHS):
        made = _texts(model, inputs, lengths, row)
        with torch.no_grad():
            out = run(**made)
        check_loss(out)
        logits = out.logits
        labels = made["labels"]
        if not labels.is_floating_point() and logits.dim() == labels.dim() + 1 == 2:
            # Of different classes: with one alone, a loss that weighs them would look like the mean.
            ranks = torch.arange(len(labels), device=labels.device) % logits.shape[1]
            made["labels"] = logits.argsort(1).gather(1, ranks[:, None])[:, 0].to(labels.dtype)
        elif "input_ids" in made and by_token("labels", labels, made["input_ids"].shape):
            made["labels"] = torch.where(labels == -100, labels, made["input_ids"] % logits.shape[-1])
        yield made, len(lengths)


def check_loss(out: Any) -> None:
    """Raises ``InputError`` where the outputs ``out`` of a model hold no loss."""
    if getattr(out, "loss", None) is None:
        raise InputError("the model gives no loss for this batch, so no text has a gradient; pass the labels, too")


def check_taken(run: Callable[..., Any], inputs: Mapping[str, Tensor]) -> None:
    """Raises ``InputError`` unless the model ``run`` takes the first text of ``inputs`` and gives a loss: a batch that it
    cannot be trained on says nothing of it."""
    try:
        with torch.no_grad():
            out = run(**mini_batch(inputs, torch.tensor([0])))
    except Exception as error:
        why = f"the model does not take this batch ({first_line(error)})"
        raise InputError(f"{why}; pass its keyword arguments for some texts, with labels") from error
    check_loss(out)


def same(found: Tensor | None, alone: Tensor | None, largest: float) -> bool:
    """Whether the two ways give one gradient of a tensor, for its own size."""
    if found is None or alone is None:
        # A tensor that one way does not see at all is no matter of rounding, however small its gradient.
        there = alone if found is None else found
        return there is None or not bool(there.any())
    alone = alone.detach().cpu()
    return float(norm([found - alone])) <= TOLERANCE * float(norm([alone])) + ROUNDING * largest


def _texts(model: nn.Module, inputs: Mapping[str, Tensor], lengths: tuple[int, ...], number: int) -> dict[str, Tensor]:
    """Texts of these lengths, all of class 0; of inputs without token ids, a row of each input's own shape."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    size, old = len(lengths), None if ids is None else ids.shape
    if ids is None or ids.dim() != 2:
        whole = 1 if mask is None or mask.dim() != 2 else mask.shape[1]
        lengths = tuple(max(1, whole * length // max(lengths)) for length in lengths)
    elif not takes_mask(model):
        lengths = (ids.shape[1],) * size  # it cannot tell padding, and may take one length only
    longest = max(lengths)
    places = torch.arange(longest).expand(size, -1)
    counts = torch.tensor(lengths)[:, None]
    there = places >= longest - counts if left_padded(inputs) else places < counts
    out = {}
    for name, value in inputs.items():
        each = value.dim() == 2 and by_token(name, value, old)
        shape = (size, longest) if each else (size, *value.shape[1:])
        if name == "input_ids" and value.dim() == 2:
            made = _ids(model, there, number)
        elif name == "attention_mask":
            made = there if value.dim() == 2 else torch.ones(shape)
        elif name == "labels":
            made = torch.zeros(shape)
            made = torch.where(there, made, -100) if each else made
        else:
            made = _spread(shape, number) if value.is_floating_point() else torch.zeros(shape)
        out[name] = made.to(value.device, widened(value[:0]).dtype)
    if old is not None and len(old) == 2 and mask is None and takes_mask(model):
        out["attention_mask"] = there.to(out["input_ids"])
    return out


def _ids(model: nn.Module, there: Tensor, number: int) -> Tensor:
    """Token ids of the model's own vocabulary where ``there``, and the padding of ``own_padding`` elsewhere. Without an id
    for it, there are words, too: a model that looks for the id of a batch's padding reads them."""
    config = getattr(model, "config", None)
    try:
        count = token_count(model)
    except InputError:
        # Of tables of unknown use, ids below the smallest are in every one; smaller ones are of types of texts.
        tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
        count = min((n for n in tables if n >= 8), default=min(tables, default=0))
    named = {} if config is None else vars(config)
    special = {v for k, v in named.items() if k.endswith("_token_id") and isinstance(v, int)}
    words = torch.tensor([k for k in range(count) if k not in special])
    ids = words[(_spread(there.shape, number) * len(words)).long()]
    ids[:, 1] = ids[:, 0]  # a repeated word, where it is not padding
    pad = padding_id(model)
    return ids if pad is None else torch.where(there, ids, pad)


def _spread(shape: Sequence[int], number: int) -> Tensor:
    """Numbers from 0 to below 1 that hardly repeat. None is drawn: a step with secret randomness refuses a generator."""
    places = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64) + 1000 * number
    return (places * 0.6180339887498949 % 1).reshape(tuple(shape))
