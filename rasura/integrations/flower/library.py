"""Flower's own types: what the mod and the strategy read from messages and put into them."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from rasura.core.interfaces import InputError, MissingExtra

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
    logging.getLogger("flwr").warning(text)


@contextmanager
def kept_here(part: str) -> Iterator[None]:
    """Inside the block, the ``part`` of a client that is not Rasura's. What it raises is logged here and not sent, since it
    may name files, rows and labels: the server is told its kind alone. Raises ``InputError`` in its place."""
    try:
        yield
    except Exception as error:
        logging.getLogger("flwr").exception(f"rasura: the {part} failed")
        raise InputError(f"the {part} of this client failed ({type(error).__name__}); its own log says why") from None


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
    """The plain numbers of a reply's one metric record; nothing where the reply has another number of records. A number
    that is not finite voids all of them but the examples: figures beside it come from the same broken model."""
    try:
        (found,) = message.content.metric_records.values()
        finite = all(math.isfinite(x) for v in found.values() for x in (v if isinstance(v, list) else [v]))
        told = {n: float(v) for n, v in found.items() if isinstance(v, int | float) and (finite or n == EXAMPLES)}
    except Exception:  # as above: without examples, the reply counts for nothing
        return {}
    return told if math.isfinite(told.get(EXAMPLES, 0)) else {}


def weighed(found: list[dict[str, float]], where: str) -> tuple[Any, int]:
    """The means, by examples, of the metrics that all measuring clients report, and how many clients these are; None and 0
    without any. Lines of the log say of ``where`` how many clients are left out and why, and that there is no figure."""
    told = [f for f in found if f.get(EXAMPLES, 0) > 0 and len(f) > 1]
    if out := len(found) - len(told):
        empty = sum(f.get(EXAMPLES) == 0 for f in found)
        log(
            f"{where}: {out} of {len(found)} clients {'is' if out == 1 else 'are'} left out of the reported figures "
            f"({empty} without a text to measure on, {out - empty} with no figures or one that is not finite)"
        )
    names = sorted(set.intersection(*(set(f) for f in told)) - {EXAMPLES}) if told else []
    total = sum(f[EXAMPLES] for f in told)
    means = {n: sum(f[n] * f[EXAMPLES] for f in told) / total for n in names}
    if names and all(map(math.isfinite, (total, *means.values()))):
        app, _ = flower()
        return app.MetricRecord(means), len(told)
    why = "a mean is not finite" if names else "clients report none in common" if told else "no client measured any"
    log(f"{where}: there is no figure, since {why}")
    return None, 0
