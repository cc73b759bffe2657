"""What the announced protection tells an adaptive attack."""

from __future__ import annotations

import math

from rasura.values import Grant, Observation


def _largest(seen: Observation, name: str, parameter: str) -> float:
    if Grant.MECHANISM not in seen:
        return 0.0
    return max((float(m.parameters.get(parameter) or 0.0) for m in seen.mechanism if m.name == name), default=0.0)


def announced_dropout(seen: Observation) -> float:
    """The dropout rate that the mechanism tells, 0 where it tells none."""
    return _largest(seen, "dropout", "p")


def announced_noise(seen: Observation) -> tuple[float, float]:
    """The standard deviation of the noise on an entry, and the norm that the whole gradient was clipped to before it.

    ``(0, inf)`` where the mechanism tells of none.
    """
    deviation = math.hypot(_largest(seen, "gaussian", "sigma"), math.sqrt(2) * _largest(seen, "laplace", "scale"))
    clips = [_largest(seen, name, "clip") for name in ("gaussian", "laplace")]
    return deviation, min((c for c in clips if c), default=math.inf)
