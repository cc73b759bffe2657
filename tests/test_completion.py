"""Hidden entries: low-rank completion, and the span attack through it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rasura.attacks.updates.span import Span
from rasura.attacks.updates.span.completion import complete, uncovered
from rasura.attacks.updates.span_matching import SpanMatching
from rasura.core.interfaces import Budget
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import Message, Observation
from rasura.data.text import Example, encode
from rasura.defenses.pruning import random_pruning
from rasura.registry import parse_defense
from rasura.testing.tiny import batch_of
from rasura.victims.loading import load
from rasura.victims.models import parts
from rasura.victims.step import step


def low_rank(rows: int, columns: int, rank: int, seed: int) -> Tensor:
    """A matrix whose rows and columns differ by orders of magnitude, as gradients do."""
    rng = generator(seed)
    left = torch.randn(rows, rank, generator=rng, dtype=torch.double) * 10 ** torch.randn(rows, 1, generator=rng)
    right = torch.randn(rank, columns, generator=rng, dtype=torch.double) * 3 ** torch.randn(columns, generator=rng)
    return left @ right


def top_hidden(matrix: Tensor, share: float) -> Tensor:
    return matrix.abs() <= matrix.abs().quantile(1 - share)


@settings(deadline=None, max_examples=12)
@given(rank=st.integers(2, 9), share=st.floats(0.1, 0.6), seed=st.integers(0, 99))
def test_the_largest_entries_come_back(rank: int, share: float, seed: int) -> None:
    matrix = low_rank(120, 60, rank, seed)
    visible = top_hidden(matrix, share)
    found = complete(matrix * visible, visible)
    assert found is not None and found.rank == rank
    inside = found.rows[:, None] & found.columns
    error = ((found.left @ found.right - matrix) * inside).norm() / (matrix * inside).norm()
    assert error < 1e-5 and found.columns.double().mean() > 0.5


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_entries_hidden_at_random_come_back(share: float) -> None:
    matrix = low_rank(240, 80, 5, 1)
    visible = torch.rand(matrix.shape, generator=generator(2)) > share
    found = complete(matrix * visible, visible)
    assert found is not None and found.rank == 5
    assert (found.left @ found.right - matrix).norm() / matrix.norm() < 1e-5


def test_nothing_is_made_up_where_too_little_is_seen_or_there_is_no_low_rank() -> None:
    matrix = low_rank(100, 60, 6, 3)
    few = torch.rand(matrix.shape, generator=generator(4)) > 0.9
    assert complete(matrix * few, few) is None
    noise = torch.randn(100, 60, generator=generator(5), dtype=torch.double)
    half = torch.rand(noise.shape, generator=generator(6)) > 0.5
    assert complete(noise * half, half) is None
    assert complete(matrix * 0, torch.zeros_like(half)) is None


def test_uncovered_leaves_the_observation_as_it_was() -> None:
    seen, _ = observed("frozen", 0.3)
    before = {n: g.clone() for n, g in seen.gradients.items()}
    out = uncovered(seen, 1)
    names = {lin.weight for lin in parts(seen.model).blocks[0].qkv}
    assert names & set(seen.visible) and not names & set(out.visible)
    assert set(seen.visible) - names == set(out.visible)
    assert all(torch.equal(before[n], g) for n, g in seen.gradients.items())


def observed(
    what: str, share: float, texts: tuple[str, ...] = ("Anna Berg pays 40 euros on Friday.",)
) -> tuple[Observation, tuple[str, ...]]:
    """MiniLM's gradient as the honest server sees it: embeddings frozen and the top hidden, or pruned at random."""
    victim = load("minilm", "classification")
    examples = [Example(t, None, k % 2) for k, t in enumerate(texts)]
    batch = encode(examples, victim.tokenizer, "classification", max_length=64, num_labels=2)
    defense = (random_pruning(share),) if what == "random" else ()
    truth = step(victim.model, batch, defense, task="classification", vocabulary=victim.vocabulary, rng=generator(0, "step"))
    seen = observe(truth, HONEST_SERVER)
    if what == "random":
        return seen, batch.seen
    kept = {n: g for n, g in seen.gradients.items() if n not in parts(victim.model).embedding_names}
    sizes = torch.cat([g.abs().flatten() for g in kept.values()])
    cut = sizes.kthvalue(round((1 - share) * len(sizes))).values
    visible = {n: g.abs() <= cut for n, g in kept.items()}
    message = Message({n: g * visible[n] for n, g in kept.items()}, visible)
    return Observation(message, seen.task, seen.granted), batch.seen


@pytest.mark.slow
@pytest.mark.parametrize("what, share", [("frozen", 0.1), ("frozen", 0.6), ("random", 0.75), ("random", 0.9)])
def test_span_reads_through_hidden_entries(what: str, share: float) -> None:
    seen, texts = observed(what, share)
    guess = Span()(seen, rng=generator(1), budget=Budget())
    assert guess.confidence == "verified"
    assert tuple(seen.vocabulary.text(t) for t in guess.tokens) == texts


@pytest.mark.slow
def test_two_texts_come_back_through_hidden_entries() -> None:
    seen, texts = observed("random", 0.75, ("Anna Berg pays 40 euros.", "The bank is closed on Monday."))
    guess = Span()(seen, rng=generator(1), budget=Budget())
    assert {seen.vocabulary.text(t) for t in guess.tokens} == set(texts)


@pytest.mark.slow
def test_span_matching_reads_through_hidden_entries() -> None:
    seen, texts = observed("random", 0.75, ("the nurse called anna.",))
    last = {n: g for n, g in seen.gradients.items() if "layer.5" in n}
    seen = Observation(Message(last, {n: seen.visible[n] for n in last}), seen.task, seen.granted)
    guess = SpanMatching()(seen, rng=generator(1), budget=Budget())
    assert tuple(seen.vocabulary.text(t) for t in guess.tokens) == texts


def test_a_decoder_s_text_that_nearly_fills_its_width_comes_back_through_a_few_hidden_entries(shared: Path) -> None:
    """47 tokens of 64 dimensions: completed, the deeper blocks show one dimension too few."""
    victim = load(shared / "models" / "stories260K-hf", "causal")
    words = victim.vocabulary
    text = (*words.prefix, *words.encode("Nobody expected that the committee would postpone its next meeting once again."))
    truth = step(
        victim.model, batch_of([[*text, *words.suffix]], "causal"), parse_defense("frozen-embeddings+sealing:grad=0.002"),
        task="causal", vocabulary=words, rng=generator(0, "step"),
    )  # fmt: skip
    guess = Span()(observe(truth, HONEST_SERVER), rng=generator(0), budget=Budget())
    assert guess.confidence == "verified" and guess.tokens == ((*text, *words.suffix),)
