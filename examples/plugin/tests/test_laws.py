"""The methods of the plug-in keep the laws that all methods of Rasura keep."""

from rasura_example import touched_rows, value_clip

from rasura.testing import check_attack, check_defense


def test_the_attack_keeps_the_laws() -> None:
    check_attack(touched_rows.SPEC)


def test_the_protection_keeps_the_laws() -> None:
    check_defense(value_clip.SPEC)
