"""The fingerprints of a model: of its weights, and of what else it computes with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, is_dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.vocabulary import Vocabulary, tokenizer_digest

PASSING = frozenset({
    "_name_or_path", "_commit_hash", "base_model_name_or_path", "transformers_version", "peft_version", "revision",
    "problem_type",
})  # fmt: skip
"""Entries of a configuration that say where a model comes from, and not what it computes; and the kind of loss, which
transformers writes at the first one, where only one kind is taken (``loading.with_one_label``)."""

NOTHING: Mapping[str, str] = MappingProxyType({})


def fingerprint(model: nn.Module, *, beside: Collection[str] = ()) -> str:
    """Sixteen hex digits that identify the parameters and buffers of ``model``: names, shapes, types and every bit; without
    those called ``beside``."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if name in beside:
            continue
        _update(found, name, tensor)
    return found.hexdigest()[:16]


def tensor_digest(tensor: Tensor) -> str:
    """Sixteen hex digits that identify ``tensor``: its shape, its type and every bit."""
    found = hashlib.sha256()
    _update(found, "", tensor)
    return found.hexdigest()[:16]


def _update(found: Any, name: str, tensor: Tensor) -> None:
    held = tensor.detach()
    found.update(f"{name} {tuple(held.shape)} {held.dtype}\n".encode())
    found.update(held.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def fingerprints(
    name: str, model: nn.Module, vocabulary: Vocabulary, beside: Mapping[str, str] = NOTHING
) -> dict[str, str | Mapping[str, str]]:
    """What tells ``model``, called ``name``, and its tokenizer from others, for ``RunStore.describe``. Of the configuration
    and what is ``beside`` it, each entry, so that one that another version of a library adds is not taken for a change."""
    return {
        name: fingerprint(model),
        f"tokenizer of the {name}": tokenizer_digest(vocabulary),
        f"configuration of the {name}": {**configuration_of(model), **beside},
    }


def configuration_of(model: nn.Module) -> dict[str, str]:
    """The entries of the configuration of ``model``, and of the adapters on it, as JSON; empty if it has none."""
    own: Any = getattr(model, "config", None)
    adapters: Any = getattr(model, "peft_config", {})
    told = {**_entries(own), **{f"adapter_{a}_{k}": v for a, one in adapters.items() for k, v in _entries(one).items()}}
    return {name: json.dumps(value, sort_keys=True, default=_plain) for name, value in sorted(told.items())}


def _entries(config: Any) -> dict[str, Any]:
    if hasattr(config, "to_dict"):
        return dict(_lasting(config.to_dict()))
    return asdict(config) if is_dataclass(config) and not isinstance(config, type) else {}


def _lasting(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _lasting(v) for k, v in value.items() if k not in PASSING}
    return value


def _plain(value: Any) -> Any:
    return sorted(value, key=str) if isinstance(value, set | frozenset) else str(value)
