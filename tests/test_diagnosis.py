"""What is said of a private training before its first step, against sums over pairs of texts."""

from __future__ import annotations

import copy
import json
import math
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from audit_setting import NAMES, model_folder
from commands import rasura_command, refused
from private_setting import DATA, Linear, collate
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

import rasura
from rasura.core.interfaces import InputError
from rasura.runs.diagnosis import Diagnosis
from rasura.testing.tiny import tiny

__all__ = ["model_folder"]

pytest.importorskip("dp_accounting")

ALIKE = DATA[::2]
"""Texts of one class, which agree on a direction."""


def told(defense: Any = "dp-sgd:1.0", *, model: Any = None, count: int = 6, **options: Any) -> Diagnosis:
    usual: dict[str, Any] = {"examples": 1000, "batch_size": 50, "public": True}
    model = model or tiny("bert", "classification", num_labels=2)
    return rasura.diagnose_training(model, collate(ALIKE[:count]), defense, **{**usual, **options})


def own_gradients(count: int) -> list[Tensor]:
    model = tiny("bert", "classification", num_labels=2)
    out = []
    for row in ALIKE[:count]:
        model.zero_grad()
        model(**collate([row])).loss.backward()
        out.append(torch.cat([p.grad.double().reshape(-1) for p in model.parameters() if p.grad is not None]))
    return out


@pytest.mark.parametrize("clip", [0.1, 100.0])
def test_the_signal_is_what_different_texts_agree_on(clip: float) -> None:
    found = told(f"dp-sgd:0.01/clip={clip}", epochs=2)
    each = [g * min(1.0, clip / float(g.norm())) for g in own_gradients(6)]
    pairs = [float(each[i] @ each[k]) for i in range(6) for k in range(6) if i != k]
    signal, noise = math.sqrt(sum(pairs) / len(pairs)), 0.01 * clip * math.sqrt(found.trained)
    assert found.trained == sum(p.numel() for p in tiny("bert", "classification", num_labels=2).parameters())
    assert found.norms == pytest.approx([float(g.norm()) for g in own_gradients(6)], rel=1e-4)
    assert found.signal_to_noise == pytest.approx(50 * signal / noise, rel=1e-3)
    assert found.after == pytest.approx(50 * signal / noise * math.sqrt(40), rel=1e-3) and found.steps == 40


def test_the_least_signal_is_that_of_the_jackknife_over_texts() -> None:
    each = [g * min(1.0, 0.1 / float(g.norm())) for g in own_gradients(6)]

    def square(some: list[Tensor]) -> float:
        pairs = [float(a @ b) for i, a in enumerate(some) for k, b in enumerate(some) if i != k]
        return sum(pairs) / len(pairs)

    without = [square([g for k, g in enumerate(each) if k != left]) for left in range(6)]
    spread = math.sqrt(5 / 6 * sum((one - sum(without) / 6) ** 2 for one in without))
    least = math.sqrt(max(0.0, square(each) - 2.5706 * spread))
    found = told("dp-sgd:0.01/clip=0.1", epochs=2)
    noise = 0.01 * 0.1 * math.sqrt(found.trained)
    assert found.least == pytest.approx(50 * least / noise * math.sqrt(40), rel=1e-3, abs=1e-6)
    assert found.after is not None and found.least is not None and found.least < found.after


def test_copies_of_a_text_do_not_agree_with_each_other() -> None:
    model = tiny("bert", "classification", num_labels=2)
    usual: dict[str, Any] = {"examples": 1000, "batch_size": 50, "public": True}
    with pytest.raises(InputError, match="1 different texts; expected at least two"):
        rasura.diagnose_training(model, collate(ALIKE[:1] * 5), "dp-sgd:1.0", **usual)
    once = rasura.diagnose_training(model, collate(ALIKE[:4]), "dp-sgd:1.0", **usual)
    assert rasura.diagnose_training(model, collate(ALIKE[:4] * 3), "dp-sgd:1.0", **usual) == once


def test_few_texts_do_not_say_that_nothing_was_found() -> None:
    """Of two texts that agree by chance, no interval says that they would again."""
    two = told("dp-sgd:1e-4", count=2)
    assert two.after is not None and two.after > 3 and two.least == 0.0
    assert "these 2 texts do not exclude 0; below 3 expect to learn little" in " ".join(two.findings)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["gaussian:5", "random-pruning:0.99", "sign"])
def test_parts_that_change_a_step_are_refused(more: str) -> None:
    with pytest.raises(InputError, match="a diagnosis knows dp-sgd alone; leave out"):
        told(f"dp-sgd:1.0+{more}")
    assert told("frozen-embeddings+dp-sgd:1.0").trained < told("dp-sgd:1.0").trained


