"""The fingerprint of a model's weights."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import torch
from torch import nn


def fingerprint(model: nn.Module, *, beside: Collection[str] = ()) -> str:
    """Sixteen hex digits that identify the parameters and buffers of ``model``: names, shapes, types and every bit; without
    those called ``beside``."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if name in beside:
            continue
        held = tensor.detach()
        found.update(f"{name} {tuple(held.shape)} {held.dtype}\n".encode())
        found.update(held.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:16]
