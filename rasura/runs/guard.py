"""A guard over a model's gradients: everything that reaches ``.grad``, and every gradient that an optimizer uses, comes from
a protected step.

Hooks on every parameter compare the gradients from autograd with those of the release, so no other backward pass gets
through: neither a submodule's own call nor a term added to the protected loss. Nothing is added to a gradient that the guard
did not leave in ``.grad`` itself. A hook before each optimizer step, and behind its closure, refuses gradients that were set
by hand. A released gradient may be changed in place (clipping, scaling), since such changes cannot be distinguished from
others: never add anything computed from the texts.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rasura.core.errors import InputError
from rasura.runs.drawing import OWNER, ROW

KEY = "_rasura_guard"
"""The attribute of a protected model that holds its guard."""

BYPASS = (
    "a backward pass reached {name}, but not through the protected loss: the gradient would not be private. "
    "Call model(**batch) with labels and its loss.backward(), once for each batch; nothing else may train this model"
)
FOREIGN = (
    "the gradient of {name} does not come from a protected backward pass: it was in .grad before, and the release would be "
    "added to it. Call model.zero_grad() before model(**batch).loss.backward(), and do not set .grad"
)

DROPPED = (
    "optimizer.step(): the gradients of the protected backward pass are gone, as after zero_grad(). Its noise is spent, and "
    "to drop it by what the batch shows would not be private. Call optimizer.step() before zero_grad(), for every batch"
)


class Guard:
    """Watches ``model`` from now on. ``answer`` is called instead of its forward, with that forward as the first argument;
    ``copied``: the model is a copy of a protected one and must be protected itself before training. ``made``: the number of
    releases in its weights, or in those of the model that it is a copy of."""

    def __init__(self, model: nn.Module, answer: Callable[..., Any], *, copied: bool, made: Callable[[], int]) -> None:
        self.model, self.answer, self.copied, self.made = weakref.ref(model), answer, copied, made
        self.inside = False
        self.released = 0
        self._pending: dict[str, Tensor] = {}
        self._left: dict[str, Tensor] = {}
        self._unused: set[str] = set()
        self._watched: dict[str, nn.Parameter] = {}
        self._hooks: list[Any] = []
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self.watch()
        own = weakref.ref(self)

        def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            guard = own()
            if guard is None:
                return None
            closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer
            if closure is None:
                guard.check_step(optimizer)
                return None
            guard.check_gradients(optimizer)  # an optimizer may not call the closure

            @functools.wraps(closure)
            def checked() -> Any:
                loss = closure()
                guard.check_step(optimizer)
                return loss

            return ((optimizer, checked, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": checked})

        self._step_hook = register_optimizer_step_pre_hook(before)
        weakref.finalize(self, self._step_hook.remove)

    def _parameters(self) -> dict[str, nn.Parameter]:
        model = self.model()
        return {} if model is None else dict(model.named_parameters())

    def watch(self) -> None:
        """Put hooks on all trainable parameters, including those that became trainable since the last call."""
        for name, parameter in self._parameters().items():
            if parameter.requires_grad and self._watched.get(name) is not parameter:
                self._watched[name] = parameter
                own = weakref.ref(self)
                tensor: Any = parameter
                self._hooks.append(tensor.register_hook(functools.partial(_arrived, own, name)))
                self._hooks.append(tensor.register_post_accumulate_grad_hook(functools.partial(_left, own, name)))

    def release(self) -> None:
        """Stop watching."""
        for hook in (*self._hooks, self._step_hook):
            hook.remove()
        self._hooks.clear()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Inside the block, the model is called for its own passes, without what was put around its forward: that was
        entered already. accelerate's autocast, entered twice, would stay on for the rest of the process."""
        held: dict[str, Any] = {} if (model := self.model()) is None else vars(model)
        around = {"forward": held.pop("forward")} if "forward" in held else {}
        self.inside = True
        try:
            yield
        finally:
            self.inside = False
            held.update(around)

    def forget(self) -> None:
        """Before a forward pass: drop the unfinished state of an earlier one, and gradients that are no longer in use."""
        self._pending.clear()
        parameters = self._parameters()
        self._left = {n: g for n, g in self._left.items() if n in parameters and parameters[n].grad is g}
        self._unused &= set(self._left)

    def expect(self, gradients: Mapping[str, Tensor]) -> None:
        """Expect these gradients in the current backward pass. Raises ``InputError`` if others are still expected."""
        if self._pending:
            raise InputError("two protected losses in one backward pass; call loss.backward() for each batch by itself")
        self._pending = dict(gradients)
        self.released += 1

    def arrived(self, name: str, gradient: Tensor | None) -> None:
        """Raises ``InputError`` for a ``gradient`` that does not come from a release, or that would be added to one that
        does not. None stands for no gradient, which autograd may pass."""
        if self.inside or gradient is None:
            return
        expected = self._pending.pop(name, None)
        same = expected is not None and (gradient.data_ptr() == expected.data_ptr() or torch.equal(gradient, expected))
        if not same:
            if self.copied:
                raise InputError("this model is a copy of a protected one: protect the copy itself before training it")
            raise InputError(BYPASS.format(name=name))
        held = self._watched[name].grad
        if held is not None and held is not self._left.get(name):
            raise InputError(FOREIGN.format(name=name))

    def left(self, name: str, gradient: Tensor | None) -> None:
        """Record what is now in ``.grad``: it came from a release."""
        if gradient is not None and not self.inside:
            self._left[name] = gradient
            self._unused.add(name)

    def check_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``optimizer`` would use gradients of this model. Raises ``InputError`` if some come from no release."""
        taken = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        named = {id(p): name for name, p in self._parameters().items()}
        if not any(id(p) in named for p in taken):
            return False
        for parameter in taken:
            name = named.get(id(parameter))
            if name is None:
                raise InputError(
                    "the optimizer trains parameters that the protected model does not have; use another optimizer for them"
                )
            if self._left.get(name) is not parameter.grad:
                raise InputError(f"optimizer.step(): the gradient of {name} does not come from a protected "
                    "backward pass; call model(**batch).loss.backward() and do not set .grad")  # fmt: skip
        return True

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ``InputError`` if ``optimizer`` would use gradients of this model that do not come from a new release, or
        none at all of a release that no step has used."""
        given = {id(p) for group in optimizer.param_groups for p in group["params"]}
        unused = {name for name, p in self._parameters().items() if id(p) in given} & self._unused
        self._unused -= unused
        if not self.check_gradients(optimizer):
            if unused:
                raise InputError(DROPPED)
            return
        if self._steps.get(optimizer, 0) == self.released:
            raise InputError("optimizer.step(): there was no protected backward pass since the last step")
        self._steps[optimizer] = self.released


