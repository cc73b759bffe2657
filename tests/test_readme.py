"""The README is short and its commands run as printed; the pages hang together."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from commands import rasura_command

from rasura.registry import DEFENSES, SERVICE_PROTECTIONS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    \.venv/bin/rasura (.+)$", README, re.M)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 90


def test_every_page_is_there_and_listed() -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")} - {"index.md"}
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\((\S+?\.md)\)", index)) == pages
    named = re.findall(r"`((?:docs|benchmarks|studies|examples)/[\w./-]+)`", README)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_site_has_every_page_and_is_strict() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    first, *parts = site["nav"]
    listed = [first, *(page for part in parts for pages in part.values() for page in pages)]
    assert sorted(listed) == sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
    assert site["strict"] and set(site["validation"].values()) == {"warn"}


def test_the_sharp_edges_name_every_protection() -> None:
    page = (ROOT / "docs" / "sharp-edges.md").read_text(encoding="utf-8")
    named = {word for code in re.findall(r"`([^`]+)`", page) for word in re.split(r"[:=/,\s]", code)}
    named |= {part for word in named for part in re.split(r"\+(?=[a-z])", word)}
    assert {*DEFENSES, *SERVICE_PROTECTIONS} - {"none"} - named == set()
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| mistake")]
    assert {row.split(" | ")[1] for row in rows} == {"critical", "high", "medium"}


@pytest.mark.slow
def test_the_commands_of_the_readme_run_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minilm_path: Path
) -> None:
    (tmp_path / "rasura").symlink_to(ROOT / "rasura")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    exec(code, {})
    assert [command.split()[0] for command in COMMANDS] == ["read", "audit", "calibrate"]
    for command in COMMANDS:
        done = rasura_command(*shlex.split(command))
        assert done.returncode == (4 if command.startswith("calibrate") else 0), (command, done.stderr)
