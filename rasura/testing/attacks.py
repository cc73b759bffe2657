"""The laws that every attack on an update keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Generator

from rasura.core.interfaces import Attack, AttackFailed, Budget, NotApplicable
from rasura.core.rng import generator
from rasura.core.specs import AttackSpec
from rasura.core.values import Grant, Message, Observation, Reconstruction
from rasura.registry import ATTACKS
from rasura.testing.defenses import snapshot
from rasura.testing.settings import TEXT, at_home, seen
from rasura.testing.tiny import VOCABULARY

QUICK = Budget("quick")


def check_attack(spec: AttackSpec) -> None:
    """Hold ``spec`` to every law. Raises ``AssertionError`` for the first that it breaks."""
    says_who_it_is(spec)
    for rows in (1, 2):
        reads_only_what_it_declares(spec, rows)
    repeats_with_its_seed_and_leaves_what_it_saw(spec)
    if spec.home.reads:
        reads_its_home_setting(spec)
    claims_nothing_on_noise(spec)


def says_who_it_is(spec: AttackSpec) -> None:
    """Its name is that of the spec, and what it needs and uses are grants."""
    attack = spec.make()
    assert attack.name == spec.name
    assert all(isinstance(g, Grant) for g in (*attack.needs, *attack.uses))
    assert spec.seconds > 0 and {"quick", "default", "paper"} <= set(spec.work) and spec.home.task in spec.tasks


def guessed(attack: Attack[Reconstruction], observation: Observation, seed: int = 0) -> Reconstruction:
    """The guess where the attack is at home: one that declines there keeps no law."""
    guess = attack(observation, rng=generator(seed, "attack"), budget=QUICK)
    assert guess.tokens or guess.labels or guess.images is not None, f"{attack.name} guesses nothing where it is at home"
    return guess


def tried(attack: Attack[Reconstruction], observation: Observation, seed: int = 0) -> Reconstruction | str:
    """The guess, or how the attack declined, where it may; any other exception breaks the law."""
    try:
        return attack(observation, rng=generator(seed, "attack"), budget=QUICK)
    except (AttackFailed, NotApplicable) as reason:
        assert str(reason) and "\n" not in str(reason)
        return type(reason).__name__


def reads_only_what_it_declares(spec: AttackSpec, rows: int = 1) -> None:
    """Granted exactly its needs, or its needs and uses, it reaches for nothing else (which raises ``NotGranted``)."""
    attack = spec.make()
    sent = at_home(spec, rows)
    for grants in {frozenset(attack.needs), frozenset(attack.needs | attack.uses)}:
        guess = guessed(attack, seen(sent, grants))
        if guess.images is None:  # who is not told of a batch may take it for one text
            assert len(guess.labels or guess.tokens) in (1, rows)


def repeats_with_its_seed_and_leaves_what_it_saw(spec: AttackSpec) -> None:
    """The same seed gives the same guess, apart from the seconds among its details; model, gradients and torch's generator
    are left as they were."""
    attack = spec.make()
    observation = seen(at_home(spec), frozenset(attack.needs | attack.uses))
    model = observation.granted.get(Grant.MODEL)
    before = None if model is None else snapshot(model)
    sums = {n: float(g.double().sum()) for n, g in observation.gradients.items()}
    state = torch.get_rng_state()
    first, again = guessed(attack, observation), guessed(spec.make(), observation)
    if first.images is None:
        assert timeless(first) == timeless(again)
    else:
        assert again.images is not None and torch.equal(first.images, again.images)
    assert torch.equal(torch.get_rng_state(), state)
    assert {n: float(g.double().sum()) for n, g in observation.gradients.items()} == sums
    assert before is None or (model is not None and snapshot(model) == before)


def timeless(guess: Reconstruction) -> Reconstruction:
    """``guess`` without the details that are clock readings, whose names end in ``seconds``."""
    return replace(guess, details={k: v for k, v in guess.details.items() if not k.endswith("seconds")})


def reads_its_home_setting(spec: AttackSpec) -> None:
    """All granted, it recovers the whole text with certainty."""
    guess = guessed(spec.make(), seen(at_home(spec), frozenset(Grant)))
    assert guess.tokens == (TEXT,) and guess.confidence in ("verified", "span")


def claims_nothing_on_noise(spec: AttackSpec) -> None:
    """Where the update is replaced by Gaussian noise it claims no certainty, and reads no more than the blind attack. So it
    is where only the largest entries of the noise were sent, whether a mask shows which or not."""
    attack, sent = spec.make(), at_home(spec)
    grants = frozenset(attack.needs | attack.uses | {Grant.BASE_MODEL, Grant.BATCH_SIZE})
    model = {Grant.MODEL} if sent.task == "vision" else set()  # the size of an image is the model's
    blind = tried(ATTACKS["blind"].make(), seen(sent, grants | model))
    assert isinstance(blind, Reconstruction)
    chance = max((token_f1(t, TEXT) for t in blind.tokens), default=0.0)
    for noises in (_noise, _largest_of_noise):
        scores = []
        for seed in range(2):
            for noise in noises(sent.message, generator(seed, "noise")):
                guess = tried(attack, seen(sent, grants, noise), seed)
                if isinstance(guess, Reconstruction):
                    assert guess.confidence not in ("verified", "span")
                    scores.append(max((token_f1(t, TEXT) for t in guess.tokens), default=0.0))
        assert sum(scores) <= (chance + 0.05) * len(scores)


def _noise(sent: Message, rng: Generator) -> Iterator[Message]:
    entries = {n: torch.randn(g.shape, generator=rng) for n, g in sent.gradients.items()}
    # A mask by chance, as dense as the one that was sent: one that follows the text would tell of it.
    density = {n: float(mask.float().mean()) for n, mask in sent.visible.items()}
    visible = {n: torch.rand(entries[n].shape, generator=rng) < one for n, one in density.items()}
    yield Message({n: g * visible[n] if n in visible else g for n, g in entries.items()}, visible)


def _largest_of_noise(sent: Message, rng: Generator) -> Iterator[Message]:
    """One entry in a thousand; without a mask, and with one."""
    entries = {n: torch.randn(g.shape, generator=rng) for n, g in sent.gradients.items()}
    limit = torch.cat([g.abs().flatten() for g in entries.values()]).sort().values
    kept = {n: g.abs() >= limit[int(0.999 * len(limit))] for n, g in entries.items()}
    largest = {n: g * kept[n] for n, g in entries.items()}
    yield Message(largest)
    yield Message(largest, kept)


def token_f1(guess: Sequence[int], text: Sequence[int]) -> float:
    """F1 of the tokens of two texts, special tokens left out, in [0, 1]."""
    a, b = (Counter(i for i in ids if i >= 0 and i not in VOCABULARY.special_ids) for ids in (guess, text))
    return 2 * sum((a & b).values()) / max(1, sum(a.values()) + sum(b.values()))
