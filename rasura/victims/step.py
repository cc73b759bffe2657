"""One private step, with any defense: batch, gradients, aggregate, message. Audits run the same code as deployments."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.batches import Batch, ImageBatch
from rasura.core.errors import Unseen
from rasura.core.exact import full_products
from rasura.core.files import make_private
from rasura.core.interfaces import Defense, InputError, NotApplicable, Transform, check_sealed_last
from rasura.core.local import FEDSGD, Local
from rasura.core.rng import Randomness, drawing, permutation, secret_generator
from rasura.core.unchanged import Assembled, Clean
from rasura.core.updates import changed
from rasura.core.values import Gradients, Message, Stage, Task, Transcript, Vocabulary
from rasura.victims.applying import applied, shapes_of
from rasura.victims.per_example import by_owner, in_parts, per_example
from rasura.victims.unwritten import unwritten

Kept = dict[str, Any]
"""The state of an aggregation between the steps of one training, as plain values for JSON."""

Record = Callable[[Sequence[int]], None]
"""A function that records a release: the number of entries of each tensor that was released."""


@contextmanager
def defended(model: nn.Module, defense: Defense) -> Iterator[nn.Module]:
    """Apply the MODEL part of ``defense`` (frozen layers, dropout) inside the block, and restore the model afterwards. Of a
    part without ``undo``, everything that the model holds is kept and put back."""
    done: list[tuple[Any, Any]] = []
    parts = [p for p in defense if p.stage is Stage.MODEL]
    lasting = [part.mechanism.name for part in parts if part.undo is None]
    were = (Assembled(model), Clean(model, weights=True)) if lasting else ()
    if were and not were[1].whole:
        raise InputError(f"{lasting[0]} has no undo, and the model is too large to keep a copy of it; give it one")
    try:
        for part in parts:
            _, state = applied(part, model, part.init(model), secret_generator())
            done.append((part, state))
        yield model
    finally:
        for part, state in reversed(done):
            if part.undo is not None:
                model = part.undo(model, state)
        for kept in were:
            kept.put_back()


def gradients(
    model: nn.Module, inputs: Mapping[str, Tensor], local: Local = FEDSGD, rng: Randomness | None = None
) -> tuple[Gradients, float]:
    """The gradient of the model's loss on ``inputs`` by every trainable parameter, and the loss.

    ``updates.changed`` describes what ``local`` training sends instead of the gradient; ``rng`` draws the order of its
    mini-batches. Returns fresh tensors and leaves ``.grad`` alone. Raises ``InputError`` if nothing is trainable.
    """
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    if not names:
        raise InputError("the model has no trainable parameter; expected at least one with requires_grad")
    order = torch.randperm if rng is None else partial(permutation, rng=rng)
    with adapter_dropout(model):
        return changed(model, inputs, names, local, order)


@contextmanager
def adapter_dropout(model: nn.Module) -> Iterator[None]:
    """Inside the block, the dropout of LoRA adapters is active, whatever the model's mode."""
    off = [m for name, m in model.named_modules() if "lora_dropout" in name and isinstance(m, nn.Dropout) and not m.training]
    try:
        for module in off:
            module.train()
        yield
    finally:
        for module in off:
            module.eval()


def message_for(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    size: int,
    defense: Defense,
    rng: Randomness,
    *,
    local: Local = FEDSGD,
    expected: float | None = None,
    record: Record | None = None,
    most: int | None = None,
    counts: Sequence[int] | None = None,
    kept: Kept | None = None,
) -> tuple[Message, float, float]:
    """The message for ``inputs`` of ``size`` texts under the MODEL, AGGREGATE and WIRE parts of ``defense``; the mean loss;
    and the wall-clock seconds of the WIRE part. ``record`` receives the result of the aggregation. ``most``: texts in memory
    at once, where texts are aggregated one by one; None for all. ``counts``: how many consecutive texts belong to each
    person; these are then aggregated instead of texts. Texts that are aggregated may not change a buffer or a weight:
    ``InputError``. ``kept``: what the aggregation keeps from one step of a training to
    the next, such as a clip that follows the norms; None for a first step."""
    by_stage = {stage: [p for p in defense if p.stage is stage] for stage in Stage}
    check_sealed_last(by_stage[Stage.WIRE])
    _check_sum(by_stage[Stage.WIRE])
    losses: list[float] = []

    def mean() -> Gradients:
        found, loss = gradients(model, inputs, local, rng)
        losses.append(loss)
        return found

    with defended(model, defense), drawing(rng):
        make = per_example if most is None else partial(in_parts, most=most)
        examples = make(model, inputs, size, mean=mean, told=losses.append, expected=expected)
        if counts is not None:
            examples = by_owner(examples, counts)
        if by_stage[Stage.AGGREGATE]:
            part = by_stage[Stage.AGGREGATE][0]
            kept = {} if kept is None else kept
            # A plain mean hides nothing that a buffer could show.
            with nullcontext() if part.mechanism.name == "mean" else unwritten(model):
                state = kept.get("state", part.init(model))
                entries, kept["state"] = applied(part, examples, state, rng, shapes_of(dict(model.named_parameters())))
            # Rounded to what the weights are stored in now, when the noise is there.
            stored = {n: p.dtype for n, p in model.named_parameters()}
            entries = {n: g.to(stored.get(n, g.dtype)) for n, g in entries.items()}
        else:
            entries = mean()
        if record is not None:
            record([entry.numel() for entry in entries.values()])
        message = Message(entries, kind=local.kind)
        start = time.perf_counter()
        for part in by_stage[Stage.WIRE]:
            message, _ = applied(part, message, part.init((model, inputs)), rng)
        seconds = time.perf_counter() - start
    return message, sum(losses) / max(len(losses), 1), seconds