@pytest.mark.parametrize("more", ["noise=laplace", "clip=0.001/quantile=0.5", "per=layer"])
def test_clips_of_another_kind_are_refused(more: str) -> None:
    """Laplace noise clips the sum of absolute entries, and a clip that follows the norms does not stay at the first one."""
    with pytest.raises(InputError, match=f"leave {more.split('/')[-1].split('=')[0]}=.* out of what is diagnosed"):
        told(f"dp-sgd:1.0/{more}")


@pytest.mark.parametrize(("rows", "one"), [(ALIKE, True), (DATA, False)])
def test_texts_of_one_class_do_not_say_that_nothing_was_found(rows: Any, one: bool) -> None:
    """They agree on their class, whatever a training would learn of what tells classes apart."""
    model = tiny("bert", "classification", num_labels=2)
    found = rasura.diagnose_training(
        model, collate(rows[:6]), "dp-sgd:1e-5", examples=1000, batch_size=50, epochs=100, public=True
    )
    assert any("All 6 texts have one class" in says for says in found.findings) == one, found.findings


@pytest.mark.slow
def test_larger_batches_are_advised_only_where_they_help() -> None:
    found = told("dp-sgd", target_epsilon=0.5, examples=50, batch_size=64)
    assert not any("larger batches" in one or "less noise" in one for one in found.findings)
    assert "Train fewer weights than" in " ".join(found.findings) and "or accept a larger epsilon" in " ".join(
        found.findings
    )
    full = " ".join(told("dp-sgd:1.0", examples=50, batch_size=50).findings)
    assert "larger batches" not in full and "more epochs or less noise" in full


@pytest.mark.slow
def test_the_advice_on_batches_is_what_they_give() -> None:
    common: dict[str, Any] = {"target_epsilon": 0.5, "epochs": 2}
    small, large = told("dp-sgd", **common), told("dp-sgd", batch_size=200, **common)
    (says,) = (one for one in small.findings if "batches of 200" in one)
    assert small.after and large.after and large.sigma > small.sigma
    assert (
        f"{large.after / small.after:.1f} times better at the same epsilon" in says
        and "below 3 expect to learn little" in says
    )


