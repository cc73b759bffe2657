"""Madlib (Feyisetan et al. 2020): noise on each token's vector, and the nearest token is sent in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rasura.core.interfaces import InputError
from rasura.core.rng import Randomness, gamma, normal, secret_generator
from rasura.core.specs import ServiceProtectionSpec
from rasura.core.values import Mechanism, Stage, Vocabulary
from rasura.service_protections.replacement import BLOCK, Words
from rasura.service_protections.service import Service
from rasura.victims.models import parts


@dataclass(frozen=True)
class NoisyTokens(Service):
    """A service whose client sends, for each token independently, the token nearest to its vector plus noise.

    The noise has the density ``exp(-epsilon * size)``: a uniform direction, and a length drawn from the gamma distribution
    of shape ``width`` and scale ``1 / epsilon``. ``words``: the vectors, of which tokens without one are sent as they are
    and for no other.
    """

    words: Words | None = None
    epsilon: float = 10.0

    @property
    def draws(self) -> bool:
        """Always true."""
        return True

    def sent(self, texts: Sequence[Sequence[int]], rng: Randomness | None = None) -> tuple[tuple[int, ...], ...]:
        """The ids that the client sends for ``texts``, drawn again at every call; special tokens are unchanged."""
        assert self.words is not None
        rng = rng or secret_generator()
        table, others = self.words.table, self.words.known.nonzero().flatten()
        flat = torch.tensor([i for text in texts for i in text], dtype=torch.long)
        places = self.words.known[flat].nonzero().flatten()
        for some in torch.split(places, BLOCK):
            noise = normal((len(some), table.shape[1]), rng)
            length = gamma(torch.full((len(some),), float(table.shape[1]), dtype=torch.float64), rng) / self.epsilon
            noisy = table[flat[some]] + (noise * (length / noise.norm(dim=1))[:, None]).float()
            flat[some] = others[torch.cdist(noisy, table[others]).argmin(1)]
        return tuple(tuple(part.tolist()) for part in torch.split(flat, [len(text) for text in texts]))


def madlib(model: nn.Module, vocabulary: Vocabulary, *, epsilon: float = 10.0, vectors: str = "model") -> Service:
    """Word-level metric privacy: two tokens' chances to be sent as any one differ by at most ``exp(epsilon * distance)``.

    The paper replaces words by vectors of GloVe or fastText; here it is tokens, and ``vectors`` is a file in GloVe's format,
    or ``model`` for the model's own table. ``epsilon`` counts per unit of distance. The noise's length grows with the width:
    about ``width / epsilon``. Raises ``InputError`` unless ``epsilon`` is above 0 and finite.
    """
    if not 0 < epsilon < float("inf"):
        raise InputError(f"madlib: epsilon is {epsilon}; expected a finite number above 0")
    table = model.get_parameter(parts(model).word_embedding)
    told = Mechanism("madlib", Stage.DATA, {"epsilon": epsilon, "vectors": vectors})
    words = Words.of(table, vocabulary, vectors)
    return NoisyTokens(model, model, vocabulary, told, torch.arange(len(table)), words=words, epsilon=epsilon)


SPEC = ServiceProtectionSpec(
    name="madlib",
    about="replaces each token by the one nearest to its vector plus noise",
    source="Feyisetan et al. 2020, Algorithm 1",
    make=madlib,
    example="madlib:epsilon=2",
    files=("vectors",),
)
