"""A round of local training: against plain loops of torch and PEFT in float64, and the same value wherever it is taken."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rasura.attacks.shared.verify import check
from rasura.core.batches import Batch
from rasura.core.interfaces import InputError
from rasura.core.local import Local, Round, announced
from rasura.core.mechanisms import mechanism
from rasura.core.rng import generator
from rasura.core.threat import THREATS, observe
from rasura.core.updates import changed
from rasura.registry import parse_update
from rasura.testing.tiny import CLS, SEP, VOCABULARY, batch_of, tiny
from rasura.victims.adapters import with_fresh_adapter
from rasura.victims.loading import Victim
from rasura.victims.recipe import Recipe
from rasura.victims.step import step
from rasura.victims.train import FineTuning

TEXTS = [[CLS, 3 + k, 40, 41 + k, 4, *range(20, 20 + k), SEP] for k in range(7)]
LABELS = [k % 2 for k in range(7)]


def victim_of(model: torch.nn.Module) -> Victim:
    return Victim(model, None, VOCABULARY, "classification", "tiny", 64, 2)


def texts(rows: list[int] | None = None) -> dict[str, torch.Tensor]:
    chosen = range(7) if rows is None else rows
    return batch_of([TEXTS[k] for k in chosen], "classification", [LABELS[k] for k in chosen]).inputs()


def plain_loop(model: torch.nn.Module, plan: Round, order: Callable[[int], torch.Tensor]) -> dict[str, torch.Tensor]:
    """The obvious trainer: what a round adds to each trained weight."""
    own = {n: p for n, p in model.named_parameters() if p.requires_grad}
    before = {n: p.detach().clone() for n, p in own.items()}
    if plan.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            own.values(), lr=plan.lr, momentum=plan.momentum, weight_decay=plan.decay
        )
    else:
        betas = (plan.beta1, plan.beta2)
        optimizer = torch.optim.AdamW(own.values(), lr=plan.lr, betas=betas, weight_decay=plan.decay)
    size = plan.batch or 7
    groups = math.ceil(math.ceil(7 / size) / plan.accumulate)
    total, taken = plan.epochs * groups, 0
    for _ in range(plan.epochs):
        places = order(7).tolist() if size < 7 else list(range(7))
        some = [places[k : k + size] for k in range(0, 7, size)]
        for start in range(0, len(some), plan.accumulate):
            together = some[start : start + plan.accumulate]
            optimizer.zero_grad()
            for rows in together:
                (model(**texts(rows)).loss / len(together)).backward()
            if plan.clip:
                norm = math.sqrt(sum(float(p.grad.square().sum()) for p in own.values() if p.grad is not None))
                for p in own.values():
                    if p.grad is not None:
                        p.grad *= min(1.0, plan.clip / (norm + 1e-6))
            done = taken / total
            factor = 1.0
            if plan.schedule != "constant" and done < plan.warmup:
                factor = done / plan.warmup
            elif plan.schedule == "linear":
                factor = (1 - done) / (1 - plan.warmup)
            elif plan.schedule == "cosine":
                factor = 0.5 * (1 + math.cos(math.pi * (done - plan.warmup) / (1 - plan.warmup)))
            for group in optimizer.param_groups:
                group["lr"] = plan.lr * factor
            optimizer.step()
            taken += 1
    return {n: p.detach() - before[n] for n, p in own.items()}


@pytest.mark.parametrize(
    "text",
    [
        "batch=3",
        "epochs=2/batch=2/accumulate=3/clip=0.1",
        "epochs=2/batch=0/beta1=0.8/beta2=0.99/decay=0.1",
        "batch=2/optimizer=sgd/lr=0.01/momentum=0.9/schedule=linear/warmup=0.3",
        "epochs=3/batch=4/schedule=cosine/decay=0",
        "epochs=2/batch=3/lora=4/schedule=cosine/warmup=0.2",
        "batch=3/lora=2/targets=all/clip=0.5",
    ],
)
def test_a_round_sends_what_a_plain_trainer_changes(text: str) -> None:
    local, _ = parse_update(f"local:{text}")
    assert local.plan is not None
    model = with_fresh_adapter(tiny("bert", "classification").double(), "classification", local.adapter, 0).double()
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    if local.lora:  # another round than the first: B is no longer zero
        with torch.no_grad():
            for n in names:
                model.get_parameter(n).add_(0.01 * torch.randn(model.get_parameter(n).shape, generator=generator(3, n)))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    orders = [generator(1), generator(1)]
    found, _ = changed(model, texts(), names, local, lambda n: torch.randperm(n, generator=orders[0]))
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters())
    wanted = plain_loop(copy.deepcopy(model), local.plan, lambda n: torch.randperm(n, generator=orders[1]))
    assert found.keys() == {n for n, w in wanted.items() if bool(w.any())} | (found.keys() & wanted.keys())
    for n, g in found.items():
        assert torch.allclose(g * -local.learning_rate, wanted[n], rtol=1e-7, atol=1e-12), n


def test_targets_are_the_layers_that_peft_adapts() -> None:
    def adapted(targets: str) -> set[str]:
        local, _ = parse_update(f"local:lora=2/targets={targets}")
        model = with_fresh_adapter(tiny("llama", "causal"), "causal", local.adapter, 0)
        return {n.split(".")[-4] for n, _ in model.named_parameters() if "lora_A" in n}

    assert adapted("attention") == {"q_proj", "v_proj"}
    assert adapted("all") == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def sent(update: str, seed: int = 0, rows: int = 7) -> Any:
    local, _ = parse_update(update)
    model = with_fresh_adapter(tiny("bert", "classification"), "classification", local.adapter, 0)
    batch = batch_of(TEXTS[:rows], "classification", LABELS[:rows])
    return step(model, batch, (), task="classification", vocabulary=VOCABULARY, rng=generator(seed), local=local)


def test_the_order_of_texts_comes_from_the_client_alone() -> None:
    one, again, other = (sent("local:batch=2/lr=0.01", seed).message.gradients for seed in (0, 0, 1))
    assert all(torch.equal(g, again[n]) for n, g in one.items())
    assert any(not torch.equal(g, other[n]) for n, g in one.items())


def test_adapters_drop_in_the_step_alone() -> None:
    update = "local:batch=0/lr=0.01/lora=4"
    truth = sent(f"{update}/dropout=0.5")
    assert not any(m.training for m in truth.model.modules())
    plain = sent(update).message.gradients
    assert any(not torch.allclose(g, plain[n]) for n, g in truth.message.gradients.items())
    assert truth.mechanism[0] == parse_update(f"{update}/dropout=0.5")[0].plan
    assert truth.mechanism[0].dropout_rate == 0.5


@pytest.mark.parametrize(
    ("update", "rows", "known"),
    [
        ("local:batch=8/optimizer=sgd/lr=0.01", 3, True),
        ("local:batch=0/epochs=2/lr=1e-3", 3, True),
        ("local:batch=2/optimizer=sgd/lr=0.01", 3, False),
        ("local:batch=8/lr=0.01/lora=2/dropout=0.1", 3, False),
    ],
)
def test_a_guess_is_checked_only_where_the_training_can_be_repeated(update: str, rows: int, known: bool) -> None:
    truth = sent(update, rows=rows)
    error, _ = check(observe(truth, THREATS["honest-server"]), [list(truth.text_batch.ids(k)) for k in range(rows)])
    assert error < 1e-4 if known else error == math.inf


def test_the_mechanism_tells_the_whole_plan() -> None:
    local, _ = parse_update("local:epochs=2/batch=4/clip=1/schedule=linear/lora=8/targets=all")
    plain = mechanism("local", dict(local.mechanism.parameters))
    assert announced([plain]) == local
    assert parse_update("local:optimizer=sgd")[0].round.decay == 0.0
    assert parse_update("fedavg-momentum:3")[0].round.momentum == 0.9


@pytest.mark.parametrize(
    ("update", "says"),
    [
        ("local:epoch=1", "no option 'epoch'"),
        ("local:batch=x", "batch is 'x'"),
        ("local:optimizer=lion", "adamw or sgd"),
        ("local:momentum=0.9", "optimizer=sgd"),
        ("local:warmup=0.1", "constant learning rate"),
        ("local:targets=all", "pass lora=RANK"),
        ("local:lr=0", "lr is 0.0"),
        ("local:lr=nan", "lr is nan"),
        ("local:schedule=step", "constant or linear or cosine"),
        ("local:batch=4:2", "takes 1 figure,"),
    ],
)
def test_a_bad_plan_is_refused(update: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse_update(update)


def test_a_round_of_so_many_examples_takes_no_other_number() -> None:
    with pytest.raises(InputError, match="the round needs 4 examples but got 7"):
        sent("local:examples=4")


def test_train_takes_the_same_round(tmp_path: Path) -> None:
    """All texts in one mini-batch, so that there is one order: training equals the round that is audited."""
    plan = parse_update("local:epochs=3/batch=7/lr=1e-3/clip=0.2/schedule=linear/beta2=0.99")[0].plan
    assert plan is not None
    rows: list[Batch] = [batch_of([t], "classification", [y]) for t, y in zip(TEXTS, LABELS)]
    model = tiny("bert", "classification").eval()
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    wanted, _ = changed(model, texts(), names, Local("local", plan=plan))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    recipe = Recipe.following(plan, patience=3, keep="last")
    assert replace(recipe.course, lora=plan.lora) == plan
    FineTuning(
        model, rows, (), recipe, tmp_path, task="classification", vocabulary=VOCABULARY,
        evaluate=lambda _: {"loss": 0.0}, watched="loss", higher=False,
    ).run()  # fmt: skip
    for n, g in wanted.items():
        assert torch.allclose(model.get_parameter(n), before[n] - g * plan.lr, atol=3e-6), n