@pytest.mark.slow
def test_clips_far_from_the_norms_are_said() -> None:
    middle = sorted(told().norms)[3]
    low, high, right = (" ".join(told(f"dp-sgd:1e-3/clip={c * middle}").findings) for c in (0.01, 100, 1))
    assert "times below the median norm" in low and "times above the median norm" in high and "median norm" not in right
    model = tiny("bert", "classification", num_labels=2)
    slow = told(f"dp-sgd:1e-3/clip={0.2 * middle}", model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    assert "5 times shorter than without clipping: a rate of 0.1" in " ".join(slow.findings)
    other = told("dp-sgd:1e-3", model=model, optimizer=torch.optim.Adagrad(model.parameters(), 0.1))
    assert "The rate of Adagrad was not judged" in " ".join(other.findings)


@pytest.mark.slow
def test_a_look_at_private_texts_is_said_first() -> None:
    assert told(public=False).findings[0].startswith("These 6 texts were looked at without noise, and no epsilon counts it")
    assert not any("looked at" in one for one in told().findings)


class Scaled(nn.Module):
    """A model with a weight outside of any layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = tiny("bert", "classification", num_labels=2), nn.Parameter(torch.ones(2))

    def forward(self, labels: Tensor, **inputs: Tensor) -> SequenceClassifierOutput:
        logits = self.body(**inputs).logits * self.scale
        return SequenceClassifierOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def test_texts_that_agree_on_nothing_give_no_ratio() -> None:
    usual: dict[str, Any] = {"examples": 1000, "batch_size": 50, "public": True}
    model = tiny("bert", "classification", num_labels=2)
    found = rasura.diagnose_training(model, collate(DATA[:6]), "dp-sgd:1.0/clip=0.1", **usual)
    assert found.signal_to_noise is None and "agree on no direction" in " ".join(found.findings)


def test_layers_without_a_rule_and_a_large_delta_are_said() -> None:
    says = " ".join(told(model=Scaled(), delta=0.1).findings)
    assert "one by one, which is slow: " in says and "Scaled" in says and "not below 1 / 1000" in says


def test_gradients_that_are_not_finite_give_no_ratio() -> None:
    model: Any = tiny("bert", "classification", num_labels=2)
    with torch.no_grad():
        model.classifier.weight.fill_(torch.nan)
    found = told(model=model)
    assert "6 of 6 texts are not finite" in " ".join(found.findings)
    assert found.signal_to_noise is None and found.after is None


def test_texts_that_predict_nothing_are_not_a_fault_of_what_is_trained() -> None:
    model, batch = tiny("gpt2", "causal"), collate(ALIKE[:4])
    batch["labels"] = torch.full_like(batch["input_ids"], -100)
    batch["labels"][0] = batch["input_ids"][0]  # one has a loss
    found = rasura.diagnose_training(model, batch, "dp-sgd:1.0", examples=1000, batch_size=50, public=True)
    assert "At least half of the texts have a gradient of zero: their loss does not depend" in " ".join(found.findings)


def test_a_loss_that_is_no_number_is_said_and_not_an_error() -> None:
    model: Any = tiny("bert", "classification", num_labels=2)
    batch = collate(ALIKE[:4])
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[batch["input_ids"][1, 1]] = torch.nan
    found = rasura.diagnose_training(model, batch, "dp-sgd:1.0", examples=1000, batch_size=50, public=True)
    assert "texts are not finite" in " ".join(found.findings) and found.after is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"defense": "gaussian:0.1"}, "needs dp-sgd or normalised with a guarantee; found gaussian"),
        ({"count": 1}, "expected at least two"),
        ({"defense": "dp-sgd:1.0", "target_epsilon": 3.0}, "names its noise"),
        ({"examples": 0}, "examples is 0"),
    ],
)
def test_what_cannot_be_judged_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        told(**options)


@pytest.mark.parametrize("kind", ["bert", "linear", "no rule"])
def test_a_batch_without_labels_is_refused_and_leaves_nothing_behind(kind: str) -> None:
    """What was found of it stayed, and the next batch of the same model was said to be slow."""
    model: nn.Module = tiny("bert", "classification", num_labels=2)
    batch: dict[str, Tensor] = collate(ALIKE[:6])
    if kind == "linear":
        model, batch = Linear(4), {"features": torch.arange(24.0).reshape(6, 4).sin(), "labels": torch.arange(6) % 2}
    if kind == "no rule":
        model.own = nn.Parameter(torch.zeros(1))  # of no layer with a rule: texts go one by one
    planned: dict[str, Any] = {"examples": 1000, "batch_size": 50, "public": True}
    usual = rasura.diagnose_training(copy.deepcopy(model), batch, "dp-sgd:1.0", **planned).findings
    with pytest.raises(InputError, match="labels"):
        rasura.diagnose_training(model, {n: t for n, t in batch.items() if n != "labels"}, "dp-sgd:1.0", **planned)
    found = rasura.diagnose_training(model, batch, "dp-sgd:1.0", **planned).findings
    assert any("slow" in one for one in found) == any("slow" in one for one in usual) == (kind == "no rule")


def test_a_model_without_trained_weights_is_refused() -> None:
    with pytest.raises(InputError, match="no trainable parameter"):
        told(model=tiny("bert", "classification", num_labels=2).requires_grad_(False))


@pytest.mark.slow
def test_the_command_says_the_same(tmp_path: Path, model_folder: Path) -> None:
    rows = [{"text": f"{name} met {other}", "label": k % 2} for k, (name, other) in enumerate(pairwise(NAMES[:-1]))]
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    common = ["diagnose", data, "--model", model_folder, "--examples", 1000, "--batch-size", 50, "--epochs", 2, "--texts"]
    asked = [*common, len(rows), "--defense", "dp-sgd:clip=100", "--target-epsilon", 1]
    done = rasura_command(*asked, "--private")
    assert done.returncode == 0, done.stderr
    assert (
        "1. These" in done.stdout and "no epsilon counts it" in done.stdout and "times above the median norm" in done.stdout
    )
    told = json.loads(rasura_command(*asked, "--public", "--json").stdout)
    assert told["steps"] == 40 and told["clip"] == 100 and len(told["norms"]) == len(rows)
    assert len(rows) % 2 == 0 and f"median {median(told['norms']):.3g}\n" in done.stdout, "as the findings state it"
    assert not any("no epsilon counts it" in one for one in told["findings"])
    assert "texts of" in refused(*common, len(rows) + 1, "--public", "--target-epsilon", 1)
    assert "needs dp-sgd or normalised with a guarantee; found no protection" in refused(
        *common, 4, "--public", "--defense", "none"
    )
    assert rasura_command(*common, 4, "--target-epsilon", 1).returncode == 2  # whether the texts are public must be said
