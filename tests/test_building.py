"""What others bring is refused by its name before anything runs, where it lacks what every run relies on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from audit_setting import TEXTS, model_folder
from own_setting import described

import rasura
from rasura.core.errors import InputError
from rasura.core.interfaces import Transform
from rasura.core.mechanisms import Gaussian, mechanism
from rasura.core.protection import Protection
from rasura.core.specs import AttackSpec, DefenseSpec, MetricSpec
from rasura.core.values import Grant, Mechanism, Reconstruction, Stage
from rasura.registry import ATTACKS, METRICS, SERVICE_PROTECTIONS, UPDATES, named_attacks, named_defenses, parse_defense
from rasura.registry import metric as make_metric
from rasura.registry.building import built_attack

__all__ = ["model_folder"]


def part(mechanism: Any, stage: Any = Stage.WIRE) -> Transform[Any, Any, Any]:
    return Transform(stage, mechanism, lambda _: None, lambda message, state, rng: (message, None))


def below_three(value: float = 5.0) -> Any:
    """What a ``__post_init__`` raises for a setting."""
    if value >= 3:
        raise ValueError("the setting must be below 3")
    return part(described("mine"))


def spec(make: Callable[..., Any], **more: Any) -> DefenseSpec:
    return DefenseSpec(name="mine", about="mine", source="own", make=make, example="mine", **more)


DEFENSES_OF_ANOTHER_FORM: Mapping[str, tuple[Callable[[], Any], str]] = {
    "plain": (lambda: part(Mechanism("mine", Stage.WIRE)), "plain Mechanism, which does not say whether it adds noise"),
    "none": (lambda: None, "is made as NoneType; expected a Transform"),
    "text": (lambda: part("mine"), "its mechanism is 'mine'; expected a Protection"),
    "stage": (lambda: part(described("mine"), "wire"), "its stage is 'wire'; expected a Stage"),
    "other-stage": (lambda: part(described("mine"), Stage.DATA), "acts at the stage data, but its mechanism says"),
    "raises": (below_three, "cannot be made: ValueError in below_three .*: the setting must be below 3"),
}


@pytest.mark.parametrize("case", DEFENSES_OF_ANOTHER_FORM)
def test_a_protection_that_no_run_could_use_is_refused(case: str) -> None:
    make, says = DEFENSES_OF_ANOTHER_FORM[case]
    with pytest.raises(InputError, match=f"the protection mine.*{says}"):
        parse_defense("mine", methods={"mine": spec(make)})


@pytest.mark.parametrize("made", [part(Mechanism("mine", Stage.WIRE)), part("mine"), part(described("mine"), "wire")])
def test_so_it_is_as_an_object(made: Transform[Any, Any, Any]) -> None:
    with pytest.raises(InputError, match="the protection "):
        named_defenses([made])


def test_a_setting_that_a_protection_refuses_is_not_called_no_number() -> None:
    methods = {"mine": spec(below_three, parameter=float)}
    assert parse_defense("mine:2", methods=methods)[0].mechanism.name == "mine"
    with pytest.raises(InputError, match=r"the protection mine:5 cannot be made: .*the setting must be below 3"):
        parse_defense("mine:5", methods=methods)
    with pytest.raises(InputError, match="needs a number, found 'five'"):
        parse_defense("mine:five", methods=methods)


def attack(**wrong: Any) -> Any:
    class Attack:
        name, needs, uses = "mine", frozenset({Grant.MODEL}), frozenset[Grant]()

        def __call__(self, seen: object, **how: object) -> Reconstruction:
            return Reconstruction(())

    made = Attack()
    vars(made).update(wrong)
    return made


def test_an_attack_that_no_run_could_use_is_refused() -> None:
    assert built_attack("mine", attack) is not None
    for wrong, says in (
        ({"needs": frozenset({"MODEL"})}, "needs is .*expected a set such as"),
        ({"uses": None}, "uses is None; expected a set"),
        ({"needs": [Grant.MODEL]}, "needs is .*expected a set"),
    ):
        with pytest.raises(InputError, match=f"the attack mine: {says}"):
            built_attack("mine", lambda wrong=wrong: attack(**wrong))
    with pytest.raises(InputError, match="the attack mine is made as NoneType; expected name, needs"):
        built_attack("mine", lambda: None)
    with pytest.raises(InputError, match=r"the attack mine cannot be made: ZeroDivisionError .*by zero"):
        built_attack("mine", lambda: 1 // 0)
    with pytest.raises(InputError, match="method name None"):
        named_attacks([attack(name=None)])


def test_a_metric_whose_figures_would_be_read_wrongly_is_refused() -> None:
    right: dict[str, Any] = {"name": "mine", "unit": "share", "higher_is": "worse", "bounds": (0.0, 1.0)}

    class Metric(SimpleNamespace):
        def __call__(self, guess: object, truth: object) -> list[float]:
            return []

    def made(**wrong: Any) -> MetricSpec:
        return MetricSpec(name="mine", about="mine", source="own", make=lambda: Metric(**{**right, **wrong}))

    assert make_metric("mine", {**METRICS, "mine": made(bounds=None)}).bounds is None
    for wrong, says in (
        ({"higher_is": "bigger"}, "higher_is is 'bigger'; expected worse or better"),
        ({"bounds": (1.0, 0.0)}, "bounds are .*the lower one first"),
        ({"bounds": (0.0,)}, "bounds are .*two finite numbers"),
        ({"bounds": (0.0, float("nan"))}, "bounds are .*two finite numbers"),
        ({"bounds": "01"}, "bounds are .*two finite numbers"),
        ({"unit": None}, "unit is None; expected text"),
    ):
        with pytest.raises(InputError, match=f"the metric mine: {says}"):
            make_metric("mine", {**METRICS, "mine": made(**wrong)})


def test_names_of_who_knows_whom_are_no_text() -> None:
    """``"clip" in "value-clip"`` holds, and a verdict would rest on it."""
    wrong: Any = "value-clip"
    with pytest.raises(InputError, match="knows is 'value-clip'; expected names in a tuple"):
        replace(ATTACKS["span"], name="mine", knows=wrong)
    with pytest.raises(InputError, match="known_by is 'span'; expected names in a tuple"):
        spec(below_three, known_by="span")
    with pytest.raises(InputError, match="known_by is "):
        spec(below_three, known_by=(ATTACKS["span"],))
    assert isinstance(replace(ATTACKS["span"], name="mine", knows=("value-clip",)), AttackSpec)


def test_nobody_takes_the_name_of_a_protection_of_rasura() -> None:
    """A ledger, or settings that say ``gaussian``, would mean the other one from then on: without noise, it may say."""
    with pytest.raises(InputError, match="'gaussian' names a protection of Rasura; give yours another name"):

        @dataclass(frozen=True)
        class Quiet(Protection, named="gaussian"):
            pass

    assert type(mechanism("gaussian", {"sigma": 0.1})) is Gaussian


@pytest.mark.parametrize(
    "name", ["frozen-embeddings+sign", "none+mine", "mine+", "+mine", "mine:1", "mine/b=1", "a=b", "a,b", "a b", " a", "a\n"]
)
def test_a_name_that_reads_as_other_methods_or_options_is_refused(name: str) -> None:
    """Under ``frozen-embeddings+sign`` the two built-in parts ran, and the protection of that name never did."""
    ways: tuple[Callable[[], Any], ...] = (
        lambda: replace(spec(below_three), name=name),
        lambda: named_defenses([part(described(name))]),
        lambda: named_defenses([(part(described("mine")), part(described(name)))]),
        lambda: replace(UPDATES["fedavg-sgd"], name=name),
    )
    for way in ways:
        with pytest.raises(InputError, match=r"method name .*expected letters, digits, '-' and '_' only"):
            way()


def test_where_nothing_is_joined_a_name_may_end_with_a_plus() -> None:
    assert replace(ATTACKS["span"], name="mine++").name == "mine++"
    ours = SERVICE_PROTECTIONS["santext+"]
    assert replace(ours, name="mine+").name == "mine+"
    for name in ("santext+custext", "mine++", "+", "mine+:", "mine +"):
        with pytest.raises(InputError, match="method name"):
            replace(ours, name=name)


def test_an_audit_refuses_before_it_runs(model_folder: Path, tmp_path: Path) -> None:
    plain = part(Mechanism("mine", Stage.WIRE))
    joined = part(described("frozen-embeddings+mine"))
    for wrong in (
        {"defenses": [plain]}, {"defenses": [joined]}, {"defenses": [spec(below_three)]}, {"attacks": [attack(needs=None)]}
    ):  # fmt: skip
        given: dict[str, Any] = {"attacks": ["blind"], "defenses": ["none"], **wrong}
        with pytest.raises(InputError, match="mine"):
            rasura.audit(model=str(model_folder), data=TEXTS, out=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()
