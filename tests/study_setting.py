"""Small studies on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def notes(path: Path, texts: Sequence[str]) -> None:
    """A data file of ``texts``, the labels by turns 0 and 1."""
    path.write_text("".join(f'{{"text": "{t}", "label": {k % 2}}}\n' for k, t in enumerate(texts)), encoding="utf-8")


def study_folder(tmp_path: Path, body: str) -> Path:
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "one.toml").write_text(body, encoding="utf-8")
    return tmp_path / "studies"
