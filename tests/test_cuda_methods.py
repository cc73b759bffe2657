"""GHOST and protected model services with a model on a GPU are as on a CPU. Skipped where there is none."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_setting import TEXTS, model_folder, plan_for
from commands import rasura_command, refused
from cuda_setting import apart
from membership_setting import plan_for as membership_plan
from safetensors.torch import load_file
from torch import nn
from training_setting import fine_tuning, notes, rows

import rasura
from rasura.core.rng import generator
from rasura.core.run_store import RunStore
from rasura.ghost.defense import ghost
from rasura.ghost.models import searchable
from rasura.ghost.table import ShadowSettings
from rasura.registry import parse_defense
from rasura.runs.ghost_obfuscator import GhostObfuscator
from rasura.runs.membership import infer_membership
from rasura.runs.service_plan import ServicePlan
from rasura.runs.services import ServiceAudit
from rasura.runs.train_plan import TrainPlan
from rasura.runs.trained import SERVED, folder_of
from rasura.runs.training import Training
from rasura.testing.tiny import CAUSAL_VOCABULARY, VOCABULARY, batch_for, tiny, tokenizer_folder
from rasura.victims.loading import load
from rasura.victims.protected_rows import protected
from rasura.victims.recipe import Recipe
from rasura.victims.step import step

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

__all__ = ["model_folder"]
DEVICE = "cuda"
PLACES = {"cpu": "cpu", "gpu": DEVICE}
SMALL = ShadowSettings(k=12, overlap=0.3, grow=4, max_k=40, language=None)
GHOST = "ghost:k=12/overlap=0.3/grow=4/max_k=40/language=none"
SERVICES = (
    "none", "obfuslm:k=4", "obfuslm:k=4/plus=true/hidden_k=2", "obfuslm:k=4/calibrated=true", "santext+:epsilon=1",
    "custext+:epsilon=1", "madlib:epsilon=20", "sentinellms", "dp-forward:epsilon=8", "dp-forward:epsilon=8/depth=1",
    "cape:depth=1", "textobfuscator:depth=1/clusters=5",
)  # fmt: skip
DRAWN_THERE = ("dp-forward:epsilon=8", "dp-forward:epsilon=8/depth=1")
"""Protections whose noise is drawn on the device, where a seed gives other numbers."""


def kinds(model: nn.Module) -> set[str]:
    return {t.device.type for t in (*model.parameters(), *model.buffers())}


# --- GHOST


@pytest.mark.parametrize("options", [{}, {"group": 4}])
@pytest.mark.parametrize(("family", "task"), [("bert", "classification"), ("gpt2", "causal"), ("llama", "causal")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_substitutes_are_the_same(family: str, task: str, options: dict[str, int], dtype: torch.dtype) -> None:
    settings = ShadowSettings(k=12, overlap=0.3, grow=4, max_k=40, language=None, **options)  # type: ignore[arg-type]
    part, batch = ghost(shadows=settings), batch_for(task, 4)
    vocabulary = CAUSAL_VOCABULARY if task == "causal" else VOCABULARY
    model = tiny(family, task).to(dtype)
    wanted, _ = part.apply(batch, part.init((model, vocabulary)), generator(0))
    model.to(DEVICE)
    for given in (batch, batch.to(DEVICE)):
        done, _ = part.apply(given, part.init((model, vocabulary)), generator(0))
        assert done.input_ids.device == given.input_ids.device
        assert torch.equal(done.input_ids.cpu(), wanted.input_ids) and torch.equal(done.labels.cpu(), wanted.labels)
    assert not torch.equal(wanted.input_ids, batch.input_ids)
    assert kinds(model) == {DEVICE} and {p.dtype for p in model.parameters()} == {dtype}
    assert kinds(searchable(model)) == {"cpu"}


@pytest.mark.parametrize(("family", "task"), [("bert", "classification"), ("llama", "causal")])
def test_a_step_behind_ghost_is_the_same(family: str, task: Any) -> None:
    vocabulary = CAUSAL_VOCABULARY if task == "causal" else VOCABULARY
    one, other = (
        step(
            tiny(family, task).to(device), batch_for(task, 3), (ghost(shadows=SMALL),), task=task, vocabulary=vocabulary,
            rng=generator(0),
        ).message.gradients
        for device in ("cpu", DEVICE)
    )  # fmt: skip
    assert apart(one, other) < 1e-4


def test_a_fine_tuning_on_ghosts_texts_is_the_same(tmp_path: Path) -> None:
    found = []
    for where, device in PLACES.items():
        model, folder = tiny("bert", "classification", num_labels=2).to(device), tmp_path / where
        hidden = protected(rows(), parse_defense(GHOST), model, VOCABULARY, folder / "protected", seed=5)
        run = fine_tuning(folder, GHOST, device=device, hidden=hidden)
        run.run()
        found.append(
            ([row.input_ids.tolist() for row in hidden], {n: p.detach().cpu() for n, p in run.model.named_parameters()})
        )
    (ids, one), (same, other) = found
    assert ids == same != [row.input_ids.tolist() for row in rows()]
    assert apart(one, other) < 1e-3


def test_an_obfuscator_takes_a_model_on_a_gpu(model_folder: Path, tmp_path: Path) -> None:
    data = {"text": list(TEXTS)}
    wanted = GhostObfuscator(load(model_folder, "classification"), shadows=SMALL)(data)
    victim, table = load(model_folder, "classification", device=DEVICE), tmp_path / "shadows.safetensors"
    assert GhostObfuscator(victim, shadows=SMALL, table=table)(data) == wanted
    assert GhostObfuscator(victim, table=table)(data) == wanted  # a table that is there already
    assert kinds(victim.model) == {DEVICE}


def test_an_audit_of_ghost_reads_the_same(model_folder: Path, tmp_path: Path) -> None:
    plan = plan_for(model_folder, attacks=("blind", "span", "ghost-lattice"), defenses=("none", GHOST), limit=1)
    found = []
    for where, device in PLACES.items():
        some = list(rasura.audit(plan, out=tmp_path / where, device=device))
        found.append({(r.defense, r.attack): (r.status, r.scores) for r in some})
        assert all(r.status != "crashed" for r in some)
    assert found[0].keys() == found[1].keys()
    assert all(found[1][key][0] == told[0] for key, told in found[0].items())
    assert found[0]["none", "span"] == found[1]["none", "span"]


def test_a_training_and_its_membership_audit_behind_ghost(model_folder: Path, tmp_path: Path) -> None:
    data, hidden = notes(tmp_path, count=16), []
    for where, device in PLACES.items():
        told = rasura_command(
            "train", data, "--model", model_folder, "--test", data, "--defense", GHOST, "--epochs", 1,
            "--device", device, "--out", tmp_path / where,
        )  # fmt: skip
        assert told.returncode == 0, told.stderr
        files = sorted((tmp_path / where / "protected").rglob("*.safetensors"))
        hidden.append([load_file(str(file))["input_ids"].tolist() for file in files])
    assert hidden[0] == hidden[1] != []
    plan = membership_plan(
        model_folder, tmp_path, attacks=("loss", "lira"), defense=GHOST, recipe=Recipe(epochs=1, batch_size=8)
    )
    here, there = (infer_membership(plan, out=tmp_path / f"{w}-members", device=device) for w, device in PLACES.items())
    assert [(r.attack, r.status) for r in here] == [(r.attack, r.status) for r in there]
    assert {r.status for r in there} == {"ok"}


# --- model services


def service_plan(folder: Path, **more: Any) -> ServicePlan:
    """An audit of the services; its texts and the adversary's are written into ``folder``."""
    lines = {"notes": TEXTS, "more": [f"{t} w{k}" for t in TEXTS for k in range(5)]}
    for name, texts in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(f'{{"text": "{t}", "label": {k % 2}}}\n' for k, t in enumerate(texts)))
    return ServicePlan(str(folder / "notes.jsonl"), str(folder / "more.jsonl"), limit=2, **more)


