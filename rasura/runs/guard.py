"""A guard over a model's gradients: what reaches ``.grad``, and what an optimizer takes, was made by a protected step.

Hooks on every parameter compare what autograd brings with what the release handed out, so that no other backward pass
goes through: not by a submodule's own call, nor added to the protected loss. A hook before each optimizer's step refuses
gradients that were put in by hand. In-place changes of a released gradient (clipping, scaling) are let through, since they
cannot be told from others: never add to it what was computed from the texts.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rasura.core.errors import InputError

KEY = "_rasura_guard"
"""The attribute of a protected model that holds its guard."""

BYPASS = (
    "a backward pass reached {name} by another way than the protected loss: the gradient would not be private. Call "
    "model(**batch) with labels and its loss.backward(), once for each batch; nothing else may train this model"
)


class Guard:
    """Watches ``model`` from now on. ``answer`` is called in place of its forward, with the forward itself first;
    ``copied``: the model is a copy of a protected one, which may not be trained before it is protected itself."""

    def __init__(self, model: nn.Module, answer: Callable[..., Any], *, copied: bool) -> None:
        self.model, self.answer, self.copied = weakref.ref(model), answer, copied
        self.inside = False
        self.released = 0
        self._pending: dict[str, Tensor] = {}
        self._left: dict[str, Tensor] = {}
        self._watched: dict[str, nn.Parameter] = {}
        self._hooks: list[Any] = []
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self.watch()
        own = weakref.ref(self)

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            guard = own()
            if guard is not None:
                guard.check_step(optimizer)

        self._step_hook = register_optimizer_step_pre_hook(before)
        weakref.finalize(self, self._step_hook.remove)

    def _parameters(self) -> dict[str, nn.Parameter]:
        model = self.model()
        return {} if model is None else dict(model.named_parameters())

    def watch(self) -> None:
        """Put hooks on all parameters that are trained, those too that were not when it was last called."""
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

    def forget(self) -> None:
        """Before a forward pass: drop what an earlier one left unfinished, and gradients that are no longer in use."""
        self._pending.clear()
        parameters = self._parameters()
        self._left = {n: g for n, g in self._left.items() if n in parameters and parameters[n].grad is g}

    def expect(self, gradients: Mapping[str, Tensor]) -> None:
        """These gradients arrive in the backward pass that runs now. Raises ``InputError`` where others still wait."""
        if self._pending:
            raise InputError("two protected losses in one backward pass; call loss.backward() for each batch by itself")
        self._pending = dict(gradients)
        self.released += 1

    def arrived(self, name: str, gradient: Tensor | None) -> None:
        """Raises ``InputError`` for a ``gradient`` that no release handed out; None is none, which autograd may bring."""
        if self.inside or gradient is None:
            return
        expected = self._pending.pop(name, None)
        same = expected is not None and (gradient.data_ptr() == expected.data_ptr() or torch.equal(gradient, expected))
        if not same:
            if self.copied:
                raise InputError("this model is a copy of a protected one: protect the copy itself before training it")
            raise InputError(BYPASS.format(name=name))

    def left(self, name: str, gradient: Tensor | None) -> None:
        """Note what is now in ``.grad``: it arrived from a release."""
        if gradient is not None and not self.inside:
            self._left[name] = gradient

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ``InputError`` where ``optimizer`` would take gradients of this model that no release left there."""
        taken = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        named = {id(p): name for name, p in self._parameters().items()}
        if not any(id(p) in named for p in taken):
            return
        for parameter in taken:
            name = named.get(id(parameter))
            if name is None:
                raise InputError("the optimizer trains parameters that the protected model does not have; give them another")
            if self._left.get(name) is not parameter.grad:
                raise InputError(f"optimizer.step(): the gradient of {name} was made by no protected backward pass; "
                                 "call model(**batch).loss.backward() and leave .grad to it")  # fmt: skip
        if self._steps.get(optimizer, 0) == self.released:
            raise InputError("optimizer.step(): no protected backward pass was made since the last step")
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
    """The guard of ``model``; None where it has none."""
    found: Guard | None = vars(model).get(KEY)
    return found


def put(model: nn.Module, answer: Callable[..., Any], *, copied: bool = False) -> Guard:
    """Guard ``model``: the same object, of a class of the same name whose forward asks ``answer``."""
    plain = type(model)

    @functools.wraps(plain.forward)
    def forward(self: nn.Module, *positional: Any, **inputs: Any) -> Any:
        guard = guarded(self)
        own = functools.partial(plain.forward, self)
        return own(*positional, **inputs) if guard is None else guard.answer(own, *positional, **inputs)

    # The model's own name: save_pretrained writes it, and the Trainer looks at the signature of forward.
    body = {
        "forward": _eager(forward), "__deepcopy__": _copied, "__reduce_ex__": _not_pickled, "__module__": plain.__module__,
        "__qualname__": plain.__qualname__, "__doc__": plain.__doc__, "_rasura_plain": plain,
    }  # fmt: skip
    guard = Guard(model, answer, copied=copied)
    vars(model)[KEY] = guard
    model.__class__ = type(plain.__name__, (plain,), body)
    return guard


def _plain(model: nn.Module) -> type[nn.Module]:
    found: type[nn.Module] = vars(type(model))["_rasura_plain"]
    return found


def taken_off(model: nn.Module) -> None:
    """Make ``model`` a plain one again."""
    guard = vars(model).pop(KEY)
    guard.release()
    model.__class__ = _plain(model)


def _eager(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward``, which ``torch.compile`` leaves as it is: gradients of single texts are taken by hooks."""
    compiler: Any = torch.compiler
    made: Any = compiler.disable(forward)
    made.__signature__ = inspect.signature(forward)
    disabled: Callable[..., Any] = made
    return disabled


def _refusing(own: Callable[..., Any], *positional: Any, **inputs: Any) -> Any:
    if torch.is_grad_enabled() and inputs.get("labels") is not None:
        raise InputError("this model is a copy of a protected one: protect the copy itself to train it; to evaluate, use "
                         "torch.no_grad()")  # fmt: skip
    return own(*positional, **inputs)


def _copied(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy that can be asked but not trained: a guarantee belongs to one training of one model."""
    swapped, guard = type(self), vars(self).pop(KEY)
    try:
        self.__class__ = _plain(self)
        made = copy.deepcopy(self, memo)
    finally:
        self.__class__ = swapped
        vars(self)[KEY] = guard
    put(made, _refusing, copied=True)
    return made


def _not_pickled(self: nn.Module, protocol: Any) -> Any:
    raise InputError("a protected model is not pickled: keep model.state_dict() or model.save_pretrained(folder), and the "
                     "ledger's state_dict() beside it")  # fmt: skip
