"""What the metrics of a service say, on ids made for it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rasura.core.answers import ServiceTranscript, TokenReading
from rasura.core.values import UNKNOWN, Mechanism, Stage
from rasura.metrics.service import BagF1, RougeL, TopTokens
from rasura.testing.tiny import CLS, SEP, VOCABULARY

PLAIN = Mechanism("none", Stage.DATA)


def truth(*texts: list[int]) -> ServiceTranscript:
    """Clients sent ``texts``, each as a tokenizer frames it."""
    ids = tuple((CLS, *text, SEP) for text in texts)
    return ServiceTranscript(nn.Identity(), nn.Identity(), torch.arange(VOCABULARY.size), ids, VOCABULARY, PLAIN)


def guess(*texts: list[int], ordered: bool = True) -> TokenReading:
    """The first guess at each place, of ordered guesses also at those of special tokens."""
    return TokenReading(tuple(torch.tensor(text)[:, None] for text in texts), ordered)


def test_guesses_at_special_tokens_count_nowhere() -> None:
    said, read = truth([50, 51]), guess([77, 50, 51, 78])
    for metric in (TopTokens(1), BagF1(), RougeL()):
        assert metric(read, said) == [1.0], metric.name
    assert BagF1()(guess([77, 50, 51, 78], ordered=False), said) == [4 / 6], "a bag names them all"


IDS = st.integers(20, 24)


@given(st.lists(st.tuples(IDS, st.sampled_from([CLS, SEP, UNKNOWN]) | IDS), min_size=1, max_size=9), IDS, IDS)
def test_tokens_wherever_they_stand_are_never_fewer_than_in_their_places(
    pairs: list[tuple[int, int]], first: int, last: int
) -> None:
    said, read = truth([own for own, _ in pairs]), guess([first, *(named for _, named in pairs), last])
    (bag,), (places,) = BagF1()(read, said) or (), TopTokens(1)(read, said) or ()
    assert bag >= places
