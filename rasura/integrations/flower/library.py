"""Flower's own types: what the mod and the strategy read from messages and put into them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rasura.core.interfaces import MissingExtra

RECORD, ARRAYS, METRICS, EXAMPLES = "rasura", "arrays", "metrics", "num-examples"
"""Names of the records of a message, and of the metric with the number of texts that a client trained on."""


def flower() -> tuple[Any, Any]:
    """The modules ``flwr.app`` and ``flwr.serverapp.strategy``. Raises ``MissingExtra`` without Flower."""
    try:
        import flwr.app
        import flwr.serverapp.strategy
    except ImportError:
        raise MissingExtra("federated training needs Flower: pip install 'rasura[federated]'") from None
    return flwr.app, flwr.serverapp.strategy


def log(text: str) -> None:
    """One line in Flower's log."""
    import logging

    logging.getLogger("flwr").warning(text)


def record(arrays: Mapping[str, Tensor]) -> Any:
    """Tensors as Flower's arrays."""
    app, _ = flower()
    return app.ArrayRecord({n: app.Array(t.numpy()) for n, t in arrays.items()})


def sent_bytes(message: Any) -> object:
    """The message of Rasura in a reply; None where it has none."""
    try:
        return message.content[RECORD]["message"]
    except Exception:  # whatever one client sent, the others go on: the collector refuses what is not bytes
        return None


def sent_metrics(message: Any) -> dict[str, float]:
    """The plain finite numbers of a reply's one metric record; nothing where the reply has another number of them."""
    try:
        (found,) = message.content.metric_records.values()
        return {n: float(v) for n, v in found.items() if isinstance(v, int | float) and math.isfinite(v)}
    except Exception:  # as above: without examples, the reply counts for nothing
        return {}


def weighed(found: list[dict[str, float]]) -> Any:
    """The means, by examples, of the metrics that all clients report; None where none does."""
    told = [f for f in found if f.get(EXAMPLES, 0) > 0]
    names = set.intersection(*(set(f) for f in told)) - {EXAMPLES} if told else set()
    if not names:
        return None
    total = sum(f[EXAMPLES] for f in told)
    app, _ = flower()
    return app.MetricRecord({n: float(sum(f[n] * f[EXAMPLES] for f in told) / total) for n in sorted(names)})
