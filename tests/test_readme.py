"""The README is short and its commands run as printed; the pages hang together."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import rasura_command

import rasura
from rasura.registry import DEFENSES, SERVICE_PROTECTIONS
from tools.picture_list import PICTURES, Bar
from tools.pictures import drawn

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

    def pages(part: Any) -> list[str]:
        if isinstance(part, str):
            return [part]
        return [page for one in (part.values() if isinstance(part, dict) else part) for page in pages(one)]

    assert sorted(pages(site["nav"])) == sorted(
        path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")
    )
    assert site["strict"] and set(site["validation"].values()) == {"warn"}


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: ([\w.]+)\.(\w+)$", page, re.M)
    assert sorted(name for _, name in shown) == sorted(set(rasura.__all__) - {"__version__"})
    for module, name in shown:
        source = (ROOT / Path(*module.split("."))).with_suffix(".py").read_text(encoding="utf-8")
        assert re.search(rf"^(class|def) {name}\b|^{name}\b.* = ", source, re.M), f"{name} is not defined in {module}"


def test_every_picture_is_that_of_its_table() -> None:
    folder = ROOT / "docs" / "pictures"
    assert {path.stem for path in folder.glob("*.svg")} == {picture.name for picture in PICTURES}
    for picture in PICTURES:
        assert (folder / f"{picture.name}.svg").read_text(encoding="utf-8") == drawn(picture), (
            f"{picture.name} differs from its table; draw it by python -m tools.pictures --write"
        )
        page = (ROOT / "docs" / "explanation" / f"{picture.name}.md").read_text(encoding="utf-8")
        assert f"(../pictures/{picture.name}.svg)" in page
        assert "## What holds" in page and "## What does not" in page


def test_a_picture_refuses_a_row_that_is_not_there_or_there_twice() -> None:
    for row in (("lamp-cos",), ("a method of nobody",)):
        wrong = replace(PICTURES[0], bars=(Bar("one", row),))
        with pytest.raises(ValueError, match="rows fit"):
            drawn(wrong)
    with pytest.raises(ValueError, match="no section"):
        drawn(replace(PICTURES[0], section="nowhere"))


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
