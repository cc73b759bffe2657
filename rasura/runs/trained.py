"""Where the trainings of ``rasura train`` lie, and the check that a result is that of the training asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rasura.core.errors import InputError
from rasura.core.files import name_for

SERVED = "served.safetensors"
"""The weights of a trained service, in the folder of its training."""


def folder_of(defense: str, seed: int) -> str:
    """The subfolder for the model trained under ``defense`` from ``seed``."""
    return f"{name_for(defense)}-{seed}"


def finished(folder: Path, defense: str, seed: int, test: str) -> dict[str, Any] | None:
    """The result in ``folder`` of the training under ``defense`` from ``seed``; None if it is not finished.

    ``test``: the hash of the texts that it was judged on. Raises ``InputError`` for the result of another training.
    """
    path = folder / folder_of(defense, seed) / "result.json"
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if (found.get("defense"), found.get("seed"), found.get("test")) != (defense, seed, test):
        raise InputError(
            f"{path} holds the result of another training: expected {defense}, seed {seed}, judged on the same texts; "
            "choose another --out"
        )
    return found
