"""Secrets come from the operating system alone: with every seed fixed they differ, with its bytes fixed they repeat."""

from __future__ import annotations

import os
import pickle
import random
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from secret_setting import (
    DISTRIBUTIONS,
    NAMES,
    NOISY,
    PUBLIC,
    QUIET,
    TEXTS,
    Draw,
    federated,
    flat,
    key,
    sent,
    states,
    system,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rasura.core.rng import (
    SecretGenerator,
    bernoulli,
    child,
    drawing,
    gamma,
    generator,
    integers,
    laplace,
    normal,
    permutation,
    secret_generator,
    uniform,
)
from rasura.core.threat import service_transcript
from rasura.defenses.significance import sensitivity
from rasura.runs.drawing import Batches
from rasura.service_protections.obfuslm.model import obfuscate, obfuscate_embedding
from rasura.service_protections.obfuslm.settings import ObfuscationSettings
from rasura.service_protections.services import cape, custext, dp_forward, santext, sentinel, text_obfuscator
from rasura.testing.tiny import VOCABULARY, batch_for
from rasura.victims.batching import batches, drawn

LIKE = torch.ones((), dtype=torch.float64)
USES: dict[str, Draw] = {
    **{text: (lambda rng, text=text: sent(text, rng)) for texts in NOISY.values() for text in texts},  # type: ignore[misc]
    **{
        f"dropout of {family}, {attention}": (lambda rng, f=family, a=attention: sent("dropout:0.5", rng, f, a))  # type: ignore[misc]
        for family in ("gpt2", "llama", "distilbert")
        for attention in ("eager", "sdpa")
    },
    "probes of a sealing's mask": lambda rng: sensitivity(
        PUBLIC, batch_for("classification").inputs(), NAMES, "randomised", rng, probes=2
    ).values(),
    "Poisson sampling": lambda rng: drawn(100, 10, rng),
    "a loader's Poisson batches": lambda rng: list(Batches(100, 10, rng, poisson=True)),
    "a loader's shuffled batches": lambda rng: list(Batches(100, 10, rng, poisson=False)),
    "shuffled batches": lambda rng: batches(range(100), 4, rng),
    "ObfusLM's key": lambda rng: key(False, rng),
    "ObfusLM+'s key": lambda rng: key(True, rng),
    "ObfusLM's permutation alone": lambda rng: obfuscate(PUBLIC, ObfuscationSettings(k=1), (), rng).tokens,
    "an embedding's key": lambda rng: obfuscate_embedding(nn.Embedding(60, 4), ObfuscationSettings(k=3), (), rng).tokens,
    "SentinelLMs' key": lambda rng: sentinel(PUBLIC, VOCABULARY, rng=rng).served.state_dict().values(),
    "SANTEXT+": lambda rng: santext(PUBLIC, VOCABULARY, epsilon=0.1).sent(TEXTS, rng),
    "CUSTEXT+": lambda rng: custext(PUBLIC, VOCABULARY, epsilon=0.1).sent(TEXTS, rng),
    "DP-Forward": lambda rng: states(dp_forward(PUBLIC, VOCABULARY), rng),
    "CAPE": lambda rng: states(cape(PUBLIC, VOCABULARY, TEXTS, depth=0), rng),
    "TextObfuscator": lambda rng: states(text_obfuscator(PUBLIC, VOCABULARY, TEXTS, clusters=3, depth=0), rng),
    "a federated client": federated,
}

BY_DEFAULT: dict[str, Callable[[], Any]] = {
    "ObfusLM's key": lambda: obfuscate(PUBLIC, ObfuscationSettings(k=4), ()).tokens,
    "an embedding's key": lambda: obfuscate_embedding(nn.Embedding(60, 4), ObfuscationSettings(k=3)).tokens,
    "SentinelLMs' key": lambda: sentinel(PUBLIC, VOCABULARY).tokens,
    "SANTEXT+": lambda: santext(PUBLIC, VOCABULARY, epsilon=0.1).sent(TEXTS),
    "states": lambda: service_transcript(dp_forward(PUBLIC, VOCABULARY), [tuple(t) for t in TEXTS]).vectors,
}


def seeds_fixed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # whatever might be drawn from it


def differs(draw: Callable[[], Any], times: int = 5) -> bool:
    """Whether draws under fixed seeds differ; two of them can agree by chance (one pair in 200 for a toy GHOST)."""
    found = set()
    for _ in range(times):
        seeds_fixed()
        found.add(flat(draw()))
        if len(found) > 1:
            return True
    return False


@pytest.fixture
def no_seed_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that a generator could be seeded by is the same every time."""
    monkeypatch.setattr(secrets, "randbits", lambda bits: 7)
    monkeypatch.setattr(secrets, "randbelow", lambda below: 7 % below)
    monkeypatch.setattr(secrets, "token_bytes", lambda count=32: b"7" * count)
    monkeypatch.setattr(random, "SystemRandom", lambda: random.Random(7))
    monkeypatch.setattr(torch, "seed", lambda: torch.manual_seed(7).initial_seed())
    fresh = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed=None: fresh(7))


@pytest.mark.parametrize("name", [*DISTRIBUTIONS, *USES])
def test_with_every_seed_fixed_secret_draws_differ(name: str, no_seed_of_the_system: None) -> None:
    draw = {**DISTRIBUTIONS, **USES}[name]
    assert differs(lambda: draw(secret_generator()))


@pytest.mark.parametrize("name", [*DISTRIBUTIONS, *USES])
def test_the_operating_system_is_their_only_source(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, found = {**DISTRIBUTIONS, **USES}[name], []
    for start in (1, 1, 2):
        stream = random.Random(start)
        monkeypatch.setattr(os, "urandom", stream.randbytes)
        if name == "an embedding's key":
            torch.manual_seed(0)  # of the vectors that are obfuscated
        found.append(flat(draw(secret_generator())))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_what_is_given_no_randomness_takes_the_secret_one(name: str, no_seed_of_the_system: None) -> None:
    assert differs(BY_DEFAULT[name])


@pytest.mark.parametrize("name", sorted(QUIET))
def test_what_draws_nothing_is_the_same_every_time(name: str) -> None:
    first, second = (sent(QUIET[name], secret_generator()) for _ in range(2))
    assert flat(first) == flat(second)


# --- what a secret generator is


REFUSED: dict[str, Callable[[Any], Any]] = {
    "rand": lambda rng: torch.rand(3, generator=rng),
    "randn": lambda rng: torch.randn(3, generator=rng),
    "randperm": lambda rng: torch.randperm(3, generator=rng),
    "randint": lambda rng: torch.randint(3, (3,), generator=rng),
    "exponential": lambda rng: torch.empty(3).exponential_(generator=rng),
    "multinomial": lambda rng: torch.multinomial(torch.ones(3), 1, generator=rng),
    "bernoulli": lambda rng: torch.bernoulli(torch.ones(3), generator=rng),
    "a seed": child,
}


@pytest.mark.parametrize("name", REFUSED)
def test_torch_draws_nothing_from_it(name: str) -> None:
    assert not isinstance(secret_generator(), torch.Generator)
    with pytest.raises(TypeError):
        REFUSED[name](secret_generator())


@pytest.mark.parametrize("name", [*(n for n in DISTRIBUTIONS if n != "von Mises-Fisher, line"), "drawing"])
def test_no_randomness_at_all_is_never_the_global_generator(name: str) -> None:
    def enter(rng: Any) -> None:
        with drawing(rng):
            pass

    with pytest.raises((TypeError, AttributeError)):
        {**DISTRIBUTIONS, "drawing": enter}[name](None)  # type: ignore[dict-item, arg-type]


def test_it_has_nothing_that_could_be_kept() -> None:
    one = secret_generator()
    assert not hasattr(one, "__dict__") and not hasattr(one, "get_state") and not hasattr(one, "initial_seed")
    again = pickle.loads(pickle.dumps(one))
    assert isinstance(again, SecretGenerator) and not torch.equal(uniform((3,), one), uniform((3,), again))


@pytest.mark.parametrize(
    ("draw", "least"),
    [
        (lambda rng: uniform((1000,), rng), 8000),
        (lambda rng: normal((1000,), rng, torch.float32), 8000),
        (lambda rng: laplace((1000,), rng), 8000),
        (lambda rng: permutation(1000, rng), 16_000),
        (lambda rng: integers(3, (1000,), rng), 8000),
        (lambda rng: bernoulli(0.5, (1000,), rng), 4000),
    ],
)
def test_every_number_has_bits_of_its_own(draw: Draw, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that the system seeds once would take 16 or 32 bytes."""
    taken: list[int] = []
    system = os.urandom
    monkeypatch.setattr(os, "urandom", lambda count: (taken.append(count), system(count))[1])
    draw(secret_generator())
    assert sum(taken) == least


# --- the draws are right


@pytest.mark.parametrize(
    ("draw", "law"),
    [
        (lambda rng: uniform((20_000,), rng), stats.uniform()),
        (lambda rng: normal((150, 133), rng).flatten(), stats.norm()),
        (lambda rng: normal((20_001,), rng, torch.float32).double(), stats.norm()),
        (lambda rng: laplace((20_000,), rng), stats.laplace()),
        (lambda rng: gamma(torch.full((5000,), 0.5, dtype=torch.float64), rng), stats.gamma(0.5)),
    ],
)
@pytest.mark.parametrize("secret", [True, False])
def test_draws_have_their_distribution(draw: Draw, law: Any, secret: bool) -> None:
    found = draw(secret_generator() if secret else generator(0)).numpy()
    assert found.dtype == np.float64 and stats.kstest(found, law.cdf).pvalue > 1e-6
    half = len(found) // 2  # the two halves of Box and Muller are independent
    assert abs(np.corrcoef(found[:half], found[half : 2 * half])[0, 1]) < 0.06
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.06


def test_the_ends_of_the_uniform_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    system(monkeypatch, 0, 2**64 - 1, 2**63, 1 << 12, 4095)
    found = uniform((5,), SecretGenerator()).tolist()
    assert found == [2**-53, 1 - 2**-53, 0.5 + 2**-53, 1.5 * 2**-52, 2**-53]
    system(monkeypatch, 0, 2**64 - 1)
    assert laplace((2,), SecretGenerator()).tolist() == pytest.approx([np.log(2**-52), -np.log(2**-52)])


def test_box_and_muller_take_radius_and_angle(monkeypatch: pytest.MonkeyPatch) -> None:
    system(monkeypatch, 0, 2**62, 2**63, 2**61)
    found = normal((4,), SecretGenerator()).tolist()
    radius = np.sqrt(-2 * np.log([2**-53, 0.25]))
    assert found == pytest.approx([-radius[0], radius[1] * np.sqrt(0.5), 0.0, radius[1] * np.sqrt(0.5)], abs=1e-12)
    assert max(map(abs, found)) < 8.6


def test_integers_are_as_likely_as_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of three the last 64-bit number, 2^64 - 1, is one too many: it is drawn again.
    system(monkeypatch, 2**64 - 1, 2**64 - 2, 5, 7)
    assert integers(3, (3,), SecretGenerator()).tolist() == [7 % 3, (2**64 - 2) % 3, 2]
    system(monkeypatch, 2**64 - 1)
    assert integers(2, (1,), SecretGenerator()).tolist() == [1], "a power of two leaves nothing over"
    monkeypatch.undo()
    for rng in (secret_generator(), generator(0)):
        found = integers(5, (40, 50), rng)
        assert found.shape == (40, 50) and stats.chisquare(found.flatten().bincount(minlength=5)).pvalue > 1e-6
    with pytest.raises(ValueError, match="at least 1"):
        integers(0, (1,), secret_generator())


def test_permutations_hold_every_number_and_every_order() -> None:
    for rng in (secret_generator(), generator(0)):
        assert permutation(0, rng).tolist() == [] and sorted(permutation(99, rng).tolist()) == list(range(99))
        orders = [permutation(3, rng) @ torch.tensor([9, 3, 1]) for _ in range(1200)]
        _, counts = torch.stack(orders).unique(return_counts=True)
        assert len(counts) == 6 and stats.chisquare(counts).pvalue > 1e-6


def test_bernoulli_has_its_chance_and_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for rng in (secret_generator(), generator(0)):
        assert not bool(bernoulli(0.0, (999,), rng).any()) and bool(bernoulli(1.0, (999,), rng).all())
        found = bernoulli(0.3, (3, 10_000), rng)
        assert found.dtype == torch.bool and found.shape == (3, 10_000)
        assert stats.binomtest(int(found.sum()), 30_000, 0.3).pvalue > 1e-6
    system(monkeypatch, (2**31 << 32) + 2**31 - 1)
    assert bernoulli(0.5, (2,), SecretGenerator()).tolist() == [True, False]
    for chance in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="between 0 and 1"):
            bernoulli(chance, (1,), secret_generator())


