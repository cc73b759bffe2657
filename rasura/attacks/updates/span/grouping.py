"""From tokens to sentences: the gradients of Q and K show exactly which of the recovered inputs belong to one text.

With all N inputs X known, the output gradient of every token is ``delta = (G X^+)^T``. In self-attention ``delta_q`` of a
token is a combination of the keys of its own text only, ``delta_k`` one of that text's queries; attention dropout changes
the coefficients, not the span. So each ``delta`` is regressed on all keys (queries), sparse over tokens jointly across
heads, and the coefficients are an affinity that is zero between texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from rasura.attacks.updates.span.rows import RowSpace
from rasura.core.values import Observation
from rasura.victims.models import Block, Linear


@dataclass(frozen=True)
class Projection:
    """Weight ``(outputs, inputs)``, bias and observed gradient of a query or key layer, float64."""

    weight: Tensor
    bias: Tensor
    gradient: Tensor

    def outputs(self, inputs: Tensor) -> Tensor:
        """The layer's outputs for ``inputs`` ``(N, hidden)``."""
        return inputs @ self.weight.T + self.bias

    def deltas(self, inverse: Tensor) -> Tensor:
        """The loss gradient by each token's output, ``(N, outputs)``; ``inverse`` is the pseudo-inverse of all inputs."""
        out: Tensor = (self.gradient @ inverse).T
        return out


DEALS = 4
"""How often the rows of all places are dealt to the groups."""

PAIRS = (("query", "key"), ("q_proj", "k_proj"), ("q_lin", "k_lin"), ("query_proj", "key_proj"), ("q", "k"))
"""The names of the query layer, and of the key layer beside it, in the model families."""


def projections(seen: Observation, block: Block) -> tuple[Projection, Projection] | None:
    """The query and the key layer of ``block``, split where they are one layer (GPT-2's ``c_attn``).

    None where a gradient is hidden, or where queries and keys differ in shape (grouped queries).
    """

    def tensors(lin: Linear) -> Projection | None:
        if lin.weight not in seen.gradients or lin.weight in seen.visible:
            return None
        weight = seen.model.get_parameter(lin.weight).detach().double()
        gradient = seen.gradients[lin.weight].double()
        if lin.transposed:
            weight, gradient = weight.T, gradient.T
        bias = torch.zeros(len(weight), dtype=weight.dtype)
        if lin.bias is not None:
            bias = seen.model.get_parameter(lin.bias).detach().double()
        return Projection(weight, bias, gradient)

    by_name = {lin.module.split(".")[-1]: lin for lin in block.qkv}
    if "c_attn" in by_name:
        whole = tensors(by_name["c_attn"])
        if whole is None:
            return None
        n = len(whole.weight) // 3
        cuts = [slice(0, n), slice(n, 2 * n)]
        first, second = (Projection(whole.weight[c], whole.bias[c], whole.gradient[c]) for c in cuts)
        return first, second
    found = [tensors(by_name[n]) for pair in PAIRS for n in pair if n in by_name]
    if len(found) != 2 or found[0] is None or found[1] is None or found[0].weight.shape != found[1].weight.shape:
        return None
    return found[0], found[1]


def affinity(seen: Observation, block: Block, inputs: Tensor, space: RowSpace, heads: int) -> Tensor | None:
    """``(N, N)`` symmetric, non-negative: how strongly two recovered inputs attend to each other in any head.

    ``inputs`` ``(N, hidden)`` float64. Where tokens of ``space`` were not found, its other directions replace them. None
    where ``projections`` finds no pair.
    """
    pair = projections(seen, block)
    if pair is None:
        return None
    shown = space.shown(inputs)
    own = torch.linalg.qr((shown @ space.basis).T).Q
    rest = space.basis @ torch.linalg.svd(own).U[:, own.shape[1] :]
    inverse = torch.linalg.pinv(torch.cat([shown, rest.T]), rtol=1e-9)[:, : len(inputs)]

    def split(x: Tensor) -> Tensor:
        return x.reshape(len(inputs), heads, -1)

    query, key = pair
    total = _regress(split(query.deltas(inverse)), split(key.outputs(inputs)))
    total = total + _regress(split(key.deltas(inverse)), split(query.outputs(inputs)))
    return total + total.T


def _regress(deltas: Tensor, vectors: Tensor, iterations: int = 40) -> Tensor:
    """Row t: size over heads of the coefficients of ``deltas[t]`` on all ``vectors``; both ``(N, heads, width)``.

    Group iteratively reweighted least squares: a token's weight is the size of its coefficients in all heads together.
    """
    count, _, width = deltas.shape
    table = vectors.permute(1, 2, 0)  # heads, width, N
    eye = torch.eye(width, dtype=table.dtype)
    rows = []
    for t in range(count):
        y = deltas[t] / (deltas[t].norm() + 1e-30)
        weight = torch.ones(count, dtype=table.dtype)
        size = weight
        for _ in range(iterations):
            weighted = table * weight
            gram = weighted @ weighted.transpose(1, 2)
            ridge = 1e-10 * gram.diagonal(dim1=1, dim2=2).sum(1) / width
            solved = torch.linalg.solve(gram + (ridge + 1e-300)[:, None, None] * eye, y[:, :, None])
            c = weight * (weighted.transpose(1, 2) @ solved)[:, :, 0]
            size = c.norm(dim=0)
            weight = (size + 1e-6 * c.norm()).sqrt()
            weight = weight / weight.max()
        rows.append(size / size.norm().clamp_min(1e-30))
    return torch.stack(rows)


def cluster(similarity: Tensor, groups: int) -> list[int]:
    """A group number for each row of ``similarity`` ``(N, N)``: spectral clustering whose groups come from a pivoted QR
    factorisation (Damle, Minden and Ying 2019). Deterministic, and without an optional library."""
    if groups <= 1 or len(similarity) <= groups:
        return [0] * len(similarity) if groups <= 1 else list(range(len(similarity)))
    alike = similarity.double() + 1e-9
    alike.fill_diagonal_(0)
    degrees = alike.sum(1).sqrt()
    leading = torch.linalg.eigh(alike / degrees / degrees[:, None]).eigenvectors[:, -groups:] / degrees[:, None]
    # A row of each group: the one that is furthest from what the rows before it span.
    rest, chosen = leading.clone(), []
    for _ in range(groups):
        furthest = int(rest.square().sum(1).argmax())
        chosen.append(furthest)
        unit = rest[furthest] / rest[furthest].norm().clamp_min(1e-300)
        rest = rest - torch.outer(rest @ unit, unit)
    u, _, v = torch.linalg.svd(leading[chosen].T)
    return [int(g) for g in (leading @ (u @ v)).abs().argmax(1)]


def dealt(similarity: Tensor, places: Sequence[int], labels: Sequence[int], groups: int) -> list[int]:
    """``labels`` changed so that no group has two rows of a place, if a place has no more rows than there are groups.

    At each place in turn, the rows go to the groups whose other rows they are most similar to in sum: an assignment problem.
    """
    out = torch.tensor(labels)
    at = torch.tensor(places)
    for _ in range(DEALS):
        before = out.clone()
        for place in sorted(set(places)):
            here = (at == place).nonzero().flatten()
            if len(here) > groups:
                continue
            member = torch.nn.functional.one_hot(out, groups).double() * (at != place).double()[:, None]
            _, columns = linear_sum_assignment(-(similarity[here].double() @ member).numpy())
            out[here] = torch.as_tensor(columns)
        if torch.equal(out, before):
            break
    return [int(g) for g in out]
