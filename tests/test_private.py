"""A training loop protected in one line: what it releases, what it counts, and every way around it that is refused."""

from __future__ import annotations

import copy
import inspect
import io
import json
import math
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from private_setting import DATA, collate, plain_gradients
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, WeightedRandomSampler

import rasura
from rasura.accounting import epsilon
from rasura.core.interfaces import Defense, InputError
from rasura.core.rng import WithoutDropout
from rasura.defenses.compose import chain
from rasura.defenses.dp_sgd import dp_sgd
from rasura.runs.drawing import ROW
from rasura.runs.private import ProtectedTraining
from rasura.testing.tiny import tiny
from rasura.victims.per_example import fault

pytest.importorskip("dp_accounting")


def loop(defense: str | Defense, *, model: nn.Module | None = None, size: int = 2, **options: Any) -> ProtectedTraining:
    model = model or tiny("bert", "classification", num_labels=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return rasura.protect_training(
        model, optimizer, DataLoader(DATA, size, shuffle=True, collate_fn=collate), defense, **options
    )


def trained(private: ProtectedTraining, epochs: int) -> list[int]:
    """The sizes of the batches of a loop as the documentation has it."""
    model, optimizer, loader, _ = private
    assert optimizer is not None
    sizes = []
    for _ in range(epochs):
        for batch in loader:
            sizes.append(len(batch["labels"]))
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            assert math.isfinite(float(loss.detach()))
            optimizer.step()
    return sizes


# --- what it releases and counts


@pytest.mark.parametrize("defense", ["dp-sgd:1.0", "directional:1e6", "frozen-embeddings+normalised:1.0"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_loop_of_ones_own_is_protected_in_one_line(defense: str, mode: str) -> None:
    """In eval mode, too, in which models come: there the gradient was the plain one, and a guarantee was claimed for it."""
    private = loop(defense, epochs=2)
    model, _, _, ledger = private
    model.train(mode == "train")
    assert ledger.planned.epsilon is not None and not ledger.planned.warnings and ledger.releases == 0
    sizes = trained(private, 2)
    assert len(sizes) == 24 == ledger.releases and (("directional" in defense) == (set(sizes) == {2}))
    frozen = [n for n, p in model.named_parameters() if p.grad is None]
    assert bool(frozen) == defense.startswith("frozen")
    assert ledger.spent().epsilon == pytest.approx(ledger.planned.epsilon)
    with torch.no_grad():
        assert model(**collate(DATA[:3])).logits.shape == (3, 2)


def test_its_gradient_is_the_released_one_and_not_the_plain_one() -> None:
    model, _, loader, _ = loop(chain(dp_sgd(1e-3, 1e3)), poisson=False, seed=0)
    batch = next(iter(loader))
    (2 * model(**batch).loss).backward()
    plain = plain_gradients(batch)
    noises = []
    for name, p in model.named_parameters():
        assert p.grad is not None
        # 1e-3 times 1e3, over two texts, twice.
        noises.append(((p.grad - 2 * plain[name]) if name in plain else p.grad).reshape(-1))
    noise = torch.cat(noises)
    assert float(noise.std()) == pytest.approx(1.0, rel=0.02) and abs(float(noise.mean())) < 0.02


def test_epsilon_is_counted_and_the_plan_is_the_limit() -> None:
    """Four epochs under a plan of one kept the statement of one."""
    private = loop("dp-sgd:1.0", epochs=1)
    _, _, loader, ledger = private
    part = iter(loader)
    for made in range(1, 13):
        batch = next(part)
        private.model(**batch).loss.backward()
        assert ledger.releases == made
        if made == 12:
            assert ledger.epsilon == pytest.approx(epsilon(1.0, 2 / 24, made, 0.1 / 24))
    assert "counted, after 12 releases" in ledger.spent().statement and "planned" in ledger.planned.statement
    with pytest.raises(InputError, match=r"all 12 planned releases \(1 epochs\) were made \(12\); plan a larger"):
        trained(private, 1)
    assert ledger.releases == 12


def test_a_pass_counts_once_where_batches_are_disjoint() -> None:
    private = loop("directional:1e3", epochs=2)
    rows: list[int] = []
    for batch in private.loader:
        private.model(**batch).loss.backward()
        rows += batch["input_ids"][:, 1].tolist()
    one = private.ledger.spent()
    assert sorted(rows) == sorted(r["input_ids"][1] for r in DATA)
    assert one.steps == 1 and one.pure == 2e3 and private.ledger.releases == 12
    d = sum(p.numel() for p in private.model.parameters())
    assert private.ledger.runs[0][0].blocks == (d,)
    next(iter(private.loader))  # a pass that was begun and left
    trained(private, 1)
    assert private.ledger.spent().pure == 4e3
    with pytest.raises(InputError, match="2 planned passes over the texts were made \\(2\\);"):
        trained(private, 1)


class Spare(nn.Module):
    """A classifier with entries that its loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny("bert", "classification", num_labels=2)
        self.unused = nn.Parameter(torch.zeros(1000))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


@pytest.mark.parametrize("defense", ["dp-sgd:1.0", "directional:1e3", "directional:1e3/blocks=parameters"])
def test_entries_that_the_loss_does_not_use_have_their_draw(defense: str) -> None:
    """They were counted among the dimensions of a directional draw, and had none: 20.9 was printed where 1,006 was right."""
    private = loop(defense, model=Spare())
    private.model(**next(iter(private.loader))).loss.backward()
    sizes = [p.numel() for p in private.model.parameters()]
    (release, count), *rest = private.ledger.runs
    assert count == 1 and not rest
    assert list(release.blocks) == (sizes if "parameters" in defense else [sum(sizes)])
    unused = dict(private.model.named_parameters())["unused"].grad
    assert unused is not None and int((unused != 0).sum()) == 1000


def test_what_is_released_has_the_same_tensors_for_an_empty_batch() -> None:
    """Tensors that only an empty batch had told that it was empty."""
    private = loop("dp-sgd:1.0", model=Spare(), size=1)
    found: dict[bool, set[str]] = {}
    for batch in private.loader:
        private.model.zero_grad()
        private.model(**batch).loss.backward()
        names = {n for n, p in private.model.named_parameters() if p.grad is not None}
        found.setdefault(len(batch["labels"]) == 0, set()).update(names)
        if len(found) == 2:
            break
    assert len(found) == 2 and found[True] == found[False]


@pytest.mark.slow
def test_releases_are_kept_with_a_checkpoint_and_counted_on() -> None:
    first = loop("dp-sgd:1.0", epochs=1)
    trained(first, 1)
    state = json.loads(json.dumps(first.ledger.state_dict()))
    second = loop("dp-sgd:1.0", epochs=2)
    second.ledger.load_state_dict(state)
    trained(second, 1)
    assert second.ledger.releases == 24 and second.ledger.epsilon == pytest.approx(epsilon(1.0, 2 / 24, 24, 0.1 / 24))
    with pytest.raises(InputError, match="all 24 planned releases"):
        trained(second, 1)


def test_a_seed_or_another_loader_guarantees_nothing() -> None:
    private = loop("dp-sgd:1.0", poisson=False, seed=0)
    trained(private, 1)
    for told in (private.ledger.planned, private.ledger.spent()):
        assert told.statement.startswith("no formal guarantee for this run") and told.epsilon is None
        assert "loader shuffles" in told.warnings[1] and "seeded" in told.warnings[0] and told.otherwise is not None
    with pytest.raises(InputError, match="no formal guarantee"):
        assert private.ledger.epsilon
    told = loop("dp-sgd:1e-9/clip=1e3").ledger.planned
    assert told.epsilon is None and "too small" in told.statement
    assert loop("gaussian:0.1").ledger.planned.epsilon is None


# --- ways around it


def protected() -> tuple[ProtectedTraining, dict[str, Tensor]]:
    private = loop("dp-sgd:1.0", poisson=True, size=24)
    return private, next(iter(private.loader))


def body(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss of a head of one's own on the model's body."""
    states = model.bert(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state  # type: ignore[operator]
    return states.square().mean()  # type: ignore[no-any-return]


def test_a_head_of_ones_own_is_no_way_around() -> None:
    private, batch = protected()
    with pytest.raises(InputError, match="but not through the protected loss"):
        body(private.model, batch).backward()
    with pytest.raises(InputError, match="but not through the protected loss"):
        (private.model(**batch).loss + body(private.model, batch)).backward()
    with pytest.raises(InputError, match="but not through the protected loss"):
        torch.autograd.grad(body(private.model, batch), list(private.model.parameters()), allow_unused=True)


def test_logits_in_eval_mode_are_no_way_around() -> None:
    private, batch = protected()
    private.model.eval()
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    with pytest.raises(InputError, match="but not through"):
        private.model(**inputs).logits.sum().backward()


def test_a_step_takes_no_gradient_that_was_put_in_by_hand() -> None:
    private, batch = protected()
    assert private.optimizer is not None
    private.model(**batch).loss.backward()
    first = next(private.model.parameters())
    kept = first.grad
    first.grad = torch.ones_like(first)
    with pytest.raises(
        InputError, match=r"optimizer.step\(\): the gradient of .* does not come from a protected backward pass"
    ):
        private.optimizer.step()
    with pytest.raises(InputError, match="does not come from a protected"):
        torch.optim.Adam(private.model.parameters()).step()  # an optimizer that protect_training has never seen
    first.grad = kept
    private.optimizer.step()
    with pytest.raises(InputError, match="there was no protected backward pass since the last step"):
        private.optimizer.step()
    first.grad = first.grad.clone()  # type: ignore[union-attr]
    with pytest.raises(InputError, match="does not come from a protected"):
        private.optimizer.step()


@pytest.mark.parametrize("named", [True, False])
def test_what_a_closure_leaves_is_checked_before_it_is_used(named: bool) -> None:
    private, batch = protected()
    assert private.optimizer is not None
    kept = [p.detach().clone() for p in private.model.parameters()]

    def step(closure: Any) -> Any:
        assert private.optimizer is not None
        return private.optimizer.step(closure=closure) if named else private.optimizer.step(closure)

    def by_hand() -> float:
        for parameter in private.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        return 0.0

    private.model.zero_grad()
    with pytest.raises(InputError, match="does not come from a protected backward pass"):
        step(by_hand)
    with pytest.raises(InputError, match="does not come from a protected backward pass"):
        step(lambda: 0.0)  # what the other left in .grad
    private.model.zero_grad()
    assert all(map(torch.equal, kept, private.model.parameters()))
    assert step(closure_of(private.model, batch)) > 0 and private.ledger.releases == 1
    assert not all(map(torch.equal, kept, private.model.parameters()))
    with pytest.raises(InputError, match="there was no protected backward pass since the last step"):
        step(lambda: 0.0)


def closure_of(model: nn.Module, batch: Any) -> Callable[[], float]:
    def closure() -> float:
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        return float(loss.detach())

    return closure


def test_steps_of_closures_are_those_of_a_plain_loop() -> None:
    trained = []
    for closed in (False, True):
        private = loop("dp-sgd:1.0", seed=3)
        assert private.optimizer is not None
        for batch in private.loader:
            closure = closure_of(private.model, batch)
            if not closed:
                closure()
            private.optimizer.step(closure if closed else None)
        trained.append([p.detach().clone() for p in private.model.parameters()])
    assert all(map(torch.equal, *trained))


def test_an_optimizer_that_asks_its_closure_twice_gets_no_batch_twice() -> None:
    private = loop("dp-sgd:1.0")
    twice = torch.optim.LBFGS(private.model.parameters(), max_iter=2)
    with pytest.raises(InputError, match="each batch of the loader that protect_training returned gets one backward pass"):
        twice.step(closure_of(private.model, next(iter(private.loader))))
    assert private.ledger.releases == 1


def test_a_gradient_from_before_is_no_way_around() -> None:
    """A look at whether the loop runs left a gradient that the first private step took."""
    model = tiny("bert", "classification", num_labels=2)
    model(**collate(DATA[:4])).loss.backward()
    with pytest.raises(InputError, match=r"has a gradient from before the protection.*model\.zero_grad\(\) before protect"):
        loop("dp-sgd:1.0", model=model, size=24)
    model.zero_grad()
    private = loop("dp-sgd:1.0", model=model, size=24)
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    with pytest.raises(InputError, match=r"does not come from a protected backward pass: it was in \.grad before"):
        model(**next(iter(private.loader))).loss.backward()
    assert torch.equal(first.grad, torch.ones_like(first))


def test_an_address_that_is_used_again_does_not_pass_for_a_release() -> None:
    private, batch = protected()
    assert private.optimizer is not None
    private.model(**batch).loss.backward()
    for p in private.model.parameters():
        p.grad = None
    for p in private.model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(InputError, match="does not come from a protected"):
        private.optimizer.step()


def test_clipping_and_two_optimizers_are_post_processing() -> None:
    private, batch = protected()
    private.model(**batch).loss.backward()
    nn.utils.clip_grad_norm_(private.model.parameters(), 1e-3)
    every = list(private.model.parameters())
    before = [p.detach().clone() for p in every]
    for some in (every[:3], every[3:]):
        torch.optim.SGD(some, lr=0.1).step()
    assert not all(torch.equal(p, q) for p, q in zip(every, before))


def test_what_is_unfrozen_later_is_watched_too() -> None:
    model = tiny("bert", "classification", num_labels=2)
    model.bert.pooler.requires_grad_(False)  # type: ignore[union-attr]
    private = loop("dp-sgd:1.0", model=model, size=24)
    model.bert.pooler.requires_grad_(True)  # type: ignore[union-attr]
    assert private.optimizer is not None
    pooled = model.bert(input_ids=torch.tensor([[1, 40, 2]])).pooler_output  # type: ignore[operator]
    weight = model.get_parameter("bert.pooler.dense.weight")
    (weight.grad,) = torch.autograd.grad(pooled.sum(), [weight])
    with pytest.raises(InputError, match=r"pooler\.dense\.weight does not come from a protected"):
        private.optimizer.step()
    weight.grad = None
    private.model(**next(iter(private.loader))).loss.backward()
    private.optimizer.step()


def test_batches_come_from_the_loader_and_are_released_once() -> None:
    private, batch = protected()
    with pytest.raises(InputError, match=f"needs {ROW} in each batch, one number a text: use the loader that"):
        private.model(**collate(DATA[:3]))
    loss = private.model(**batch).loss
    loss.backward(retain_graph=True)
    with pytest.raises(InputError, match="released only once"):
        loss.backward()
    with pytest.raises(InputError, match="was not handed out in this pass"):
        private.model(**batch)
    assert private.ledger.releases == 1


def test_two_losses_in_one_backward_pass_are_refused() -> None:
    private = loop("dp-sgd:1.0", size=24, epochs=2, poisson=False)
    losses = [private.model(**next(iter(private.loader))).loss for _ in range(2)]
    with pytest.raises(InputError, match="two protected losses in one backward pass"):
        sum(losses).backward()  # type: ignore[union-attr]


def test_an_empty_batch_is_not_left_out() -> None:
    """That nothing was released for it would tell that it was empty."""
    private = loop("dp-sgd:1.0", size=1)
    left = False
    with pytest.raises(InputError, match=r"expected batch \d+ of 24 of this pass, with 0 texts, and this is another one"):
        for batch in private.loader:
            if len(batch["labels"]):
                private.model(**batch).loss.backward()
            left = left or not len(batch["labels"])
    assert left
    private = loop("dp-sgd:1.0", size=1, epochs=9)
    with pytest.raises(InputError, match="the batch before had no backward pass"):
        for _ in range(9):
            for batch in private.loader:
                loss = private.model(**batch).loss
                if len(batch["labels"]):
                    loss.backward()


@pytest.fixture
def two_processes() -> Iterator[Callable[[], None]]:
    """Starts a group of two processes of which the other does nothing."""
    distributed: Any = torch.distributed
    store: Any = pytest.importorskip("torch.testing._internal.distributed.fake_pg").FakeStore()
    yield lambda: distributed.init_process_group("fake", rank=0, world_size=2, store=store)
    if distributed.is_initialized():
        distributed.destroy_process_group()


def test_processes_that_train_one_model_are_refused(two_processes: Callable[[], None]) -> None:
    """Each ledger counted its own half: 7.0 was stated where 11.3 was right."""
    private, batch = protected()
    two_processes()
    with pytest.raises(InputError, match=r"^torch\.distributed runs 2 processes\. .* train in one process$"):
        private.model(**batch)
    with pytest.raises(InputError, match=r"^torch\.distributed runs 2 processes"):
        loop("dp-sgd:1.0")
    assert private.ledger.releases == 0


def test_a_process_by_itself_is_not(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/group")
    try:
        private, batch = protected()
        private.model(**batch).loss.backward()
    finally:
        torch.distributed.destroy_process_group()
    assert private.ledger.releases == 1


def test_a_model_for_several_devices_is_refused() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.DataParallel(tiny("bert", "classification", num_labels=2))

        def forward(self, **inputs: Tensor) -> Any:
            return self.inner(**inputs)

    for model in (Outer(), Outer().inner):
        with pytest.raises(InputError, match="wrapped for several devices"):
            loop("dp-sgd:1.0", model=model)
    private, batch = protected()
    replica: Any = private.model._replicate_for_data_parallel()  # type: ignore[operator]
    with pytest.raises(InputError, match="a replica of the protected model, as DataParallel makes them"):
        replica(**batch)


# --- copies, files, compilation


def test_a_copy_can_be_asked_and_not_trained() -> None:
    """It stayed bound to the original: its loss was the original's, and its own backward pass plain."""
    private, batch = protected()
    other = copy.deepcopy(private.model)
    with torch.no_grad():
        assert torch.equal(other(**batch).logits, private.model(**batch).logits)
        next(other.parameters()).add_(1)
    assert not torch.equal(next(other.parameters()), next(private.model.parameters()))
    with pytest.raises(InputError, match="copy of a protected one: protect the copy"):
        other(**batch)
    with pytest.raises(InputError, match="copy of a protected one"):
        body(other, batch).backward()
    assert type(other).__name__ == type(private.model).__name__ == "BertForSequenceClassification"
    again = loop("dp-sgd:1.0", model=other, size=24)
    again.model(**next(iter(again.loader))).loss.backward()
    assert again.ledger.releases == 1 and private.ledger.releases == 0
    assert all(p.grad is None for p in private.model.parameters())
    private.model(**batch).loss.backward()
    assert private.ledger.releases == 1


def test_a_copy_of_what_was_trained_does_not_start_at_zero() -> None:
    """Its ledger did not have the releases that are in its weights: 4.8 was stated where 7.0 was right."""
    private = loop("dp-sgd:1.0")
    early = copy.deepcopy(private.model)
    trained(private, 1)
    late = copy.deepcopy(private.model)
    for other in (late, copy.deepcopy(late), early):  # weights may be written into the early one later, as averages are
        with pytest.raises(InputError, match=r"^the model is a copy of one that made 12 releases, which a new ledger would"):
            loop("dp-sgd:1.0", model=other)
    resumed = loop("dp-sgd:1.0", epochs=2)
    resumed.model.load_state_dict(late.state_dict())
    resumed.ledger.load_state_dict(private.ledger.state_dict())
    with pytest.raises(InputError, match="made 12 releases"):
        loop("dp-sgd:1.0", model=copy.deepcopy(resumed.model))


def test_weights_are_saved_and_the_whole_is_not_pickled(tmp_path: Path) -> None:
    private, _ = protected()
    file = io.BytesIO()
    torch.save(private.model.state_dict(), file)
    file.seek(0)
    plain = tiny("bert", "classification", num_labels=2, seed=3)
    plain.load_state_dict(torch.load(file, weights_only=True))
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), private.model.parameters()))
    private.model.save_pretrained(tmp_path)  # type: ignore[operator]
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["BertForSequenceClassification"]
    for dump in (lambda: torch.save(private.model, io.BytesIO()), lambda: pickle.dumps(private.model)):
        with pytest.raises(InputError, match=r"save model.state_dict\(\)"):
            dump()


def test_a_compiled_model_is_protected_all_the_same() -> None:
    private, batch = protected()
    compiled: Any = torch.compile(private.model, backend="eager")
    compiled(**batch).loss.backward()
    assert private.ledger.releases == 1 and private.optimizer is not None
    private.optimizer.step()
    other: Any = torch.compile(tiny("bert", "classification", num_labels=2), backend="eager")
    with pytest.raises(InputError, match=r"protect the model before torch.compile"):
        rasura.protect_training(other, None, DataLoader(DATA, 2, collate_fn=collate), "dp-sgd:1.0")


# --- what is refused at once


def test_what_voids_a_protected_loop_is_refused() -> None:
    model, _, loader, _ = loop("dp-sgd:1.0")
    model.train()
    batch = collate(DATA[:2])
    with pytest.raises(InputError, match="pass labels"):
        model(input_ids=batch["input_ids"])
    with pytest.raises(InputError, match="with keywords"):
        model(batch["input_ids"], labels=batch["labels"])
    with pytest.raises(InputError, match="position_ids: expected tensors with a row"):
        model(**batch, position_ids=torch.arange(5)[None])
    with pytest.raises(InputError, match="already protected"):
        rasura.protect_training(model, None, loader, "dp-sgd:1.0")
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(InputError, match="parameters that the model does not have"):
        rasura.protect_training(tiny("bert", "classification"), other, loader, "dp-sgd:1.0")
    with pytest.raises(InputError, match="before training"):
        loop("ghost")
    wrapped = tiny("bert", "classification")
    wrapped.forward = wrapped.forward  # type: ignore[method-assign]
    with pytest.raises(InputError, match="forward was replaced"):
        loop("dp-sgd:1.0", model=wrapped)


@pytest.mark.parametrize(
    ("defense", "words"),
    [
        ("sealing:all", "zeros and their weights would not learn"),
        ("sealing:grad=0.1", "use rasura.integrations.flower"),
        ("dp-sgd:1.0+sealing:all", "zeros and their weights would not learn"),
        ("accumulate:16", "collect batches first"),
        ("dp-sgd:1.0+accumulate:16", "collect batches first"),
    ],
)
def test_what_belongs_to_a_client_and_its_server_is_refused(defense: str, words: str) -> None:
    """Sealing zeroed every gradient without a word; accumulate raised out of the user's forward."""
    with pytest.raises(InputError, match=words):
        loop(defense)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampler": WeightedRandomSampler([1.0] * 24, 24)}, "WeightedRandomSampler, for which no guarantee holds"),
        ({"sampler": torch.utils.data.RandomSampler(DATA, replacement=True)}, "with replacement"),
        ({"batch_size": None}, "no batch size"),
    ],
)
def test_loaders_whose_choice_of_texts_is_not_known_are_refused(options: dict[str, Any], words: str) -> None:
    model = tiny("bert", "classification", num_labels=2)
    with pytest.raises(InputError, match=words):
        rasura.protect_training(model, None, DataLoader(DATA, **{"batch_size": 2, **options}), "dp-sgd:1.0")
    assert type(model).__name__ == "BertForSequenceClassification" and "_rasura_guard" not in vars(model)


