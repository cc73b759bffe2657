"""The words that follow in the texts of a causal model, from the noisy gradient of its output layer or from its signs.

That gradient is ``sum_t (p_t - onehot(y_t)) h_t^T``, up to a factor: the row of a word that follows at t is about ``-h_t``.
Noise hides the entries of a row, but the states ``h_t`` of a public model are alike. Their mean has most of their size, a
few directions have most of the rest. So a row is not looked at entry by entry, but compared with the law of the states: a
detector of a Gaussian signal in Gaussian noise (Kay 1998, Fundamentals of Statistical Signal Processing II, sec. 5.6).
Words that the model expects have rows along ``+h_t``. This tells neither the order of the words nor how often each occurs.
"""

from __future__ import annotations

import math
from itertools import chain

import torch
from torch import Tensor

from rasura.attacks.shared.mechanism import announced_noise
from rasura.attacks.shared.verify import prove, verified
from rasura.attacks.updates.pursuit.fits import are_signs, signs_of
from rasura.attacks.updates.pursuit.ordering import LONGEST, STARTS, Ordering, starts_of
from rasura.attacks.updates.pursuit.signed import LONGEST as SIGNED_LONGEST
from rasura.attacks.updates.pursuit.signed import Signed
from rasura.attacks.updates.pursuit.states import States, frequencies_of, output_of, states_of
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.so_far import tell
from rasura.core.values import Grant, Observation, Parameter, Reconstruction
from rasura.victims.models import parts

CANDIDATES = 2048
"""Rows that are looked at closely: those of the most energy, and as many that lie most against the mean."""

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


def following_words(seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
    """The bag of words that follow in the texts of ``seen``, an update of a causal model, given once for every text. Of a
    single text of few words, the words in order where one explains the gradient (in noise not with the budget ``quick``).

    Raises ``NotApplicable`` where the output layer's gradient is not visible as a whole, ``AttackFailed`` where no word
    stands out.
    """
    known = parts(seen.model)
    own = None if known.head is None else known.head.weight
    name = known.word_embedding if known.tied else own
    gradient = None if name is None else seen.whole(name)
    if name is None or gradient is None:
        raise NotApplicable("the gradient of the output layer is not visible as a whole")
    if not bool(gradient.isfinite().all()):
        raise AttackFailed("the gradient of the output layer holds NaN or infinity")
    module, frequencies = output_of(seen.model), frequencies_of(seen)
    states = states_of(seen, module, frequencies, rng)
    rows = gradient.float().cpu()
    if are_signs(seen, rows):
        signs = signs_of(seen, rows, seen.model.get_parameter(name).detach().float().cpu())
        return _by_signs(seen, Signed(seen, module, signs, states, budget.level), frequencies)
    norms = rows.norm(dim=1)
    noise = announced_noise(seen)[0] or float(rows.flatten()[::97].abs().median()) / 0.6745
    deviation = max(noise, FLOOR * float(norms.max()) / math.sqrt(rows.shape[1]))
    if deviation == 0:
        raise AttackFailed("the gradient of the output layer is zero")
    count = min(CANDIDATES, len(rows))
    against = (rows @ states.mean).topk(count, largest=False).indices
    chosen = torch.tensor(sorted({*norms.topk(count).indices.tolist(), *against.tolist()}))
    words = words_of(Rows(-rows[chosen], states, deviation), frequencies[chosen])
    bag = tuple(sorted(set(chosen[words].tolist()) - seen.vocabulary.special_ids))
    if not bag:
        raise AttackFailed("no word stands out from the noise in the output layer's gradient")
    texts = seen.batch_size if Grant.BATCH_SIZE in seen else 1
    details: dict[str, Parameter] = {"distinct_tokens": len(bag)}
    tell(lambda: [bag] * texts, ordered=False)
    if texts == 1 and Grant.BATCH_SIZE in seen and len(bag) <= LONGEST and budget.level != "quick":
        search = Ordering(seen, module, rows, list(bag), states, deviation, frequencies)
        if (text := search()) is not None:
            return Reconstruction((text,), "matched", details=details)
    return Reconstruction((bag,) * texts, "matched", ordered=False, details=details)


def _by_signs(seen: Observation, search: Signed, frequencies: Tensor) -> Reconstruction:
    """The text of ``seen`` that ``search`` reads, in order; of several, or where none is found, the bag of the words that
    follow."""
    details: dict[str, Parameter] = {"distinct_tokens": len(search.bag), "signs": True}
    texts = seen.batch_size if Grant.BATCH_SIZE in seen else 1
    tell(lambda: [search.bag] * texts, ordered=False)
    alone = texts == 1 and Grant.BATCH_SIZE in seen and len(search.bag) <= SIGNED_LONGEST
    text = search.text(_beginnings(seen, search, frequencies)) if alone else None
    if text is not None:
        for whole in (text, text[1:]):  # the first word follows none, so that one too many may stand there
            if proof := prove(seen, [whole]):  # of AdamW's steps, where they can be repeated
                return verified(proof, details)
        return Reconstruction((text,), "matched", details=details)
    return Reconstruction((search.bag,) * texts, "matched", ordered=False, details=details)


def _beginnings(seen: Observation, search: Signed, frequencies: Tensor) -> list[list[tuple[int, ...]]]:
    """Beginnings of the text, in groups of which the first is the likeliest: the tokenizer's own tokens. Then the words that
    are read, if the gradient of an embedding of its own tells them, else those whose rows stand out, and frequent ones."""
    known, frame = parts(seen.model), tuple(seen.vocabulary.prefix)
    inputs = None if known.tied else seen.whole(known.word_embedding)
    if inputs is None:
        single = [one for one in starts_of(seen, search.words[:STARTS].tolist(), frequencies) if one != frame]
    else:
        sizes = inputs.float().norm(dim=1).topk(min(SIGNED_LONGEST, len(inputs)))
        single = [(int(word),) for word in sizes.indices[sizes.values > sizes.values[0] / 2]]
        frame = frame if {*frame} <= {*chain(*single)} else ()
    return [group for group in ([frame] if frame else [], single) if group]


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