def test_long_draws_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rasura.core.rng._AT_ONCE", 7)
    assert len(normal((15,), secret_generator()).unique()) == 15
    assert 150 < int(bernoulli(0.5, (400,), secret_generator()).sum()) < 250


# --- what torch draws by itself


def test_masks_of_dropout_fit_the_gradient_and_have_their_rate() -> None:
    x = torch.ones(20_000, requires_grad=True)
    with drawing(secret_generator()):
        for out in (nn.functional.dropout(x, 0.3), torch.native_dropout(x, 0.3, True)[0]):
            assert out.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
            assert stats.binomtest(int((out > 0).sum()), 20_000, 0.7).pvalue > 1e-6
            (gradient,) = torch.autograd.grad(out.sum(), x)
            assert torch.equal(gradient, out.detach())
        kept = torch.native_dropout(x, 0.3, True)
        assert torch.equal(kept[1], kept[0] > 0) and kept[1].dtype == torch.bool
        assert not bool(torch.native_dropout(x, 1.0, True)[0].any())
        for rate, training in ((0.3, False), (0.0, True)):
            assert torch.equal(nn.functional.dropout(x, rate, training), x)
            assert torch.equal(torch.native_dropout(x, rate, training)[0], x)


def test_noise_of_layers_has_its_distribution() -> None:
    like = torch.empty(20_000)
    with drawing(secret_generator()):
        assert stats.kstest(torch.randn_like(like).double().numpy(), "norm").pvalue > 1e-6
        found = like.uniform_(-2, 3)
        assert stats.kstest(found.double().numpy(), stats.uniform(-2, 5).cdf).pvalue > 1e-6
        law = torch.distributions.Laplace(0.0, 1.0).sample((20_000,))
        assert stats.kstest(law.double().numpy(), "laplace").pvalue > 1e-6
        rand = torch.rand(200, 100, dtype=torch.float64)
        assert rand.shape == (200, 100) and stats.kstest(rand.flatten().numpy(), "uniform").pvalue > 1e-6
        assert torch.rand([]).shape == ()  # as models ask whether to drop a layer
        half = torch.randn_like(like[:9], dtype=torch.bfloat16)
        assert half.dtype == torch.bfloat16


