"""The utility of a trained model: accuracy, F1, MCC and loss of a classifier; loss and perplexity of a language model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

HIGHER_IS_BETTER = {"accuracy": True, "f1": True, "mcc": True, "loss": False, "perplexity": False}
"""Whether higher or lower is better, for each figure."""


def classification(logits: Tensor, labels: Sequence[int]) -> dict[str, float]:
    """Figures of a classifier from ``logits`` ``(n, classes)``: F1 of class 1 with two classes, otherwise the mean over
    classes. All are NaN where a logit is not finite: such a model names no class."""
    from sklearn.metrics import f1_score, matthews_corrcoef

    if not bool(torch.isfinite(logits).all()):
        return dict.fromkeys(("accuracy", "f1", "mcc", "loss"), math.nan)
    target = torch.tensor(labels)
    guess = logits.argmax(1)
    average = "binary" if logits.shape[1] == 2 else "macro"
    return {
        "accuracy": float((guess == target).double().mean()),
        "f1": float(f1_score(target.tolist(), guess.tolist(), average=average, zero_division=0)),
        # 0 by definition where there is one class in all, of which the library warns.
        "mcc": float(matthews_corrcoef(target.tolist(), guess.tolist())) if len({*labels, *guess.tolist()}) > 1 else 0.0,
        "loss": float(torch.nn.functional.cross_entropy(logits.double(), target)),
    }


def causal(nats: float, tokens: int) -> dict[str, float]:
    """Figures of a causal model from the sum of ``nats`` over ``tokens`` predicted tokens. NaN where there is none, or the
    sum is not finite."""
    if tokens < 1 or not math.isfinite(nats):
        return {"loss": math.nan, "perplexity": math.nan}
    loss = nats / tokens
    return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}


def stored(figures: Mapping[str, float]) -> dict[str, float | None]:
    """``figures`` as results keep them: None, as nothing was measured, for those that are not finite; JSON has none."""
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}
