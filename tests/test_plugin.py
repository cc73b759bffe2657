"""Methods that others bring: as objects, and as an installed package. ``examples/plugin`` is that package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from audit_setting import TEXTS, model_folder
from rows import GUESS, MANY, METRIC, column

import rasura
from rasura.core.errors import InputError
from rasura.core.interfaces import Attack
from rasura.core.specs import CLASSIFIERS, AttackSpec, DefenseSpec
from rasura.core.values import Reconstruction, Task
from rasura.defenses.dropout import dropout
from rasura.defenses.noise import gaussian_noise
from rasura.metrics.text import jaccard
from rasura.registry import (
    ATTACKS,
    DEFENSES,
    METRICS,
    SERVICE_ATTACKS,
    SERVICE_PROTECTIONS,
    Methods,
    adversaries,
    named_attacks,
    named_defenses,
    named_metrics,
)
from rasura.registry.services import parse_service_protection
from rasura.report.page import write_report
from rasura.report.verdicts import NOT_MEASURED, NOT_TOLD, verdict
from rasura.runs.service_plan import ServicePlan

__all__ = ["model_folder"]
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "plugin"


class Rows:
    """An attack of a researcher: the embedding rows under another name."""

    name = "my-rows"
    needs = ATTACKS["embedding-rows"].make().needs
    uses = ATTACKS["embedding-rows"].make().uses

    def __call__(self, seen: object, **how: object) -> Reconstruction:
        return ATTACKS["embedding-rows"].make()(seen, **how)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def loaded(model_folder: Path) -> tuple[torch.nn.Module, object]:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(model_folder)
    return model.train(), transformers.AutoTokenizer.from_pretrained(model_folder)


def test_an_audit_takes_a_model_texts_and_methods_in_memory(loaded: tuple[torch.nn.Module, object], tmp_path: Path) -> None:
    model, tokenizer = loaded
    before = {n: p.clone() for n, p in model.state_dict().items()}
    records = list(
        rasura.audit(
            model=model, tokenizer=tokenizer, data=TEXTS, attacks=["blind", Rows()], metrics=["token_recall", jaccard()],
            defenses=["none", dropout(0.2), gaussian_noise(0.01)], budget="quick", out=tmp_path,
        )
    )  # fmt: skip
    assert {r.attack for r in records} == {"blind", "my-rows"}
    assert {r.status for r in records if r.defense != "own-gaussian"} == {"ok"}, "noise may hide the rows"
    assert {r.defense for r in records} == {"none", "own-dropout", "own-gaussian"}
    assert len(records) == 2 * 3 * len(TEXTS) and set(records[0].scores) == {"token_recall", "own-jaccard"}
    read = [r for r in records if (r.attack, r.defense) == ("my-rows", "none")]
    assert all(r.scores["token_recall"]["mean"] == 1.0 for r in read)
    unknown = {tuple(r.known_by["unknown"]) for r in records if r.defense == "own-gaussian"}
    assert unknown == {("own-gaussian",)}, "no attack is taken to know an object"
    assert model.training and all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
    assert "own-gaussian" in write_report(tmp_path).read_text(encoding="utf-8")


def test_other_weights_never_continue_a_run(loaded: tuple[torch.nn.Module, object], tmp_path: Path) -> None:
    model, tokenizer = loaded
    wanted: dict[str, Any] = {"data": TEXTS[:1], "attacks": ["blind"], "defenses": ["none"], "out": tmp_path}
    list(rasura.audit(model=model, tokenizer=tokenizer, **wanted))
    weight = next(model.parameters())
    try:
        with torch.no_grad():
            weight[0, 0] += 1
        with pytest.raises(InputError, match="plan"):
            list(rasura.audit(model=model, tokenizer=tokenizer, **wanted))
    finally:
        with torch.no_grad():
            weight[0, 0] -= 1


def test_objects_that_are_no_methods_are_refused_with_what_was_expected() -> None:
    refused: tuple[tuple[Callable[[Any], object], object, str], ...] = (
        (named_attacks, object(), "not an attack; expected name, needs, uses and a call"),
        (named_defenses, object(), "not a protection; expected a Transform"),
        (named_defenses, (), "not a protection; expected a Transform"),
        (named_metrics, object(), "not a metric; expected name, unit"),
    )
    for make, what, expected in refused:
        with pytest.raises(InputError, match=expected):
            make([what])
    with pytest.raises(InputError, match="expected a list of names or objects"):
        named_attacks("span")
    with pytest.raises(InputError, match="two of the methods are called 'my-rows'"):
        named_attacks([Rows(), Rows()])
    assert isinstance(Rows(), Attack)


ROLLED = DefenseSpec(name="rolled", about="rolls", source="own", make=lambda: dropout(0.2), example="rolled")


def knowing(
    own: DefenseSpec, *attacks: AttackSpec, beside: str = "", task: Task = "classification"
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    known = {**DEFENSES, own.name: own}
    found = adversaries(beside + own.name, task=task, defenses=known, attacks={**ATTACKS, **{a.name: a for a in attacks}})
    return found.attacks, found.unknown, found.protection_readers


def test_a_plug_in_cannot_say_that_nobody_needs_to_know_it() -> None:
    for known_by in (None, ()):
        assert knowing(replace(ROLLED, known_by=known_by)) == ((), ("rolled",), ())
        copied = replace(DEFENSES["gaussian"], name="own-gaussian", known_by=known_by)
        assert knowing(copied) == ((), ("own-gaussian",), ()), "what makes it is Rasura's, and says nothing of who knows it"
    assert adversaries("fp16").unknown == adversaries("none").unknown == ()


def test_an_attack_that_does_not_know_a_plug_in_does_not_speak_for_it() -> None:
    """``span`` was not written for it. That it reads nothing there says nothing, and the verdict could hold."""
    mine = replace(ATTACKS["embedding-rows"], name="mine", embedding=False)
    knows = replace(mine, knows=("rolled",))
    for known_by in (("span",), ("mine",), ("span", "mine")):
        assert knowing(replace(ROLLED, known_by=known_by), mine) == (known_by, ("rolled",), ())
    assert knowing(replace(ROLLED, known_by=("span", "mine")), knows) == (("span", "mine"), (), ()), "both must have run"
    assert knowing(replace(ROLLED, known_by=("span",)), knows) == (("span",), ("rolled",), ()), "each must name the other"
    assert knowing(replace(ROLLED, known_by=("mine",)), knows, task="vision") == ((), ("rolled",), ())
    of_classifiers = replace(knows, tasks=CLASSIFIERS)
    assert knowing(replace(ROLLED, known_by=("mine",)), of_classifiers, task="causal") == ((), ("rolled",), ())
    reads_it = replace(knows, protection=True)
    assert knowing(replace(ROLLED, known_by=("mine",)), reads_it) == (("mine",), (), ()), (
        "it is shown to work, or not believed"
    )
    rows = replace(knows, embedding=True)
    assert knowing(replace(ROLLED, known_by=("mine",)), rows, beside="frozen-embeddings+")[1] == ("rolled",)
    with pytest.raises(InputError, match="rolled names the attack 'spam' in known_by, and there is no such attack"):
        knowing(replace(ROLLED, known_by=("spam",)))


def test_an_audit_refuses_an_attack_that_is_not_there_before_it_runs(model_folder: Path, tmp_path: Path) -> None:
    rolled = replace(ROLLED, known_by=("spam",))
    with pytest.raises(InputError, match="no such attack"):
        rasura.audit(model=str(model_folder), data=TEXTS, attacks=["blind"], defenses=[rolled], out=tmp_path)


def test_a_verdict_on_a_plug_in_needs_an_attack_that_names_it() -> None:
    said = []
    for knows in ((), ("rolled",)):
        mine = replace(ATTACKS["span"], name="mine", knows=knows)
        defenses = {"rolled": replace(ROLLED, known_by=("mine",))}
        known_by = asdict(adversaries("rolled", defenses=defenses, attacks={"mine": mine}))
        rows = [{**r, "known_by": known_by} for r in column("mine", "rolled", [GUESS] * MANY)]
        said.append(verdict("rolled", rows, column("mine", "none", [1.0] * MANY), METRIC))
    assert said[0].word == NOT_MEASURED and "no attack knows rolled" in said[0].says
    assert said[1].word == NOT_TOLD


def test_a_protection_of_a_service_is_not_taken_at_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(**given: Any) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        spec = replace(SERVICE_PROTECTIONS["santext+"], name="mine", **given)
        monkeypatch.setitem(SERVICE_PROTECTIONS.specs, "mine", spec)
        found = parse_service_protection("mine").adversaries
        return found.attacks, found.unknown, found.protection_readers

    assert known(known_by=()) == known(known_by=None) == ((), ("mine",), ())
    assert known(known_by=("preimage",)) == (("preimage",), ("mine",), ("preimage",))
    told = replace(SERVICE_ATTACKS["preimage"], name="reads-mine", knows=("mine",), protection=True)
    monkeypatch.setitem(SERVICE_ATTACKS.specs, "reads-mine", told)
    assert known(known_by=("preimage", "reads-mine")) == (("preimage", "reads-mine"), (), ("preimage",))
    spec = replace(SERVICE_PROTECTIONS["santext+"], name="mine", known_by=("spam",))
    monkeypatch.setitem(SERVICE_PROTECTIONS.specs, "mine", spec)
    with pytest.raises(InputError, match="mine names the attack 'spam' in known_by"):
        ServicePlan("a", "b", protections=("mine",)).checked()
    assert parse_service_protection("none").adversaries.unknown == ()


def test_nothing_given_stands_for_a_method_of_the_registry() -> None:
    names, own = named_defenses(["none", DEFENSES["dropout"], replace(DEFENSES["fp16"], known_by=None)])
    assert names == ("none", "dropout", "own-fp16") and own["dropout"] is DEFENSES["dropout"]
    assert own["own-fp16"].name == own["own-fp16"].example == "own-fp16"
    rows = Rows()
    rows.name = "span"
    assert named_attacks([rows, replace(ATTACKS["best"], seconds=1.0)])[0] == ("own-span", "own-best")
    assert named_metrics([jaccard()])[0] == ("own-jaccard",)
    assert Methods().attacks is ATTACKS and Methods().metrics is METRICS


def test_a_model_in_memory_needs_a_tokenizer_and_a_config() -> None:
    with pytest.raises(InputError, match="pass its tokenizer"):
        rasura.audit(model=torch.nn.Linear(2, 2), data=TEXTS)
    with pytest.raises(InputError, match="Linear has no Hugging Face config"):
        rasura.audit(model=torch.nn.Linear(2, 2), tokenizer=object(), data=TEXTS)
    with pytest.raises(InputError, match="a tokenizer was given for a folder"):
        rasura.audit(model="minilm", tokenizer=object(), data=TEXTS)


# --- the package of others


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a process in which the example is installed."""
    place, source = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("source") / "plugin"
    shutil.copytree(EXAMPLE, source)  # pip builds beside the sources
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation", "--target",
         str(place), str(source)], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    path = os.pathsep.join([str(place), str(Path(rasura.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    yield {**os.environ, "PYTHONPATH": path}


def command(installed: dict[str, str], *words: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=installed, capture_output=True, text=True, check=False, cwd=EXAMPLE
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


LISTS = """
import contextlib, sys
from rasura.cli import main
for kind in ("attacks", "defenses"):
    sys.argv = ["rasura", "list", kind, "--json"]
    with contextlib.suppress(SystemExit):
        main()
"""


@pytest.mark.slow
def test_an_installed_plugin_is_listed_audited_and_in_the_report(
    installed: dict[str, str], model_folder: Path, tmp_path: Path
) -> None:
    listed = command(installed, "-c", LISTS).splitlines()
    for line, name in zip(listed, ("touched-rows", "value-clip:X"), strict=True):
        assert name in json.loads(line)
    notes = tmp_path / "notes.csv"
    notes.write_text("text,label\n" + "\n".join(f"{t},{k % 2}" for k, t in enumerate(TEXTS)) + "\n", encoding="utf-8")
    told = json.loads(
        command(
            installed, "-m", "rasura", "audit", notes, "--model", model_folder, "--attack", "blind,touched-rows",
            "--defense", "value-clip:0.001", "--limit", "3", "--out", tmp_path / "run", "--json",
        )
    )  # fmt: skip
    assert "value-clip:0.001" in json.dumps(told) and "touched-rows" in json.dumps(told)
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "touched-rows" in page and "value-clip:0.001" in page


@pytest.mark.slow
def test_the_plugin_keeps_the_laws(installed: dict[str, str]) -> None:
    assert "2 passed" in command(installed, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "tests")


def test_a_plugin_that_cannot_be_loaded_takes_nothing_down(installed: dict[str, str], tmp_path: Path) -> None:
    broken = tmp_path / "broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n", encoding="utf-8")
    lines = "[rasura.attacks]\nmine = absent_module:SPEC\nscript = a_script:SPEC\njoined = a_name:SPEC\n"
    (broken / "entry_points.txt").write_text(lines, encoding="utf-8")
    (tmp_path / "a_script.py").write_text("import sys\nsys.exit(0)\n", encoding="utf-8")
    named = (
        "from dataclasses import replace\nfrom rasura.attacks.updates.idlg import SPEC\nSPEC = replace(SPEC, name='a+b')\n"
    )
    (tmp_path / "a_name.py").write_text(named, encoding="utf-8")
    here = {**installed, "PYTHONPATH": os.pathsep.join([str(tmp_path), installed["PYTHONPATH"]])}
    done = subprocess.run(
        [sys.executable, "-m", "rasura", "list", "attacks"], env=here, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "span" in done.stdout
    assert "the plug-in mine could not be loaded: ModuleNotFoundError" in done.stderr
    assert "the plug-in script could not be loaded: SystemExit" in done.stderr
    assert "the plug-in joined could not be loaded" in done.stderr and "method name 'a+b'" in done.stderr
