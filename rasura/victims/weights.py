"""A model folder's config and weights, checked before memory is taken, and what loading found, checked before it is used.

A weight that a folder lacks is drawn at random by the library that loads it. That is right for a new classification head and
wrong everywhere else: an audit of a random network says nothing about the model that the folder claims to hold.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from torch import nn

from rasura.core.interfaces import InputError
from rasura.core.values import Task
from rasura.victims.embedded import TASKS
from rasura.victims.hub import hub_config
from rasura.victims.models import parts

CONFIG_BYTES = 10_000_000
HEADER_BYTES = 100_000_000
"""Maximum bytes of a config and of the header of a safetensors file. Real configs have thousands, and headers of large
shards millions."""

LARGEST = {
    "layers": (1_000, {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"}),
    "width": (
        200_000,
        {"hidden_size", "d_model", "n_embd", "dim", "intermediate_size", "hidden_dim", "n_inner", "ffn_dim", "d_ff"}
        | {"d_inner", "embedding_size", "word_embed_proj_dim", "num_attention_heads", "num_key_value_heads", "n_head"}
        | {"n_heads", "head_dim", "num_labels", "type_vocab_size"},
    ),
    "rows": (20_000_000, {"vocab_size", "max_position_embeddings", "n_positions"}),
}
"""Upper bounds of a config's sizes: far above those of existing language models, far below what memory cannot hold."""

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
WHOLE = frozenset({"I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"})

HEADS = (".classifier.weight", ".classifier.out_proj.weight", ".score.weight")
"""Ends of the names of heads, whose rows are classes."""

CAUSAL = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of architectures that are causal language models."""

CLASSIFIERS = ("ForSequenceClassification", "ForMaskedLM", "ForPreTraining", "Model")
"""Ends of the names of architectures that are classifiers, or that classifiers are made of."""

ADAPTED: dict[str, Task] = {"CAUSAL_LM": "causal", "SEQ_CLS": "classification"}
"""Tasks of adapters, by PEFT's names of them."""

IMAGE_MODELS = ("lenet", "cnn")
"""Names of models that read images (``victims.vision``)."""

TELL = "pass --task, or task= in Python"

NAMED = 3
"""Number of weights that a message names."""


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises ``InputError`` if there is none, or if it is too large."""
    try:
        if path.stat().st_size > CONFIG_BYTES:
            raise InputError(f"{path} has {path.stat().st_size} bytes; expected a config of at most {CONFIG_BYTES}")
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON ({str(error).splitlines()[0][:100]})") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} holds {type(found).__name__}; expected a JSON object")
    return found


def is_adapter(model: str | Path) -> bool:
    """Whether ``model`` is the folder of a PEFT adapter."""
    return (Path(model) / "adapter_config.json").is_file()


def task_of(model: str | Path) -> Task:
    """The task that ``model`` states, a folder of a model or an adapter, a hub id or a name of ours. Raises ``InputError``
    where it states none, or one that is neither classification nor causal, such as one label for each token: what is
    measured of another loss would be of no model. Also as ``read_config`` and ``check_hub_id`` do."""
    folder = Path(model)
    if str(model) in TASKS:
        return TASKS[str(model)]
    if str(model) in IMAGE_MODELS:
        return "vision"
    if is_adapter(folder):
        return _of_adapter(folder)
    config = folder / "config.json" if folder.exists() else hub_config(str(model))
    if config is None or not config.is_file():
        return "classification"  # there is no model, which loading says
    stated = read_config(config).get("architectures")
    if found := _by_classes(model, [str(name) for name in stated] if isinstance(stated, list) else []):
        return found
    raise InputError(f"{config} names no architectures, so whether it is a classifier is not known; {TELL}")


def task_in_memory(model: nn.Module) -> Task:
    """The task of a model in memory, by its class or that of the model that it adapts."""
    adapted: Any = getattr(model, "get_base_model", lambda: model)
    names = [kind.__name__ for one in (model, adapted()) for kind in type(one).__mro__]
    return "causal" if any(name.endswith(CAUSAL) for name in names) else "classification"


def task_for(task: str | None, model: str | Path | None, num_labels: int | None = None) -> str:
    """The ``task`` that was given. Otherwise classification where classes were given, or what the model's folder states."""
    return task or ("classification" if num_labels is not None or model is None else task_of(model))


