"""The doors from the truth to the adversary: every threat gets what it is granted, as it was, and nothing besides."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rasura.core.answers import Answers
from rasura.core.batches import ImageBatch
from rasura.core.rng import generator
from rasura.core.threat import (
    HONEST_SERVER,
    MALICIOUS_SERVER,
    MODEL_USER,
    THREATS,
    WITH_LABELS,
    WITH_LABELS_AND_LENGTHS,
    WITH_LENGTHS,
    ThreatModel,
    adversary_copy,
    observe,
    observe_model,
    observe_service,
    service_transcript,
)
from rasura.core.values import UNKNOWN, Grant, Mechanism, Message, NotGranted, Stage, Transcript
from rasura.registry import parse_defense
from rasura.service_protections.service import Service
from rasura.service_protections.services import custext, dp_forward, plain
from rasura.testing.tiny import CLS, SEP, VOCABULARY, WORDS, batch_for, tiny
from rasura.victims.step import step

PUBLIC = {Grant.MODEL, Grant.BASE_MODEL, Grant.MECHANISM, Grant.BATCH_SIZE, Grant.REFERENCE_TEXT, Grant.LANGUAGE_MODEL}
EVERYBODY = ThreatModel("everybody", frozenset(Grant), "whoever is granted all that there is")
NOBODY = ThreatModel("nobody", frozenset(), "whoever is granted nothing")
TEXT = ("a text of the same kind",)
IDS = ((CLS, 40, 41, 3, SEP), (CLS, 50, SEP))


@pytest.fixture(scope="module")
def truth() -> Transcript:
    model, batch = tiny("bert", "classification"), batch_for("classification", 3)
    defense = parse_defense("frozen-embeddings+gaussian:0.1")
    return step(model, batch, defense, task="classification", vocabulary=VOCABULARY, rng=generator(0))


# --- updates


def test_each_threat_is_granted_what_its_name_says() -> None:
    more = {
        HONEST_SERVER: set(), WITH_LABELS: {Grant.LABELS}, WITH_LENGTHS: {Grant.LENGTHS},
        WITH_LABELS_AND_LENGTHS: {Grant.LABELS, Grant.LENGTHS}, MALICIOUS_SERVER: set(),
    }  # fmt: skip
    for threat, added in more.items():
        assert threat.grants == PUBLIC | added
    assert [t.active for t in more] == [False] * 4 + [True], "only one may send crafted weights"
    assert list(THREATS.values()) == [HONEST_SERVER, WITH_LABELS, WITH_LENGTHS, WITH_LABELS_AND_LENGTHS, MALICIOUS_SERVER]
    assert list(THREATS) == ["honest-server", "with-labels", "with-lengths", "with-labels-and-lengths", "malicious-server"]
    trained = {Grant.MODEL, Grant.BASE_MODEL, Grant.CANDIDATES, Grant.REFERENCE_TEXT, Grant.MECHANISM, Grant.TRAINING}
    assert (
        MODEL_USER.grants == trained | {Grant.REFERENCE_MODEL} and MODEL_USER.name == "model-user" and not MODEL_USER.active
    )
    assert not ThreatModel("new", frozenset(), "a new one").active


def test_all_that_is_granted_is_the_truth(truth: Transcript) -> None:
    other = tiny("gpt2", "causal")
    seen = observe(truth, EVERYBODY, reference_text=TEXT, language_model=(other, VOCABULARY))
    assert seen.message is truth.message and seen.task == truth.task == "classification"
    assert seen.vocabulary is VOCABULARY and seen.batch_size == 3 and seen.mechanism == truth.mechanism
    assert [m.name for m in seen.mechanism] == ["frozen-embeddings", "gaussian"]
    assert seen.lengths == (8, 6, 9) and seen.labels.tolist() == [1, 0, 2]
    assert seen.labels.data_ptr() != truth.batch.labels.data_ptr(), "a copy: writing to it leaves the truth as it is"
    assert seen.reference_text == TEXT and seen.language_model[0] is other and seen.language_model[1] is VOCABULARY
    assert set(seen.granted) == set(Grant) - {Grant.CANDIDATES, Grant.TRAINING, Grant.REFERENCE_MODEL}


@pytest.mark.parametrize("threat", [*THREATS.values(), NOBODY])
def test_nothing_is_told_that_is_not_granted_and_nothing_that_there_is_not(truth: Transcript, threat: ThreatModel) -> None:
    there = {Grant.REFERENCE_TEXT, Grant.LANGUAGE_MODEL}
    assert set(observe(truth, threat).granted) == set(threat.grants) - there
    assert set(observe(truth, threat, reference_text=TEXT).granted) == set(threat.grants) - {Grant.LANGUAGE_MODEL}
    with_model = observe(truth, threat, language_model=(truth.model, VOCABULARY))
    assert set(with_model.granted) == set(threat.grants) - {Grant.REFERENCE_TEXT}
    if Grant.LABELS not in threat.grants:
        with pytest.raises(NotGranted):
            _ = observe(truth, threat).labels


def test_pictures_have_no_lengths() -> None:
    batch = ImageBatch(torch.zeros(2, 3, 4, 4), torch.tensor([1, 0]), ("one", "two"))
    pictures = Transcript(batch, nn.Linear(2, 2), Message({}), (), 0.0, "classification", VOCABULARY)
    seen = observe(pictures, WITH_LABELS_AND_LENGTHS)
    assert Grant.LENGTHS not in seen and seen.batch_size == 2 and seen.labels.tolist() == [1, 0]


class Counted(nn.Module):
    """A model with a parameter, a buffer, dropout, and something of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.tied = self.inner.weight
        self.drop = nn.Dropout(0.5)
        self.register_buffer("seen", torch.ones(2))
        self.settings = {"a": [1]}


