"""The laws of ``rasura.testing``, held for every method of the registry: where each is at home, its spec says."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from rasura import registry
from rasura.core.batches import Batch
from rasura.core.interfaces import InputError, Unavailable
from rasura.core.specs import MethodSpec
from rasura.core.values import NotGranted, Stage, Task, Transcript
from rasura.defenses.compose import chain, none, with_aggregation
from rasura.registry import parse_defense
from rasura.testing import attacks, check_metric, check_service_attack, check_service_protection, defenses
from rasura.testing.defenses import SETTINGS, snapshot
from rasura.testing.settings import at_home, seen, send
from rasura.testing.tiny import tiny
from rasura.victims.step import defended

EVERY = [spec for methods in registry.KINDS.values() for spec in methods.values()]
ATTACKS = {name: spec for name, spec in registry.ATTACKS.items() if spec.home.task != "vision"}
"""Attacks on texts: those on images have their own budget and laws in test_images.py."""

SAME = {"grab-without-masks", "grab-without-discrete", "lamp-l1l2", "lamp-weighted"} | {
    n for n in ATTACKS if n.endswith("-tuned")
}
"""Other settings of an attack that is held to the laws beside them."""

LONG = {"dlg", "tag", "lamp-cos", "grab", "guided-grab"}
"""Attacks that match gradients step by step: each law takes seconds."""

SEARCH = {name for name in ATTACKS if name.startswith("ghost-")} - {"ghost-sampling"}
"""Attacks that differ from ``ghost-sampling`` in what they choose among the same preimages."""


def tried(*later: str) -> list[Any]:
    """Every attack, where those of ``SAME`` and ``later`` are slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in {*SAME, *later} else name for name in ATTACKS]


ACTS = [name for name, spec in registry.DEFENSES.items() if name != "none" and not spec.waits]
WAITS = [name for name, spec in registry.DEFENSES.items() if spec.waits]
NEUTRAL = {name: spec.neutral for name, spec in registry.DEFENSES.items() if spec.neutral is not None}
NEUTRAL["mean"] = lambda: with_aggregation(none())
"""Settings at which a defense does nothing: the message must be the gradient of the mean loss."""

everywhere = pytest.mark.parametrize(("family", "task"), SETTINGS)


# --- what each says of itself


@pytest.mark.parametrize("spec", EVERY, ids=lambda spec: f"{type(spec).__name__}-{spec.name}")
def test_every_method_says_what_it_is_and_where_it_comes_from(spec: MethodSpec) -> None:
    assert len(spec.about.split()) > 1 and not spec.about.endswith(".")
    assert spec.source.startswith("Rasura") or "sec." in spec.source or any(c.isdigit() for c in spec.source)


def test_no_kind_is_empty_and_no_plugin_is_lost() -> None:
    assert all(len(methods) for kind, methods in registry.KINDS.items() if kind != "models")
    assert {kind: methods.unusable for kind, methods in registry.KINDS.items() if methods.unusable} == {}


# --- the step and the defenses


@pytest.mark.parametrize("name", NEUTRAL)
@everywhere
def test_a_step_without_protection_equals_autograd(family: str, task: Task, name: str) -> None:
    defenses.equals_autograd(chain(NEUTRAL[name]()), family, task)


@pytest.mark.parametrize("name", registry.DEFENSES)
@everywhere
def test_a_step_leaves_model_and_batch_as_they_were_and_repeats_with_its_seed(family: str, task: Task, name: str) -> None:
    defenses.leaves_model_and_batch_as_they_were(registry.DEFENSES[name], family, task)


@pytest.mark.parametrize("name", registry.DEFENSES)
@everywhere
def test_a_message_is_well_formed(family: str, task: Task, name: str) -> None:
    defenses.sends_a_message_that_is_well_formed(registry.DEFENSES[name], family, task)


@pytest.mark.parametrize("name", registry.DEFENSES)
def test_a_mechanism_is_public_and_plain(name: str) -> None:
    defenses.its_mechanism_is_public_and_plain(registry.DEFENSES[name])