def test_workers_hand_over_what_was_drawn() -> None:
    model = tiny("bert", "classification", num_labels=2)
    plain = DataLoader(DATA, 6, shuffle=True, collate_fn=collate, num_workers=1)
    private = rasura.protect_training(model, torch.optim.SGD(model.parameters(), lr=0.1), plain, "dp-sgd:1.0")
    assert trained(private, 1) and private.ledger.releases == 4


# --- the Trainer


def trainer(folder: Path, epochs: int = 1, defense: str = "dp-sgd:0.5", **options: Any) -> Any:
    pytest.importorskip("accelerate")
    from transformers import TrainingArguments

    from rasura.integrations.transformers import PrivateTrainer

    usual = {"save_strategy": "no", "logging_steps": 6, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    options = {"per_device_train_batch_size": 2, "num_train_epochs": epochs, **usual, **options}
    arguments = TrainingArguments(str(folder), **options)
    model = tiny("bert", "classification", num_labels=2)
    return PrivateTrainer(model, arguments, train_dataset=DATA, data_collator=collate, defense=defense)


@pytest.mark.slow
def test_the_trainer_has_a_switch_and_counts(tmp_path: Path) -> None:
    private: Any = trainer(tmp_path)
    before = [p.detach().clone() for p in private.model.parameters()]
    assert private.guarantee is None and private.train().global_step == 12
    spent = private.ledger.spent()
    assert private.guarantee == spent and spent.sampling == "poisson" and private.ledger.releases == 12
    assert spent.epsilon == pytest.approx(epsilon(0.5, 2 / 24, 12, 0.1 / 24))
    assert not all(torch.equal(p, q) for p, q in zip(private.model.parameters(), before))
    logged = [r["epsilon"] for r in private.state.log_history if "epsilon" in r]
    exact = [epsilon(0.5, 2 / 24, n, 0.1 / 24) for n in (6, 12)]
    # The Trainer prints four digits: at a smaller figure than the exact one the guarantee does not hold.
    assert all(0 <= float(f"{told:.4g}") - true <= 1e-3 * true for told, true in zip(logged[:2], exact, strict=True))
    with pytest.raises(InputError, match="all 12 planned releases"):
        private.train()


def autocast() -> tuple[Any, ...]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("weight", [0.1, torch.nan])
def test_a_trainer_in_bf16_leaves_autocast_as_it_was(tmp_path: Path, weight: float) -> None:
    """It stayed on for the whole process: all later work in float32 was in bfloat16, from weights that were cached. Also
    after a step that fails: of a weight that is not a number, no gradient is released."""
    private, before = trainer(tmp_path, bf16=True, max_steps=2, per_device_train_batch_size=24), autocast()
    with torch.no_grad():
        private.model.classifier.weight[0] = weight
    try:
        with pytest.raises(InputError, match="no clip bounds it") if weight != weight else nullcontext():
            private.train()
        assert autocast() == before and private.ledger.releases == (0 if weight != weight else 2)
        assert tiny("bert", "classification")(**collate(DATA[:2])).logits.dtype == torch.float32
    finally:
        torch.set_autocast_enabled("cpu", False)


def test_a_trainer_in_bf16_clips_the_gradients_of_bf16_passes(tmp_path: Path) -> None:
    rows: Any = [{**row, "labels": 1} for row in DATA]
    found: dict[str, Tensor] = {}

    class Looks(transformers.TrainerCallback):  # type: ignore[misc]  # transformers has no types here
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            found.update({n: p.grad.clone() for n, p in model.named_parameters()})

    arguments = trainer(tmp_path, bf16=True, max_steps=1, per_device_train_batch_size=24, max_grad_norm=0).args
    private = rasura.PrivateTrainer(
        tiny("bert", "classification", num_labels=2), arguments, collate, rows, defense="dp-sgd:1e-7/clip=0.5",
        callbacks=[Looks()],
    )  # fmt: skip
    with WithoutDropout():
        private.train()
    wanted = {n: torch.zeros_like(g) for n, g in found.items()}
    for row in rows:  # each of them is in the one batch
        alone = tiny("bert", "classification", num_labels=2).eval()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = alone(**collate([row])).loss
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(alone.parameters(), 0.5))
        assert norm > 0.5
        for n, p in alone.named_parameters():
            wanted[n] += p.grad / len(rows)
    apart = sum(float((found[n] - g).square().sum()) for n, g in wanted.items()) ** 0.5
    assert apart <= 0.01 * sum(float(g.square().sum()) for g in wanted.values()) ** 0.5
    assert fault(private.model, collate(rows)) is None  # the layers were tried in float32, as without autocast