def test_the_adversarys_model_shares_weights_and_nothing_that_can_be_changed() -> None:
    model = Counted().train()
    copied: Any = adversary_copy(model)
    assert type(copied) is Counted and copied is not model and copied.inner is not model.inner
    for own, other in ((model.inner.weight, copied.inner.weight), (model.inner.bias, copied.inner.bias)):
        assert own.data_ptr() == other.data_ptr() and isinstance(other, nn.Parameter)
        assert own.requires_grad and not other.requires_grad
    assert copied.seen.data_ptr() == model.seen.data_ptr() and copied.tied is copied.inner.weight
    assert not any(m.training for m in copied.modules()) and all(m.training for m in model.modules())
    copied.settings["a"].append(2)
    assert model.settings == {"a": [1]}
    x = torch.ones(1, 3)
    assert torch.equal(copied.inner(x), model.inner(x)) and not copied.inner(x).requires_grad


def test_what_computes_a_buffer_keeps_no_gradient() -> None:
    model = Counted()
    model.seen = torch.ones(2, requires_grad=True) * 2
    copied: Any = adversary_copy(model)
    assert not copied.seen.requires_grad and copied.seen.tolist() == [2.0, 2.0]


def test_a_copy_is_made_for_each_observation_unless_one_is_passed(truth: Transcript) -> None:
    made, other = observe(truth, HONEST_SERVER).model, observe(truth, HONEST_SERVER).model
    assert made is not other and made is not truth.model and not made.training
    assert not any(p.requires_grad for p in made.parameters())
    one = adversary_copy(truth.model)
    assert observe(truth, HONEST_SERVER, adversary_model=one).model is one


# --- trained models


def ask(batches: Any) -> Answers:
    return Answers(torch.zeros(len(batches)), torch.zeros(len(batches)), torch.zeros(len(batches), 2))


def test_a_user_of_a_model_has_all_that_is_passed_and_granted() -> None:
    model, batches = tiny("bert", "classification"), [batch_for("classification", 1), batch_for("classification", 2)]
    mechanism = (Mechanism("told", Stage.WIRE),)
    trained: list[int] = []

    def train() -> tuple[Any, ...]:
        trained.append(1)
        return ()

    seen = observe_model(
        MODEL_USER, "classification", ask=ask, candidates=batches, base=(model, VOCABULARY), reference=batches[:1],
        mechanism=mechanism, shadow_models=train, ask_reference=ask,
    )  # fmt: skip
    assert (
        seen.task == "classification"
        and seen.ask_reference is ask
        and seen.candidates == tuple(batches)
        and seen.reference == (batches[0],)
    )
    assert seen.ask is ask and seen.base == (model, VOCABULARY) and seen.mechanism == mechanism
    assert not trained, "models are trained when they are first asked for"
    assert seen.shadow_models == () and trained == [1]
    assert set(seen.granted) == set(MODEL_USER.grants)