def _by_classes(model: str | Path, names: Sequence[str]) -> Task | None:
    """The task of ``model`` by the ``names`` of its classes; None without any."""
    if any(name.endswith(CAUSAL) for name in names):
        return "causal"
    if names and not any(name.endswith(CLASSIFIERS) for name in names):
        raise _another_task(model, names[0][:60])
    return "classification" if names else None


def _of_adapter(folder: Path) -> Task:
    """The task of an adapter. PEFT's default is to state none; then it names the class that was adapted, or the task is that
    of the base model."""
    config = read_config(folder / "adapter_config.json")
    if kind := str(config.get("task_type") or ""):
        if kind not in ADAPTED:
            raise _another_task(folder, f"task_type {kind[:40]}")
        return ADAPTED[kind]
    mapped, base = config.get("auto_mapping"), config.get("base_model_name_or_path")
    adapted = mapped.get("base_model_class") if isinstance(mapped, dict) else None
    if found := _by_classes(folder, [str(adapted)] if adapted else []):
        return found
    if not base or is_adapter(str(base)):
        raise InputError(f"{folder} states no task, no class of a model and no base model; {TELL}")
    return task_of(str(base))


def _another_task(model: str | Path, stated: str) -> InputError:
    return InputError(
        f"{model} states another task than classification and causal ({stated}), and what its updates show is not measured; "
        "--task classification takes it for the body of a classifier with one label a text"
    )


def classes_of(model: str | Path) -> int | None:
    """The number of classes of the classifier, or of the adapter with a head, in a folder; None if the folder does not say.
    Raises ``InputError`` as ``read_config`` does, and for a damaged adapter."""
    path, adapter = Path(model) / "config.json", Path(model) / "adapter_model.safetensors"
    if adapter.is_file():
        for name, told in _header(adapter).items():
            shape = told.get("shape") if isinstance(told, dict) and name.endswith(HEADS) else None
            if isinstance(shape, list) and shape and type(shape[0]) is int:
                return shape[0]
        return None
    labels = read_config(path).get("id2label") if path.is_file() else None
    return len(labels) if isinstance(labels, dict) and labels else None


def classes_for(model: str, needed: int) -> int:
    """The number of classes with which to load ``model`` for texts whose labels need ``needed``: as many as its head has, so
    that it stays, unless the labels need more. At least two."""
    return max(2, needed, classes_of(model) or 0)


def check_config(config: Mapping[str, Any], name: str) -> None:
    """Refuse sizes that no real model has, and quantised weights. Raises ``InputError``."""
    if config.get("quantization_config") is not None:
        raise InputError(f"{name}: the weights are quantised; expected a model in float32, float16 or bfloat16")
    for nested in ("text_config", "encoder", "decoder"):
        if isinstance(config.get(nested), Mapping):
            check_config(config[nested], name)
    for max_value, keys in LARGEST.values():
        for key in sorted(keys & set(config)):
            value = config[key]
            if value is None:
                continue
            whole = isinstance(value, int) and not isinstance(value, bool)
            listed = isinstance(value, list) and all(isinstance(v, int) and 0 <= v <= max_value for v in value)
            if not listed and not (whole and 0 <= value <= max_value):
                raise InputError(
                    f"{name}: config.json says {key} = {str(value)[:30]}; expected a whole number up to {max_value}"
                )


def check_files(folder: Path) -> None:
    """Refuse weights in formats that would be read as wrong values. Raises ``InputError``."""
    for path in sorted(folder.glob("*.safetensors")):
        for key, told in _header(path).items():
            kind = told.get("dtype") if isinstance(told, dict) else None
            if key == "__metadata__" or kind in FLOATS or (kind in WHOLE and not key.endswith(".weight")):
                continue
            raise InputError(f"{path}: {key} is {str(kind)[:20]}; expected float32, float16 or bfloat16")


