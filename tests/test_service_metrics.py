"""What the metrics of a service say, on ids made for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rasura.core.answers import ServiceTranscript, TokenReading
from rasura.core.errors import InputError
from rasura.core.values import UNKNOWN, Mechanism, Stage
from rasura.metrics.service import BagF1, RougeL, TopTokens
from rasura.registry import SERVICE_METRICS
from rasura.runs.scoring import likeness, recovered_texts, service_scores
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


KNOWN = replace(VOCABULARY, special_ids=VOCABULARY.special_ids | {7}, unknown_ids=frozenset({7}))
"""A tokenizer that puts id 7 in place of every word that it does not know."""


def test_a_text_of_which_the_tokenizer_knows_no_word_is_not_measured() -> None:
    said = replace(truth([7, 7], [50, 51], []), vocabulary=KNOWN)
    for read in (
        guess([CLS, 7, 7, SEP], [CLS, 50, 51, SEP], [CLS, SEP]),
        guess([60, 60, 60, 60], [CLS, 50, 51, SEP], [0, 0]),
    ):
        for metric in (TopTokens(1), TopTokens(3), RougeL(), BagF1()):
            values = metric(read, said) or ()
            assert [math.isnan(v) for v in values] == [True, False, True] and values[1] == 1.0, metric.name
        for name, found in service_scores(read, said).items():
            assert found["n"] == 1 == found["mean"] == found["worst"], name


@dataclass(frozen=True)
class Always:
    value: float
    name: str = "top1"

    def __call__(self, guess: TokenReading, truth: ServiceTranscript) -> Sequence[float]:
        return [self.value] * len(truth.ids)


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_only_such_a_text_is_left_out_whatever_a_metric_says(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SERVICE_METRICS.specs, "top1", replace(SERVICE_METRICS["top1"], make=lambda: Always(value)))
    said, read = replace(truth([7], [50]), vocabulary=KNOWN), guess([CLS, 7, SEP], [CLS, 50, SEP])
    if value == value:
        blank, other = service_scores(read, said)["top1"]["per_record"]
        assert math.isnan(blank) and other == value
    else:
        with pytest.raises(InputError, match="top1 is not a number"):
            service_scores(read, said)


def test_words_that_the_tokenizer_does_not_know_count_as_not_read() -> None:
    said = replace(truth([7, 7, 50, 7]), vocabulary=KNOWN)
    read = guess([CLS, 7, 7, 50, 7, SEP])
    for metric, share in ((TopTokens(1), 0.25), (TopTokens(3), 0.25), (BagF1(), 2 / 5), (RougeL(), 2 / 5)):
        assert metric(read, said) == [share], metric.name
    row = recovered_texts(read, said, True)[0]
    assert row["unknown"] == [3, 4] and row["sent"] == row["read"] == "· · w50 ·" and row["score"] == 2 / 5


def test_a_text_without_letters_and_digits_has_no_rouge() -> None:
    """Read word for word, it scored 0."""
    marks = {50: "?!", 51: "😀", 52: "help"}
    spoken = replace(VOCABULARY, decode=lambda ids: " ".join(marks[i] for i in ids))
    said, read = replace(truth([50, 51], [52]), vocabulary=spoken), guess([CLS, 50, 51, SEP], [CLS, 52, SEP])
    found = service_scores(read, said)
    blank, other = found["rougeL"]["per_record"]
    assert math.isnan(blank) and other == 1.0 and found["top1"]["per_record"] == [1.0, 1.0]
    for kind in ("rouge1", "rougeL"):
        assert likeness([[50], [52]], [[50], [52]], spoken)[f"continuation_{kind}"]["n"] == 1


def test_continuations_without_a_known_word_are_not_measured() -> None:
    found = likeness([[50], [50]], [[7], [50, 7]], KNOWN)["continuation_rouge1"]
    assert found["n"] == 1 and found["mean"] == pytest.approx(2 / 3)


IDS = st.integers(20, 24)


@given(st.lists(st.tuples(IDS, st.sampled_from([CLS, SEP, UNKNOWN]) | IDS), min_size=1, max_size=9), IDS, IDS)
def test_tokens_wherever_they_stand_are_never_fewer_than_in_their_places(
    pairs: list[tuple[int, int]], first: int, last: int
) -> None:
    said, read = truth([own for own, _ in pairs]), guess([first, *(named for _, named in pairs), last])
    (bag,), (places,) = BagF1()(read, said) or (), TopTokens(1)(read, said) or ()
    assert bag >= places
