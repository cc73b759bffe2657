"""How far the embeddings of the recovered tokens are from those of the private ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Any, Literal

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from rasura.core.specs import MetricSpec
from rasura.core.values import Reconstruction, Transcript
from rasura.metrics.matching import assign, own_tokens


def wasserstein(a: np.ndarray, b: np.ndarray) -> float:
    """The 1-Wasserstein distance of the uniform distributions on the rows ``a`` ``(n, width)`` and ``b`` ``(m, width)``: the
    mean way that a row goes when one is moved onto the other as cheaply as possible. NaN if one has no rows.

    >>> wasserstein(np.array([[0.0], [1.0]]), np.array([[1.0], [3.0]]))
    1.5
    """
    if not len(a) or not len(b):
        return nan
    if len(a) == len(b):  # then some cheapest plan moves whole rows
        ways = cdist(a, b)
        return float(ways[linear_sum_assignment(ways)].mean())
    from scipy.stats import wasserstein_distance_nd  # takes long to import

    return float(wasserstein_distance_nd(a, b))


@dataclass(frozen=True)
class EmbeddingDistance:
    """The Wasserstein distance of the word embeddings (rows of the attacked model's table, without special tokens) of each
    private text and the recovered one, assigned one to one with the least sum; lower means more was recovered.

    Selective encryption (sec. 4, Metrics) names "the Wasserstein distance" between "embeddings" and no more; which order,
    which rows and which scale is our reading, so that its figures and ours are not on one scale. A text without a recovered
    one, or without a token of its own, has none (NaN).
    """

    name: str = "embedding_distance"
    unit: str = "distance"
    higher_is: Literal["worse", "better"] = "better"
    bounds: tuple[float, float] | None = None

    def __call__(self, guess: Reconstruction, truth: Transcript) -> Sequence[float]:
        batch, model = truth.text_batch, truth.model
        table: Any = model.get_input_embeddings()  # type: ignore[operator]  # a Hugging Face model

        def rows(ids: Sequence[int]) -> np.ndarray:
            found: np.ndarray = table.weight.detach()[own_tokens(ids, truth)].double().cpu().numpy()
            return found

        sent, read = [rows(batch.ids(row)) for row in range(len(batch))], [rows(t) for t in guess.tokens]
        ways = np.array([[wasserstein(a, b) for b in read] for a in sent]).reshape(len(sent), len(read))
        there, own = ([k for k, b in enumerate(some) if len(b)] for some in (read, sent))
        out = [nan] * len(sent)
        for row, k in zip(own, assign(-ways[np.ix_(own, there)], [tuple(batch.ids(row)) for row in own])):
            out[row] = float(ways[row, there[k]]) if k >= 0 else nan
        return out


SPEC = MetricSpec(
    name="embedding_distance",
    about="Wasserstein distance of word embeddings; lower means more was recovered",
    source="Selective encryption, sec. 4, Metrics (its scale is not told)",
    make=EmbeddingDistance,
    usual=False,
)
