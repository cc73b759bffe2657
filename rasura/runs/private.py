"""A protected training loop in one line: the model returns private gradients, the loader draws texts as the accounting
assumes, and a ledger counts the releases."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from rasura.accounting import Draw, Ledger, Run, formal
from rasura.core.interfaces import Defense, InputError
from rasura.core.rng import Randomness, SecretGenerator, generator, secret_generator
from rasura.runs.carried import mark
from rasura.runs.drawing import ONCE, OWNER, ROW, DrawnLoader, OrderedLoader
from rasura.runs.earlier import begins_on
from rasura.runs.gradient_canaries import GradientCanaries
from rasura.runs.guard import Guard, guarded, put, taken_off
from rasura.runs.loop_checks import (
    RESUME,
    batching,
    check_alone,
    check_trainable,
    drawing_loader,
    loop_defense,
    owners_of,
    planned_run,
)
from rasura.runs.loss_alone import loss_alone
from rasura.runs.noise_target import solved
from rasura.victims.padding import check_padding, takes_mask
from rasura.victims.step import Kept, defended, message_for
from rasura.victims.unmasked import check_unmasked


class ProtectedTraining(NamedTuple):
    """A protected training loop: what ``protect_training`` returns.

    ``model`` is the object that was passed; train with ``loader``. ``ledger`` holds the guarantee of the plan
    (``ledger.planned``) and of the releases so far (``ledger.spent()``).
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    loader: DrawnLoader | OrderedLoader | DataLoader[Any]
    ledger: Ledger


class _Step:
    """The private gradients of one batch, kept until its backward pass returns them."""

    def __init__(
        self, guard: Guard, ledger: Ledger, draw: Draw, rows: int, secret: bool, released: Callable[[], None]
    ) -> None:
        self.guard, self.ledger, self.draw, self.rows, self.secret = guard, ledger, draw, rows, secret
        self.released = released
        self.gradients: list[tuple[str, Tensor | None]] = []
        self.sizes: list[int] = []
        self.done = False

    def hand_out(self, factor: Tensor) -> list[Tensor | None]:
        """The gradients multiplied by ``factor``, counted as one release."""
        if self.done:
            raise InputError("this loss already had its backward pass; a batch can be released only once")
        self.ledger.made(self.draw, self.sizes, secret=self.secret)
        self.released()
        self.done = True
        found = [None if g is None else factor * g for _, g in self.gradients]
        self.guard.expect({n: g for (n, _), g in zip(self.gradients, found) if g is not None})
        self.gradients = []
        return found