def test_the_trainer_takes_what_a_trainer_takes_by_name() -> None:
    pytest.importorskip("accelerate")
    asked, usual = (inspect.signature(c.__init__).parameters for c in (rasura.PrivateTrainer, transformers.Trainer))
    own = {"defense", "delta", "target_epsilon", "poisson", "seed", "unit", "canaries"}
    assert own <= set(asked) <= own | set(usual)
    assert not {p.kind for p in asked.values()} & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    by_place = [n for n, p in asked.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert by_place == list(usual)[: len(by_place)]


def test_the_trainer_refuses_what_would_replace_the_protected_model(tmp_path: Path) -> None:
    private = trainer(tmp_path)
    with pytest.raises(InputError, match="not support hyperparameter search"):
        private.train(trial={"learning_rate": 1.0})
    PrivateTrainer: Any = rasura.PrivateTrainer
    for name in ("model_init", "compute_loss_func"):
        with pytest.raises(TypeError, match=name):
            PrivateTrainer(private.model, defense="dp-sgd:1.0", **{name: print})


PUBLIC: Any = [{**row, "input_ids": [1, 60 + k, 3, 41, 2]} for k, row in enumerate(DATA[:4])]


@pytest.mark.parametrize(
    "evaluated", [DATA, {"public": PUBLIC, "all": DATA}, DATA[:], Subset(DATA, [5, 6]), [*PUBLIC, DATA[3]]]
)
def test_the_trainer_refuses_to_be_steered_by_its_own_texts(tmp_path: Path, evaluated: Any) -> None:
    model, arguments = tiny("bert", "classification", num_labels=2), trainer(tmp_path).args
    arguments.lr_scheduler_type = "reduce_lr_on_plateau"
    with pytest.raises(InputError, match="of eval_dataset are texts of train_dataset, the first one row"):
        rasura.PrivateTrainer(model, arguments, collate, DATA, evaluated, defense="dp-sgd:1.0")
    private = rasura.PrivateTrainer(model, arguments, collate, DATA, PUBLIC, defense="dp-sgd:1.0")  # other texts may
    assert private.evaluate()["eval_loss"] > 0
    for data in (DATA, DATA[3:5], {"all": DATA}):
        with pytest.raises(InputError, match="of eval_dataset are texts of train_dataset"):
            private.evaluate(data)


def test_texts_of_the_training_are_known_by_their_tokens(tmp_path: Path) -> None:
    """In a padded row, with another label, in another type; what shows no tokens is not taken for other texts."""
    ids = [[1, 40 + k, 5, 2] for k in range(4)]
    rows: Any = [{"input_ids": one, "attention_mask": [1] * 4, "labels": 0} for one in ids]
    padded = [{"input_ids": torch.tensor([0, *ids[2], 0]), "attention_mask": torch.tensor([0, 1, 1, 1, 1, 0]), "labels": 1}]

    def made(evaluated: Any, gather: Any = transformers.default_data_collator) -> object:
        return rasura.PrivateTrainer(model, trainer(tmp_path).args, gather, rows, evaluated, defense="dp-sgd:1.0")

    model = tiny("bert", "classification", num_labels=2)
    same: Any
    for same in (padded, [rows[1]], Subset(rows, [3])):
        with pytest.raises(InputError, match="1 of the 1 rows of eval_dataset are texts"):
            made(same)
    assert made([{**rows[0], "input_ids": [1, 50, 5, 2]}])
    with pytest.raises(InputError, match="has no input_ids"):
        made(["a text"], lambda some: {"texts": some})


@pytest.mark.parametrize("strategy", ["group_by_length", "sequential"])
def test_the_trainer_refuses_another_choice_of_batches_than_its_own(tmp_path: Path, strategy: str) -> None:
    with pytest.raises(InputError, match=f"train_sampling_strategy is {strategy}; a protected Trainer needs random"):
        trainer(tmp_path, train_sampling_strategy=strategy)


def test_a_batch_size_that_is_searched_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="auto_find_batch_size is True; a protected Trainer needs False"):
        trainer(tmp_path, auto_find_batch_size=True)


