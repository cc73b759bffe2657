"""Padding without an attention mask: whether a model leaves it out by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rasura.core.exact import exact, norm
from rasura.core.interfaces import InputError
from rasura.core.rng import WithoutDropout
from rasura.victims.trial_texts import in_float32, same
from rasura.victims.unwritten import unwritten

Alone = Mapping[str, Sequence[tuple[int, ...]]]
"""The shape of each row of a batch where it is collated alone, by entry; entries of the same shape are left out."""

MOST = 8
"""How many rows of a batch are tried, those with the most padding."""


def check_unmasked(model: nn.Module, inputs: Mapping[str, Tensor], alone: Alone) -> None:
    """Raises ``InputError`` where a row of ``inputs`` that was padded to the length of the others has another gradient than
    without its padding: one text more would change the gradients of all others, and no clip bounds that.

    The rows with the most padding are tried on either side, for the trained parameters of ``model``.
    """
    if not alone:
        return
    lacks = {k: sum(inputs[n][k].numel() - torch.Size(shapes[k]).numel() for n, shapes in alone.items())
             for k in range(len(next(iter(alone.values()))))}  # fmt: skip
    rows = sorted((k for k in lacks if any(inputs[n][k].shape != s[k] for n, s in alone.items())), key=lambda k: -lacks[k])
    device = next(model.parameters()).device.type
    with unwritten(model), torch.random.fork_rng(devices=[]), WithoutDropout(), exact(device):
        if not any(all(_unpadded(model, inputs, k, alone, left) for k in rows[:MOST]) for left in (False, True)):
            name = next(iter(alone))
            raise InputError(
                f"the batch has no attention_mask, and padding changes the gradient of a text: {name} of row {rows[0] + 1} "
                f"has the shape {tuple(inputs[name][rows[0]].shape)} beside the others, and {alone[name][rows[0]]} alone. "
                "So one text more would change the gradients of others. Pad all rows to one length that depends on no text, "
                "or pass an attention_mask to a model that leaves padding out"
            )


def _unpadded(model: nn.Module, inputs: Mapping[str, Tensor], row: int, alone: Alone, left: bool) -> bool:
    """Whether the gradient of ``row`` is the same without what is beyond its own shape, at the end or on the ``left``."""
    padded = {name: value[row : row + 1] for name, value in inputs.items()}
    cut = dict(padded)
    for name, shapes in alone.items():
        has, own = padded[name].shape[1:], shapes[row]
        if len(has) != len(own) or any(a < b for a, b in zip(has, own)):
            return False  # it lost something to the others
        cut[name] = padded[name][(slice(None), *(slice(a - b, a) if left else slice(b) for a, b in zip(has, own)))]
    run, trained = in_float32(model)
    found = []
    for some in (padded, cut):
        try:
            with torch.enable_grad():
                found.append(torch.autograd.grad(run(**some).loss, list(trained.values()), allow_unused=True))
        except (RuntimeError, ValueError, IndexError):
            return False  # the model takes the text only with its padding
    largest = float(norm([g.detach() for g in found[1] if g is not None]))
    return all(same(None if a is None else a.detach().cpu(), b, largest) for a, b in zip(*found))
