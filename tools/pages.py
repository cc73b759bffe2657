"""Pages of which a program writes a part, between two marks."""

from __future__ import annotations

from pathlib import Path


def put(page: Path, begin: str, text: str, end: str) -> None:
    """Write ``text`` into ``page`` between the marks ``begin`` and ``end``, in place of what stands there."""
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")