def _header(path: Path) -> dict[str, Any]:
    """The names, types and shapes in the header of a safetensors file, without weights."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > min(HEADER_BYTES, path.stat().st_size):
                raise ValueError
            found = json.loads(file.read(size))
    except (OSError, ValueError, RecursionError, struct.error):
        raise InputError(f"{path} is not a safetensors file") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} is not a safetensors file")
    return found


def check_size(folder: Path, entries: int) -> None:
    """Refuse a model with more ``entries`` than the folder's weights can hold. Raises ``InputError``."""
    held = sum(p.stat().st_size for pattern in ("*.safetensors", "*.bin") for p in folder.glob(pattern))
    if entries > 2 * held + 10_000_000:
        raise InputError(
            f"{folder}: config.json describes a model of {entries} weights, but the folder holds only {held} "
            "bytes of weights; expected the config that belongs to them"
        )


def fresh_weights(model: nn.Module, info: Mapping[str, Any], name: str, *, head: bool) -> tuple[str, ...]:
    """The weights that the folder lacked and that were drawn at random; with ``head``, a classification head may be.

    ``info``: what ``from_pretrained(output_loading_info=True)`` returns. BERT's pooler counts as part of the head: models
    that were trained without it have none. Raises ``InputError`` for every other weight that is missing or has another
    shape, and for weights of blocks that the config does not know.
    """
    missing = sorted(info.get("missing_keys", ()))
    mismatched = sorted(info.get("mismatched_keys", ()), key=str)
    body = f"{getattr(model, 'base_model_prefix', '')}."
    # Without a body under its own name the head cannot be told from the rest.
    known = head and body != "." and any(n.startswith(body) for n, _ in model.named_parameters())

    def allowed(key: str) -> bool:
        return known and (not key.startswith(body) or key[len(body) :].startswith("pooler."))

    lacking = [k for k in missing if not allowed(k)]
    if lacking:
        what = "only a new classification head may be drawn at random" if head else "expected a causal language model"
        raise InputError(f"{name} lacks {len(lacking)} of the model's weights ({some(lacking)}); {what}")
    other = [(k, tuple(a), tuple(b)) for k, a, b in mismatched if not allowed(k)]
    if other:
        key, found, expected = other[0]
        raise InputError(f"{name}: {len(other)} weights have another shape ({key} is {found}; config.json says {expected})")
    errors = [str(e).splitlines()[0][:200] for e in info.get("error_msgs", ()) if str(e)]
    if errors:
        raise InputError(f"{name}: the weights do not fit the model ({errors[0]})")
    extra = _of_unknown_blocks(model, info.get("unexpected_keys", ()))
    if extra:
        raise InputError(f"{name} holds weights of blocks that config.json does not describe ({some(extra)})")
    return tuple(missing) + tuple(k for k, *_ in mismatched)


def _of_unknown_blocks(model: nn.Module, unexpected: Iterable[str]) -> list[str]:
    """Unexpected weights, and biases of layers, that belong to blocks: the saved model had different or more blocks.

    Older files hold constants under the names ``attn.bias`` or ``inv_freq``, which belong to no layer with a weight.
    """
    try:
        known = parts(model).blocks
    except InputError:
        known = ()
    if not known:
        return []
    module = known[0].module
    body = f"{getattr(model, 'base_model_prefix', '')}."
    blocks = module.removeprefix(body).rsplit(".", 1)[0] + "."
    extra = {k: k.removeprefix(body) for k in unexpected}
    weights = {n.removeprefix(body) for n, _ in model.named_parameters(remove_duplicate=False)} | set(extra.values())

    def is_weight(key: str) -> bool:
        return key.endswith(".weight") or (key.endswith(".bias") and f"{key.removesuffix('bias')}weight" in weights)

    return sorted(k for k, short in extra.items() if short.startswith(blocks) and is_weight(short))


def check_finite(model: nn.Module, name: str) -> None:
    """Refuse NaN and infinity among the weights. Raises ``InputError`` that names a few."""
    # NaN is the least and the largest of whatever holds one.
    whole = ((n, p.detach().aminmax()) for n, p in model.named_parameters() if p.numel())
    bad = [n for n, ends in whole if not all(isfinite(float(end)) for end in ends)]
    if bad:
        raise InputError(f"{name}: {len(bad)} weights hold NaN or infinity ({some(bad)})")


def some(names: Sequence[str]) -> str:
    """The first few of ``names``."""
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")


def first_line(error: Exception) -> str:
    """The first line of an error of another library."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    # Where the first line only announces what is wrong, the second one says it.
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:300]
