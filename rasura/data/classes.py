"""The names of a model's classes, as its folder gives them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

CLASSES = "classes.json"
"""The file beside a trained adapter that names its classes, as the configuration of a model does."""


def model_classes(model: str) -> tuple[str, ...]:
    """Names of the classes that a model's folder gives, or that of an adapter's base model; empty for a hub id, and where
    they are ``LABEL_0`` and so on."""
    folder = Path(model)
    try:
        path = next((p for p in (folder / "config.json", folder / CLASSES) if p.exists()), None)
        if path is None:
            path = Path(_read(folder / "adapter_config.json")["base_model_name_or_path"]) / "config.json"
        return class_names(_read(path)["id2label"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ()


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size < 1 << 24 else {}


def class_names(id2label: Any) -> tuple[str, ...]:
    """The names of the classes 0, 1, ... in the field of a model's config; empty where they are ``LABEL_0`` and so on."""
    try:
        names = {int(k): v for k, v in id2label.items()}
    except (ValueError, TypeError, AttributeError):
        return ()
    usual = all(isinstance(v, str) and re.fullmatch(r"LABEL_\d+", v) for v in names.values())
    if usual or sorted(names) != list(range(len(names))) or not all(isinstance(v, str) for v in names.values()):
        return ()
    return tuple(names[k] for k in range(len(names)))
