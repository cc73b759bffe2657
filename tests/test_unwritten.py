"""What a model writes of its texts beside the gradients: nothing is released where it does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.utils import ModelOutput

import rasura
from rasura.core.interfaces import InputError
from rasura.core.rng import generator
from rasura.core.values import Message
from rasura.registry import parse_defense
from rasura.victims.step import message_for

pytest.importorskip("opacus")
DATA: Any = [{"features": torch.full((4,), 1.0 + k % 3), "labels": torch.tensor(k % 2)} for k in range(16)]


class Net(nn.Module):
    """A classifier; ``write`` is called with the hidden states. ``rule``: its weights are all in layers with a rule."""

    def __init__(self, write: Callable[[Any, Tensor], None], *, rule: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.write, self.first, self.head = write, nn.Linear(4, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(4), requires_grad=not rule)
        self.still = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("cache", torch.zeros(4), persistent=False)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("constant", torch.tensor([1.0, float("nan"), float("inf")]))

    def forward(self, features: Tensor, labels: Tensor | None = None) -> ModelOutput:
        hidden = self.first(features)
        with torch.no_grad():
            self.write(self, hidden)
        logits = self.head(torch.tanh(hidden) * self.scale)
        return ModelOutput(loss=None if labels is None else nn.functional.cross_entropy(logits, labels), logits=logits)


def in_place(m: Any, hidden: Tensor) -> None:
    m.seen.mul_(0.9).add_(hidden.mean(0), alpha=0.1)


def behind_the_counter(m: Any, hidden: Tensor) -> None:
    m.seen.data.copy_(hidden.mean(0))


def another(m: Any, hidden: Tensor) -> None:
    m.seen = hidden.mean(0)


def not_saved(m: Any, hidden: Tensor) -> None:
    m.cache = hidden.repeat(1, 2)


def counted(m: Any, hidden: Tensor) -> None:
    m.count += 1


def fresh(m: Any, hidden: Tensor) -> None:
    m.register_buffer("late", hidden.mean(0))


def gone(m: Any, hidden: Tensor) -> None:
    m.cache = None


def kept(m: Any, hidden: Tensor) -> None:
    m.seen.copy_(m.seen.clone())
    m.cache = m.cache.clone()


def centred(m: Any, hidden: Tensor) -> None:
    m.center = 0.9 * m.center + 0.1 * hidden.mean(0)


def centred_in_place(m: Any, hidden: Tensor) -> None:
    m.center.mul_(0.9).add_(hidden.mean(0))


def last(m: Any, hidden: Tensor) -> None:
    m.last = hidden.mean()


def array(m: Any, hidden: Tensor) -> None:
    m.array += hidden.mean(0).numpy()


def fraction(m: Any, hidden: Tensor) -> None:
    m.share = 0.9 * m.share + float(hidden.mean())


def queue(m: Any, hidden: Tensor) -> None:
    m.queue.append(hidden.mean(0))


def table(m: Any, hidden: Tensor) -> None:
    m.table["mean"] = float(hidden.mean())


def in_place_of_another(m: Any, hidden: Tensor) -> None:
    m.other = [hidden.mean(0)]


def several(m: Any, hidden: Tensor) -> None:
    m.several[0].add_(hidden.mean(0))


def weight(m: Any, hidden: Tensor) -> None:
    m.still.add_(hidden.mean(0))


def trained(model: nn.Module, defense: str = "dp-sgd:1.0", epochs: int = 1) -> Any:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    done = rasura.protect_training(model, optimizer, DataLoader(DATA, 4), defense, epochs=epochs, seed=0)
    for batch in done.loader:
        optimizer.zero_grad()
        done.model(**batch).loss.backward()
        optimizer.step()
    return done


@pytest.mark.parametrize("rule", [True, False])
@pytest.mark.parametrize(
    ("write", "name"),
    [(in_place, "seen"), (behind_the_counter, "seen"), (another, "seen"), (not_saved, "cache"), (counted, "count"),
     (fresh, "late"), (gone, "cache")],
)  # fmt: skip
def test_a_buffer_that_texts_change_is_refused_and_put_back(write: Any, name: str, rule: bool) -> None:
    model = Net(write, rule=rule)
    before = {n: b.clone() for n, b in model.named_buffers()}
    with pytest.raises(InputError, match=f"writes the buffer {name}, .*nothing was released"):
        trained(model)
    after = dict(model.named_buffers())
    assert set(after) == set(before)
    assert all(torch.allclose(after[n], before[n], equal_nan=True) for n in before)
    assert list(model.state_dict()) == list(Net(write, rule=rule).state_dict())


@pytest.mark.parametrize("rule", [True, False])
@pytest.mark.parametrize(
    ("write", "name"),
    [(centred, "center"), (centred_in_place, "center"), (last, "last"), (array, "array"), (fraction, "share"),
     (queue, "queue"), (table, "table"), (several, "several"), (in_place_of_another, "other")],
)  # fmt: skip
def test_figures_of_texts_in_a_plain_attribute_are_refused_and_put_back(write: Any, name: str, rule: bool) -> None:
    """The next step's gradients would depend on them, and no noise hides that."""
    model: Any = Net(write, rule=rule)
    model.center, model.array, model.share = torch.zeros(4), np.zeros(4, dtype=np.float32), 0.5
    model.queue, model.table, model.several = deque(maxlen=3), {"mean": 1.0}, [torch.zeros(4), None]
    center, listed, model.other = model.center, model.several, object()
    with pytest.raises(InputError, match=f"keeps figures in the attribute {name}, .*nothing was released"):
        trained(model)
    assert model.center is center and not center.any() and not model.array.any() and model.share == 0.5
    assert not model.queue and model.table == {"mean": 1.0} and not hasattr(model, "last")
    assert model.several is listed and not listed[0].any() and listed[1] is None