class _Release(torch.autograd.Function):
    """A loss whose backward pass returns gradients that were computed before."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, step: _Step, *parameters: Tensor) -> Tensor:
        ctx.step = step
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Any:
        return None, None, *ctx.step.hand_out(grad[0])


class _Protected:
    """The forward of a protected model: a loss with private gradients or, without autograd, the model's own forward."""

    def __init__(
        self, model: nn.Module, defense: Defense, ledger: Ledger, rng: Randomness,
        loader: DrawnLoader | OrderedLoader | None, most: int | None, canaries: GradientCanaries | None,
    ) -> None:  # fmt: skip
        self.defense, self.ledger, self.rng, self.loader, self.canaries = defense, ledger, rng, loader, canaries
        ledger.earlier = begins_on(model)
        by_chance = isinstance(loader, DrawnLoader) and loader.drawn.poisson
        if canaries is not None and not by_chance:
            raise InputError(
                "gradient canaries need dp-sgd or normalised, with a guarantee, and batches drawn by Poisson sampling"
            )
        self.order = loader.order if isinstance(loader, OrderedLoader) else None
        self.owned = isinstance(loader, DrawnLoader) and loader.drawn.rows is not None
        fixed = by_chance or self.order is not None
        self.expected, self.most = min(ledger.run.batch_size, ledger.run.examples) if fixed else None, most
        self.last: _Step | None = None
        self.kept: Kept = {} if self.order is None else {"state": self.order.noise}
        self.guard = put(model, self, made=lambda: ledger.releases)
        mark(model, ledger, set(_shapes(model, defense)))

    def __call__(self, own: Callable[..., Any], *positional: Any, **inputs: Any) -> Any:
        model = self.guard.model()
        assert model is not None  # it is being called
        owners, numbers = inputs.pop(OWNER, None), inputs.pop(ROW, None)
        if self.guard.inside or not torch.is_grad_enabled():
            return own(*positional, **inputs)
        if not model.training and inputs.get("labels") is None:
            return own(*positional, **inputs)  # the guard refuses a backward pass through it
        if positional:
            raise InputError("call the protected model with keywords: model(**batch)")
        # The Trainer's count of tokens belongs to losses over the whole batch.
        inputs = {k: v for k, v in inputs.items() if v is not None and k not in ("num_items_in_batch", "return_dict")}
        labels = inputs.get("labels")
        if labels is None:
            raise InputError("the protected model computes its own loss; pass labels with the batch during training")
        other = [k for k, v in inputs.items() if not isinstance(v, Tensor) or v.shape[:1] != labels.shape[:1]]
        if other:
            raise InputError(f"{', '.join(other)}: expected tensors with a row for each of the {len(labels)} texts")
        if self.loader is not None:
            check_padding(model, inputs, unsaid=True)
        self._check_numbers(len(labels), numbers, owners)
        if owners is None:
            return self._step(model, inputs, len(labels), numbers)
        order = owners.argsort(stable=True)
        counts = owners[order].unique_consecutive(return_counts=True)[1].tolist()
        inputs = {k: v[order.to(v.device)] for k, v in inputs.items()}
        return self._step(model, inputs, len(labels), numbers[order.to(numbers.device)], owners[order], counts)

    def _check_numbers(self, texts: int, numbers: Tensor | None, owners: Tensor | None) -> None:
        """Raises ``InputError`` where the batch does not say which rows it holds, and whose they are."""
        passing = "use the loader that protect_training returned, and pass on all that its batches hold"
        if (self.loader is not None) != (numbers is not None) or (numbers is not None and numbers.shape != (texts,)):
            needs = "this training takes the batches of a given loader, which have no" if self.loader is None else (
                "a training whose draws are counted needs")  # fmt: skip
            raise InputError(f"{needs} {ROW} in each batch, one number a text: {passing}")
        if self.owned != (owners is not None):
            raise InputError(f"a training that protects persons needs {OWNER} in each batch, and no other has it; {passing}")
        if owners is not None and owners.shape != (texts,):
            raise InputError(f"{OWNER} has the shape {tuple(owners.shape)}; expected a number for each of {texts} texts")

    def _step(
        self, model: nn.Module, inputs: Mapping[str, Tensor], rows: int, numbers: Tensor | None,
        owners: Tensor | None = None, counts: Sequence[int] | None = None,
    ) -> Any:  # fmt: skip
        check_alone(model)
        draw = self._draw(inputs, numbers, owners)
        self.ledger.room(draw)
        self.guard.watch()
        self.guard.forget()
        defense, counted = self._among(model, draw)
        kept = dict(self.kept)

        def released() -> None:
            # Not before: a step that nobody counted must not change the next one.
            self.kept = kept
            counted()
            if self.loader is not None:
                self.loader.release()

        step = _Step(self.guard, self.ledger, draw, rows, isinstance(self.rng, SecretGenerator), released)
        with self.guard.passing():
            if self.loader is not None and self.loader.alone:
                with defended(model, defense):
                    check_unmasked(model, inputs, self.loader.alone)
            message, loss, _ = message_for(
                model, inputs, rows, defense, self.rng, expected=self.expected, record=step.sizes.extend,
                most=self.most, counts=counts, kept=kept,
            )  # fmt: skip
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        step.gradients = [
            (n, None if (g := message.gradients.get(n)) is None else g.to(p.device, p.dtype)) for n, p in named.items()
        ]
        self.last = step
        value = torch.tensor(loss, device=next(iter(named.values())).device)
        return loss_alone(_Release.apply(value, step, *named.values()))  # type: ignore[no-untyped-call]  # of torch

    def _draw(self, inputs: Mapping[str, Tensor], numbers: Tensor | None, owners: Tensor | None) -> Draw:
        """How the batch was drawn that is trained on now. Raises ``InputError`` for another one than the next."""
        if self.loader is None or numbers is None:
            return Draw(rate=min(1.0, len(inputs["labels"]) / self.ledger.run.examples) or None)
        if self.order is None and self.last is not None and not self.last.done:
            raise InputError(
                f"the batch before had no backward pass: its loss was computed, and nothing was released; {ONCE}. If that "
                f"loss is gone, as after an interruption, {RESUME}"
            )
        return self.loader.take(inputs, numbers.tolist(), None if owners is None else owners.tolist())

    def _among(self, model: nn.Module, draw: Draw) -> tuple[Defense, Callable[[], None]]:
        """The protection of one step with the canaries, and what to call when its release was counted."""
        if self.canaries is None:
            return self.defense, lambda: None
        return self.canaries.joined(self.defense, draw, _shapes(model, self.defense))


