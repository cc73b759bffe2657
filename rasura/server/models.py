"""Model folders without a tokenizer: checked before they are stored, and loaded for training or inference."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rasura.data.classes import class_names
from rasura.server.container import CONFIG, WEIGHTS, tensor_shapes
from rasura.server.limits import Refused
from rasura.service_protections.obfuslm.key import PAIR
from rasura.victims.weights import CAUSAL

FAMILIES = frozenset({"bert", "roberta", "distilbert", "gpt2", "llama"})
"""Accepted model types: those whose obfuscation is tested."""

CODE = ("auto_map", "quantization_config", "adapter_config", "base_model_name_or_path")
"""Entries of a config.json by which a library would load something besides these two files."""

MEANT = frozenset({
    "architectures", "id2label", "label2id", "num_labels", "model_type", "transformers_version", "tie_word_embeddings",
    "bos_token_id", "eos_token_id", "pad_token_id",
})  # fmt: skip
"""Of the settings that every model of the library has, those that say what a model is. The others say how it is run, such as
``output_attentions``, which would keep every layer's; they are the library's own here."""

ROOM = 64 << 10
"""Bytes by which the header and the config.json of a model may grow when a job trains it."""

LARGEST, DEEPEST = 1 << 22, 256
"""A number in a config.json, at most; layers, at most: both before a model is built from it."""

MAX_POSITIONS = 8192
"""Maximum rows of a table of positions."""

DTYPES = frozenset({"F32", "F16", "BF16"})


def checked(folder: Path) -> dict[str, Any]:
    """The description of the model in ``folder``, without allocating it.

    Returns ``kind`` (classification or causal), ``vocabulary``, ``max_length`` in tokens, ``labels``, ``classes`` (their
    names; empty where they have none), ``pad``, ``ends`` (ids that end a text), ``hidden``, ``blocks``, ``heads``, ``inner``
    (width of the feed-forward part), ``across`` (of a token's states, queries or keys), ``parameters``, ``pair``,
    ``trained`` (bytes of a model that a job trains from it, at most, which is in float32).
    Raises ``Refused`` for a config that is invalid, is of another family, or describes other tensors than the file holds:
    what is allocated later is as large as what was sent.
    """
    config = _config(folder / CONFIG)
    kinds = config.get("architectures")
    name = str(kinds[0]) if isinstance(kinds, list) and kinds else ""
    causal = name.endswith(CAUSAL)
    if not causal and not name.endswith("ForSequenceClassification"):
        raise Refused(422, f"{CONFIG}: architectures must name one classifier or one causal language model")
    shapes = tensor_shapes(folder / WEIGHTS)
    if any(dtype not in DTYPES for dtype, _ in shapes.values()):
        raise Refused(422, f"{WEIGHTS}: the tensors must be of float32, float16 or bfloat16")
    found = {tensor: shape for tensor, (_, shape) in shapes.items()}
    try:
        model, text = _skeleton(folder, causal)
        # A table of positions is a constant; older files hold it.
        wanted = {n: tuple(p.shape) for n, p in model.named_parameters()}
    except Exception:
        raise Refused(422, f"{CONFIG}: no model can be made of it") from None
    if any(found.get(tensor) != shape for tensor, shape in wanted.items()):
        raise Refused(422, f"{WEIGHTS} does not hold the tensors that {CONFIG} describes")
    rows = int(model.get_input_embeddings().num_embeddings)  # type: ignore[operator]  # a Hugging Face model
    pad = int(text.pad_token_id) if isinstance(text.pad_token_id, int) else 0
    end = text.eos_token_id
    positions = int(getattr(text, "max_position_embeddings", 0) or getattr(text, "n_positions", 0) or 0)
    longest = positions - (pad + 1 if text.model_type == "roberta" else 0)
    # GPT-2 allocates a square of it.
    if not 0 <= pad < rows or not 1 <= longest <= (LARGEST if text.model_type == "llama" else MAX_POSITIONS):
        raise Refused(422, f"{CONFIG}: pad_token_id or the number of positions is wrong")
    pair = config.get(PAIR)
    parameters = sum(prod(shape) for shape in wanted.values())
    return {
        "kind": "causal" if causal else "classification",
        "vocabulary": rows,
        "max_length": longest,
        "labels": 0 if causal else int(text.num_labels),
        "classes": [] if causal else list(class_names(text.id2label)),
        "pad": pad,
        "ends": [i for i in (end if isinstance(end, list) else [end]) if isinstance(i, int)],
        "hidden": int(text.hidden_size),
        "blocks": int(text.num_hidden_layers),
        "heads": int(text.num_attention_heads),
        "inner": _inner(text),
        "across": _across(text),
        "parameters": parameters,
        "trained": 4 * parameters + _header(folder / WEIGHTS) + (folder / CONFIG).stat().st_size + ROOM,
        "pair": pair if isinstance(pair, str) else None,
    }


def _header(path: Path) -> int:
    """Bytes before the tensors of a safetensors file."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _inner(config: Any) -> int:
    """The width of the feed-forward part, which each family names differently. No other name than its own counts."""
    name = {"gpt2": "n_inner", "distilbert": "hidden_dim"}.get(config.model_type, "intermediate_size")
    return int(getattr(config, name) or 4 * config.hidden_size)


def _across(config: Any) -> int:
    """The widest of a token's states, queries and keys: of Llama, the heads may be wider together than the states."""
    if config.model_type != "llama":
        return int(config.hidden_size)
    heads = max(config.num_attention_heads, config.num_key_value_heads)
    return max(int(config.hidden_size), int(config.head_dim) * int(heads))


def _config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise Refused(422, f"{CONFIG} is not valid JSON") from None
    if not isinstance(found, dict) or str(found.get("model_type")) not in FAMILIES:
        raise Refused(422, f"{CONFIG}: model_type must be one of {', '.join(sorted(FAMILIES))}")
    if any(name in found for name in CODE):
        raise Refused(422, f"{CONFIG} must not hold any of {', '.join(CODE)}")
    numbers = {name: value for name, value in _leaves(found) if isinstance(value, int | float)}
    deep = max((numbers.get(name, 0) for name in ("num_hidden_layers", "n_layer", "n_layers")), default=0)
    if any(not -LARGEST <= value <= LARGEST for value in numbers.values()) or deep > DEEPEST:
        raise Refused(422, f"{CONFIG} holds a number that is too large")
    return found


def _leaves(value: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Names and plain values, those inside of other objects too; names that come again count by the largest."""
    out: dict[str, Any] = {}
    for name, inner in value.items():
        for key, leaf in _leaves(inner) if isinstance(inner, dict) else [(name, inner)]:
            number = isinstance(leaf, int | float) and isinstance(out.get(key), int | float)
            out[key] = max(leaf, out[key], key=abs) if number else leaf
    return list(out.items())


def _skeleton(folder: Path, causal: bool) -> tuple[nn.Module, Any]:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    config = _settled(folder, causal)
    kind = AutoModelForCausalLM if causal else AutoModelForSequenceClassification
    with torch.device("meta"):
        model: nn.Module = kind.from_config(config, trust_remote_code=False, attn_implementation="eager")
    return model, config


def _settled(folder: Path, causal: bool) -> Any:
    """The configuration in ``folder`` without what it says of how the model is run, as ``rasura.server.memory`` expects."""
    from transformers import CONFIG_MAPPING, PretrainedConfig

    found = _config(folder / CONFIG)
    running = set(PretrainedConfig().to_dict()) - MEANT
    kept = {n: v for n, v in found.items() if n not in running and not n.startswith(("_", "output_", "attn_implementation"))}
    # A classifier that keeps keys and values would keep those of all layers, for nothing.
    return CONFIG_MAPPING[found["model_type"]].from_dict({**kept, "use_cache": causal})


def opened(folder: Path, kind: str, device: str) -> nn.Module:
    """The model in ``folder``, checked before, in eval mode and float32 on ``device``."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    causal = kind == "causal"
    maker = AutoModelForCausalLM if causal else AutoModelForSequenceClassification
    model: nn.Module = maker.from_pretrained(
        str(folder), config=_settled(folder, causal), local_files_only=True, trust_remote_code=False, use_safetensors=True,
        attn_implementation="eager", dtype=torch.float32,
    )  # fmt: skip
    return model.to(device).eval()
