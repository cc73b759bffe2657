"""Every tutorial and how-to runs from top to bottom: its Python in one namespace, its commands through the command line."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import rasura_command

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
HOW_TO = sorted((ROOT / "docs" / "how-to").glob("*.md"))
NEEDS = {"flower": "flwr", "ray": "ray", "impact-assessment": "docx"}


def test_the_pages_are_there() -> None:
    assert [t.stem for t in TUTORIALS] == ["federated", "protect-a-loop", "read-a-sentence", "service"]
    assert [t.stem for t in HOW_TO] == [
        "ci-gate", "flower", "impact-assessment", "nvflare", "own-attack", "own-defense", "own-model", "ray",
    ]  # fmt: skip


def run_command(line: str, folder: Path) -> None:
    """One line of a page; a comment ``exit code N`` says how it ends if not with 0."""
    name, *words = shlex.split(line, comments=True)
    expected = int(said[1]) if (said := re.search(r"# exit code (\d+)$", line)) else 0
    if name == "rasura":
        done = rasura_command(*words)
    else:
        assert name == "flwr"
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        where = {"FLWR_HOME": str(folder / "flwr"), "PYTHONPATH": str(ROOT)}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            [name, *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
            env={**os.environ, **quiet, **where, "PATH": path},
        )
    assert done.returncode == expected, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("page", [*TUTORIALS, *HOW_TO], ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page in HOW_TO and page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RASURA_PASSPHRASE", raising=False)
    here: dict[str, Any] = {}
    blocks = re.findall(r'^```(python|sh|toml)(?: title="(.*?)")?\n(.*?)^```', page.read_text(encoding="utf-8"), re.M | re.S)
    assert blocks
    try:
        for kind, title, text in blocks:
            if title:
                Path(title).parent.mkdir(exist_ok=True)
                Path(title).write_text(text, encoding="utf-8")
            elif kind == "python":
                exec(compile(text, page.name, "exec"), here)
            else:
                for line in filter(None, text.splitlines()):
                    run_command(line, tmp_path)
    finally:
        # flwr run starts a SuperLink that outlives it.
        subprocess.run(["pkill", "-f", str(tmp_path / "flwr")], check=False)
