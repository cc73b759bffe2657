"""Membership in the training of a causal model from its answers to single tokens, without shadow models.

Some attacks ask the audited model alone. The others also ask the reference model, on which the training began. They share
the answers about the candidates: two forward passes in all.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from rasura.core.answers import Answers, Membership, ModelObservation, TokenAnswers
from rasura.core.interfaces import NotApplicable
from rasura.core.specs import MembershipSpec
from rasura.core.values import Grant, Task

_CAUSAL: frozenset[Task] = frozenset({"causal"})
_ALONE = frozenset({Grant.MODEL, Grant.CANDIDATES})
_COMPARED = _ALONE | {Grant.REFERENCE_MODEL}


def _tokens(answers: Answers, texts: int) -> tuple[TokenAnswers, ...]:
    if len(answers.tokens) != texts:
        raise NotApplicable("the model does not answer token by token; expected a causal model")
    return answers.tokens


def _guess(scores: Sequence[float]) -> Membership:
    return Membership(torch.tensor(scores, dtype=torch.float64))


class Zlib:
    """The loss over the text's length after compression, with the sign turned (Carlini et al. 2021, sec. 5.2).

    The loss is the mean over predicted tokens, the length the bytes of zlib's output for what the model was shown.
    """

    name = "zlib"
    needs = _ALONE
    uses: frozenset[Grant] = frozenset()

    def __call__(self, seen: ModelObservation, *, rng: Generator) -> Membership:
        losses = seen.ask(seen.candidates).losses.tolist()
        lengths = [len(zlib.compress(row.seen[0].encode())) for row in seen.candidates]
        return _guess([-loss / length for loss, length in zip(losses, lengths, strict=True)])


@dataclass(frozen=True)
class MinK:
    """Min-K%: the mean log probability of the least likely ``share`` of a text's tokens, one at least (Shi et al. 2024).

    ``standardised`` is Min-K%++ (Zhang et al. 2025, eq. 3): each log probability less its mean, over its standard deviation,
    for tokens drawn from the model's own distribution at that place.
    """

    standardised: bool = False
    share: float = 0.2
    needs: frozenset[Grant] = _ALONE
    uses: frozenset[Grant] = frozenset()

    @property
    def name(self) -> str:
        """``min-k`` or ``min-k++``."""
        return "min-k++" if self.standardised else "min-k"

    def __call__(self, seen: ModelObservation, *, rng: Generator) -> Membership:
        said = _tokens(seen.ask(seen.candidates), len(seen.candidates))
        values = [one.standard if self.standardised else one.logs for one in said]
        return _guess([float(v.sort().values[: max(1, int(self.share * len(v)))].mean()) for v in values])


class ReferenceLoss:
    """The reference model's loss minus the audited model's (Carlini et al. 2021, sec. 5.2, with a reference model)."""

    name = "reference-loss"
    needs = _COMPARED
    uses: frozenset[Grant] = frozenset()

    def __call__(self, seen: ModelObservation, *, rng: Generator) -> Membership:
        return Membership(seen.ask_reference(seen.candidates).losses - seen.ask(seen.candidates).losses)


def _gains(seen: ModelObservation) -> list[tuple[TokenAnswers, Tensor]]:
    """For each text the audited model's answers, and by how much each token is likelier than to the reference model."""
    said, before = (_tokens(ask(seen.candidates), len(seen.candidates)) for ask in (seen.ask, seen.ask_reference))
    return [(one, one.logs - old.logs) for one, old in zip(said, before, strict=True)]


class ErrorZone:
    """EZ-MIA: where the model errs, do tokens become likelier rather than less likely (Ilić et al. 2026)?

    arXiv 2601.12104. Over the places where the token is not the model's first choice, P sums the rises of the log
    probability over the reference model, N the falls. The paper's score is P / N. Ours is P / (P + N), which orders texts
    alike and is finite without a fall, where the authors' code says 0. With fewer than two such places, or no change at all,
    it is one half: nothing is known. The authors' code says 0 there as well, and leaves out the first predicted token.
    """

    name = "ez-mia"
    needs = _COMPARED
    uses: frozenset[Grant] = frozenset()

    def __call__(self, seen: ModelObservation, *, rng: Generator) -> Membership:
        return _guess([self._score(gain[~said.first]) for said, gain in _gains(seen)])

    def _score(self, gain: Tensor) -> float:
        moved = float(gain.abs().sum())
        return float(gain.clamp(min=0).sum()) / moved if len(gain) > 1 and moved > 0 else 0.5


WINDOWS = tuple(round(2 * 20 ** (k / 9)) for k in range(10))
"""The window sizes of WBC, in tokens: ten from 2 to 40, geometrically spaced."""


