"""A model's outputs for rows of texts: logits, losses in nats, and its answers to an attacker's queries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rasura.core.answers import Answers, TokenAnswers
from rasura.core.batches import Batch
from rasura.core.interfaces import InputError
from rasura.core.word_rows import token_count
from rasura.victims.batching import joined

T = TypeVar("T")


def predictions(model: nn.Module, rows: Sequence[Batch], pad: int, together: int = 64) -> Tensor:
    """The logits ``(texts, classes)`` of a classifier in eval mode on ``rows``; rows of similar length are batched
    together."""
    return torch.stack(_ordered(model, rows, pad, together, lambda out, batch: out.logits.float().cpu()))


def nats(model: nn.Module, rows: Sequence[Batch], pad: int, together: int = 16) -> tuple[float, int]:
    """The summed loss of a causal model on ``rows`` in nats, and the number of tokens that it predicted."""

    def losses(out: Any, batch: Batch) -> Tensor:
        logits, labels = out.logits[:, :-1].float(), batch.labels[:, 1:]
        each = nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
        return torch.stack([each.double().sum(1).cpu(), (labels != -100).sum(1).cpu()], 1)

    found = torch.stack(_ordered(model, rows, pad, together, losses))
    return float(found[:, 0].sum()), int(found[:, 1].sum())


def predicts(row: Batch) -> bool:
    """Whether a causal model predicts a token of ``row``; it predicts none of a text of one token."""
    return bool((row.labels[:, 1:] != -100).any())


def check_predicted(rows: Sequence[Batch], source: str) -> None:
    """Raises ``InputError`` unless a causal model predicts a token of ``rows``, which come from ``source``."""
    if not any(map(predicts, rows)):
        raise InputError(
            f"{source}: no text has a token to predict, so nothing would be measured; expected texts of two tokens or more"
        )


def answers(model: nn.Module, rows: Sequence[Batch], pad: int, together: int = 64, *, tokens: bool = False) -> Answers:
    """The answers of ``model`` to ``rows`` (one text each): loss, margin, and a classifier's logits.

    ``tokens``: a causal model also answers for each token. It is asked about at most ``together`` texts at once, and about
    fewer where their logits would need more than ``LOGITS`` entries.
    """
    if not rows:
        return Answers(torch.empty(0).double(), torch.empty(0).double(), torch.empty(0, 0).double())
    if rows[0].labels.dim() == 1:
        found = torch.stack(_ordered(model, rows, pad, together, _labels))
        return Answers(found[:, 0], found[:, 1], found[:, 2:])
    size = token_count(model) * max(row.input_ids.shape[1] for row in rows)

    def take(out: Any, batch: Batch) -> list[TokenAnswers]:
        return [_predicted(out.logits[k], batch.labels[k], tokens) for k in range(len(batch))]

    said = _ordered(model, rows, pad, max(1, min(together, LOGITS // size)), take)
    none = torch.zeros(1, dtype=torch.float64)
    losses = torch.stack([-(one.logs if len(one.logs) else none).mean() for one in said])
    margins = -losses - torch.log(-torch.expm1(-losses.clamp(min=1e-12)))
    return Answers(losses, margins, torch.empty(len(rows), 0).double(), tuple(said) if tokens else ())


LOGITS = 1 << 26
"""Most entries of the logits of texts that a causal model is asked about at once."""


def _labels(out: Any, batch: Batch) -> Tensor:
    logits, label = out.logits.double(), batch.labels[:, None]
    others = logits.scatter(1, label, -torch.inf).logsumexp(1, keepdim=True)
    margins = logits.gather(1, label) - others
    # softplus keeps what is left of a loss that the difference of two logits would round to nothing
    return torch.cat([nn.functional.softplus(-margins), margins, logits], 1).cpu()


def _predicted(logits: Tensor, labels: Tensor, tokens: bool) -> TokenAnswers:
    """The answers for the tokens of one text that a causal model predicts, from ``(length, vocabulary)`` logits.

    Without ``tokens`` only the log probabilities.
    """
    places = (labels[1:] != -100).nonzero().flatten()
    target = labels[1:][places][:, None]
    rows = logits[:-1][places]
    whole = rows.double().logsumexp(1, keepdim=True)
    own = (rows.gather(1, target).double() - whole)[:, 0]
    if not tokens:
        return TokenAnswers(own.cpu(), own[:0].cpu(), (own[:0] > 0).cpu())
    # A logit of minus infinity has the probability 0; its log must be finite, since 0 times infinity is no number.
    logs = (rows - whole.to(rows.dtype)).clamp(min=-1e4)
    chance = logs.exp()
    mean = (chance * logs).sum(1, dtype=torch.float64)
    variance = (chance * (logs - mean[:, None].to(logs.dtype)).square()).sum(1, dtype=torch.float64)
    standard = (own - mean) / variance.sqrt().clamp(min=1e-12)
    return TokenAnswers(own.cpu(), standard.cpu(), (rows.argmax(1) == target[:, 0]).cpu())


def _ordered(
    model: nn.Module, rows: Sequence[Batch], pad: int, together: int, take: Callable[[Any, Batch], Iterable[T]]
) -> list[T]:
    """What ``take`` makes of the model's output for each row, in the order of ``rows``."""
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    by_length = sorted(range(len(rows)), key=lambda k: rows[k].input_ids.shape[1])
    out: dict[int, T] = {}
    try:
        for start in range(0, len(rows), together):
            some = by_length[start : start + together]
            batch = joined([rows[k] for k in some], pad).to(device)
            with torch.no_grad():
                inputs = {k: v for k, v in batch.inputs().items() if k != "labels"}
                found = take(model(**inputs), batch)
            out.update(zip(some, found, strict=True))
    finally:
        model.train(training)
    return [out[k] for k in range(len(rows))]
