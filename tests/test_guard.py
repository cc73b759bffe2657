"""The guard by itself, around a model of two weights: what it lets through, what it refuses, and how it is taken off."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from rasura.core.errors import InputError
from rasura.runs.guard import Guard, guarded, put, taken_off

ROWS = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
SCALE = 0.5


class Small(nn.Module):
    """A model of one's own, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)
        self.calls: list[str] = []

    def forward(self, rows: Tensor, labels: Tensor | None = None, *, mode: str = "plain") -> Tensor:
        """The sum, or the loss."""
        self.calls.append(mode)
        found: Tensor = self.inner(rows).sum()
        return found if labels is None else found * labels.sum()


def plain(own: Callable[..., Any], *positional: Any, **inputs: Any) -> Any:
    """An answer that is the model's own."""
    return own(*positional, **inputs)


def released(model: nn.Module, scale: float = SCALE) -> dict[str, Tensor]:
    """A protected backward pass: what is expected arrives."""
    guard = guarded(model)
    assert guard is not None
    guard.forget()
    made = {n: torch.full_like(p, scale) for n, p in model.named_parameters() if p.requires_grad}
    guard.expect(made)
    sum((p * made[n]).sum() for n, p in model.named_parameters() if n in made).backward()  # type: ignore[union-attr]
    return made


def guarded_model() -> tuple[Small, Guard, torch.optim.Optimizer]:
    model = Small()
    return model, put(model, plain), torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_guarded_model_is_the_same_object_of_the_same_name_and_asks_the_answer() -> None:
    asked: list[Any] = []

    def answer(own: Callable[..., Any], *positional: Any, **inputs: Any) -> Any:
        asked.append((positional, inputs))
        return own(*positional, **inputs) + 1

    class Inner(Small):
        """Of a name that tells where it is."""

    model, other = Inner(), Inner()
    other.load_state_dict(model.state_dict())
    assert guarded(model) is None
    guard = put(model, answer)
    assert guarded(model) is guard and guard.model() is model and not guard.copied and guarded(other) is None
    assert isinstance(model, Inner) and type(model) is not Inner
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(model), name) == getattr(Inner, name)
    assert inspect.signature(model.forward) == inspect.signature(other.forward)
    assert model.forward.__doc__ == "The sum, or the loss."
    assert torch.equal(model(ROWS, mode="asked"), other(ROWS) + 1)
    assert len(asked) == 1 and asked[0][0][0] is ROWS and asked[0][1] == {"mode": "asked"} and model.calls == ["asked"]
    taken_off(model)
    assert type(model) is Inner and guarded(model) is None and torch.equal(model(ROWS), other(ROWS)) and len(asked) == 1
    model(ROWS).backward()  # nothing watches it any more
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_what_was_released_arrives_and_is_taken() -> None:
    model, guard, optimizer = guarded_model()
    before = [p.detach().clone() for p in model.parameters()]
    for count in (1, 2):
        optimizer.zero_grad()
        made = released(model)
        assert guard.released == count
        assert all(torch.equal(p.grad, made[n]) for n, p in model.named_parameters() if p.grad is not None)
        optimizer.step()
    assert all(torch.allclose(b - p, torch.tensor(0.1)) for b, p in zip(before, model.parameters()))


@pytest.mark.parametrize("name", ["inner.weight", "inner.bias"])
def test_another_backward_pass_is_refused_by_the_name_it_reaches(name: str) -> None:
    model, _, _ = guarded_model()
    model.inner.requires_grad_(False)
    weight = dict(model.named_parameters())[name].requires_grad_(True)
    fresh = Small()
    fresh.inner.requires_grad_(False)
    own = dict(fresh.named_parameters())[name].requires_grad_(True)
    put(fresh, plain)
    for one, reached in ((model, weight), (fresh, own)):
        with pytest.raises(InputError, match=rf"^a backward pass reached {name}, but not through the protected loss: .* "
                           r"nothing else may train this model$"):  # fmt: skip
            one(ROWS).backward()
        assert reached.grad is None


def test_a_release_that_is_changed_on_its_way_is_refused_and_an_equal_one_is_not() -> None:
    model, guard, _ = guarded_model()
    weight = model.inner.weight
    for made, right in ((torch.ones(1, 2), True), (torch.tensor([[1.0, 1.1]]), False), (torch.zeros(1, 2), False)):
        guard.forget()
        weight.grad = None
        guard.expect({"inner.weight": made})
        loss = weight.sum()  # brings ones
        if right:
            loss.backward()
            assert weight.grad is not None and weight.grad.tolist() == [[1, 1]]
        else:
            with pytest.raises(InputError, match="but not through the protected loss"):
                loss.backward()
    guard.forget()
    guard.expect({"inner.weight": torch.ones(1, 2)})
    with pytest.raises(InputError, match=r"reached inner\.bias, but not through"):
        model.inner.bias.sum().backward()
    with pytest.raises(InputError, match=r"reached inner\.weight, but not through"):
        (weight.sum() + weight.sum()).backward()


