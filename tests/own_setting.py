"""A protection of somebody: its description, which several tests build on."""

from __future__ import annotations

from typing import Any

from rasura.core.protection import Protection
from rasura.core.values import Stage


def described(name: str, stage: Stage = Stage.WIRE) -> Protection:
    """The description of a protection of somebody. Its class is in no register, so that no other test meets it."""
    kind: Any = type("Own", (Protection,), {"NAME": name, "STAGE": stage, "__module__": __name__})
    made: Protection = kind()
    return made
