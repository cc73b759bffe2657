"""Noisy states in place of ids: DP-Forward (Du et al. 2023), CAPE (Plant et al. 2021), TextObfuscator (Zhou et al. 2023).

Changes for a ``Split``. Noise is drawn as PyTorch draws, from its global generator; steps and ``Service.states`` draw inside
``rng.drawing``, whose source may be the operating system.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.interfaces import InputError
from rasura.service_protections.split import Change


def analytic_sigma(epsilon: float, delta: float) -> float:
    """The smallest standard deviation of Gaussian noise at sensitivity 1 that is (epsilon, delta) private, by bisection.

    Balle and Wang 2018, theorem 8: delta = Phi(1 / 2s - epsilon s) - e^epsilon Phi(-1 / 2s - epsilon s). DP-Forward's
    analytic matrix Gaussian mechanism is this for matrices, with independent entries.
    """
    if not (0 < epsilon < math.inf and 0 < delta < 1):
        raise InputError(f"epsilon {epsilon}, delta {delta}; expected a finite epsilon above 0 and delta between 0 and 1")
    from scipy.stats import norm

    def spent(sigma: float) -> float:
        first = norm.cdf(1 / (2 * sigma) - epsilon * sigma)
        return float(first - math.exp(epsilon + norm.logcdf(-1 / (2 * sigma) - epsilon * sigma)))

    low, high = 1e-3, 1.0
    while spent(high) > delta:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > delta else (low, middle)
    return high


class MatrixGaussian(Change):
    """DP-Forward: a text's states, as one matrix, scaled down to Frobenius norm ``clip`` at most, and Gaussian noise.

    Sensitivity is ``clip``, as in the authors' code: epsilon compares a text's states with zeros in their place. For any two
    texts the sensitivity is twice that, and epsilon is larger. Noise is drawn again in every
    pass, as there: over several epochs the server gets several draws, which (epsilon, delta) does not count.
    """

    def __init__(self, epsilon: float, delta: float = 1e-5, clip: float = 1.0) -> None:
        super().__init__()
        if not 0 < clip < math.inf:
            raise InputError(f"dp-forward: clip {clip}; expected a finite clip above 0")
        self.clip, self.sigma = clip, clip * analytic_sigma(epsilon, delta)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Clipped and noisy states; padding is zero."""
        own = states * mask[:, :, None]
        whole = own.flatten(1).norm(dim=1).clamp_min(1e-12)
        own = own * (self.clip / whole).clamp_max(1)[:, None, None]
        out: Tensor = (own + self.sigma * torch.randn_like(own)) * mask[:, :, None]
        return out


def laplace_like(states: Tensor) -> Tensor:
    """Laplace noise of scale 1, of the shape of ``states``."""
    return torch.distributions.Laplace(0.0, 1.0).sample(states.shape).to(states)


