"""Padding must not change a text's gradient: how much of it there is depends on the other texts of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import Tensor, nn

from rasura.core.interfaces import InputError
from rasura.core.updates import by_token


def takes_mask(model: nn.Module) -> bool:
    """Whether the forward of ``model`` takes an attention mask, by name or as any keyword."""
    taken = inspect.signature(model.forward).parameters.values()
    return any(p.name == "attention_mask" or p.kind is inspect.Parameter.VAR_KEYWORD for p in taken)


def padding_id(model: nn.Module) -> int | None:
    """The id that the config of ``model`` names for padding. None where it names none."""
    pad = getattr(getattr(model, "config", None), "pad_token_id", None)
    return pad if isinstance(pad, int) else None


def own_padding(model: nn.Module, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """``inputs`` with the model's own padding id wherever the attention mask is 0, whatever the batch was padded with.

    Some models look for padding by this id: classifiers on decoders find the last token by it, RoBERTa counts positions by
    it. With another id they would read the padding. Without an id in the config, ``inputs`` are returned as they are.
    """
    ids, mask, pad = inputs.get("input_ids"), inputs.get("attention_mask"), padding_id(model)
    if ids is None or mask is None or pad is None or mask.shape != ids.shape:
        return inputs
    return {**inputs, "input_ids": ids.masked_fill(mask == 0, pad)}


def check_padding(model: nn.Module, inputs: Mapping[str, Tensor], *, unsaid: bool = False) -> None:
    """Raises ``InputError`` for a batch whose padding may change gradients, so that no clip bounds what one text changes.

    A batch without an attention mask does not say what is padding. It is refused where it holds the model's padding token,
    and with ``unsaid`` in any case, since a batch may be padded with another token.
    """
    ids, mask, labels = inputs.get("input_ids"), inputs.get("attention_mask"), inputs.get("labels")
    _check_targets(model, inputs)
    if not takes_mask(model):
        return
    pad = padding_id(model)
    if mask is None:
        if ids is not None and (unsaid or (pad is not None and bool((ids == pad).any()))):
            raise InputError("the batch has input_ids but no attention_mask, so padding counts as text, and a text's "
                "gradient depends on the others; pass the tokenizer's attention_mask (ones where nothing is padded)"
            )  # fmt: skip
        return
    if mask.dim() != 2 or (ids is not None and ids.shape != mask.shape):
        raise InputError(f"attention_mask has the shape {tuple(mask.shape)}, so it cannot be tried whether padding changes "
            "a text's gradient; pass it and input_ids as (texts, length)")  # fmt: skip
    _check_tokens(mask, ids, pad)
    if labels is not None and by_token("labels", labels, mask.shape) and bool(((labels != -100) & (mask == 0)).any()):
        raise InputError("labels ask for a loss on padding, so a text's loss would depend on the other texts of its batch; "
            "set the labels to -100 where attention_mask is 0")  # fmt: skip


def _check_targets(model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """Raises ``InputError`` for a batch of target sequences: they have a padding of their own, which no mask tells."""
    labels = inputs.get("labels")
    sequences = labels is not None and labels.dim() > 1 and not labels.is_floating_point()
    kinds = {type(m) for m in model.modules()}  # far fewer than modules: this runs in every step
    if any(name.startswith("decoder_") for name in inputs) or (
        sequences and any("decoder_input_ids" in inspect.signature(kind.forward).parameters for kind in kinds)
    ):
        raise InputError(
            "the batch has target sequences for a decoder beside its encoder, as for translation. attention_mask does not "
            "say which targets are padding, so a text's gradient may depend on the targets of others. Such a model cannot "
            "be trained on texts that are clipped one by one; train a decoder alone, on source and target as one text"
        )


def _check_tokens(mask: Tensor, ids: Tensor | None, pad: int | None) -> None:
    """Raises ``InputError`` for a text that is padding alone: attention over it is spread over the width of the batch, and
    where padding comes first, a model that looks for the id ``pad`` reads the first place of the batch."""
    there = (mask != 0) if ids is None or pad is None else (mask != 0) & (ids != pad)
    empty = (~there.any(1) & ~(mask[:, :1] != 0).any(1)).nonzero().flatten().tolist()
    if empty:
        raise InputError(f"text {empty[0] + 1} of {len(mask)} in this batch has no token: its attention_mask is 0 "
            "everywhere, or all its ids are padding. What the model reads then depends on the longest text of the batch. "
            "Leave texts without tokens out of the data set, or let the tokenizer add its special tokens")  # fmt: skip
