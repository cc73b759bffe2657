"""The words that follow in the texts of a causal model, from the noisy gradient of its output layer.

That gradient is ``sum_t (p_t - onehot(y_t)) h_t^T``, up to a factor: the row of a word that follows at t is about ``-h_t``.
Noise hides the entries of a row, but the states ``h_t`` of a public model are alike. Their mean has most of their size, a
few directions have most of the rest. So a row is not looked at entry by entry, but compared with the law of the states: a
detector of a Gaussian signal in Gaussian noise (Kay 1998, Fundamentals of Statistical Signal Processing II, sec. 5.6).
Words that the model expects have rows along ``+h_t``. The order of the words is not read, nor how often each occurs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from rasura.attacks.shared.dummies import ordinary_ids
from rasura.attacks.shared.mechanism import announced_noise
from rasura.core.interfaces import AttackFailed, InputError, NotApplicable
from rasura.core.updates import announced_update
from rasura.core.values import Grant, Observation, Reconstruction
from rasura.priors.ngram import Unigram
from rasura.victims.models import layer_inputs, parts

TEXTS, LENGTH = 64, 16
"""Texts of random common words, and their length, in which the states of the model are taken."""

DIRECTIONS = 64
"""Directions of the states' covariance that are kept apart; the others count as one."""

CANDIDATES = 2048
"""Rows that are looked at closely: those of the most energy, and as many that lie most along the mean."""

FOLLOWING = (0.6, 0.8, 1.0, 1.25, 1.6, 2.2, 3.2)
"""Sizes of the row of a word that follows, in those of one state: the model expected the word, or the word is repeated."""

OTHERS = ((0.0, 0.98), *((-f, 0.002) for f in (3.2, 1.6, 0.8, 0.4, 0.2, 0.1, 0.05, 0.025, 0.0125)))
"""Sizes of the rows of other words, with their shares: nothing, or the opposite of a state, which the model expected in
vain."""

SIZES = 14
"""Sizes of one state that are tried."""

EXPECTED = 32
"""Different words that a text is expected to have."""

SURE = 5.0
"""Log odds above which a word is named. In noise alone none was, in 312 updates (SmolLM2-135M, stories260K)."""

FLOOR = 0.02
"""Least deviation that counts, by the largest row's: what the law of the states does not say."""


@dataclass(frozen=True)
class States:
    """The law of the states before an output layer: ``mean`` ``(width,)``, ``directions`` ``(k, width)`` with their
    ``variances`` ``(k,)``, and the variance ``rest`` of every other direction."""

    mean: Tensor
    directions: Tensor
    variances: Tensor
    rest: float

    @property
    def size(self) -> float:
        """Root mean square of a state's norm."""
        others = self.rest * (len(self.mean) - len(self.variances))
        return math.sqrt(float(self.mean.square().sum() + self.variances.sum()) + others)


class Rows:
    """Rows ``(rows, width)`` in noise of a deviation, as far as the law of ``states`` looks at them."""

    def __init__(self, rows: Tensor, states: States, noise: float) -> None:
        self.states, self.noise, self.width = states, noise, rows.shape[1]
        rows, directions, mean = rows.double(), states.directions.double(), states.mean.double()
        self.along = rows @ directions.T
        self.mean = directions @ mean
        beside = mean - self.mean @ directions
        self.beside = rows @ beside
        self.beside_mean = float(beside.square().sum())
        self.energy = (rows.square().sum(1) - self.along.square().sum(1)).clamp_min(0)

    def log_likelihood(self, size: float) -> Tensor:
        """Of each row, if it is ``size`` states and noise: ``(rows,)``, up to the same constant for every size."""
        within = size**2 * self.states.variances.double() + self.noise**2
        outside = size**2 * self.states.rest + self.noise**2
        miss = ((self.along - size * self.mean).square() / within).sum(1) + within.log().sum()
        left = self.energy - 2 * size * self.beside + size**2 * self.beside_mean
        dimensions = self.width - self.along.shape[1]
        return -0.5 * (miss + left / outside + dimensions * math.log(outside))

    def of_words(self, size: float) -> tuple[Tensor, Tensor]:
        """Log-likelihoods ``(rows,)`` of a word that follows, and of another one, where one state has this ``size``."""
        following = torch.stack([self.log_likelihood(size * f) for f in FOLLOWING]).logsumexp(0) - math.log(len(FOLLOWING))
        other = torch.stack([self.log_likelihood(size * f) + math.log(share) for f, share in OTHERS]).logsumexp(0)
        return following, other


