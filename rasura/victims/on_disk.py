"""Large models whose weights stay on disk: memory-mapped in their own precision, and converted to float32 part by part for
each computation.

A layer computes what it would with its weights in float32, since every bfloat16 and float16 value is a float32 value. Only
the order in which products are added may differ. Apart from the operating system's cache, memory is needed for one part of
one layer, for activations, and for what is neither a linear layer nor an embedding.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_parameter_registration_hook

from rasura.core.interfaces import InputError
from rasura.core.limits import memory_here
from rasura.victims.weights import fresh_weights, some

PART = 1 << 22
"""Number of a layer's weights that are in float32 at once: 16 MiB, which fits a processor's cache."""

HALF = (torch.bfloat16, torch.float16)


class StoredLinear(nn.Linear):
    """A linear layer whose weight is on disk. In half precision, it is converted to float32 part by part when it is used.

    Autograd keeps only the location of each part, so a backward pass converts it again.
    """

    def forward(self, x: Tensor) -> Tensor:
        """As ``nn.Linear``, in the precision of ``x`` ``(..., inputs)``."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.weight.requires_grad or self.weight.dtype == x.dtype:
            return functional.linear(x, self.weight.to(x.dtype), bias)
        out = torch.cat([_linear(x, part) for part in torch.split(self.weight, max(1, PART // self.in_features))], -1)
        return out if bias is None else out + bias


def _linear(x: Tensor, part: Tensor) -> Tensor:
    """``x`` times ``part`` ``(outputs, inputs)``, which is frozen and has another type."""
    wide = part.to(x.dtype)
    # Hooks live as long as the graph, so that they must not hold the wide weights themselves.
    place, count = wide.data_ptr(), wide.numel()

    def pack(kept: Tensor) -> Tensor | tuple[torch.Size, tuple[int, ...]]:
        is_weight = kept.data_ptr() == place and kept.numel() == count
        return (kept.shape, kept.stride()) if is_weight else kept

    def unpack(kept: Tensor | tuple[torch.Size, tuple[int, ...]]) -> Tensor:
        return kept if isinstance(kept, Tensor) else part.to(x.dtype).as_strided(*kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return functional.linear(x, wide)


class StoredEmbedding(nn.Embedding):
    """An embedding in half precision that returns float32."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).float()


@contextmanager
def _without_weights() -> Iterator[None]:
    """Modules made inside the block have parameters without memory; buffers are allocated as usual."""

    def empty(_: nn.Module, __: str, parameter: Any) -> Any:
        if parameter is None or parameter.is_meta:
            return None  # tied parameters stay the same object
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=False)

    handle = register_module_parameter_registration_hook(empty)
    try:
        yield
    finally:
        handle.remove()


def stored_model(make: Callable[[], nn.Module], folder: Path) -> nn.Module:
    """The model that ``make`` makes, with the weights and buffers in ``folder``. Those of linear layers and embeddings stay
    on disk; others are in memory in float32. All are frozen.

    Raises ``InputError`` if a weight or a buffer is missing, has another shape, or is not in a safetensors file, and for
    weights of blocks that the config does not describe.
    """
    with _without_weights():
        model = make()
    if getattr(getattr(model, "config", None), "transformers_weights", None) is not None:
        raise InputError(f"{folder}: config.json names its file (transformers_weights); expected model.safetensors")
    files = _files(folder)
    held: dict[int, nn.Parameter] = {}
    lacking: list[tuple[str, int]] = []
    mismatched: list[tuple[str, Any, Any]] = []
    for name, module in model.named_modules():
        kind = {nn.Linear: StoredLinear, nn.Embedding: StoredEmbedding}.get(type(module))
        for key, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            whole = f"{name}.{key}" if name else key
            if id(parameter) not in held:
                found = _tensor(files, whole, model)
                if found is None:
                    lacking.append((whole, id(parameter)))
                    continue
                if found.shape != parameter.shape:
                    mismatched.append((whole, found.shape, parameter.shape))
                stays = kind is not None and key == "weight" and found.dtype in (*HALF, torch.float32)
                held[id(parameter)] = nn.Parameter(found if stays else found.float(), requires_grad=False)
        if kind is not None:
            module.__class__ = kind
    missing = [n for n, parameter in lacking if parameter not in held]
    for name, found, buffer in _buffers(files, model):
        if found is None:
            missing.append(name)
        elif found.shape != buffer.shape:
            mismatched.append((name, found.shape, buffer.shape))
        else:
            buffer.data = (found.float() if found.is_floating_point() else found).clone()
    if missing:
        raise InputError(
            f"{folder} lacks {len(missing)} of the model's weights ({some(missing)}); a model on disk cannot get a new head"
        )
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = held[id(parameter)]
    model.eval()
    info = {"mismatched_keys": mismatched, "unexpected_keys": _not_read(files, model)}
    fresh_weights(model, info, str(folder), head=False)
    return model


def is_stored(model: nn.Module) -> bool:
    """Whether any weights of ``model`` are on disk."""
    return any(isinstance(module, StoredLinear | StoredEmbedding) for module in model.modules())


def copied(model: nn.Module) -> nn.Module:
    """A copy of ``model`` that shares the weights on disk."""
    stored = (m.weight for m in model.modules() if isinstance(m, StoredLinear | StoredEmbedding))
    return copy.deepcopy(model, {id(weight): weight for weight in stored})


def needs_disk(entries: int) -> bool:
    """Whether this many weights in float32 need more than half of the memory here."""
    memory = memory_here()
    return memory is not None and 8 * entries > memory


def check_stored(model: nn.Module, name: str) -> bool:
    """Whether weights of ``model`` are on disk; NaN and infinity are refused in those in memory, and in embeddings.

    In linear layers, they show in the logits of any text, which ``verify_parts`` checks. Raises ``InputError``.
    """
    if not is_stored(model):
        return False
    linear = {id(m.weight) for m in model.modules() if isinstance(m, StoredLinear)}
    read = ((n, p) for n, p in model.named_parameters() if id(p) not in linear or "embed" in n)
    bad = [n for n, p in read if not all(bool(torch.isfinite(part).all()) for part in torch.split(p, 1 << 12))]
    if bad:
        raise InputError(f"{name}: {len(bad)} weights hold NaN or infinity ({some(bad)})")
    return True


def _files(folder: Path) -> Mapping[str, Any]:
    """Every tensor's name with the opened file that holds it: ``model.safetensors``, or else the files that its index names,
    as transformers chooses them. Other files of the folder may hold other weights."""
    from safetensors import SafetensorError, safe_open

    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    paths = [whole]
    if not whole.is_file() and index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            paths = [folder / Path(str(n)).name for n in names]
        except (ValueError, LookupError, TypeError, AttributeError):
            raise InputError(f"{index} is not an index of shards") from None
    out: dict[str, Any] = {}
    for path in paths:
        try:
            opened: Any = safe_open(str(path), framework="pt")
            out |= dict.fromkeys(opened.keys(), opened)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path} is not a safetensors file ({str(error).splitlines()[0][:100]})") from None
    return out


def _tensor(files: Mapping[str, Any], name: str, model: nn.Module) -> Tensor | None:
    """The memory-mapped tensor with this name in the model, or with this name without the prefix of the model's body."""
    for key in (name, name.removeprefix(_body(model))):
        if key in files:
            found: Tensor = files[key].get_tensor(key)
            return found
    return None


def _buffers(files: Mapping[str, Any], model: nn.Module) -> Iterator[tuple[str, Tensor | None, Tensor]]:
    """The name, the stored value and the own one of each buffer that is kept with the weights, such as the scale of a layer;
    None where the files lack a value that the class of ``model`` needs."""
    kept, optional = set(model.state_dict()), getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    for name, buffer in model.named_buffers():
        found = _tensor(files, name, model) if name in kept else None
        if name in kept and not (found is None and any(re.search(pattern, name) for pattern in optional)):
            yield name, found, buffer


def _not_read(files: Mapping[str, Any], model: nn.Module) -> list[str]:
    """The tensors that ``_tensor`` finds under no name of ``model``, without those that its class says to leave out."""
    known, body = set(model.state_dict()), _body(model)
    read = {name if name in files else name.removeprefix(body) for name in known}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return [key for key in files if key not in read and not any(re.search(pattern, key) for pattern in ignored)]


def _body(model: nn.Module) -> str:
    """The prefix of the names of the model's body."""
    return f"{getattr(model, 'base_model_prefix', '')}."
