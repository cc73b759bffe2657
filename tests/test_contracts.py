"""The laws that every defense and every attack keeps. A new method adds one row to a table here."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import pytest
import torch
from tiny import CAUSAL_VOCABULARY, CLS, FAMILIES, SEP, VOCABULARY, batch_for, batch_of, tiny
from torch import nn

from rasura import recipes
from rasura.defenses.compose import ORDER, chain, none, with_aggregation
from rasura.defenses.dropout import dropout
from rasura.defenses.noise import gaussian_noise, laplace_noise
from rasura.defenses.pruning import magnitude_pruning, random_pruning
from rasura.interfaces import Attack, AttackFailed, Budget, Defense, InputError, NotApplicable, NotSent
from rasura.rng import generator
from rasura.threat import adversary_copy
from rasura.values import Batch, Grant, Message, NotGranted, Observation, Reconstruction, Stage, Transcript
from rasura.victims.step import defended, step

TASKS = [(family, "classification") for family in FAMILIES] + [("gpt2", "causal"), ("llama", "causal")]

DEFENSES: dict[str, str] = {
    "ghost": "ghost",
    "none": "none",
    "accumulate": "accumulate:8",
    "frozen-embeddings": "frozen-embeddings",
    "frozen-blocks": "frozen-blocks:1",
    "dropout": "dropout:0.2",
    "gaussian": "gaussian:0.001",
    "laplace": "laplace:0.001",
    "pruning": "pruning:0.7",
    "sealing": "sealing:grad=0.3",
    "random-pruning": "random-pruning:0.7",
    "fp16": "fp16",
    "bf16": "bf16",
    "sign": "sign",
    "dp-sgd": "dp-sgd:1.0/clip=0.5",
    "normalised": "normalised:1.0",
    "directional": "directional:1e5/blocks=parameters",
}
"""Every defense as it is written on the command line, at a setting at which it acts."""

WAITS = "accumulate"
"""The defense that acts by sending nothing: what it lets through is the plain gradient."""

NEUTRAL: dict[str, Callable[[], Defense]] = {
    "none": none,
    "dropout": lambda: chain(dropout(0.0)),
    "gaussian": lambda: chain(gaussian_noise(0.0, clip=math.inf)),
    "laplace": lambda: chain(laplace_noise(0.0, clip=math.inf)),
    "pruning": lambda: chain(magnitude_pruning(0.0)),
    "random-pruning": lambda: chain(random_pruning(0.0)),
    "mean": lambda: with_aggregation(none()),
}
"""Settings at which a defense does nothing: the message must be the gradient of the mean loss."""


@dataclass(frozen=True)
class Case:
    """A setting in which an attack is at home and must guess: model family and task, whether it reads the text in full there
    with certainty, the attack that crafts the weights, if any, and the defense that it was built against."""

    family: str = "bert"
    task: str = "classification"
    reads: bool = True
    crafts: str = ""
    defense: str = "none"


ATTACKS: dict[str, Case] = {
    "blind": Case(reads=False),
    "embedding-rows": Case(),
    "labels": Case(reads=False),
    "span": Case(),
    "dager": Case(),
    "mask-positions": Case(reads=False, defense="sealing:grad=0.3"),
    "span-matching": Case(),
    "pursuit": Case(reads=False),
    "dlg": Case(reads=False),
    "lamp-cos": Case(reads=False),
    "lamp-l1l2": Case(reads=False),
    "tag": Case(reads=False),
    "grab": Case(reads=False),
    "best": Case(),
    "decepticons": Case(reads=False, crafts="decepticons"),
    **{
        f"ghost-{name}": Case(reads=False, defense="ghost")
        for name in ("lattice", "sampling", "maximum", "median", "mean", "generation")
    },
}

TEXT = [CLS, 3, 40, 41, 4, 42, 9, SEP]


# --- the tables cover everything


def test_every_method_has_a_row() -> None:
    assert set(DEFENSES) == set(recipes.DEFENSES)
    of_images = set(recipes.IMAGE_ATTACKS) - {"blind"}  # their rows are in test_images.py
    assert set(ATTACKS) == set(recipes.ATTACKS) - of_images


# --- the step and the defenses


def send(family: str, task: str, defense: Defense, model: nn.Module | None = None, seed: int = 0) -> Transcript:
    return step(
        tiny(family, task) if model is None else model,
        batch_for(task), defense, task=task, vocabulary=VOCABULARY, rng=generator(seed, "step"),
    )  # fmt: skip


@pytest.mark.parametrize("name", NEUTRAL)
@pytest.mark.parametrize(("family", "task"), TASKS)
def test_a_step_without_protection_equals_autograd(family: str, task: str, name: str) -> None:
    model = tiny(family, task)
    loss = model(**batch_for(task).inputs()).loss
    named = dict(model.named_parameters())
    expected = dict(zip(named, torch.autograd.grad(loss, list(named.values()), allow_unused=True)))
    sent = send(family, task, NEUTRAL[name](), model)
    assert sent.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    assert {n for n, g in expected.items() if g is not None} == set(sent.message.gradients)
    for key, gradient in sent.message.gradients.items():
        assert torch.allclose(gradient, expected[key], rtol=1e-6, atol=1e-6)
        assert sent.message.visible.get(key, torch.ones(1)).all()


def snapshot(model: nn.Module) -> list[object]:
    modules = [(m.training, getattr(m, "p", None), m.__dict__.get("attention_dropout")) for m in model.modules()]
    parameters = [(n, p.requires_grad, p.grad is None, p.detach().clone()) for n, p in model.named_parameters()]
    return [*modules, *((n, r, g, float(p.double().sum())) for n, r, g, p in parameters)]


@pytest.mark.parametrize("name", DEFENSES)
@pytest.mark.parametrize(("family", "task"), TASKS)
def test_a_step_leaves_model_and_batch_as_they_were_and_repeats_with_its_seed(family: str, task: str, name: str) -> None:
    defense = recipes.parse_defense(DEFENSES[name])
    model = tiny(family, task)
    before, state = snapshot(model), torch.get_rng_state()
    first = send(family, task, defense, model)
    assert snapshot(model) == before and torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.batch.input_ids, batch_for(task).input_ids)
    again = send(family, task, defense, model)
    for key, gradient in first.message.gradients.items():
        assert torch.equal(gradient, again.message.gradients[key])


@pytest.mark.parametrize("name", DEFENSES)
@pytest.mark.parametrize(("family", "task"), TASKS)
def test_a_message_is_well_formed(family: str, task: str, name: str) -> None:
    model = tiny(family, task)
    message = send(family, task, recipes.parse_defense(DEFENSES[name]), model).message
    shapes = {n: p.shape for n, p in model.named_parameters()}
    assert message.gradients and message.kind == "fedsgd"
    for key, gradient in message.gradients.items():
        assert gradient.shape == shapes[key] and bool(torch.isfinite(gradient).all()) and not gradient.requires_grad
    for key, mask in message.visible.items():
        assert mask.dtype is torch.bool and mask.shape == shapes[key]
        assert not message.gradients[key][~mask].any()


@pytest.mark.parametrize("name", DEFENSES)
def test_a_mechanism_is_public_and_plain(name: str) -> None:
    """It names the defense as the command line does, and holds plain figures: a tensor could smuggle a secret out."""
    for part in recipes.parse_defense(DEFENSES[name]):
        assert part.mechanism.name == name and part.mechanism.stage is part.stage
        for value in part.mechanism.parameters.values():
            assert type(value) in (float, int, str, bool, type(None))
        assert json.loads(json.dumps(dict(part.mechanism.parameters))) == dict(part.mechanism.parameters)


@pytest.mark.parametrize(("one", "other"), combinations([n for n in DEFENSES if n != "none"], 2))
def test_defenses_compose_in_the_order_of_their_stages_only(one: str, other: str) -> None:
    a, b = (recipes.parse_defense(DEFENSES[n]) for n in (one, other))
    early, late = sorted((a, b), key=lambda d: ORDER.index(d[0].stage))
    if early[0].stage is late[0].stage is Stage.AGGREGATE:
        with pytest.raises(InputError, match="both aggregate the batch"):
            chain(early, late)
        return
    both = chain(early, late)
    assert both == (*early, *late)
    assert send("bert", "classification", both).mechanism == tuple(t.mechanism for t in both)
    if early[0].stage is not late[0].stage:
        with pytest.raises(InputError, match="the order is"):
            chain(late, early)


def differs(one: Message, other: Message) -> bool:
    """Whether a receiver can tell the messages apart by more than rounding."""
    if set(one.gradients) != set(other.gradients) or set(one.visible) != set(other.visible):
        return True
    pairs = [(g, other.gradients[n]) for n, g in one.gradients.items()]
    return any(float((a - b).norm()) > 1e-4 * float(b.norm()) for a, b in pairs)


@pytest.mark.parametrize("name", [n for n in DEFENSES if n not in ("none", WAITS)])
@pytest.mark.parametrize(("family", "task"), TASKS)
def test_a_defense_changes_what_is_sent(family: str, task: str, name: str) -> None:
    plain, again = (send(family, task, none()).message for _ in range(2))
    assert not differs(plain, again)
    assert differs(send(family, task, recipes.parse_defense(DEFENSES[name])).message, plain)


@pytest.mark.parametrize(("family", "task"), TASKS)
def test_the_defense_that_waits_sends_nothing_before_its_time(family: str, task: str) -> None:
    enough = send(family, task, recipes.parse_defense(DEFENSES[WAITS])).message
    assert not differs(enough, send(family, task, none()).message)
    with pytest.raises(NotSent, match="waits for 100"):
        send(family, task, recipes.parse_defense(f"{WAITS}:100"))


def test_model_defenses_undo_even_when_the_step_fails() -> None:
    model = tiny("bert", "classification")
    before = snapshot(model)
    defense = recipes.parse_defense("frozen-blocks:1+dropout:0.3")
    with pytest.raises(ZeroDivisionError), defended(model, defense):
        assert snapshot(model) != before
        raise ZeroDivisionError
    assert snapshot(model) == before


# --- the attacks


def truth(case: Case, rows: int = 1) -> Transcript:
    batch: Batch = batch_of([TEXT, [CLS, 50, 3, 51, SEP]][:rows], case.task, [1, 0][:rows])
    vocabulary = CAUSAL_VOCABULARY if case.task == "causal" else VOCABULARY
    model = tiny(case.family, case.task, num_labels=2)
    if case.crafts:
        model = recipes.ATTACKS[case.crafts]().craft(model, case.task, rng=generator(0, "craft"))
    defense = recipes.parse_defense(case.defense)
    return step(model, batch, defense, task=case.task, vocabulary=vocabulary, rng=generator(0, "step"))


def seen(sent: Transcript, grants: frozenset[Grant], message: Message | None = None) -> Observation:
    """What an adversary with exactly ``grants`` sees; every other field raises ``NotGranted``."""
    everything = {
        Grant.MODEL: adversary_copy(sent.model),
        Grant.BASE_MODEL: sent.vocabulary,
        Grant.LABELS: sent.batch.labels,
        Grant.LENGTHS: sent.batch.lengths,
        Grant.BATCH_SIZE: len(sent.batch),
        Grant.REFERENCE_TEXT: ("the w60 of w61 .", "the w62"),
        Grant.LANGUAGE_MODEL: (tiny("gpt2", "causal"), CAUSAL_VOCABULARY),
        Grant.MECHANISM: sent.mechanism,
    }
    return Observation(message or sent.message, sent.task, {g: everything[g] for g in grants if g in everything})


def guessed(attack: Attack[Reconstruction], observation: Observation, seed: int = 0) -> Reconstruction:
    """The guess where the attack is at home: one that declines keeps no law, and is a fault."""
    guess = attack(observation, rng=generator(seed, "attack"), budget=Budget("quick"))
    assert guess.labels if attack.name == "labels" else guess.tokens
    return guess


def run(attack: Attack[Reconstruction], observation: Observation, seed: int = 0) -> Reconstruction | str:
    """The guess, or how the attack declined, where it may; any other exception is a fault."""
    try:
        return attack(observation, rng=generator(seed, "attack"), budget=Budget("quick"))
    except (AttackFailed, NotApplicable) as reason:
        assert str(reason) and "\n" not in str(reason)
        return type(reason).__name__


def f1(guess: tuple[int, ...], text: list[int]) -> float:
    """Token F1 without special tokens."""
    a, b = (Counter(i for i in ids if i >= 0 and i not in VOCABULARY.special_ids) for ids in (guess, text))
    return 2 * sum((a & b).values()) / max(1, sum(a.values()) + sum(b.values()))


def test_an_observation_refuses_every_field_that_is_not_granted() -> None:
    sent = truth(Case())
    nothing = seen(sent, frozenset())
    fields = ["model", "vocabulary", "labels", "lengths", "batch_size", "mechanism", "reference_text", "language_model"]
    for name in fields:
        with pytest.raises(NotGranted):
            getattr(nothing, name)
    assert not any(isinstance(v, (Transcript, Batch)) for v in vars(nothing).values())


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_reads_only_what_it_declares(name: str, rows: int) -> None:
    """Granted exactly its needs, and exactly its needs and uses, it never reaches for more (NotGranted would surface)."""
    attack = recipes.ATTACKS[name]()
    sent = truth(ATTACKS[name], rows=rows)
    for grants in {frozenset(attack.needs), frozenset(attack.needs | attack.uses)}:
        guess = guessed(attack, seen(sent, grants))
        assert len(guess.labels or guess.tokens) in (1, rows)  # who is not told of a batch may take it for one text


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_repeats_with_its_seed_and_leaves_what_it_saw(name: str) -> None:
    attack = recipes.ATTACKS[name]()
    observation = seen(truth(ATTACKS[name]), frozenset(attack.needs | attack.uses))
    model = observation.granted.get(Grant.MODEL)
    before = None if model is None else snapshot(model)
    sums = {n: float(g.double().sum()) for n, g in observation.gradients.items()}
    state = torch.get_rng_state()
    assert guessed(attack, observation) == guessed(recipes.ATTACKS[name](), observation)
    assert torch.equal(torch.get_rng_state(), state)
    assert {n: float(g.double().sum()) for n, g in observation.gradients.items()} == sums
    assert before is None or (model is not None and snapshot(model) == before)


@pytest.mark.parametrize("name", [n for n, c in ATTACKS.items() if c.reads])
def test_an_attack_reads_its_home_setting_and_beats_blind(name: str) -> None:
    sent = truth(ATTACKS[name])
    guess = guessed(recipes.ATTACKS[name](), seen(sent, frozenset(Grant)))
    assert guess.tokens == (tuple(TEXT),) and guess.confidence in ("verified", "span")


@pytest.mark.parametrize("name", ATTACKS)
def test_on_pure_noise_an_attack_claims_nothing_and_does_not_beat_blind(name: str) -> None:
    attack, sent = recipes.ATTACKS[name](), truth(ATTACKS[name])
    grants = frozenset(attack.needs | attack.uses | {Grant.BASE_MODEL, Grant.BATCH_SIZE})
    blind = run(recipes.ATTACKS["blind"](), seen(sent, grants | {Grant.BATCH_SIZE}))
    assert isinstance(blind, Reconstruction)
    chance = max(f1(t, TEXT) for t in blind.tokens)
    scores = []
    for seed in range(2):
        rng = generator(seed, "noise")
        entries = {n: torch.randn(g.shape, generator=rng) for n, g in sent.message.gradients.items()}
        # A mask by chance, as dense as the one that was sent: one that follows the text would tell of it.
        shares = {n: float(mask.float().mean()) for n, mask in sent.message.visible.items()}
        visible = {n: torch.rand(entries[n].shape, generator=rng) < share for n, share in shares.items()}
        noise = Message({n: g * visible[n] if n in visible else g for n, g in entries.items()}, visible)
        guess = run(attack, seen(sent, grants, noise), seed)
        if isinstance(guess, Reconstruction):
            assert guess.confidence not in ("verified", "span")
            scores.append(max((f1(t, TEXT) for t in guess.tokens), default=0.0))
    assert sum(scores) <= (chance + 0.05) * len(scores)