@pytest.mark.parametrize("rule", [True, False])
def test_counts_in_a_plain_attribute_are_put_back_and_not_read_by_another_pass(rule: bool) -> None:
    seen = []

    def count(m: Any, hidden: Tensor) -> None:
        seen.append((m.calls, m.longest, list(m.sizes)))
        m.calls, m.longest = m.calls + 1, max(m.longest, 100 + len(seen))
        m.sizes.append(len(hidden))
        m.kind = "trained"

    model: Any = Net(count, rule=rule)
    model.calls, model.longest, model.sizes, model.kind = 3, 0, [7], None
    assert trained(model).ledger.releases == 4
    assert set(map(str, seen)) == {"(3, 0, [7])"} and len(seen) > 4
    assert (model.calls, model.longest, model.sizes, model.kind) == (3, 0, [7], None)


def test_a_weight_that_the_forward_pass_writes_is_refused() -> None:
    with pytest.raises(InputError, match=r"writes the weight still, .*let only the optimizer change weights"):
        trained(Net(weight, rule=True))


@pytest.mark.parametrize("defense", ["dp-sgd:1.0", "normalised:1.0", "dp-ftrl:1.0/band=2", "directional:1e3"])
def test_a_step_that_writes_nothing_goes_on(defense: str) -> None:
    assert trained(Net(kept, rule=True), defense).ledger.releases == 4
    with pytest.raises(InputError, match="writes the buffer seen"):
        trained(Net(in_place, rule=True), defense)


def test_a_table_that_is_filled_before_training_is_not_in_its_way() -> None:
    def table(m: Any, hidden: Tensor) -> None:
        if m.cache.numel() < 8:
            m.cache = torch.arange(8.0)

    with pytest.raises(InputError, match=r"by one pass under torch\.no_grad\(\) before training"):
        trained(Net(table, rule=True))
    model = Net(table, rule=True)
    with torch.no_grad():
        model(DATA[0]["features"][None])
    assert trained(model).ledger.releases == 4


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_that_is_put_in_training_later_is_refused(affine: bool) -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__(lambda m, hidden: None, rule=False)
            self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=affine))  # type: ignore[assignment]

    model = Normed().eval()
    done = trained(model, epochs=2)
    assert done.ledger.releases == 4
    model.train()
    with pytest.raises(InputError, match="batch norm"):
        for batch in done.loader:
            done.model(**batch).loss.backward()
    assert not any(b.any() for n, b in model.named_buffers() if n.endswith("running_mean"))


def test_a_plain_mean_may_write_what_it_likes() -> None:
    batch = {k: torch.stack([row[k] for row in DATA]) for k in DATA[0]}
    found, _, _ = message_for(Net(in_place, rule=True), batch, 16, parse_defense("none"), generator(0))
    assert isinstance(found, Message)
