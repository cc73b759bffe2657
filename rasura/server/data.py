"""The input of a fine-tuning job: its settings, and texts as token ids in one safetensors file.

The file holds ``ids`` (all texts, one behind the other) and ``lengths`` (tokens of each), int32; ``labels`` (int32, one a
text) for a classifier; ``types`` (uint8, like ``ids``) where texts are pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rasura.core.batches import Batch
from rasura.core.values import NO_TEXT, Vocabulary
from rasura.server.container import DATA, tensor_shapes
from rasura.server.limits import Limits, Refused
from rasura.server.memory import check_job

EXPECTED = {"ids": "I32", "lengths": "I32", "labels": "I32", "types": "U8"}


@dataclass(frozen=True)
class JobSettings:
    """How a job trains. The defaults are the paper's (appendix C.3); None stands for a default that depends on the kind of
    model.

    ``method`` full: all weights. lora: the first two blocks, the last one and a classifier's head with all their weights,
    the other blocks by adapters of ``rank`` (256, or the model's width where smaller) and ``alpha`` on every linear layer.
    ``learning_rate``: 2e-5 for a classifier, 1e-4 for a causal model; ``batch_size``: 32 and 8. ``holdout``: fraction of the
    texts held out for early stopping, which ends the job after ``patience`` epochs without improvement.
    """

    method: Literal["full", "lora"] = "full"
    epochs: int = 10
    batch_size: int | None = None
    learning_rate: float | None = None
    rank: int | None = None
    alpha: int = 16
    patience: int = 5
    holdout: float = 0.1
    precision: Literal["float32", "bf16"] = "float32"
    seed: int = 0

    @classmethod
    def read(cls, told: Any, about: Mapping[str, Any]) -> JobSettings:
        """The settings of a request for the model that ``about`` describes, with defaults filled in. Raises ``Refused``."""
        names = {field.name for field in fields(cls)}
        if not isinstance(told, dict) or not set(told) <= names:
            raise Refused(422, f"settings must be an object with some of {', '.join(sorted(names))}")
        causal = about["kind"] == "causal"
        settled = {
            **asdict(cls()), "batch_size": 8 if causal else 32, "learning_rate": 1e-4 if causal else 2e-5,
            "rank": min(256, about["hidden"]),
        }  # fmt: skip
        settled |= {name: value for name, value in told.items() if value is not None}
        for name, (low, high) in _WHOLE.items():
            value = settled[name]
            if type(value) is not int or not low <= value <= high:
                raise Refused(422, f"settings: {name} must be a whole number from {low} to {high}")
        for name, limit in (("learning_rate", 10.0), ("holdout", 0.9)):
            value = settled[name]
            if type(value) not in (int, float) or not 0 < value <= limit:
                raise Refused(422, f"settings: {name} must be above 0 and at most {limit}")
        for name, choices in (("method", ("full", "lora")), ("precision", ("float32", "bf16"))):
            if settled[name] not in choices:
                raise Refused(422, f"settings: {name} must be {' or '.join(choices)}")
        if settled["rank"] > about["hidden"]:
            raise Refused(422, f"settings: rank must be at most the model's width, {about['hidden']}")
        return cls(**settled)


_WHOLE = {
    "epochs": (1, 1000), "batch_size": (1, 1024), "rank": (1, 1 << 16), "alpha": (1, 1 << 16), "patience": (1, 1000),
    "seed": (0, 1 << 62),
}  # fmt: skip


def alike(rows: Sequence[Batch]) -> list[Batch]:
    """``rows`` with the types of their tokens in all, where any has them: zeros in a text alone."""
    if all(row.token_type_ids is None for row in rows):
        return list(rows)
    return [r if r.token_type_ids is not None else replace(r, token_type_ids=torch.zeros_like(r.input_ids)) for r in rows]


def write(rows: Sequence[Batch], path: Path) -> None:
    """Write ``rows`` (one text each, ids of the server's vocabulary) for a job: their ids, types and labels, no text."""
    from safetensors.torch import save_file

    tensors = {
        "ids": torch.cat([row.input_ids[0] for row in rows]).int() if rows else torch.zeros(0, dtype=torch.int32),
        "lengths": torch.tensor([row.input_ids.shape[1] for row in rows], dtype=torch.int32),
    }
    if rows and rows[0].labels.dim() == 1:
        tensors["labels"] = torch.cat([row.labels for row in rows]).int()
    types = [row.token_type_ids[0] for row in alike(rows) if row.token_type_ids is not None]
    if types:
        tensors["types"] = torch.cat(types).to(torch.uint8)
    save_file(tensors, str(path))


def check(folder: Path, about: Mapping[str, Any], settings: JobSettings, limits: Limits) -> int:
    """The number of texts in the data of a job for the model that ``about`` describes. Raises ``Refused``, also where the
    training would take more memory than ``limits`` allow."""
    from safetensors.numpy import load_file

    shapes = tensor_shapes(folder / DATA)
    count = next(iter(shapes.get("lengths", ("", ()))[1]), 0)
    if count < 2:
        raise Refused(422, f"the data set holds {count} texts; expected at least 2, one of them for early stopping")
    if count > limits.texts:
        raise Refused(413, f"the data set holds more than {limits.texts} texts, the limit of this server")
    labelled = about["kind"] == "classification"
    required = {"ids", "lengths"} | ({"labels"} if labelled else set())
    if not required <= set(shapes) <= required | {"types"}:
        raise Refused(422, f"{DATA} must hold {', '.join(sorted(required))}, and types for pairs")
    if any(kind != EXPECTED[name] or len(shape) != 1 for name, (kind, shape) in shapes.items()):
        raise Refused(422, f"{DATA}: the tensors must have one dimension, types of uint8, the others of int32")
    found = load_file(str(folder / DATA))
    ids, lengths = found["ids"], found["lengths"]
    if int(lengths.min()) < 1 or int(lengths.max()) > about["max_length"] or int(lengths.sum(dtype=np.int64)) != len(ids):
        raise Refused(422, f"the texts must have 1 to {about['max_length']} tokens, and lengths that add up to ids")
    if int(ids.min()) < 0 or int(ids.max()) >= about["vocabulary"]:
        raise Refused(422, f"the data set has ids outside the vocabulary's 0 .. {about['vocabulary'] - 1}")
    if labelled:
        labels = found["labels"]
        if len(labels) != len(lengths) or int(labels.min()) < 0 or int(labels.max()) >= about["labels"]:
            raise Refused(422, f"there must be one label for each text, from 0 to {about['labels'] - 1}")
    if "types" in found and (len(found["types"]) != len(ids) or int(found["types"].max()) > 1):
        raise Refused(422, "types must be 0 or 1, one for each id")
    check_job(about, min(settings.batch_size or 1, count), int(lengths.max()), limits.training_memory)
    return count


def read(folder: Path, causal: bool) -> list[Batch]:
    """The texts of a job's data, checked before."""
    from safetensors.torch import load_file

    found = load_file(str(folder / DATA))
    sizes = found["lengths"].tolist()
    ids = found["ids"].long().split(sizes)
    types = found["types"].long().split(sizes) if "types" in found else None
    return [
        as_row(one, int(found["labels"][k]) if not causal else None, None if types is None else types[k])
        for k, one in enumerate(ids)
    ]


def as_row(ids: torch.Tensor, label: int | None, types: torch.Tensor | None) -> Batch:
    """One text as a batch: ``ids`` and ``types`` ``(length,)``; without a label, each token is its own."""
    labels = ids[None] if label is None else torch.tensor([label])
    return Batch(ids[None], torch.ones_like(ids)[None], labels, ("",), ("",), None if types is None else types[None])


def vocabulary(about: Mapping[str, Any]) -> Vocabulary:
    """All that a server knows of a vocabulary: its size, and which id pads."""
    return Vocabulary(about["vocabulary"], NO_TEXT.decode, NO_TEXT.encode, pad_id=about["pad"])
