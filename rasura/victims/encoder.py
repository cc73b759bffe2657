"""A sentence encoder from any Hugging Face model: the mean of its last hidden states, of norm 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from rasura.victims.embedded import EMBEDDED
from rasura.victims.loading import load


@lru_cache(maxsize=2)
def sentence_encoder(path_or_id: str = EMBEDDED) -> Callable[[Sequence[str]], np.ndarray]:
    """A function from texts to ``(texts, hidden)`` float64 of norm 1, by the model in a folder or with a hub id. Texts that
    are too long for the model are truncated.

    Mean pooling is how the embedded default was trained (all-MiniLM-L6-v2). The model is loaded when it is first needed.
    Raises ``InputError`` for a folder without a model.
    """
    loaded: list[Any] = []

    def encode(texts: Sequence[str]) -> np.ndarray:
        if not loaded:
            loaded.append(load(path_or_id, "classification", attacked=False))
        victim = loaded[0]
        coded = victim.tokenizer(
            list(texts), padding=True, truncation=True, max_length=victim.max_length, return_tensors="pt"
        )
        mask = coded["attention_mask"]
        with torch.no_grad():
            states = victim.model.base_model(input_ids=coded["input_ids"], attention_mask=mask).last_hidden_state
        mean = (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        return np.asarray(torch.nn.functional.normalize(mean.double(), dim=1).numpy())

    return encode