class _Reversed(torch.autograd.Function):
    """The identity, whose gradient is turned round and scaled (gradient reversal, Ganin and Lempitsky 2015)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # as torch calls it
        return -ctx.weight * gradient, None


class Cape(Change):
    """CAPE: every state scaled to the range of 0 to 1, Laplace noise of scale 1 / ``epsilon`` on each entry, and training
    against an adversary of one hidden layer, whose gradient is reversed with weight ``adversary``.

    CAPE's adversary names an attribute of the author; here, where tokens are to be hidden, it names them: one of ``names``,
    the training texts' tokens, by their public rows ``table``. Scaled back after the noise, so that the server's blocks
    get states of the range that they know; both ends of the range are sent, which CAPE does not count either.
    """

    names: Tensor
    rows: Tensor

    def __init__(self, table: Tensor, names: Tensor, epsilon: float = 5.0, adversary: float = 0.1) -> None:
        super().__init__()
        if not (0 < epsilon < math.inf and 0 <= adversary < math.inf):
            raise InputError(
                f"cape: epsilon {epsilon}, adversary {adversary}; expected finite values, epsilon above 0 and adversary at "
                "least 0"
            )
        self.epsilon, self.weight = epsilon, adversary
        place = torch.full((len(table),), -100)
        place[names] = torch.arange(len(names))
        self.register_buffer("names", place)
        self.register_buffer("rows", nn.functional.normalize(table[names].detach().float(), dim=1))
        width = table.shape[1]
        self.adversary = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.scale = nn.Parameter(torch.tensor(16.0))

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Noisy states."""
        least, most = states.amin(2, keepdim=True), states.amax(2, keepdim=True)
        return states + (most - least) * laplace_like(states) / self.epsilon

    def loss(self, states: Tensor, changed: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """The adversary's loss; to the client it comes back with the other sign."""
        wanted = self.names[ids].masked_fill(mask == 0, -100)
        own = wanted != -100
        if not bool(own.any()):
            return changed.new_zeros(())
        read = self.adversary(_Reversed.apply(changed[own].float(), self.weight))  # type: ignore[no-untyped-call]
        scores = self.scale * nn.functional.normalize(read, dim=1) @ self.rows.T
        return nn.functional.cross_entropy(scores, wanted[own])


class Prototypes(Change):
    """TextObfuscator: states drawn to the prototype of their token's cluster while prototypes are kept apart, and noise.

    ``clusters`` ``(vocabulary,)``: each token's cluster, -1 for none; ``centres`` ``(clusters, hidden)``: where prototypes
    begin (k-means of tokens' mean states). Added to the task's loss: ``close`` times the mean squared distance of states to
    their prototype, minus ``away`` times the mean distance of two prototypes. Noise is Laplace of scale ``noise`` times the
    prototypes' standard deviation at the start. The authors move label words to clusters of their own; here no cluster
    knows of labels.
    """

    clusters: Tensor
    spread: Tensor

    def __init__(
        self, clusters: Tensor, centres: Tensor, close: float = 0.03, away: float = 0.01, noise: float = 1.0
    ) -> None:
        super().__init__()
        if not all(0 <= value < math.inf for value in (close, away, noise)):
            raise InputError(
                f"textobfuscator: close {close}, away {away}, noise {noise}; expected finite values of at least 0"
            )
        self.close, self.away, self.noise = close, away, noise
        self.register_buffer("clusters", clusters)
        self.register_buffer("spread", centres.std())
        self.prototypes = nn.Parameter(centres.clone())

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Noisy states."""
        return states + self.noise * self.spread * laplace_like(states)

    def loss(self, states: Tensor, changed: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """Both losses, weighted."""
        wanted = self.clusters[ids].masked_fill(mask == 0, -1)
        own = wanted >= 0
        near = (states[own].float() - self.prototypes[wanted[own]]).square().sum() / max(1, int(own.sum()) * states.shape[2])
        apart = nn.functional.pdist(self.prototypes)
        out: Tensor = self.close * near - self.away * apart.sum() / max(1, len(apart))
        return out


def prototypes(model: nn.Module, texts: list[list[int]], depth: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """For ``Prototypes``: clusters of the tokens of ``texts`` by their mean state behind ``depth`` blocks, and centres."""
    from sklearn.cluster import KMeans

    from rasura.victims.models import layer_inputs, parts

    known = parts(model)
    rows = model.get_parameter(known.word_embedding)
    sums, counts = torch.zeros(rows.shape), torch.zeros(len(rows))
    for text in texts:
        ids = torch.tensor([text])
        with torch.no_grad():
            place = known.blocks[depth].module
            states = layer_inputs(model, [place], input_ids=ids, attention_mask=torch.ones_like(ids))[place][0]
        sums.index_add_(0, ids[0], states.float())
        counts.index_add_(0, ids[0], torch.ones(len(text)))
    there = counts.nonzero().flatten()
    means = sums[there] / counts[there, None]
    found = KMeans(min(count, len(there)), random_state=seed, n_init=1).fit(means.numpy())
    clusters = torch.full((len(rows),), -1)
    clusters[there] = torch.from_numpy(found.labels_).long()
    return clusters, torch.from_numpy(found.cluster_centers_).float()