def _check_sum(wire: Sequence[Transform[Any, Any, Any]]) -> None:
    """Refuse what each client does to its own update beside a secure sum: one step has the sum alone to do it to."""
    summed = any(p.mechanism.name == "sealing" and p.mechanism.parameters.get("scheme") == "secagg" for p in wire)
    others = [p.mechanism.name for p in wire if p.mechanism.name not in ("sealing", "accumulate")]
    if summed and others:
        raise Unseen(
            f"each client does {', '.join(others)} to its own update, and an audit would do it to the sum, which hides more "
            "of it; audit sealing:all/by=secagg without it"
        )


def step(
    model: nn.Module,
    batch: Batch | ImageBatch,
    defense: Defense = (),
    *,
    task: Task,
    vocabulary: Vocabulary,
    rng: Randomness,
    local: Local = FEDSGD,
    expected: float | None = None,
    public: nn.Module | None = None,
    record: Record | None = None,
    most: int | None = None,
    kept: Kept | None = None,
    counts: Sequence[int] | None = None,
) -> Transcript:
    """One step of training as a client takes it; the Transcript holds the message and the truth behind it.

    MODEL transforms are applied for the duration of the step. Without an AGGREGATE transform the message holds the gradient
    of the mean loss, or what ``local`` training sends. Active dropout draws from ``rng``: the same generator state gives the
    same masks. Masks from a ``SecretGenerator`` cannot be repeated. ``expected``: the mean batch size under random sampling;
    None for batches of a fixed size. ``public``: the model that the client knew before a server sent ``model``; protections
    of the data use it. ``record``: receives the number of entries of each aggregated tensor, where noise is drawn.
    ``most``, ``kept`` and ``counts`` as in ``message_for``. Raises ``NotApplicable`` if what is sent is not finite, and
    ``InputError`` for secure aggregation with a ``SecretGenerator``, which only an audit can show of one step, and for a
    part behind ``sealing``, which would change no entry that is sealed.
    """
    if local.kind != "fedsgd" and any(p.stage is Stage.AGGREGATE and p.mechanism.name != "mean" for p in defense):
        raise InputError(
            f"{local.kind} trains on whole batches, so texts cannot be aggregated one by one; use the update kind fedsgd"
        )
    if local.plan is not None and local.plan.examples not in (0, len(batch)):
        raise InputError(f"update local: the round needs {local.plan.examples} examples but got {len(batch)}")
    # A protection may write into what it is given, and both protections of data and attacks run on the CPU.
    original, batch = batch.to("cpu"), batch.copied().to("cpu")
    start = time.perf_counter()
    for part in (p for p in defense if p.stage is Stage.DATA):
        batch, _ = applied(part, batch, part.init((public or model, vocabulary)), rng)
    before = time.perf_counter() - start
    inputs = batch.to(next(model.parameters()).device).inputs()
    with full_products():  # rounded to TF32, what is sent would differ from what attacks recompute
        message, loss, after = message_for(
            model, inputs, len(batch), defense, rng, local=local, expected=expected, record=record, most=most,
            counts=counts, kept=kept,
        )  # fmt: skip
    if not all(bool(sent.isfinite().all()) for sent in message.gradients.values()):
        raise NotApplicable("what is sent holds values that are not finite, so nothing can be measured")
    mechanism = tuple(p.mechanism for p in defense)
    if local != FEDSGD:
        mechanism = (local.mechanism, *mechanism)
    return Transcript(original, model, message, mechanism, loss, task, vocabulary, before + after)


def capture(model: nn.Module, inputs: Mapping[str, Tensor], path: str | Path = "update.safetensors") -> float:
    """Write the update that ``model`` would send for ``inputs`` to a safetensors file, one tensor per parameter name.

    ``inputs`` are the keyword arguments of the model's forward, labels included, for example ``input_ids`` with shape
    ``(batch, length)``. The model's mode (train or eval) is kept.
    Returns the loss. Read the file back with ``rasura read``.
    """
    from safetensors.torch import save_file

    if "labels" not in inputs:
        raise InputError(f"the batch has {', '.join(sorted(inputs))} but no labels; expected labels for the loss")
    found, loss = gradients(model, dict(inputs))
    make_private(Path(path), partial(save_file, {n: g.contiguous() for n, g in found.items()}))
    return loss