def test_the_upper_end_of_a_uniform_is_never_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    system(monkeypatch, 2**64 - 1, 0)
    with drawing(SecretGenerator()):
        found = torch.empty(2).uniform_(0, 1).tolist()
    assert found[0] == 1 - 2**-24 and found[1] >= 0


def test_attention_with_dropout_draws_the_secret_mask_too(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = (torch.randn(1, 2, 64, 4, generator=generator(n)) for n in range(2))
    v = torch.eye(64).expand(1, 2, 64, 64)

    def attended(*given: Any, **named: Any) -> Tensor:
        monkeypatch.setattr(os, "urandom", random.Random(3).randbytes)
        torch.manual_seed(0)
        with drawing(SecretGenerator()):
            return nn.functional.scaled_dot_product_attention(q, k, v, *given, **named)

    plain = nn.functional.scaled_dot_product_attention(q, k, v)
    assert torch.allclose(attended(), plain, atol=1e-6) and torch.allclose(attended(None, 0.0), plain, atol=1e-6)
    found = attended(dropout_p=0.5)
    assert torch.equal(found, attended(None, 0.5))
    dropped = found == 0
    assert stats.binomtest(int(dropped.sum()), dropped.numel(), 0.5).pvalue > 1e-6
    assert torch.allclose(found[~dropped], 2 * plain[~dropped], atol=1e-5)


UNKNOWN: dict[str, Callable[[], Any]] = {
    "randn": lambda: torch.randn(3),
    "randperm": lambda: torch.randperm(3),
    "exponential": lambda: torch.empty(3).exponential_(),
    "multinomial": lambda: torch.multinomial(torch.ones(3), 1),
    "rrelu": lambda: nn.functional.rrelu(torch.ones(3), training=True),
    "a generator of its own": lambda: torch.rand(3, generator=torch.Generator()),
    "a generator for a known draw": lambda: torch.empty(3).uniform_(generator=torch.Generator()),
    "a layer made inside": lambda: torch.empty(3).normal_(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_draw_in_a_secret_step_raises(name: str) -> None:
    with drawing(secret_generator()), pytest.raises(RuntimeError, match="refused"):
        UNKNOWN[name]()
    UNKNOWN[name]()


def test_a_backward_pass_that_draws_anew_raises() -> None:
    """Its mask would be another than that of the forward pass, so that the gradient would be wrong without a word."""
    x = torch.ones(50, requires_grad=True)
    with drawing(secret_generator()):
        out = checkpoint(lambda y: nn.functional.dropout(y, 0.5) * y, x, use_reentrant=False)
        with pytest.raises(RuntimeError, match="gradient checkpointing"):
            out.sum().backward()


def test_a_seeded_stream_repeats_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    found = []
    for seed in (1, 1, 2):
        with drawing(generator(seed)):
            found.append(nn.functional.dropout(torch.ones(99), 0.5))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert torch.equal(torch.rand(3), expected)
    assert child(generator(1)) == child(generator(1)) != child(generator(2)) and 0 <= child(generator(1)) < 2**62
