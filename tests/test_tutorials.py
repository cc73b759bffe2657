"""Every tutorial runs from top to bottom: its Python in one namespace, its commands through the command line."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from commands import rasura_command

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


def test_there_are_four() -> None:
    assert [t.stem for t in TUTORIALS] == ["federated", "protect-a-loop", "read-a-sentence", "service"]


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_from_top_to_bottom(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RASURA_PASSPHRASE", raising=False)
    here: dict[str, Any] = {}
    blocks = re.findall(r"^```(python|sh)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    assert blocks
    for kind, text in blocks:
        if kind == "python":
            exec(compile(text, page.name, "exec"), here)
            continue
        for line in filter(None, text.splitlines()):
            name, *words = shlex.split(line)
            assert name == "rasura"
            done = rasura_command(*words)
            assert done.returncode == 0, f"{line}\n{done.stderr}"
