"""On a GPU everything is as on a CPU: updates, audits, trainings, guarantees. Skipped where there is none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_setting import TEXTS, model_folder, plan_for
from commands import rasura_command
from cuda_setting import apart
from private_setting import DATA, Linear, collate
from torch import Tensor, nn
from torch.utils.data import DataLoader
from training_setting import fine_tuning, notes, rows, stopped

import rasura
from rasura.attacks.updates.candidates import scores
from rasura.core.batches import ImageBatch
from rasura.core.interfaces import Budget
from rasura.core.rng import drawing, generator, secret_generator
from rasura.core.threat import THREATS, observe
from rasura.core.updates import changed
from rasura.core.values import Transcript
from rasura.registry import attack, parse_defense, parse_update
from rasura.runs.candidates import inputs_of
from rasura.testing.tiny import ALL, CAUSAL_VOCABULARY, DECODERS, UNSUPPORTED, VOCABULARY, batch_for, tiny
from rasura.victims.loading import load
from rasura.victims.outputs import predictions
from rasura.victims.per_example import fault
from rasura.victims.step import step
from rasura.victims.together import Together
from rasura.victims.vision import build

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

__all__ = ["model_folder"]
KINDS = [(f, "classification") for f in ALL if f not in UNSUPPORTED] + [(f, "causal") for f in DECODERS]
DEFENSES = [
    "none", "accumulate:8", "bf16", "directional:1e5", "dp-sgd:1.0/clip=0.5", "fp16", "frozen-blocks:1",
    "frozen-embeddings", "gaussian:0.001", "laplace:0.001", "normalised:1.0", "pruning:0.7", "qsgd:16",
    "random-pruning:0.7", "sealing:grad=0.3", "sealing:sens=0.3", "sealing:sens-exact=0.3", "sign",
]  # fmt: skip


def sent(
    device: str,
    family: str = "bert",
    task: Any = "classification",
    defense: str = "none",
    update: str = "fedsgd",
    **more: Any,
) -> Transcript:
    """What a client sends whose model is on ``device``."""
    model = tiny(family, task).to(more.get("dtype", torch.float32)).to(device)
    if more.get("attention"):
        model.set_attn_implementation(more["attention"])  # type: ignore[operator]
    vocabulary = CAUSAL_VOCABULARY if task == "causal" else VOCABULARY
    local, wire = parse_update(update)
    protections = (*parse_defense(defense), *wire)
    rng = generator(0) if more.get("seeded", True) else secret_generator()
    return step(model, batch_for(task, 3), protections, task=task, vocabulary=vocabulary, rng=rng, local=local)


# --- updates


@pytest.mark.parametrize(("family", "task"), KINDS)
@pytest.mark.parametrize("attention", [None, "sdpa"])
def test_an_update_is_the_same(family: str, task: str, attention: str | None) -> None:
    if attention and not getattr(tiny(family, task), "_supports_sdpa", False):
        pytest.skip("this family has no fused attention")
    found = sent("cuda", family, task, attention=attention)
    assert apart(sent("cpu", family, task).message.gradients, found.message.gradients) < 1e-4


@pytest.mark.parametrize("defense", DEFENSES)
def test_a_protection_of_the_update_is_the_same(defense: str) -> None:
    one, other = (sent(d, defense=defense).message for d in ("cpu", "cuda"))
    if defense.startswith(("sealing", "pruning", "sign", "bf16", "fp16", "qsgd")):  # where rounding can move an entry
        assert apart(one.gradients, other.gradients) < 0.02
    else:
        assert apart(one.gradients, other.gradients) < 1e-4


@pytest.mark.parametrize("update", ["fedavg-sgd:2:0.01", "fedavg-adamw:2:0.001", "fedavg-momentum:3:0.01"])
def test_local_training_is_the_same(update: str) -> None:
    one, other = (sent(d, update=update).message for d in ("cpu", "cuda"))
    assert apart(one.gradients, other.gradients) < 1e-2


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_dropout_is_drawn_and_a_seed_repeats_it(seeded: bool, attention: str) -> None:
    one, other = (sent("cuda", defense="dropout:0.5", seeded=seeded, attention=attention) for _ in range(2))
    gap = apart(one.message.gradients, other.message.gradients)
    assert gap < 1e-5 if seeded else gap > 0.1
    assert apart(sent("cuda").message.gradients, one.message.gradients) > 0.1


def test_the_random_numbers_of_the_caller_go_on(model_folder: Path) -> None:
    model = tiny("bert", "classification").cuda()
    torch.manual_seed(7)
    wanted = torch.rand(4, device="cuda")
    torch.manual_seed(7)
    step(
        model, batch_for("classification", 2), parse_defense("dropout:0.1"), task="classification", vocabulary=VOCABULARY,
        rng=generator(3),
    )  # fmt: skip
    load(model_folder, "classification", num_labels=5)
    assert torch.equal(torch.rand(4, device="cuda"), wanted)


def test_secret_numbers_on_a_gpu_come_from_the_operating_system() -> None:
    torch.manual_seed(7)
    plain = torch.rand(1000, device="cuda")
    torch.manual_seed(7)
    with drawing(secret_generator()):
        secret = torch.rand(1000, device="cuda")
        mask = nn.functional.dropout(torch.ones(1000, device="cuda"), 0.5)
    assert secret.is_cuda and not torch.equal(plain, secret) and 0.4 < float(secret.mean()) < 0.6
    assert mask.is_cuda and 0.4 < float((mask > 0).float().mean()) < 0.6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("defense", ["none", "dp-sgd:1.0/clip=0.5", "sealing:grad=0.3", "pruning:0.5", "directional:1e5"])
def test_a_model_in_half_precision_sends_an_update(dtype: torch.dtype, defense: str) -> None:
    found = sent("cuda", "llama", "causal", defense, dtype=dtype).message.gradients
    assert found and all(torch.isfinite(t).all() for t in found.values())
    if defense == "none":
        assert apart(sent("cpu", "llama", "causal").message.gradients, {n: t.float() for n, t in found.items()}) < 0.1


# --- texts one by one


@pytest.mark.parametrize(("family", "task"), KINDS)
def test_gradients_of_single_texts(family: str, task: str) -> None:
    pytest.importorskip("opacus")
    model, batch = tiny(family, task).cuda(), batch_for(task, 4)
    inputs = batch.to("cuda").inputs()
    if fault(model, inputs) is not None:
        pytest.skip("texts of this family go one by one")
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    one_by_one = [changed(model, {k: v[i : i + 1] for k, v in inputs.items()}, names)[0] for i in range(len(batch))]
    together = Together(model, inputs, len(batch))
    for found, wanted in zip(together.each(), one_by_one, strict=True):
        assert apart(wanted, found) < 1e-5
    norms = torch.tensor([math.sqrt(sum(float(t.double().square().sum()) for t in g.values())) for g in one_by_one])
    assert torch.allclose(together.norms().cpu().float(), norms, rtol=1e-4)


def test_a_step_is_exact_where_the_process_allows_tf32() -> None:
    pytest.importorskip("opacus")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        found = [sent("cuda", defense=d).message.gradients for d in ("none", "dp-sgd:1e-7/clip=0.05")]
    finally:
        torch.set_float32_matmul_precision(before)
    assert apart(sent("cpu").message.gradients, found[0]) < 1e-4
    assert apart(sent("cpu", defense="dp-sgd:1e-7/clip=0.05").message.gradients, found[1]) < 3e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_texts_of_a_model_in_half_precision_go_together(dtype: torch.dtype) -> None:
    pytest.importorskip("opacus")
    for family, task in (("bert", "classification"), ("llama", "causal")):
        model, batch = tiny(family, task).to(dtype).cuda(), batch_for(task, 4)
        assert fault(model, batch.to("cuda").inputs()) is None


@pytest.mark.parametrize("kind", ["lenet", "cnn"])
@pytest.mark.parametrize("defense", ["none", "dp-sgd:1e-7/clip=0.05"])
def test_an_update_of_images(kind: str, defense: str) -> None:
    pixels = torch.rand((3, 3, 32, 32), generator=generator(0))
    batch = ImageBatch(pixels, torch.tensor([0, 2, 1]), ("a", "b", "c"))
    found = []
    for device in ("cpu", "cuda"):
        model = build(kind, 3).to(device)
        done = step(model, batch, parse_defense(defense), task="vision", vocabulary=VOCABULARY, rng=generator(0))
        found.append(done.message.gradients)
    assert apart(*found) < 3e-3


# --- audits


def test_a_step_on_a_batch_that_lies_on_the_gpu_is_observed() -> None:
    model, batch = tiny("bert", "classification").cuda(), batch_for("classification", 2).to("cuda")
    truth = step(
        model, batch, parse_defense("frozen-embeddings"), task="classification", vocabulary=VOCABULARY, rng=generator(3)
    )
    seen = observe(truth, THREATS["with-labels"])
    found = attack("span")(seen, rng=generator(0), budget=Budget("quick"))
    assert sorted(found.tokens) == sorted(batch.to("cpu").ids(k) for k in range(2))


@pytest.mark.parametrize("update", ["fedsgd", "local:batch=2/lr=1e-3"])
def test_candidates_are_scored(update: str) -> None:
    told = []
    for device in ("cpu", "cuda"):
        model, texts = tiny("bert", "classification").to(device), [batch_for("classification", k + 1) for k in range(3)]
        local, _ = parse_update(update)
        sent, _ = changed(model, texts[0].to(device).inputs(), [n for n, _ in model.named_parameters()], local)
        told.append(scores(model, inputs_of(texts), sent, local))
    assert told[1] == pytest.approx(told[0], rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("threat", ["honest-server", "malicious-server"])
def test_an_audit_reads_the_same(threat: str, model_folder: Path, tmp_path: Path) -> None:
    attacks = ("blind", "labels", "embedding-rows", "span", "dager", "lamp-cos", "grab", "joint-pursuit", "decepticons")
    defenses = ("none", "frozen-embeddings", "gaussian:0.1", "dp-sgd:1.0", "sealing:grad=0.3", "pruning:0.9", "dropout:0.1")
    plan = plan_for(model_folder, attacks=attacks, defenses=defenses, threats=(threat,), batch_sizes=(1,), limit=1)
    one, other = (
        {(r.defense, r.attack): r for r in rasura.audit(plan, out=tmp_path / str(k), device=device)}
        for k, device in enumerate(("cpu", "cuda"))
    )
    assert set(one) == set(other) and {r.device for r in other.values()} == {"cuda"}
    for key, r in other.items():
        if key[0] != "dropout:0.1":  # whose masks are others on a GPU
            assert (r.status, r.reason) == (one[key].status, one[key].reason), key
        if key[0] in ("none", "frozen-embeddings") and key[1] in ("embedding-rows", "span", "labels", "decepticons"):
            assert r.scores == one[key].scores and r.confidence == one[key].confidence, key


def test_a_model_in_memory_is_audited_where_it_is(model_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(model_folder).cuda()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    found = list(rasura.audit(
        model=model, tokenizer=tokenizer, data=list(TEXTS[:2]), attacks=["span"], defenses=["none"], budget="quick",
        device="cuda", out=tmp_path,
    ))  # fmt: skip
    assert next(model.parameters()).is_cuda and [r.confidence for r in found] == ["verified"] * 2


def test_the_commands_take_a_gpu(model_folder: Path, tmp_path: Path) -> None:
    data = notes(tmp_path)
    told = rasura_command(
        "audit", data, "--model", model_folder, "--attack", "blind,span", "--defense", "gaussian:0.001",
        "--limit", 2, "--budget", "quick", "--device", "cuda", "--out", tmp_path / "audit",
    )  # fmt: skip
    assert told.returncode in (0, 4), told.stderr
    told = rasura_command(
        "train", data, "--model", model_folder, "--test", data, "--defense", "none,dp-sgd:1.0", "--epochs", 1,
        "--device", "cuda", "--precision", "bf16", "--out", tmp_path / "train",
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    told = rasura_command(
        "calibrate", data, "--model", model_folder, "--defense", "gaussian", "--limit", 2, "--budget", "quick",
        "--device", "cuda", "--out", tmp_path / "calibrate",
    )  # fmt: skip
    assert "Report: " in told.stderr, told.stderr


# --- trainings


def fine_tuned(folder: Path, device: str, defense: str, stop: int | None = None) -> nn.Module:
    if stop is not None:
        stopped(fine_tuning(folder, defense, device=device), after=stop)
    run = fine_tuning(folder, defense, device=device)
    run.run()
    return run.model


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().cpu() for n, p in model.named_parameters()}


@pytest.mark.parametrize("defense", ["none", "gaussian:0.001", "dp-sgd:0.5/clip=0.01"])
def test_a_training_is_the_same(defense: str, tmp_path: Path) -> None:
    one, other = (weights(fine_tuned(tmp_path / d, d, defense)) for d in ("cpu", "cuda"))
    assert apart(one, other) < 1e-3


@pytest.mark.parametrize("defense", ["none", "dropout:0.1", "dp-sgd:0.5/clip=0.001/quantile=0.5"])
def test_an_interrupted_training_ends_as_an_uninterrupted_one(defense: str, tmp_path: Path) -> None:
    whole = weights(fine_tuned(tmp_path / "whole", "cuda", defense))
    assert apart(whole, weights(fine_tuned(tmp_path / "cut", "cuda", defense, stop=8))) < 1e-4


# --- loops of one's own


@pytest.mark.parametrize("defense", ["dp-sgd:1e-7/clip=0.05", "normalised:1e-7", "directional:1e12"])
def test_a_protected_loop_releases_the_same(defense: str) -> None:
    found = []
    for device in ("cpu", "cuda"):
        model = tiny("bert", "classification", num_labels=2).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(DATA[:4], 4, collate_fn=collate)
        model, _, drawn, _ = rasura.protect_training(model, optimizer, loader, defense)  # type: ignore[assignment]
        for batch in drawn:
            model(**{k: v.to(device) for k, v in batch.items()}).loss.backward()
        found.append({n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None})
    assert apart(*found) < (0.01 if "directional" not in defense else 0.2)


def test_canaries_in_gradients_are_counted() -> None:
    canaries, rng = rasura.GradientCanaries(200), generator(0, "features")
    data: Any = [{"features": torch.randn(600, generator=rng), "labels": torch.tensor(k % 2)} for k in range(60)]
    model: Any = Linear(600).cuda()
    model, optimizer, drawn, ledger = rasura.protect_training(
        model, torch.optim.SGD(model.parameters(), 0.01), DataLoader(data, batch_size=30), "dp-sgd:2.633", epochs=10,
        delta=1e-5, canaries=canaries,
    )  # fmt: skip
    for _ in range(10):
        for batch in drawn:
            optimizer.zero_grad()
            model(**{k: v.cuda() for k, v in batch.items()}).loss.backward()
            optimizer.step()
    found = canaries.measure(ledger)
    assert not found.refuted and found.bound.epsilon < found.stated


def test_answers_of_a_model_are_the_same() -> None:
    model, some = tiny("bert", "classification", num_labels=2), rows()
    one, other = predictions(model, some, 0), predictions(model.cuda(), some, 0)
    assert torch.allclose(one, other, atol=1e-5)