def following_words(seen: Observation, rng: torch.Generator) -> Reconstruction:
    """The bag of words that follow in the texts of ``seen``, an update of a causal model, given once for every text.

    Raises ``NotApplicable`` where the output layer's gradient is not visible as a whole, ``AttackFailed`` where no word
    stands out.
    """
    known = parts(seen.model)
    own = None if known.head is None else known.head.weight
    name = known.word_embedding if known.tied else own
    gradient = None if name is None else seen.whole(name)
    if gradient is None:
        raise NotApplicable("the gradient of the output layer is not visible as a whole")
    if announced_update(seen).adaptive:
        raise NotApplicable("AdamW's steps are no gradient, whose rows would be states")
    if not bool(gradient.isfinite().all()):
        raise AttackFailed("the gradient of the output layer holds NaN or infinity")
    states = states_of(seen, rng)
    rows = -gradient.float().cpu()
    norms = rows.norm(dim=1)
    noise = announced_noise(seen)[0] or float(rows.flatten()[::97].abs().median()) / 0.6745
    deviation = max(noise, FLOOR * float(norms.max()) / math.sqrt(rows.shape[1]))
    if deviation == 0:
        raise AttackFailed("the gradient of the output layer is zero")
    count = min(CANDIDATES, len(rows))
    chosen = torch.tensor(sorted({*norms.topk(count).indices.tolist(), *(rows @ states.mean).topk(count).indices.tolist()}))
    words = words_of(Rows(rows[chosen], states, deviation), _frequencies(seen)[chosen])
    bag = tuple(sorted(set(chosen[words].tolist()) - seen.vocabulary.special_ids))
    if not bag:
        raise AttackFailed("no word stands out from the noise in the output layer's gradient")
    texts = seen.batch_size if Grant.BATCH_SIZE in seen else 1
    return Reconstruction((bag,) * texts, "matched", ordered=False, details={"distinct_tokens": len(bag)})


def words_of(rows: Rows, frequencies: Tensor) -> Tensor:
    """Which of ``rows`` are those of words that follow, ``(words,)``, with the size of one state that makes all rows the
    likeliest. ``frequencies``: the chance of each row's word, ``(rows,)``."""
    expected = (EXPECTED * frequencies).clamp(max=0.5).log()
    strongest = math.sqrt(max(0.0, float(rows.energy.max() + rows.along.square().sum(1).max())))
    most, least = 1.5 * strongest / rows.states.size, rows.noise / rows.states.size
    sizes = [least * max(2.0, most / least) ** (k / (SIZES - 1)) for k in range(SIZES)]
    tried = [rows.of_words(size) for size in sizes]
    best = max(range(SIZES), key=lambda k: float(torch.logaddexp(tried[k][0] + expected, tried[k][1]).sum()))
    following, other = tried[best]
    return (following + expected - other > SURE).nonzero().flatten()


def _frequencies(seen: Observation) -> Tensor:
    """The chance of every token of the vocabulary: of common English, where it has any of it."""
    with suppress(InputError):
        return Unigram.english(seen.vocabulary).probabilities
    ordinary = ordinary_ids(seen.vocabulary)
    flat = torch.zeros(seen.vocabulary.size, dtype=torch.float64)
    flat[ordinary] = 1 / len(ordinary)
    return flat


@torch.no_grad()
def states_of(seen: Observation, rng: torch.Generator) -> States:
    """The law of the states that go into the model's output layer, in texts of random words."""
    drawn = torch.multinomial(_frequencies(seen), TEXTS * LENGTH, replacement=True, generator=rng).view(TEXTS, LENGTH)
    frame: Sequence[int] = seen.vocabulary.prefix
    ids = torch.cat([torch.tensor(frame, dtype=torch.long).expand(TEXTS, len(frame)), drawn], 1)
    output = seen.model.get_output_embeddings()  # type: ignore[operator]  # a Hugging Face model
    module = next(name for name, one in seen.model.named_modules() if one is output)
    inputs = layer_inputs(seen.model, [module], input_ids=ids, attention_mask=torch.ones_like(ids))[module]
    states = inputs[:, len(frame) :].flatten(0, 1).float().cpu()
    mean = states.mean(0)
    _, values, directions = torch.linalg.svd(states - mean, full_matrices=False)
    variances = values.square() / len(states)
    kept = min(DIRECTIONS, len(variances))
    rest = float(variances[kept:].sum()) / max(1, states.shape[1] - kept)
    return States(mean, directions[:kept], variances[:kept], rest)