def test_a_gradient_passes_once_for_one_release() -> None:
    model, guard, _ = guarded_model()
    guard.expect({"inner.weight": torch.ones(1, 2)})
    model.inner.weight.sum().backward()
    with pytest.raises(InputError, match=r"reached inner\.weight, but not through"):
        model.inner.weight.sum().backward()


def test_two_releases_at_once_are_refused_and_a_new_forward_pass_drops_the_first() -> None:
    model, guard, optimizer = guarded_model()
    guard.expect({"inner.weight": torch.ones(1, 2)})
    with pytest.raises(InputError, match=r"^two protected losses in one backward pass; call"):
        guard.expect({"inner.bias": torch.ones(1)})
    assert guard.released == 1
    released(model)
    assert guard.released == 2
    optimizer.step()


def test_inside_the_protected_step_gradients_pass_and_leave_nothing_that_counts() -> None:
    model, guard, optimizer = guarded_model()
    guard.inside = True
    model(ROWS).backward()
    guard.inside = False
    assert model.inner.weight.grad is not None
    with pytest.raises(InputError, match=r"gradient of inner\.weight does not come from a protected backward pass; call "
                       r"model\(\*\*batch\)\.loss\.backward\(\) and do not set \.grad$"):  # fmt: skip
        optimizer.step()
    guard.arrived("inner.weight", None)  # no gradient at all is let through
    guard.left("inner.weight", None)


def test_a_step_takes_what_was_released_since_the_last_one_and_nothing_else() -> None:
    model, guard, optimizer = guarded_model()
    other = torch.optim.SGD([model.inner.bias], lr=0.1)
    stranger = nn.Parameter(torch.zeros(3))
    mixed = torch.optim.SGD([*model.parameters(), stranger], lr=0.1)
    optimizer.step()  # nothing to take
    released(model)
    mixed.step()  # the stranger has no gradient
    optimizer.step()
    other.step()
    for one in (optimizer, other, mixed):
        with pytest.raises(InputError, match=r"^optimizer\.step\(\): there was no protected backward pass since the last"):
            one.step()
    stranger.grad = torch.ones(3)
    torch.optim.SGD([stranger], lr=0.1).step()  # another model's
    assert stranger.tolist() == pytest.approx([-0.1] * 3)
    released(model)
    with pytest.raises(InputError, match=r"^the optimizer trains parameters that the protected model does not have; use"):
        mixed.step()
    grad = model.inner.bias.grad
    assert grad is not None
    model.inner.bias.grad = grad.clone()
    with pytest.raises(InputError, match=r"the gradient of inner\.bias does not come from a protected"):
        other.step()
    model.inner.bias.grad = grad
    grad.mul_(0.5)  # clipping
    other.step()
    assert guard.released == 2


def test_a_release_that_was_dropped_is_refused_at_the_step() -> None:
    """Whether a batch moved the weights told of its loss: nothing was said where a program dropped its gradients by it."""
    model, _, optimizer = guarded_model()
    other = torch.optim.SGD([model.inner.bias], lr=0.1)
    released(model)
    optimizer.zero_grad()
    before = model.inner.weight.detach().clone()
    with pytest.raises(InputError, match=r"^optimizer\.step\(\): the gradients of the protected backward pass are gone, as"):
        optimizer.step()
    released(model)
    model.inner.bias.grad = None
    with pytest.raises(InputError, match="are gone"):
        other.step(lambda: 0.0)
    optimizer.step()  # it has others
    assert not torch.equal(before, model.inner.weight)


def test_a_step_without_a_release_of_its_own_does_nothing() -> None:
    model, guard, optimizer = guarded_model()
    released(model)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # a new one, of which a schedule wants a first step
    released(model)
    optimizer.zero_grad()
    guard.forget()  # the next batch begins, and no step was taken
    optimizer.step()
    model.inner.bias.requires_grad_(False)
    released(model)
    torch.optim.SGD([model.inner.bias], lr=0.1).step()  # nothing was released for it


@pytest.mark.parametrize("when", ["before the guard", "before the release"])
def test_a_release_is_not_added_to_a_gradient_from_elsewhere(when: str) -> None:
    """What was in ``.grad`` before counted as released: the first step was the plain one."""
    model = Small()
    weight = model.inner.weight
    if when == "before the guard":
        model(ROWS).backward()
    put(model, plain)
    if when == "before the release":
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match=r"^the gradient of inner\.\w+ does not come from a protected backward pass: it"):
        released(model)
    with pytest.raises(InputError, match="does not come from a protected backward pass"):
        optimizer.step()
    optimizer.zero_grad()
    made = released(model)
    assert weight.grad is not None and torch.equal(weight.grad, made["inner.weight"])
    optimizer.step()


