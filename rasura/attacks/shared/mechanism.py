"""The facts of the announced protection that an adaptive attack uses."""

from __future__ import annotations

import math

from rasura.core.mechanisms import typed
from rasura.core.protection import Protection
from rasura.core.values import Grant, Observation


def announced(seen: Observation) -> tuple[Protection, ...]:
    """The protections that the mechanism states; none if it is not granted.

    Raises ``InputError`` for an unknown one, which must not count as one without noise.
    """
    return tuple(typed(one) for one in seen.mechanism) if Grant.MECHANISM in seen else ()


def announced_dropout(seen: Observation) -> float:
    """The dropout rate that the mechanism states; 0 if it states none."""
    return max((one.dropout_rate for one in announced(seen)), default=0.0)


def announced_noise(seen: Observation) -> tuple[float, float]:
    """The standard deviation of the noise on an entry, and the norm that the update cannot exceed without it.

    ``(0, inf)`` if the mechanism states neither. The noise of several protections adds up. If the number of texts is not
    granted, noise that is divided by it counts as the noise on a single text.
    """
    told = announced(seen)
    texts = seen.batch_size if Grant.BATCH_SIZE in seen else 1
    entries = sum(g.numel() for g in seen.message.gradients.values()) or None
    deviation = math.hypot(*(one.noise_per_entry(texts, entries) for one in told))
    return deviation, min((one.largest_norm for one in told), default=math.inf)
