"""Examples whose gradients the noise is checked on."""

from __future__ import annotations

import torch
from torch import Tensor

from rasura.core.rng import generator
from rasura.core.values import Gradients, PerExample, Weigh


def examples(rows: Tensor, expected: float | None = None) -> PerExample:
    """Texts whose gradients are the rows, as two parameters of 2 and the other entries."""
    each: list[Gradients] = [{"a": row[:2], "b": row[2:].reshape(2, -1)} for row in rows]

    def weighted(weigh: Weigh, by_layer: bool = False) -> Gradients:
        assert not by_layer  # both parameters are of one layer
        total = weigh(rows.norm(dim=1)).to(rows) @ rows if len(rows) else torch.zeros(rows.shape[1], dtype=rows.dtype)
        return {"a": total[:2], "b": total[2:].reshape(2, -1)}

    return PerExample(dict, lambda: iter(each), len(rows), weighted, expected)


ROWS = torch.randn((6, 22), generator=generator(3), dtype=torch.float64) * torch.tensor([0.1, 1, 2, 3, 4, 20.0])[:, None]
