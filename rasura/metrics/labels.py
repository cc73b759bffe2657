"""Which labels of a batch were recovered. An attack names them as a bag, without saying whose they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def label_hits(read: Sequence[int], labels: Sequence[int]) -> list[float]:
    """For each private label 1 if it is among the labels ``read``, each of which counts once, otherwise 0. More labels than
    texts name none, since the true ones would be among them whatever they are.

    >>> label_hits([0, 0, 1], [0, 1, 1])
    [1.0, 1.0, 0.0]
    """
    left = Counter(read if len(read) <= len(labels) else ())
    out = []
    for label in labels:
        out.append(float(left[label] > 0))
        left[label] -= 1
    return out