def _arrived(guard: weakref.ref[Guard], name: str, gradient: Tensor | None) -> None:
    found = guard()
    if found is not None:
        found.arrived(name, gradient)


def _left(guard: weakref.ref[Guard], name: str, parameter: Tensor) -> None:
    found = guard()
    if found is not None:
        found.left(name, parameter.grad)


def guarded(model: nn.Module) -> Guard | None:
    """The guard of ``model``; None if it has none."""
    found: Guard | None = vars(model).get(KEY)
    return found


def put(
    model: nn.Module, answer: Callable[..., Any], *, copied: bool = False, made: Callable[[], int] = int
) -> Guard:  # fmt: skip
    """Guard ``model``: the object stays the same; its class is replaced by one of the same name whose forward calls
    ``answer``."""
    plain = type(model)

    @functools.wraps(plain.forward)
    def forward(self: nn.Module, *positional: Any, **inputs: Any) -> Any:
        guard = guarded(self)
        if guard is not None and guard.model() is not self:
            raise InputError("this is a replica of the protected model, as DataParallel makes them; use one device")
        own = functools.partial(plain.forward, self)
        return own(*positional, **inputs) if guard is None else guard.answer(own, *positional, **inputs)

    # The model's own name: save_pretrained writes it, and the Trainer looks at the signature of forward.
    body = {
        "forward": _eager(forward), "__deepcopy__": _copied, "__reduce_ex__": _not_pickled, "__module__": plain.__module__,
        "__qualname__": plain.__qualname__, "__doc__": plain.__doc__, "_rasura_plain": plain,
    }  # fmt: skip
    guard = Guard(model, answer, copied=copied, made=made)
    vars(model)[KEY] = guard
    model.__class__ = type(plain.__name__, (plain,), body)
    return guard


def _plain(model: nn.Module) -> type[nn.Module]:
    found: type[nn.Module] = vars(type(model))["_rasura_plain"]
    return found


def taken_off(model: nn.Module) -> None:
    """Remove the guard from ``model``."""
    guard = vars(model).pop(KEY)
    guard.release()
    model.__class__ = _plain(model)


def _eager(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward``, left uncompiled by ``torch.compile``: hooks compute the gradients of single texts."""
    compiler: Any = torch.compiler
    made: Any = compiler.disable(forward)
    made.__signature__ = inspect.signature(forward)
    disabled: Callable[..., Any] = made
    return disabled


def _refusing(own: Callable[..., Any], *positional: Any, **inputs: Any) -> Any:
    inputs = {k: v for k, v in inputs.items() if k not in (OWNER, ROW)}
    if torch.is_grad_enabled() and inputs.get("labels") is not None:
        raise InputError("this model is a copy of a protected one: protect the copy itself to train it; to evaluate, use "
                         "torch.no_grad()")  # fmt: skip
    return own(*positional, **inputs)


def _copied(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy that can be evaluated but not trained: a guarantee belongs to one training of one model."""
    swapped, guard = type(self), vars(self).pop(KEY)
    try:
        self.__class__ = _plain(self)
        made = copy.deepcopy(self, memo)
    finally:
        self.__class__ = swapped
        vars(self)[KEY] = guard
    put(made, _refusing, copied=True, made=guard.made)
    return made


def _not_pickled(self: nn.Module, protocol: Any) -> Any:
    raise InputError("a protected model cannot be pickled; save model.state_dict() or use "
        "model.save_pretrained(folder), and keep the ledger's state_dict() beside it")  # fmt: skip