@pytest.mark.parametrize(("one", "other"), combinations([n for n in registry.DEFENSES if n != "none"], 2))
def test_defenses_compose_in_the_order_of_their_stages_only(one: str, other: str) -> None:
    a, b = (parse_defense(registry.DEFENSES[n].example) for n in (one, other))
    early, late = sorted((a, b), key=lambda d: (list(Stage).index(d[0].stage), d[0].mechanism.name == "sealing"))
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


@pytest.mark.parametrize("name", ACTS)
@everywhere
def test_a_defense_changes_what_is_sent(family: str, task: Task, name: str) -> None:
    defenses.changes_what_is_sent(registry.DEFENSES[name], family, task)


@pytest.mark.parametrize("name", WAITS)
@everywhere
def test_a_defense_that_waits_sends_nothing_before_its_time(family: str, task: Task, name: str) -> None:
    defenses.sends_nothing_before_its_time(registry.DEFENSES[name], family, task)


def test_model_defenses_undo_even_when_the_step_fails() -> None:
    model = tiny("bert", "classification")
    before = snapshot(model)
    defense = parse_defense("frozen-blocks:1+dropout:0.3")
    with pytest.raises(ZeroDivisionError), defended(model, defense):
        assert snapshot(model) != before
        raise ZeroDivisionError
    assert snapshot(model) == before


# --- the attacks


def test_an_observation_refuses_every_field_that_is_not_granted() -> None:
    sent = at_home(registry.ATTACKS["span"])
    nothing = seen(sent, frozenset())
    fields = ["model", "vocabulary", "labels", "lengths", "batch_size", "mechanism", "reference_text", "language_model"]
    for name in fields:
        with pytest.raises(NotGranted):
            getattr(nothing, name)
    assert not any(isinstance(v, (Transcript, Batch)) for v in vars(nothing).values())


@pytest.mark.parametrize("name", registry.ATTACKS)
def test_an_attack_says_who_it_is(name: str) -> None:
    attacks.says_who_it_is(registry.ATTACKS[name])


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", tried(*LONG - {"lamp-cos"}))
def test_an_attack_reads_only_what_it_declares(name: str, rows: int) -> None:
    attacks.reads_only_what_it_declares(ATTACKS[name], rows)


@pytest.mark.parametrize("name", tried(*LONG - {"lamp-cos"}))
def test_an_attack_repeats_with_its_seed_and_leaves_what_it_saw(name: str) -> None:
    attacks.repeats_with_its_seed_and_leaves_what_it_saw(ATTACKS[name])


@pytest.mark.parametrize("name", [n for n, spec in ATTACKS.items() if spec.home.reads])
def test_an_attack_reads_its_home_setting_and_beats_blind(name: str) -> None:
    attacks.reads_its_home_setting(ATTACKS[name])


@pytest.mark.parametrize("name", tried(*LONG, *SEARCH))
def test_on_pure_noise_an_attack_claims_nothing_and_does_not_beat_blind(name: str) -> None:
    attacks.claims_nothing_on_noise(ATTACKS[name])


# --- the metrics


@pytest.mark.parametrize("name", registry.METRICS)
def test_a_metric_tells_the_truth_from_another_example(name: str, minilm_path: object) -> None:
    spec = registry.METRICS[name]
    try:
        check_metric(spec, registry.metric(name))
    except Unavailable as reason:
        pytest.skip(str(reason))


# --- services


@pytest.mark.parametrize("name", registry.SERVICE_ATTACKS)
def test_an_attack_on_a_service_guesses_where_it_is_at_home(name: str) -> None:
    check_service_attack(registry.SERVICE_ATTACKS[name])


@pytest.mark.parametrize("name", [n for n in registry.SERVICE_PROTECTIONS if n != "none"])
def test_a_protection_of_a_service_changes_what_the_service_sees(name: str) -> None:
    check_service_protection(registry.SERVICE_PROTECTIONS[name])