def test_a_user_of_a_model_has_nothing_else() -> None:
    base = (tiny("bert", "classification"), VOCABULARY)
    seen = observe_model(MODEL_USER, "causal", ask=ask, candidates=[], base=base)
    assert seen.task == "causal" and seen.candidates == () and seen.mechanism == ()
    assert set(seen.granted) == set(MODEL_USER.grants) - {Grant.REFERENCE_TEXT, Grant.REFERENCE_MODEL, Grant.TRAINING}
    for field in ("reference", "ask_reference", "shadow_models"):
        with pytest.raises(NotGranted):
            getattr(seen, field)
    asked = ThreatModel("asks", frozenset({Grant.MODEL}), "may ask")
    seen = observe_model(asked, "causal", ask=ask, candidates=[], base=base, shadow_models=tuple)
    assert set(seen.granted) == {Grant.MODEL}


# --- model services


def turned() -> Service:
    """A service whose server knows tokens by other ids, and has another model than the public one."""
    made = plain(tiny("bert", "classification"), VOCABULARY)
    tokens = torch.arange(WORDS)
    tokens[3:] = tokens[3:].flip(0)
    return dataclasses.replace(made, served=tiny("bert", "classification", seed=1), tokens=tokens)


def first(model: nn.Module) -> Tensor:
    return next(model.parameters())


def test_a_service_sees_ids_by_its_own_names_and_both_models() -> None:
    service = turned()
    truth = service_transcript(service, [list(text) for text in IDS], generator(0))  # type: ignore[misc]
    assert (truth.public, truth.served, truth.tokens) == (service.public, service.served, service.tokens)
    assert truth.vocabulary is VOCABULARY and truth.mechanism is service.mechanism
    assert truth.sent is None and truth.vectors is None and tuple(map(tuple, truth.ids)) == IDS
    seen = observe_service(truth)
    assert seen.ids == tuple(tuple(t if t < 3 else WORDS + 2 - t for t in text) for text in IDS)
    assert seen.vocabulary is VOCABULARY and seen.mechanism is service.mechanism and seen.mechanism.name == "none"
    assert seen.reference_text == () and seen.vectors == ()
    assert observe_service(truth, reference_text=TEXT).reference_text == TEXT
    for own, copied in ((service.public, seen.public), (service.served, seen.served)):
        assert copied is not own and torch.equal(first(copied), first(own)) and not first(copied).requires_grad
    assert not torch.equal(first(seen.public), first(seen.served))


def test_a_service_sees_the_ids_that_were_drawn_and_a_seed_repeats_them() -> None:
    service = custext(tiny("bert", "classification"), VOCABULARY, epsilon=0.1)
    truth, again = (service_transcript(service, IDS, generator(seed)) for seed in (1, 1))
    assert truth.sent == again.sent == service.sent(IDS, generator(1)) and truth.sent != IDS and truth.ids == IDS
    assert truth.vectors is None and observe_service(truth).ids == truth.sent
    assert len({service_transcript(service, IDS).sent for _ in range(5)}) > 1, "unseeded, every sending draws anew"


def test_a_service_sees_states_and_no_ids_where_states_are_sent() -> None:
    service = dp_forward(tiny("bert", "classification"), VOCABULARY)
    truth, again = (service_transcript(service, IDS, generator(1)) for _ in range(2))
    assert truth.sent is None and truth.vectors is not None and again.vectors is not None
    assert [tuple(v.shape) for v in truth.vectors] == [(5, 64), (3, 64)]
    assert all(torch.equal(a, b) for a, b in zip(truth.vectors, again.vectors))
    seen = observe_service(truth, reference_text=TEXT)
    assert seen.vectors is truth.vectors and seen.reference_text == TEXT
    assert seen.ids == ((CLS, UNKNOWN, UNKNOWN, UNKNOWN, SEP), (CLS, UNKNOWN, SEP))
    other = service_transcript(service, IDS).vectors
    assert other is not None and not torch.equal(other[0], truth.vectors[0])
