"""The training texts under a protection of the data, applied once before training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from rasura.core.batches import Batch
from rasura.core.files import make_private
from rasura.core.interfaces import Defense
from rasura.core.rng import generator
from rasura.core.values import Stage, Vocabulary
from rasura.victims.applying import applied
from rasura.victims.batching import joined, renamed

CHUNK = 64
"""Number of texts that a protection of the data takes at once. It can resume after each such chunk."""


def protected(
    rows: Sequence[Batch],
    defense: Defense,
    model: nn.Module,
    vocabulary: Vocabulary,
    folder: Path,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[Batch]:
    """``rows`` under the DATA part of ``defense``, applied once before training, with the model at that time.

    The ids of every ``CHUNK`` rows are kept in ``folder`` for resumption.
    """
    from safetensors.torch import load_file, save_file

    parts = [p for p in defense if p.stage is Stage.DATA]
    if not parts:
        return list(rows)
    folder.mkdir(parents=True, exist_ok=True)
    states: list[Any] = []
    out: list[Batch] = []
    for start in range(0, len(rows), CHUNK):
        some = list(rows[start : start + CHUNK])
        file = folder / f"{start:08d}.safetensors"
        if not file.exists():
            states = states or [p.init((model, vocabulary)) for p in parts]
            batch = joined(some, vocabulary.pad_id or 0)
            for k, part in enumerate(parts):
                batch, states[k] = applied(part, batch, states[k], generator(seed, "data", k, start))
            make_private(file, partial(save_file, {"input_ids": batch.input_ids.contiguous()}))
        ids = load_file(str(file))["input_ids"]
        for row, new in zip(some, ids):
            out.append(renamed(row, new[None, : row.input_ids.shape[1]]))
        if progress is not None:
            progress(len(out), len(rows))
    return out