class WindowVotes:
    """WBC: the share of windows of tokens that are likelier than to the reference model (Chen et al. 2026).

    arXiv 2601.02751, sec. 4.1: for each window size, the share of windows whose summed gain is positive; the score is the
    mean over sizes. The sizes are the paper's formula for 2 to 40 tokens; those in the authors' configuration differ
    slightly. The paper's texts have 512 tokens or more. Here, sizes longer than a text are left out, and a single token is
    one window.
    """

    name = "wbc"
    needs = _COMPARED
    uses: frozenset[Grant] = frozenset()

    def __call__(self, seen: ModelObservation, *, rng: Generator) -> Membership:
        return _guess([self._score(gain) for _, gain in _gains(seen)])

    def _score(self, gain: Tensor) -> float:
        sums = torch.cat([gain.new_zeros(1), gain.cumsum(0)])
        sizes = [w for w in WINDOWS if w <= len(gain)] or [len(gain)]
        return sum(float((sums[w:] - sums[:-w] > 0).double().mean()) for w in sizes) / len(sizes)


@dataclass(frozen=True)
class RmiaOne:
    """RMIA with one reference model, which was trained on no candidate (Zarifzadeh et al. 2024, sec. 3.2, offline).

    A text's probability is that of its mean token. Its average over models with and without the text is taken as
    ``((1 + a) p + (1 - a)) / 2`` of the reference model's ``p``. The score is the share of other texts z whose ratio to that
    average is no larger (gamma 1): the reference texts or, without any, the candidates. The paper tunes ``a`` to the data;
    .3 is our choice. At 1 the order is that of ``reference-loss``, at 0 nearer to that of ``loss``.
    """

    a: float = 0.3
    name: str = "rmia-1"
    needs: frozenset[Grant] = _COMPARED
    uses: frozenset[Grant] = frozenset({Grant.REFERENCE_TEXT})

    def __call__(self, seen: ModelObservation, *, rng: Generator) -> Membership:
        ratio = self._ratio(seen.ask(seen.candidates), seen.ask_reference(seen.candidates))
        others = ratio
        if Grant.REFERENCE_TEXT in seen and seen.reference:
            others = self._ratio(seen.ask(seen.reference), seen.ask_reference(seen.reference))
        below = torch.searchsorted(others.sort().values, ratio, right=True)
        return Membership(below.double() / len(others), {"compared_with": len(others)})

    def _ratio(self, said: Answers, before: Answers) -> Tensor:
        return torch.exp(-said.losses) / (((1 + self.a) * torch.exp(-before.losses) + (1 - self.a)) / 2)


ZLIB = MembershipSpec(
    name="zlib",
    about="a member has a lower loss for how well it compresses",
    source="Carlini et al. 2021, sec. 5.2",
    make=Zlib,
    tasks=_CAUSAL,
    usual=_CAUSAL,
)

MIN_K = MembershipSpec(
    name="min-k",
    about="a member's least likely tokens are likelier",
    source="Shi et al. 2024, sec. 3",
    make=MinK,
    tasks=_CAUSAL,
    usual=_CAUSAL,
)

MIN_K_PLUS = MembershipSpec(
    name="min-k++",
    about="a member's least likely tokens are likelier, relative to what else could stand there",
    source="Zhang et al. 2025, eq. 3",
    make=lambda: MinK(standardised=True),
    tasks=_CAUSAL,
    usual=_CAUSAL,
)

REFERENCE = MembershipSpec(
    name="reference-loss",
    about="a member's loss is lower than that of the model before training",
    source="Carlini et al. 2021, sec. 5.2",
    make=ReferenceLoss,
    tasks=_CAUSAL,
    usual=_CAUSAL,
)

EZ = MembershipSpec(
    name="ez-mia",
    about="where the model errs, a member's tokens became likelier",
    source="Ilić et al. 2026, arXiv 2601.12104",
    make=ErrorZone,
    tasks=_CAUSAL,
    usual=_CAUSAL,
)

WBC = MembershipSpec(
    name="wbc",
    about="most windows of a member's tokens became likelier",
    source="Chen et al. 2026, sec. 4.1, arXiv 2601.02751",
    make=WindowVotes,
    tasks=_CAUSAL,
    usual=_CAUSAL,
)

RMIA_ONE = MembershipSpec(
    name="rmia-1",
    about="likelihood of the text relative to that of other texts, with one reference model",
    source="Zarifzadeh et al. 2024, sec. 3.2 (offline)",
    make=RmiaOne,
    tasks=_CAUSAL,
    usual=_CAUSAL,
)
