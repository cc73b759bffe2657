"""What tests on a GPU compare with."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor


def apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The distance of two sets of tensors, relative to the first."""
    assert list(one) == list(other)
    assert all(t.device.type == "cpu" for t in (*one.values(), *other.values()))
    size = math.sqrt(sum(float(t.double().square().sum()) for t in one.values()))
    return math.sqrt(sum(float((one[n].double() - other[n].double()).square().sum()) for n in one)) / size