@pytest.mark.slow
def test_a_resumed_trainer_counts_on(tmp_path: Path) -> None:
    first = trainer(tmp_path, save_strategy="epoch")
    first.train()
    second = trainer(tmp_path, epochs=2, save_strategy="no")
    assert second.train(resume_from_checkpoint=True).global_step == 24
    assert second.ledger.releases == 24
    for elsewhere in (tmp_path, tmp_path / "other"):
        third = trainer(elsewhere, epochs=2, save_strategy="no")
        later = tmp_path / "checkpoint-18"
        shutil.copytree(tmp_path / "checkpoint-12", later, dirs_exist_ok=True)
        state = json.loads((later / "rasura_ledger.json").read_text())
        state["runs"][0]["count"] = 18
        (later / "rasura_ledger.json").write_text(json.dumps(state))
        with pytest.raises(InputError, match=r"checkpoint-18 holds 18 releases, and .*checkpoint-12, to go on from, 12"):
            third.train(resume_from_checkpoint=str(tmp_path / "checkpoint-12"))
    # Killed after the weights were written and before the ledger was: its releases are in no ledger.
    (tmp_path / "checkpoint-18" / "rasura_ledger.json").unlink()
    with pytest.raises(InputError, match=r"checkpoint-18 is newer than .*checkpoint-12 and has no ledger"):
        trainer(tmp_path, epochs=2, save_strategy="no").train(resume_from_checkpoint=str(tmp_path / "checkpoint-12"))
    shutil.rmtree(tmp_path / "checkpoint-18")
    (tmp_path / "checkpoint-12" / "rasura_ledger.json").unlink()
    with pytest.raises(InputError, match="is not a ledger"):
        trainer(tmp_path, epochs=2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-12"))


def test_a_trainer_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^resume_from_checkpoint is True, but .* holds no checkpoint; leave it out"):
        trainer(tmp_path, epochs=1).train(resume_from_checkpoint=True)