def test_releases_add_up_and_zeros_that_are_kept_are_the_guards_own() -> None:
    model, _, optimizer = guarded_model()
    for keep in (0, 1):
        released(model)
        assert model.inner.weight.grad is not None and torch.all(model.inner.weight.grad == (1 + keep) * SCALE)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    made = released(model)
    assert model.inner.weight.grad is not None and torch.equal(model.inner.weight.grad, made["inner.weight"])
    optimizer.step()


def test_gradients_that_are_no_longer_in_use_are_forgotten() -> None:
    model, guard, optimizer = guarded_model()
    released(model)
    kept = model.inner.weight.grad
    model.inner.weight.grad = None
    guard.forget()
    model.inner.weight.grad = kept
    with pytest.raises(InputError, match=r"gradient of inner\.weight does not come from a protected"):
        optimizer.step()
    optimizer.zero_grad()
    released(model)
    guard.forget()
    optimizer.step()  # what is still there is still known


def test_what_is_unfrozen_or_exchanged_is_watched_from_the_next_look_on() -> None:
    model = Small()
    model.inner.bias.requires_grad_(False)
    guard = put(model, plain)
    model.inner.bias.requires_grad_(True)
    model.inner.bias.sum().backward()  # not watched yet
    model.inner.bias.grad = None
    guard.watch()
    guard.watch()
    with pytest.raises(InputError, match=r"reached inner\.bias, but not through"):
        model.inner.bias.sum().backward()
    released(model)
    model.inner.bias = nn.Parameter(torch.zeros(1))
    guard.watch()
    with pytest.raises(InputError, match=r"reached inner\.bias, but not through"):
        model.inner.bias.sum().backward()
    released(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_a_copy_says_that_it_is_one_and_may_be_asked() -> None:
    model, guard, _ = guarded_model()
    other = copy.deepcopy(model)
    assert guarded(model) is guard and type(model) is not Small and isinstance(other, Small)
    held = guarded(other)
    assert held is not None and held is not guard and held.copied and held.model() is other
    assert torch.equal(other(ROWS), model(ROWS)) and other.calls[-1] == "plain"
    assert torch.equal(other(ROWS, mode="named"), model(ROWS)) and other.calls[-1] == "named"
    with torch.no_grad():
        assert torch.equal(other(ROWS, labels=torch.ones(2)), 2 * model(ROWS))
    with pytest.raises(InputError, match=r"^this model is a copy of a protected one: protect the copy itself to train it; "
                       r"to evaluate, use torch\.no_grad\(\)$"):  # fmt: skip
        other(rows=ROWS, labels=torch.ones(2))
    with pytest.raises(InputError, match=r"^this model is a copy of a protected one: protect the copy itself before"):
        other(ROWS).backward()
    taken_off(other)
    other(ROWS, labels=torch.ones(2)).backward()
    released(model)
    assert guard.released == 1


def test_what_a_copy_shares_with_its_surroundings_is_copied_once() -> None:
    model, _, _ = guarded_model()
    both: dict[str, Any] = copy.deepcopy({"model": model, "weight": model.inner.weight, "again": model})
    assert both["model"] is both["again"] and both["model"].inner.weight is both["weight"]
    assert both["weight"] is not model.inner.weight


class Stubborn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, rows: Tensor) -> Tensor:
        return self.weight * rows

    def __getstate__(self) -> Any:
        raise RuntimeError("not copied")


def test_a_copy_that_fails_leaves_the_model_guarded() -> None:
    model = Stubborn()
    guard = put(model, plain)
    made = type(model)
    with pytest.raises(RuntimeError, match="not copied"):
        copy.deepcopy(model)
    assert guarded(model) is guard and type(model) is made
    with pytest.raises(InputError, match="ledger's state_dict"):
        pickle.dumps(model)


def test_a_guard_goes_with_its_model() -> None:
    gc.collect()  # guards of other tests
    model, guard, _ = guarded_model()
    gone, hooks = weakref.ref(guard), len(_global_optimizer_pre_hooks)
    assert hooks >= 1
    del model, guard
    gc.collect()
    assert gone() is None and len(_global_optimizer_pre_hooks) == hooks - 1


def test_a_guard_that_outlives_its_model_watches_nothing() -> None:
    model, guard, _ = guarded_model()
    taken_off(model)
    del model
    gc.collect()
    assert guard.model() is None
    guard.watch()
    guard.forget()
    stranger = nn.Parameter(torch.zeros(1))
    stranger.grad = torch.ones(1)
    guard.check_step(torch.optim.SGD([stranger], lr=0.1))
