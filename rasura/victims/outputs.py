"""A model's outputs for rows of texts: logits, losses in nats, and its answers to an attacker's queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.answers import Answers
from rasura.core.batches import Batch
from rasura.victims.batching import joined


def predictions(model: nn.Module, rows: Sequence[Batch], pad: int, together: int = 64) -> Tensor:
    """The logits ``(texts, classes)`` of a classifier in eval mode on ``rows``; rows of similar length are batched
    together."""
    return torch.cat(_ordered(model, rows, pad, together, lambda out, batch: out.logits.float().cpu()))


def nats(model: nn.Module, rows: Sequence[Batch], pad: int, together: int = 16) -> tuple[float, int]:
    """The summed loss of a causal model on ``rows`` in nats, and the number of tokens that it predicted."""

    def losses(out: Any, batch: Batch) -> Tensor:
        logits, labels = out.logits[:, :-1].float(), batch.labels[:, 1:]
        each = nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
        return torch.stack([each.double().sum(1).cpu(), (labels != -100).sum(1).cpu()], 1)

    found = torch.cat(_ordered(model, rows, pad, together, losses))
    return float(found[:, 0].sum()), int(found[:, 1].sum())


def answers(model: nn.Module, rows: Sequence[Batch], pad: int, together: int = 64) -> Answers:
    """The answers of ``model`` to ``rows`` (one text each): loss, margin, and a classifier's logits."""

    def take(out: Any, batch: Batch) -> Tensor:
        logits = out.logits.double()
        if batch.labels.dim() == 1:
            label = batch.labels[:, None]
            others = logits.scatter(1, label, -torch.inf).logsumexp(1, keepdim=True)
            margins = logits.gather(1, label) - others
            # softplus keeps what is left of a loss that the difference of two logits would round to nothing
            return torch.cat([nn.functional.softplus(-margins), margins, logits], 1).cpu()
        target = batch.labels[:, 1:]
        each = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), target, ignore_index=-100, reduction="none")
        losses = each.sum(1) / (target != -100).sum(1).clamp(min=1)
        margins = -losses - torch.log(-torch.expm1(-losses.clamp(min=1e-12)))
        return torch.stack([losses, margins], 1).cpu()

    if not rows:
        return Answers(torch.empty(0).double(), torch.empty(0).double(), torch.empty(0, 0).double())
    found = torch.cat(_ordered(model, rows, pad, together, take))
    return Answers(found[:, 0], found[:, 1], found[:, 2:])


def _ordered(
    model: nn.Module, rows: Sequence[Batch], pad: int, together: int, take: Callable[[Any, Batch], Tensor]
) -> list[Tensor]:
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    by_length = sorted(range(len(rows)), key=lambda k: rows[k].input_ids.shape[1])
    out: list[Tensor] = [torch.empty(0)] * len(rows)
    try:
        for start in range(0, len(rows), together):
            some = by_length[start : start + together]
            batch = joined([rows[k] for k in some], pad).to(device)
            with torch.no_grad():
                inputs = {k: v for k, v in batch.inputs().items() if k != "labels"}
                found = take(model(**inputs), batch)
            for k, one in zip(some, found):
                out[k] = one[None]
    finally:
        model.train(training)
    return out