def protect_training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    loader: DataLoader[Any],
    defense: str | Defense,
    *,
    epochs: int = 1,
    max_steps: int | None = None,
    target_epsilon: float | None = None,
    delta: float | None = None,
    physical_batch_size: int | None = None,
    poisson: bool = True,
    seed: int | None = None,
    unit: Sequence[str | int] | None = None,
    canaries: GradientCanaries | None = None,
) -> ProtectedTraining:
    """Protect a training loop. To protect a file of training texts instead, use ``obfuscate_file``.

    ``model, optimizer, loader, ledger = protect_training(model, optimizer, loader, "dp-sgd:1.0")``.

    From then on, ``model(**batch).loss.backward()``, with labels in the batch, leaves protected gradients in ``.grad``, in
    training mode and in eval mode. Every optimizer and schedule works with them. Any other backward pass to the model's
    weights raises ``InputError``, and so does ``optimizer.step()`` on gradients that were set by hand. Under
    ``torch.no_grad()`` the model is unchanged. The returned loader draws texts as the guarantee assumes (Poisson sampling
    for DP-SGD, disjoint batches for DirDP-SGD, one fixed order for DP-FTRL); each of its batches is released once, in turn,
    whole and unchanged. The ledger counts each, computes epsilon, and refuses a step beyond ``epochs`` or ``max_steps``.

    ``target_epsilon``: ``defense`` names no noise (``"dp-sgd"``, ``"frozen-blocks:6+dp-sgd:clip=0.5"``) and gets the least
    noise with which the plan spends at most this epsilon at ``delta``; a state that is loaded into the ledger counts as
    well, and is refused where the whole would spend more. ``physical_batch_size``: texts in memory at once. It
    changes the memory and the time of a step, and nothing that is released: the loader's batch size is the logical one.
    ``unit``: whose each row of the data set is. Persons are then drawn, clipped and hidden, each with the mean gradient of
    all their rows; guarantee and batch size are for persons. ``canaries``: gradients that measure a lower bound of epsilon
    (``rasura.GradientCanaries``).

    ``"dp-ftrl:S/band=B"`` needs no sampling: every pass takes the same batches in the same order, each of them once. A batch
    out of turn and a resumed training are refused. The last batch of a pass may be smaller; it is divided like the others.

    ``poisson=False`` keeps the given loader; then nothing is proven for the run, and the ledger says so. Noise comes from
    the operating system unless an experiment's ``seed`` is given. Not covered: the loss, and what else is published.

    Raises ``InputError`` for what cannot be protected in a loop, such as ``sealing``, and a target that cannot be reached.
    """
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1
    owners = owners_of(loader, unit)
    planned = partial(planned_run, loader, owners, size, epochs, max_steps, delta)
    if target_epsilon is not None:
        defense = solved(defense, target_epsilon, planned("poisson" if poisson else "shuffled"))
    parts = loop_defense(defense, physical_batch_size)
    check_trainable(model, optimizer)
    mechanisms = [p.counted for p in parts]
    run = Run(1, 1, epochs) if formal(mechanisms) is None else planned(batching(mechanisms, poisson))
    sizes = [math.prod(s) for s in _shapes(model, parts).values()]
    ledger = Ledger(mechanisms, run, sizes=sizes, secure=seed is None, target=target_epsilon)
    rng = secret_generator() if seed is None else generator(seed, "protect")
    drawing = drawing_loader(loader, owners, ledger, rng, poisson, takes_mask(model))
    if (earlier := guarded(model)) is not None and earlier.copied:
        taken_off(model)
    _Protected(model, parts, ledger, rng, drawing, physical_batch_size, canaries)
    return ProtectedTraining(model, optimizer, loader if drawing is None else drawing, ledger)


def _shapes(model: nn.Module, defense: Defense) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter that is trained under ``defense``."""
    with defended(model, defense):
        return {n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad}
