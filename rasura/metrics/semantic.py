"""How close the meaning of the recovered text is to the private text: the cosine of two sentence embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rasura.core.specs import MetricSpec
from rasura.core.values import Reconstruction, Transcript
from rasura.metrics.matching import assign, read_texts


@dataclass(frozen=True)
class SentenceCosine:
    """The cosine of the embeddings of private and recovered text, in [-1, 1]; recovered texts are assigned one to one.

    ``encode``: texts to embeddings of norm 1, ``(texts, size)``. The calibration paper takes the Universal Sentence Encoder,
    here the user chooses the encoder, and figures of different encoders are not comparable. Unrelated texts also score above
    0: compare with the baseline. A text without a recovered one scores 0.
    """

    encode: Callable[[Sequence[str]], np.ndarray]
    name: str = "sentence_cosine"
    unit: str = "cosine"
    higher_is: Literal["worse", "better"] = "worse"
    bounds: tuple[float, float] | None = (-1.0, 1.0)

    def __call__(self, guess: Reconstruction, truth: Transcript) -> Sequence[float]:
        sent, read = truth.text_batch.seen, read_texts(guess, truth)
        there = [k for k, text in enumerate(read) if text.strip()]  # an empty text has no meaning to compare
        if not there:
            return [0.0] * len(sent)
        table = self.encode(sent) @ self.encode([read[k] for k in there]).T
        return [float(table[row, place]) if place >= 0 else 0.0 for row, place in enumerate(assign(table, sent))]


SPEC = MetricSpec(
    name="sentence_cosine",
    about="cosine of sentence embeddings, in [-1, 1]; sentence_cosine:FOLDER names the encoder",
    source="Empirical calibration with metric DP, sec. III (there by another encoder)",
    make=SentenceCosine,
    encoder=True,
    usual=False,
)
