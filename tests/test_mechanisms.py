"""Mechanisms: what a protection tells of itself is what it does, and what is not known is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from scipy.special import ive

from rasura import registry
from rasura.attacks.shared.mechanism import announced_dropout, announced_noise
from rasura.core.errors import InputError
from rasura.core.local import Local
from rasura.core.mechanisms import Directional, DpSgd, Gaussian, Laplace, Normalised, mechanism, typed
from rasura.core.protection import KNOWN, Protection
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import Grant, Mechanism, Message, Observation, Stage, Transcript
from rasura.defenses.accumulate import accumulate
from rasura.defenses.noise import gaussian_noise, laplace_noise
from rasura.ghost.selection_settings import Selection
from rasura.ghost.table import ShadowSettings
from rasura.testing.tiny import VOCABULARY, batch_for, tiny
from rasura.victims.step import step

EXAMPLES = {name: spec.example for name, spec in registry.DEFENSES.items()}

WRITTEN = (
    *EXAMPLES.values(), "accumulate:1.0d", "sealing:all", "sealing:param=0.1/scheme=bfv", "ghost:group=4",
    "dp-sgd:1.0/noise=laplace", "directional:1e3",
)  # fmt: skip


def told(written: str) -> list[Mechanism]:
    return [part.mechanism for part in registry.parse_defense(written)]


def sent(written: str, rows: int, seed: int) -> Transcript:
    model, defense = tiny("bert", "classification"), registry.parse_defense(written)
    rng = generator(seed)
    return step(model, batch_for("classification", rows), defense, task="classification", vocabulary=VOCABULARY, rng=rng)


def flat(message: Message) -> torch.Tensor:
    return torch.cat([g.flatten().double() for g in message.gradients.values()])


def test_every_protection_and_kind_of_update_has_a_typed_mechanism() -> None:
    names = {m.name for written in WRITTEN for m in told(written)} | {"mean"}
    kinds = {registry.parse_update(spec.example)[0].kind for spec in registry.UPDATES.values()}
    assert set(registry.DEFENSES) - {"none"} <= names
    assert {*names, *kinds} == set(KNOWN)


@pytest.mark.parametrize("written", WRITTEN)
def test_a_mechanism_comes_back_from_json(written: str) -> None:
    for one in told(written):
        assert isinstance(one, Protection) and KNOWN[one.name] is type(one) and one.stage is type(one).STAGE
        plain = json.loads(json.dumps({"name": one.name, "parameters": dict(one.parameters)}))
        again = mechanism(**plain)
        assert again == one and again.parameters == one.parameters and again.stage is one.stage
        assert typed(Mechanism(one.name, one.stage, one.parameters)) == one and typed(one) is one
        for name in one.parameters:
            without = {k: v for k, v in one.parameters.items() if k != name}
            assert getattr(one, name) == one.parameters[name]
            try:
                assert mechanism(one.name, without).name == one.name
            except InputError as error:
                assert one.name in str(error)


def test_kinds_of_updates_come_back_too() -> None:
    for kind, decay in (("fedavg-sgd", 0.0), ("fedavg-adamw", 0.01)):
        one = Local(kind, steps=3, learning_rate=0.1, lora=2).mechanism  # type: ignore[arg-type]
        assert one.parameters == {"steps": 3, "learning_rate": 0.1, "weight_decay": decay, "lora": 2}
        assert mechanism(kind, one.parameters) == one and one.stage is Stage.AGGREGATE


@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        ("gausian", {"sigma": 1.0}, "unknown mechanism 'gausian'; known: accumulate"),
        ("gaussian", {}, "gaussian: the parameter sigma is missing"),
        ("gaussian", {"sigma": 1.0, "noise": "x"}, "unknown parameter 'noise'; known: sigma, clip"),
        ("gaussian", {"sigma": math.nan}, "sigma is nan; expected a finite number at least 0"),
        ("gaussian", {"sigma": math.inf}, "expected a finite number"),
        ("gaussian", {"sigma": -1e-9}, "at least 0"),
        ("gaussian", {"sigma": True}, "sigma is True"),
        ("gaussian", {"sigma": "1"}, "sigma is '1'"),
        ("gaussian", {"sigma": None}, "sigma is None"),
        ("gaussian", {"sigma": 1.0, "clip": 0.0}, "clip is 0.0; expected a number above 0"),
        ("gaussian", {"sigma": 1.0, "clip": -math.inf}, "clip is -inf"),
        ("gaussian", {"sigma": 1.0, "clip": math.nan}, "clip is nan"),
        ("laplace", {"scale": -1.0}, "scale is -1.0"),
        ("laplace", {"scale": 1.0, "clip": 0.0}, "clip is 0.0"),
        ("dp-sgd", {"sigma": 0.0}, "sigma is 0.0; expected a finite number above 0"),
        ("dp-sgd", {"sigma": 1.0, "clip": math.inf}, "clip is inf"),
        ("dp-sgd", {"sigma": 1.0, "noise": "cauchy"}, "noise is 'cauchy'; expected gaussian or laplace"),
        ("normalised", {"sigma": 0.0}, "sigma is 0.0"),
        ("dp-ftrl", {"sigma": 1.0, "band": 0}, "band is 0; expected a whole number at least 1"),
        ("dp-ftrl", {"sigma": 1.0, "band": 2, "noise": "laplace"}, "noise is 'laplace'; expected gaussian"),
        ("normalised", {"sigma": 1.0, "clip": 2.0}, "clip is 2.0; expected a finite number at least 1 and at most 1"),
        ("directional", {"kappa": 0.0}, "kappa is 0.0"),
        ("directional", {"kappa": 1.0, "blocks": "half"}, "expected whole or parameters"),
        ("pruning", {"ratio": 1.0}, "ratio is 1.0; expected a finite number at least 0 and below 1"),
        ("random-pruning", {"ratio": -0.1}, "random-pruning: ratio is -0.1"),
        ("dropout", {"p": 1.0}, "below 1"),
        ("frozen-blocks", {"n": 1.5}, "n is 1.5; expected a whole number at least 0"),
        ("frozen-blocks", {"n": -1}, "n is -1"),
        ("accumulate", {}, "expected either tokens or widths"),
        ("accumulate", {"tokens": 3, "widths": 1.0}, "expected either tokens or widths"),
        ("accumulate", {"tokens": 0}, "tokens is 0"),
        ("accumulate", {"widths": 0.0}, "widths is 0.0"),
        ("fedavg-sgd", {"steps": 0}, "steps is 0"),
        ("fedavg-sgd", {"learning_rate": 0.0}, "learning_rate is 0.0"),
        ("fedavg-adamw", {"weight_decay": -0.1}, "weight_decay is -0.1"),
        ("fedsgd", {"lora": -1}, "lora is -1"),
        ("sealing", {"metric": 3}, "metric is 3; expected text"),
        ("sealing", {"metric": "grad", "ratio": 1.01}, "ratio is 1.01"),
        ("sealing", {"metric": "all", "scheme": "rot13"}, "scheme is 'rot13'; expected none or bfv or ckks"),
        ("sealing", {"metric": "all", "scope": "row"}, "scope is 'row'"),
        ("sealing", {"metric": "all", "embeddings": "x"}, "embeddings is 'x'"),
    ],
)
def test_what_is_not_known_or_cannot_be_is_refused(name: str, parameters: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        mechanism(name, parameters)
    assert says in str(caught.value) and name in str(caught.value)


def test_the_ends_of_what_can_be_are_allowed() -> None:
    for name, parameters in (
        ("gaussian", {"sigma": 0}), ("laplace", {"scale": 0, "clip": math.inf}), ("pruning", {"ratio": 0}),
        ("dropout", {"p": 0}), ("frozen-blocks", {"n": 0}), ("accumulate", {"tokens": 1}), ("accumulate", {"widths": 0.01}),
        ("sealing", {"metric": "grad", "ratio": 1}), ("sealing", {"metric": "grad", "ratio": 0}),
        ("fedavg-sgd", {"steps": 1}),
    ):  # fmt: skip
        assert mechanism(name, parameters).name == name
    assert type(mechanism("gaussian", {"sigma": 1}).parameters["sigma"]) is float
    assert accumulate(tokens=3).mechanism.parameters == {"tokens": 3}


def test_ghosts_fields_are_those_of_its_settings() -> None:
    """Written down twice, since a mechanism imports no method."""
    names = {*ShadowSettings.__dataclass_fields__, *Selection.__dataclass_fields__}
    (ghost,) = told("ghost")
    assert set(ghost.parameters) == names
    for name, wrong in {
        "k": 0, "overlap": 1.1, "grow": 0, "max_k": 0, "language": 3, "direct": 1, "indirect": 0, "lemma": "yes", "group": 0,
        "choices": 0, "keep_punctuation": 1, "keep_numbers": 1, "round_trip": 1, "beam": 0, "tried": -1, "sweeps": -1,
        "enough": 1.0, "start": "far",
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=f"ghost: {name} is"):
            mechanism("ghost", {**ghost.parameters, name: wrong})
    edge = dict.fromkeys(("k", "overlap", "grow", "max_k", "group", "choices", "beam"), 1)
    edge |= dict.fromkeys(("tried", "sweeps", "enough"), 0)
    assert mechanism("ghost", {**ghost.parameters, **edge, "language": None}).parameters["language"] is None


# What they answer

NOISY = {
    "gaussian:0.02": 0.02,
    "laplace:0.02": 0.02 * math.sqrt(2),
    "dp-sgd:1.5/clip=0.5": 1.5 * 0.5 / 3,
    "dp-sgd:1.5/clip=0.5/noise=laplace": 1.5 * 0.5 * math.sqrt(2) / 3,
    "dp-ftrl:1.5/band=4/clip=0.5": 1.5 * 0.5 / 3,
    "normalised:1.5": 0.5,
}


def strayed(written: str, rows: int = 3, draws: int = 5) -> tuple[float, int]:
    """The deviation of an entry over draws of the sent update, and the number of entries."""
    every = torch.stack([flat(sent(written, rows, seed).message) for seed in range(draws)])
    return float(every.var(0, unbiased=True).mean().sqrt()), every.shape[1]


@pytest.mark.parametrize("written", NOISY)
def test_the_noise_that_is_told_is_the_noise_that_is_sent(written: str) -> None:
    (one,) = told(written)
    assert isinstance(one, Protection)
    assert one.noise_per_entry(3) == one.noise_per_entry(3, 10) == pytest.approx(NOISY[written])
    assert strayed(written)[0] == pytest.approx(NOISY[written], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", ["whole", "parameters"])
@pytest.mark.parametrize("share", [0.01, 1.0, 30.0])
def test_the_noise_of_a_direction_is_what_a_draw_strays(blocks: str, share: float) -> None:
    entries = flat(sent("none", 3, 0).message).numel()
    kappa = share * entries
    one = Directional(kappa, blocks)
    found, counted = strayed(f"directional:{kappa!r}/blocks={blocks}")
    assert counted == entries and one.noise_per_entry(3, entries) == pytest.approx(found, rel=0.03)
    assert one.noise_per_entry(3, entries) <= one.noise_per_entry(3) == pytest.approx(1 / math.sqrt(3 * kappa))


@pytest.mark.parametrize(("kappa", "entries"), [(3.0, 10), (50.0, 40), (200.0, 101)])
def test_the_noise_of_a_direction_by_bessel_functions(kappa: float, entries: int) -> None:
    mean = float(ive(entries / 2, kappa) / ive(entries / 2 - 1, kappa))
    exact = math.sqrt((1 - mean**2) / (2 * entries))
    assert exact <= Directional(kappa).noise_per_entry(2, entries) <= 1.02 * exact


def test_the_noise_of_a_direction_to_the_digit() -> None:
    """With one entry the bound of the mean is kappa over the root of its square and 1: here .75 / 1.25."""
    assert Directional(0.75).noise_per_entry(1, 1) == pytest.approx(0.8, rel=1e-15)
    assert Directional(9.0).noise_per_entry() == pytest.approx(1 / 3) and Directional(9.0).noise_per_entry(4) == 1 / 6
    # (3 - 1) / 2 is 1; 1.5 / (1 + 2.5), three entries of each of two texts
    assert Directional(1.5).noise_per_entry(2, 3) == pytest.approx(math.sqrt((1 - (1.5 / 3.5) ** 2) / 6), rel=1e-15)


def test_noise_is_over_the_number_of_texts_where_each_text_is_clipped() -> None:
    for one in (DpSgd(2.0, 0.5), Normalised(2.0)):
        assert one.noise_per_entry(4) == pytest.approx(one.noise_per_entry() / 4) and one.noise_per_entry() > 0
    assert Directional(9.0).noise_per_entry(4) == pytest.approx(Directional(9.0).noise_per_entry() / 2)
    assert Directional(9.0).noise_per_entry(4, 50) == pytest.approx(Directional(9.0).noise_per_entry(1, 50) / 2)
    assert Gaussian(2.0).noise_per_entry(4) == 2.0 and Laplace(2.0).noise_per_entry(4) == pytest.approx(2 * math.sqrt(2))
    for wrong in (0, -1, 1.5, True):
        for noise in (DpSgd(1.0), Normalised(1.0), Directional(1.0)):
            with pytest.raises(ValueError, match=r"a batch of .* texts"):
                noise.noise_per_entry(wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"an update of .* entries"):
            Directional(1.0).noise_per_entry(1, wrong)  # type: ignore[arg-type]
    assert DpSgd(1.0).noise_per_entry(1) == 1.0 and Directional(1.0).noise_per_entry(1, 1) > 0


def test_only_noise_counts_as_noise() -> None:
    """Every registered defense: either it tells of noise, or what arrives of its updates is the same in two draws."""
    plain = sent("none", 3, 0).message
    for name, written in EXAMPLES.items():
        for one in told(written):
            assert isinstance(one, Protection)
            if one.noise_per_entry(3) > 0:
                assert name in ("gaussian", "laplace", "dp-sgd", "dp-ftrl", "normalised", "directional")
                continue
            if one.dropout_rate or one.changes_texts:
                assert name in ("dropout", "ghost")
                continue
            if registry.DEFENSES[name].draws and not one.hides_entries:
                assert registry.DEFENSES[name].known_by is None, "no attack may count it as one without noise"
                continue
            first, second = (sent(written, 3, seed).message for seed in range(2))
            for key, gradient in first.gradients.items():
                both = torch.ones_like(gradient, dtype=torch.bool)
                for message in (first, second):
                    both &= message.visible.get(key, both)
                assert torch.equal(gradient[both], second.gradients[key][both])
                if name not in ("fp16", "bf16", "sign"):
                    assert torch.equal(gradient[both], plain.gradients[key][both])


def test_what_each_protection_answers() -> None:
    def those(says: str, nothing: object) -> set[str]:
        return {n for n, w in EXAMPLES.items() for m in told(w) if getattr(m, says) != nothing}

    assert those("largest_norm", math.inf) == {"gaussian", "laplace", "dp-sgd", "dp-ftrl", "normalised", "directional"}
    assert those("dropout_rate", 0.0) == {"dropout"}
    assert those("hides_entries", False) == {"pruning", "random-pruning", "sealing", "frozen-embeddings", "frozen-blocks"}
    assert those("changes_texts", False) == {"ghost"} and those("accumulates", False) == {"accumulate"}
    norms = [gaussian_noise(1.0, 0.3), laplace_noise(1.0, 0.4)]
    assert [typed(t.mechanism).largest_norm for t in norms] == [0.3, 0.4]
    assert (DpSgd(1.0, 0.5).largest_norm, Normalised(1.0).largest_norm, Directional(1.0).largest_norm) == (0.5, 1.0, 1.0)
    assert mechanism("dropout", {"p": 0.3}).dropout_rate == 0.3
    assert mechanism("random-pruning", {"ratio": 0.1}).hides_entries
    assert not mechanism("pruning", {"ratio": 0.0}).hides_entries, "nothing is left out"


# What attacks are told


def seen_with(*announcements: Mechanism, batch_size: int | None = 3) -> Observation:
    granted: dict[Grant, Any] = {Grant.MECHANISM: announcements}
    if batch_size is not None:
        granted[Grant.BATCH_SIZE] = batch_size
    return Observation(Message({"w": torch.zeros(10, 10)}), "classification", granted)


@pytest.mark.parametrize("written", [*NOISY, "directional:1e4"])
def test_an_attack_takes_noise_for_announced_whatever_makes_it(written: str) -> None:
    transcript = sent(written, 3, 0)
    seen = observe(transcript, HONEST_SERVER, adversary_model=transcript.model)
    deviation, clip = announced_noise(seen)
    entries = flat(transcript.message).numel()
    wanted = NOISY.get(written, Directional(1e4).noise_per_entry(3, entries))
    assert Grant.BATCH_SIZE in seen and deviation == pytest.approx(wanted) and clip <= 1.0


def test_announcements_add_up_and_an_unknown_one_is_refused() -> None:
    assert announced_noise(seen_with()) == (0.0, math.inf)
    assert announced_noise(seen_with(Gaussian(3.0, 0.5), Gaussian(4.0, 0.7))) == (pytest.approx(5.0), 0.5)
    assert announced_noise(seen_with(DpSgd(6.0), Gaussian(1.5, math.inf))) == (pytest.approx(2.5), 1.0)
    assert announced_noise(seen_with(DpSgd(6.0), batch_size=None))[0] == 6.0, "unknown, it is that of a single text"
    plain = Mechanism("dp-sgd", Stage.AGGREGATE, {"sigma": 6.0, "clip": 1.0, "noise": "gaussian"})
    assert announced_noise(seen_with(plain))[0] == 2.0, "described plainly, it is the same"
    rates = seen_with(mechanism("dropout", {"p": 0.2}), mechanism("dropout", {"p": 0.1}))
    assert announced_dropout(rates) == 0.2 and announced_dropout(seen_with()) == 0.0
    assert announced_noise(Observation(Message({}), "classification", {})) == (0.0, math.inf)
    for ask in (announced_noise, announced_dropout):
        with pytest.raises(InputError, match="unknown mechanism 'cauchy'"):
            ask(seen_with(Mechanism("cauchy", Stage.WIRE, {"scale": 1.0})))


def test_a_mechanism_cannot_be_changed() -> None:
    one = Gaussian(1.0)
    for name in ("sigma", "parameters", "name"):
        with pytest.raises(AttributeError):
            setattr(one, name, 2.0)
    assert isinstance(one.parameters, Mapping) and one == Gaussian(1) != Gaussian(2)
