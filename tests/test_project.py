"""The files by which others carry the project on say the same as the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import rasura

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_version_is_the_same_everywhere() -> None:
    assert PROJECT["version"] == rasura.__version__
    assert str(yaml.safe_load(read("CITATION.cff"))["version"]) == rasura.__version__
    assert f"## [{rasura.__version__}] - " in read("CHANGELOG.md")


def test_the_citation_has_what_the_format_demands() -> None:
    """Citation File Format 1.2.0: the required keys, and no key that it does not know."""
    cited = yaml.safe_load(read("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    known = {"abstract", "type", "version", "license", "repository-code", "url", "keywords", "doi", "date-released"}
    assert set(cited) <= known | {"cff-version", "message", "title", "authors"}
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software" and cited["license"] == PROJECT["license"]
    assert cited["authors"] == PROJECT["authors"] and cited["repository-code"] == PROJECT["urls"]["Repository"]


def test_the_changelog_has_versions_with_sections() -> None:
    lines = read("CHANGELOG.md").splitlines()
    heads = [line for line in lines if line.startswith("#")]
    sections = {"### Added", "### Changed", "### Deprecated", "### Removed", "### Fixed", "### Security"}
    assert heads[0] == "# Changelog" and re.fullmatch(r"## \[\d+\.\d+\.\d+\] - (unreleased|\d{4}-\d\d-\d\d)", heads[1])
    assert [h for h in heads[1:] if h not in sections and not h.startswith("## [")] == []


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda p: p.name)
def test_every_file_for_the_forge_is_valid_yaml(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)


def test_the_public_checks_cover_what_the_package_claims_to_support() -> None:
    jobs = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]
    matrix = jobs["tests"]["strategy"]["matrix"]
    claimed = [c.rsplit(" ", 1)[1] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert matrix["python"] == claimed and PROJECT["requires-python"] == f">={claimed[0]}"
    assert {system.split("-")[0] for system in matrix["os"]} == {"ubuntu", "macos", "windows"}
    lowest = "\n".join(step.get("run", "") for step in jobs["minimum"]["steps"])
    assert "--resolution lowest-direct" in lowest and "pytest" in lowest
    for tool in ("ruff format --check", "ruff check", "mypy"):
        assert any(step.get("run", "").startswith(tool) for step in jobs["style"]["steps"])
        assert tool in read("Makefile")
    typed = tomllib.loads(read("pyproject.toml"))["tool"]["mypy"]
    assert typed["strict"] and {"rasura", "tests", "benchmarks", "fuzz", "tools"} <= set(typed["files"])


def test_a_release_holds_no_secret() -> None:
    release = read(".github/workflows/release.yml")
    jobs = yaml.safe_load(release)["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and "secrets." not in release


def test_paths_that_the_guide_names_exist() -> None:
    for page in ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "docs/versioning.md", "docs/install.md"):
        named = re.findall(r"`((?:docs|tests|tools|rasura)/[\w./-]+|[A-Z_]+\.md|pyproject\.toml)`", read(page))
        assert [name for name in named if not (ROOT / name).exists()] == [], page
    targets = set(re.findall(r"^([a-z]+):", read("Makefile"), re.M))
    assert set(re.findall(r"`?make ([a-z]+)", read("CONTRIBUTING.md"))) <= targets
