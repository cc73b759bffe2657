"""Checked fields: a value is what its rule allows, or it is refused in words that say what was expected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from rasura.core.checked import flag, number, rules, settle, whole, word
from rasura.core.errors import InputError
from rasura.core.mechanisms import mechanism
from rasura.core.protection import KNOWN, Protection
from rasura.core.values import Mechanism, Parameter, Stage


def box() -> Any:
    """A class with a field of every kind, made anew: rules are written down when a class is."""

    @dataclass(frozen=True)
    class Box:
        share: float = number(minimum=0, maximum=1, open="low")
        below: float = number(0.0, minimum=-1, maximum=1, open="high")
        free: float = number(0.5)
        wide: float = number(2.0, minimum=0, infinite=True)
        count: int = whole(3, minimum=1, maximum=5)
        any_count: int | None = whole(None, optional=True, absent=True)
        kind: str = word("red", words=("red", "blue"))
        text: str | None = word(None, optional=True)
        on: bool = flag(True)
        plain: int = 7  # without a rule

    return Box


def settled(**values: Any) -> tuple[Any, Mapping[str, Parameter]]:
    made = box()(**{"share": 0.5, **values})
    return made, settle(made, "box")


def test_fields_are_told_by_name_and_what_is_absent_is_left_out() -> None:
    made, told = settled()
    assert told == {
        "share": 0.5, "below": 0.0, "free": 0.5, "wide": 2.0, "count": 3, "kind": "red", "text": None, "on": True,
    }  # fmt: skip
    assert list(rules(made)) == [*list(told)[:5], "any_count", "kind", "text", "on"] == list(rules(box()))
    assert settled(any_count=2)[1]["any_count"] == 2
    with pytest.raises(TypeError, match="share"):
        box()()  # a field without a default


def test_values_get_the_type_of_their_rule() -> None:
    made, told = settled(share=1, count=2.0, wide=3)
    for name, value in {"share": 1.0, "count": 2, "wide": 3.0, "on": True}.items():
        assert type(told[name]) is type(getattr(made, name)) is type(value) and told[name] == value


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("share", (5e-324, 1.0)), ("below", (-1.0, 0.999)), ("free", (-1e300, 1e300)), ("wide", (0.0, math.inf)),
        ("count", (1, 5)), ("any_count", (None, -3, 0)), ("kind", ("red", "blue")), ("text", (None, "", "x")),
        ("on", (True, False)),
    ],
)  # fmt: skip
def test_the_ends_that_a_rule_includes_are_allowed(name: str, fits: tuple[Any, ...]) -> None:
    for value in fits:
        assert getattr(settled(**{name: value})[0], name) == value


@pytest.mark.parametrize(
    ("name", "wrong", "wanted"),
    [
        ("share", (0, 1.001, None, "1", True, math.nan, math.inf), "a finite number above 0 and at most 1"),
        ("below", (-1.001, 1, None), "a finite number at least -1 and below 1"),
        ("free", (math.inf, -math.inf, math.nan, None, [1]), "a finite number"),
        ("wide", (-0.001, -math.inf, math.nan), "a number at least 0"),
        ("count", (0, 6, 2.5, math.inf, "3", False), "a whole number at least 1 and at most 5"),
        ("any_count", (0.5, math.inf, "0"), "a whole number"),
        ("kind", ("green", "", None, 1), "red or blue"),
        ("text", (1, True), "text"),
        ("on", (1, 0, None, "yes"), "true or false"),
    ],
)
def test_a_value_that_breaks_its_rule_is_refused_and_the_rule_told(name: str, wrong: tuple[Any, ...], wanted: str) -> None:
    for value in wrong:
        with pytest.raises(InputError) as caught:
            settled(**{name: value})
        assert str(caught.value) == f"box: {name} is {value!r}; expected {wanted}"


def test_a_protection_is_known_by_the_name_it_is_made_with() -> None:
    before = dict(KNOWN)
    try:

        class Shared(Protection):
            """What several have in common has no name."""

        assert before == KNOWN

        @dataclass(frozen=True)
        class Blur(Shared, named="blur", at=Stage.DATA):
            width: float = number(1.0, minimum=0)

        class Plain(Shared, named="plain"):
            pass

        made = mechanism("blur", {"width": 2})
        assert type(made) is Blur and made == Blur(2.0) and (made.name, made.stage) == ("blur", Stage.DATA)
        assert made.parameters == {"width": 2.0} and isinstance(made, Mechanism)
        assert mechanism("plain").stage is Stage.WIRE and {*KNOWN} - {*before} == {"blur", "plain"}
    finally:
        for name in {*KNOWN} - {*before}:
            del KNOWN[name]
    assert before == KNOWN
