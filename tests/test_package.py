"""What is published: sdist and wheel are built from a clean copy, hold what they should, and the wheel runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from email import message_from_string
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from audit_setting import TEXTS, model_folder

__all__ = ["model_folder"]
ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LEFT = (".git", ".venv", "build", "dist", "mutants", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")


@dataclass(frozen=True)
class Built:
    """The two archives: the names of their files, and the metadata of the wheel."""

    wheel: Path
    of_wheel: frozenset[str]
    of_sdist: frozenset[str]
    metadata: Message


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    pytest.importorskip("build")
    source, out = tmp_path_factory.mktemp("source") / "rasura", tmp_path_factory.mktemp("dist")
    some = shutil.ignore_patterns(*LEFT)
    shutil.copytree(ROOT, source, ignore=lambda at, names: {*some(at, names), *({"runs"} if Path(at) == ROOT else ())})
    # Without isolation nothing is downloaded: setuptools is the one of this environment. The wheel is made from the sdist.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=out, env=clean)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive, tarfile.open(sdist) as tar:
        names = archive.namelist()
        (about,) = [n for n in names if n.endswith(".dist-info/METADATA")]
        metadata = message_from_string(archive.read(about).decode())
        inside = frozenset(m.name.partition("/")[2] for m in tar.getmembers() if m.isfile())
    return Built(wheel, frozenset(names), inside, metadata)


def test_the_wheel_holds_the_package_whole_and_nothing_else(built: Built) -> None:
    wanted = {p.relative_to(ROOT).as_posix() for p in (ROOT / "rasura").rglob("*") if p.is_file()}
    wanted = {name for name in wanted if "__pycache__" not in name}
    assert {n for n in built.of_wheel if ".dist-info/" not in n} == wanted
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in built.of_wheel)
    assert built.wheel.name == f"rasura-{PROJECT['version']}-py3-none-any.whl"


def test_the_sdist_holds_what_is_needed_to_test_it(built: Built) -> None:
    for folder in ("rasura", "tests", "fuzz", "tools", "examples"):
        wanted = {p.relative_to(ROOT).as_posix() for p in (ROOT / folder).rglob("*.py")}
        assert wanted <= built.of_sdist, folder
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "Makefile", "constraints.txt"):
        assert name in built.of_sdist
    assert not any(name.startswith("runs/") or name.endswith(".safetensors") for name in built.of_sdist)


def test_the_metadata_says_who_where_and_what(built: Built) -> None:
    about = built.metadata
    assert about["Name"] == "rasura" and about["Version"] == PROJECT["version"]
    assert about["License-Expression"] == "Apache-2.0" and about["License-File"] == "LICENSE"
    assert about["Requires-Python"] == ">=3.11" and about["Description-Content-Type"] == "text/markdown"
    urls = dict(line.split(", ", 1) for line in about.get_all("Project-URL", []))
    assert urls == PROJECT["urls"] and set(urls) >= {"Repository", "Issues", "Changelog", "Documentation"}
    assert about.get_all("Classifier") == PROJECT["classifiers"] and about["Keywords"]
    required = [line for line in about.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(required) == sorted(PROJECT["dependencies"]) and len(required) <= 8
    assert set(about.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])


def test_the_wheel_runs_outside_the_checkout(built: Built, tmp_path: Path) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        archive.extractall(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = (
        "import rasura, sys; from rasura.cli import main; sys.argv = ['rasura', '--version']; print(rasura.__file__); main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    where, version = done.stdout.split("\n")[:2]
    assert Path(where).is_relative_to(tmp_path) and version == f"rasura {PROJECT['version']}"


def lowest(requirements: list[str]) -> list[str]:
    """Each requirement at its lowest version."""
    return [line.replace(">=", "==") for line in requirements]


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the lowest versions are promised on the lowest Python")
def test_the_wheel_works_with_the_lowest_versions(built: Built, model_folder: Path, tmp_path: Path) -> None:
    python, place = sys.executable, tmp_path / "environment"
    asked = [python, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(tmp_path / "there"), "typer"]
    if subprocess.run(asked, capture_output=True, check=False).returncode:
        pytest.skip("no package index can be reached")
    subprocess.run([python, "-m", "venv", str(place)], check=True)
    scripts = place / ("Scripts" if os.name == "nt" else "bin")
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(*words: object) -> str:
        done = subprocess.run(
            [str(scripts / str(words[0])), *map(str, words[1:])],
            capture_output=True, text=True, check=False, cwd=tmp_path, env=clean,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    run("python", "-m", "pip", "install", "-q", built.wheel, *lowest(PROJECT["dependencies"]))
    assert run("rasura", "--version") == f"rasura {PROJECT['version']}\n"
    assert "span" in json.loads(run("rasura", "list", "attacks", "--json"))
    common = ("--model", model_folder, "--attack", "blind,span", "--limit", "2", "--out", tmp_path / "run", "--json")
    told = json.loads(run("rasura", "audit", *(part for one in TEXTS for part in ("--text", one)), *common))
    assert told["verdicts"]["none"]["verdict"] == "reads"