def records(plan: ServicePlan, training: Training, folder: Path) -> dict[tuple[str, str, str], Any]:
    audit = ServiceAudit(plan, training, baseline=False)
    store = RunStore(folder, audit.identity)
    try:
        return {(r.defense, r.attack, r.update): r for r in audit.run(store)}
    finally:
        store.close()


@pytest.fixture(scope="module")
def trainings(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The training under one protection on a device, and its result; each is run once."""
    data = notes(tmp_path_factory.mktemp("data"))

    @cache
    def trained(protection: str, where: str) -> tuple[Training, dict[str, Any]]:
        plan = TrainPlan(
            str(data), str(data), str(model_folder), defenses=(protection,), recipe=Recipe(1, 4, learning_rate=1e-3),
            service=True,
        )  # fmt: skip
        training = Training(plan, tmp_path_factory.mktemp(f"train-{where}"), device=PLACES[where])
        (result,) = training.run()
        return training, result

    return trained


@pytest.mark.parametrize("protection", SERVICES)
def test_a_service_is_trained_to_the_same(protection: str, trainings: Any) -> None:
    (here, one), (there, other) = (trainings(protection, where) for where in PLACES)
    assert other["device"] == DEVICE and one["weights"] == other["weights"] and one["mechanism"] == other["mechanism"]
    served = [load_file(str(t.folder / folder_of(protection, 0) / SERVED)) for t in (here, there)]
    if protection in DRAWN_THERE:
        assert list(served[0]) == list(served[1]) and all(torch.isfinite(t).all() for t in served[1].values())
    else:
        floats = [{n: t for n, t in some.items() if t.is_floating_point()} for some in served]
        assert apart(*floats) < 1e-2 and all(
            torch.equal(t, served[1][n]) for n, t in served[0].items() if n not in floats[0]
        )
        assert one["before"]["loss"] == pytest.approx(other["before"]["loss"], rel=1e-3)
    list(there.run())  # finished trainings are read
    victim = there.victim(0)
    made = there.service(protection, victim, 0)
    assert kinds(made.public) == kinds(made.served) == kinds(there.trained_service(made, protection, 0).served) == {"cpu"}


@pytest.mark.parametrize("protection", SERVICES)
def test_a_service_that_a_gpu_trained_is_audited(
    protection: str, model_folder: Path, trainings: Any, tmp_path: Path
) -> None:
    plan = service_plan(
        tmp_path, model=str(model_folder), protections=(protection,), attacks=("blind", "knn", "invbert"),
        weights=("uploaded", "trained"),
    )  # fmt: skip
    here, there = (records(plan, trainings(protection, where)[0], tmp_path / where) for where in PLACES)
    assert here.keys() == there.keys() and len(there) >= 3
    for key, r in there.items():
        assert r.status == here[key].status, (key, r.reason)
        assert r.status == "ok" or (r.status == "not_applicable" and key[1] != "blind"), (key, r.reason)
        if key[2] == "uploaded":
            assert r.scores == here[key].scores, key


def test_a_generating_service_that_a_gpu_trained_answers_on_a_cpu(tmp_path: Path) -> None:
    model = tokenizer_folder(tiny("llama", "causal"), tmp_path / "model")
    protections = ("none", "obfuslm:k=2", "santext+:epsilon=1", "sentinellms")
    texts = [" ".join(f"w{20 + (7 * k + n) % 20}" for n in range(8 + k % 3)) for k in range(12)]
    for name, some in (("notes", texts[:4]), ("more", texts[4:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{t}"}}\n' for t in some))
    more, private = str(tmp_path / "more.jsonl"), str(tmp_path / "notes.jsonl")
    recipe = Recipe(epochs=1, batch_size=4, learning_rate=1e-3)
    plan = TrainPlan(more, private, str(model), "causal", protections, recipe=recipe, service=True)
    training = Training(plan, tmp_path / "training", device=DEVICE)
    assert {r["device"] for r in training.run()} == {DEVICE}
    wanted = ServicePlan(
        private, more, model=str(model), task="causal", protections=protections, attacks=("blind", "knn"), limit=2,
        weights=("uploaded", "trained"),
    )  # fmt: skip
    found = records(wanted, training, tmp_path / "run")
    assert {r.status for (_, attack, _), r in found.items() if attack != "knn"} == {"ok"}
    assert {key[0] for key in found if key[1] == "client"} == set(protections)


def test_the_commands_train_services_on_a_gpu_and_resume(model_folder: Path, tmp_path: Path) -> None:
    data = notes(tmp_path)
    for _ in range(2):
        told = rasura_command(
            "train", data, "--service", "--model", model_folder, "--test", data, "--defense", ",".join(SERVICES[::3]),
            "--epochs", 1, "--device", DEVICE, "--out", tmp_path / "train",
        )  # fmt: skip
        assert told.returncode == 0, told.stderr


# --- what needs a CPU


def test_a_ray_cluster_computes_on_cpus(model_folder: Path, tmp_path: Path) -> None:
    told = refused(
        "audit", notes(tmp_path), "--model", model_folder, "--engine", "ray", "--device", "cuda", "--out", tmp_path / "run"
    )
    assert "--engine ray computes on CPUs" in told and "pass --device cpu" in told
