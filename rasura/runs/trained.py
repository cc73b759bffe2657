"""Where the trainings of ``rasura train`` lie, what is written beside a model, and the check that a result is that of the
training asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rasura.core.errors import InputError
from rasura.core.files import name_for, write_whole
from rasura.core.records import canonical
from rasura.data.classes import CLASSES

SERVED = "served.safetensors"
"""The weights of a trained service, in the folder of its training."""


def folder_of(defense: str, seed: int) -> str:
    """The subfolder for the model trained under ``defense`` from ``seed``."""
    return f"{name_for(defense)}-{seed}"


def claim(
    folder: Path, about: Mapping[str, Any], rows: Mapping[str, Any], files: Mapping[str, str], codes: Mapping[str, str]
) -> None:
    """Claim ``folder`` for the plan that ``about`` describes. ``rows``: which rows of the file are trained on, and on which
    model training begins: what attacks on membership start from. ``files``: by protection, what it reads (``files_of``).
    ``codes``: likewise, what of it is not Rasura's own (``codes_of``).

    Raises ``InputError`` if the folder belongs to another plan, or holds a training under the same protection with other
    files or code, or does not say with which; defenses and seeds may be added.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "plan.json"
    if path.exists() and json.loads(path.read_text(encoding="utf-8")) != about:
        raise InputError(f"{folder} holds a training with other settings, data or weights; choose another --out")
    _claim_files(folder, {text: ", ".join(filter(None, (files.get(text), codes.get(text)))) for text in {**files, **codes}})
    write_whole(path, canonical(about) + "\n")
    write_whole(folder / "rows.json", canonical(rows) + "\n")


def _claim_files(folder: Path, files: Mapping[str, str]) -> None:
    path = folder / "files.json"
    held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for text, now in files.items():
        begun = any(f.name.rpartition("-")[0] == name_for(text) for f in folder.iterdir())
        if held.get(text, None if begun else now) != now:
            raise InputError(
                f"{folder} holds a training under {text} with another content of its file, or other code; "
                "choose another --out"
            )
    if files:
        write_whole(path, canonical({**held, **files}) + "\n")


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


def name_classes(config: Any, label_names: Sequence[str], count: int, adapter: Path | None) -> None:
    """Write the names of ``count`` classes into the configuration of a model, so that they are read in the same way from
    then on. ``adapter``: the folder of one; it has no configuration of a model, so they get a file there."""
    names = [*label_names, *(f"unused {k}" for k in range(len(label_names), count))]
    config.id2label = dict(enumerate(names))
    config.label2id = {name: k for k, name in enumerate(names)}
    if adapter is not None:
        adapter.mkdir(exist_ok=True)
        write_whole(adapter / CLASSES, canonical({"id2label": config.id2label}) + "\n")
