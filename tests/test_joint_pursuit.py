"""Joint pursuit: adapters of small rank show the words of far more tokens than they have dimensions, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from span_setting import in_later_round

from rasura.attacks.updates.joint_pursuit import Found, JointPursuit, Pursuit
from rasura.attacks.updates.span.inputs import Inputs
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.local import Adapter
from rasura.core.rng import generator
from rasura.core.threat import THREATS, observe
from rasura.core.values import Observation, Reconstruction
from rasura.data.text import Example, encode
from rasura.registry import parse_update
from rasura.testing.tiny import CAUSAL_VOCABULARY, batch_of, tiny
from rasura.victims.loading import Victim, load
from rasura.victims.step import step

TEXT = "the patient owes 4250 euros to dr brandt of the clinic in basel, who treated her"


@pytest.fixture(scope="module")
def minilm(minilm_path: Path) -> Victim:
    return load(minilm_path, "classification")


def seen_of(
    victim: Victim, adapter: Adapter, texts: Sequence[str] = (TEXT,), update: str = "fedsgd", b: float = 0.02
) -> Observation:
    """What a client sends in a later round."""
    model = in_later_round(victim.model, victim.task, adapter, b)
    batch = encode([Example(t, None, 1) for t in texts], victim.tokenizer, "classification", max_length=64, num_labels=2)
    local, _ = parse_update(update)
    truth = step(model, batch, (), task="classification", vocabulary=victim.vocabulary, rng=generator(0), local=local)
    return observe(truth, THREATS["honest-server"])


def read(seen: Observation) -> Reconstruction:
    return JointPursuit()(seen, rng=generator(0), budget=Budget())


@pytest.mark.slow
def test_an_adapter_of_few_dimensions_gives_a_longer_text_back(minilm: Victim) -> None:
    """Rank 8 on queries and values: 16 dimensions, 20 tokens."""
    seen = seen_of(minilm, Adapter(8))
    guess = read(seen)
    assert guess.details["dimensions"] == 16 and len(guess.tokens[0]) == 20
    assert guess.confidence == "verified" and minilm.vocabulary.text(guess.tokens[0]) == minilm.vocabulary.text(
        minilm.tokenizer(TEXT)["input_ids"]
    )


@pytest.mark.slow
def test_a_decoder_with_positions_gives_its_last_token_as_well() -> None:
    """Rank 4 on all linear layers: fewer dimensions a block than the text has tokens."""
    text = [40, 3, 41, 9, 3, 42, 50, 51, 4, 60, 61, 277]
    model = in_later_round(tiny("gpt2", "causal", hidden=96), "causal", Adapter(4))
    truth = step(model, batch_of([text], "causal"), (), task="causal", vocabulary=CAUSAL_VOCABULARY, rng=generator(0))
    guess = read(observe(truth, THREATS["honest-server"]))
    assert guess.details["dimensions"] == 4 and guess.tokens == (tuple(text),) and guess.confidence == "verified"


def test_the_first_round_shows_nothing(minilm: Victim) -> None:
    with pytest.raises(NotApplicable, match="above zero"):
        read(seen_of(minilm, Adapter(8), b=0.0))


@pytest.mark.slow
def test_noise_is_not_explained(minilm: Victim) -> None:
    seen = seen_of(minilm, Adapter(4))
    for n, g in seen.gradients.items():
        g.copy_(torch.randn(g.shape, generator=generator(2, n)))
    try:
        guess = read(seen)
    except AttackFailed:
        return
    assert guess.confidence == "matched"


def test_what_adamw_sends_is_a_ranking_alone(minilm: Victim) -> None:
    guess = read(seen_of(minilm, Adapter(8), update="local:batch=0/lr=1e-3"))
    assert guess.confidence == "matched" and not guess.ordered and guess.details["signs"]


def test_against_all_subsets() -> None:
    """The slow obvious reference: of all sets of words, one alone explains what is seen, and the search finds it."""
    from itertools import combinations

    from rasura.testing.tiny import tiny

    inputs = Inputs(tiny("llama", "causal").double())
    ids = torch.arange(4, 20)
    truth = (5, 9, 14)
    states = inputs.first(torch.tensor(truth), 0).double()
    mixed = torch.randn(2, 3, generator=generator(4), dtype=torch.double) @ states
    space = torch.linalg.qr(mixed.T).Q
    explaining = []
    for some in combinations(ids.tolist(), 3):
        basis = torch.linalg.qr(inputs.first(torch.tensor(some), 0).double().T).Q
        if float((space - basis @ (basis.T @ space)).norm()) < 1e-6:
            explaining.append(some)
    assert explaining == [truth]
    found = Pursuit(space, inputs, ids, 1, one_each=False)()
    assert sorted(token for _, token in found.rows) == list(truth) and found.left < 1e-6


@pytest.mark.parametrize(
    ("alone", "left", "dimensions", "width", "known"),
    [
        ([0.5, 0.3], 1e-5, 4, 64, True),
        ([0.5, 1e-5], 1e-5, 4, 64, False),  # a token that explains no more than rounding
        ([0.5, 0.3], 0.2, 4, 64, False),  # much is left
        ([0.5] * 60, 1e-5, 4, 64, False),  # as many tokens as inputs
        ([], 1e-5, 4, 64, False),
        ([0.5, 0.3], float("nan"), 4, 64, False),
        ([0.5, 0.3], 1e-3, 1, 5, False),  # fewer numbers than bags
    ],
)
def test_a_bag_is_believed_only_where_chance_cannot_explain_it(
    alone: list[float], left: float, dimensions: int, width: int, known: bool
) -> None:
    found = Found([(0, k) for k in range(len(alone))], alone, left)
    assert found.believed(dimensions, width, 30_000) is known
