"""``--fail-above``: whether every protection of a run was measured to stay below a share. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rasura.core.errors import InputError
from rasura.core.rounding import above, below, percent
from rasura.report.pooled import texts_needed
from rasura.report.verdicts import READS, Verdict, plain, unmeasured

PASSED, ABOVE_LIMIT, NOT_JUDGED = 0, 3, 4
"""Exit codes: every judged column stays below; one is above; one could not be judged."""

ROUNDING = 1e-9
"""How far two means of the same scores may lie apart."""


@dataclass(frozen=True)
class Gate:
    """The outcome: the exit code, the columns that were judged, and what is said of those that did not pass."""

    exit: int
    judged: tuple[str, ...]
    says: tuple[str, ...]


def judged(verdicts: Mapping[str, Verdict]) -> dict[str, Verdict]:
    """The columns that a run is judged by: its protections. ``none`` is what they are compared with, unless it is alone."""
    return {name: v for name, v in verdicts.items() if not plain(v.defense)} or dict(verdicts)


def checked_limit(limit: float) -> float:
    """``limit`` if it is valid. Otherwise raises ``InputError``, since nothing is above NaN."""
    if not 0 < limit < 1:
        raise InputError(f"--fail-above is {limit}; expected a fraction above 0 and below 1, such as 0.2")
    return limit


def outcomes(verdicts: Mapping[str, Verdict], limit: float) -> dict[str, tuple[int, str]]:
    """The exit code of each judged column of ``verdicts``, and what is said of it.

    A column is above it where its strongest attack read more on average, and more than guessing scores: one that gave up has
    the score of guessing and recovered nothing. So is a column of which a text came back nearly whole. Otherwise it is not
    judged unless it was fully measured and the upper bound of what was read is at most ``limit``.
    """
    checked_limit(limit)
    share = _limit(limit)
    found: dict[str, tuple[int, str]] = {}
    for name, v in judged(verdicts).items():
        most = max((c for c in v.columns or (v,) if _read_more(c, limit)), key=lambda c: c.risk or 0.0, default=None)
        if most is not None:
            read = f"{most.attack} read {below(100 * (most.risk or 0))} %"
            found[name] = ABOVE_LIMIT, f"{name}: {read}, above {share}{_guessing(most, limit)}{_cut(v)}"
        elif v.word == READS:
            found[name] = ABOVE_LIMIT, f"{name}: {v.says}, which no limit allows"
        elif not v.meets(limit):
            found[name] = NOT_JUDGED, f"{name}: not judged against {share}: {_why(v, limit)}"
        else:
            most_read = above(100 * (1.0 if v.upper is None else v.upper))
            found[name] = PASSED, f"{name}: at most {most_read} % is read{_behind(v)}, within {share}{_cut(v)}"
    return found


def gate(verdicts: Mapping[str, Verdict], limit: float) -> Gate:
    """Judge every column of ``verdicts`` against ``limit``, as ``outcomes`` says."""
    found = outcomes(verdicts, limit)
    above = [says for code, says in found.values() if code == ABOVE_LIMIT]
    unknown = [says for code, says in found.values() if code == NOT_JUDGED]
    if not found:
        unknown = [f"nothing to judge against {_limit(limit)}: the run contains no protection and no baseline"]
    return Gate(ABOVE_LIMIT if above else NOT_JUDGED if unknown else PASSED, tuple(found), (*above, *unknown))


def _limit(limit: float) -> str:
    return f"--fail-above {100 * limit:g} %"


def _read_more(v: Verdict, limit: float) -> bool:
    """Whether the strongest attack of one column read more than ``limit``, and more than guessing on the same texts."""
    return v.risk is not None and v.risk > max(limit, _guess(v) + ROUNDING)


def _guess(v: Verdict) -> float:
    return 0.0 if v.guess is None else v.guess.mean


def _guessing(v: Verdict, limit: float) -> str:
    return f" (guessing alone scores {percent(_guess(v)):.0f} %, so no protection can pass)" if _guess(v) > limit else ""


def _cut(v: Verdict) -> str:
    return f"; {v.cut}" if v.cut else ""


def _behind(v: Verdict) -> str:
    return f", on average over {v.keys} keys" if v.keys else ""


def _why(v: Verdict, limit: float) -> str:
    if v.missing or v.upper is None or v.risk is None:
        return unmeasured(v.missing or ("no attack gave a result",))
    if _guess(v) >= limit:
        return f"guessing alone scores {percent(_guess(v)):.0f} %, so no protection can pass"
    likely = need = texts_needed(limit)
    n, many = v.draws, "keys" if v.draws == v.keys else v.many if v.draws == v.n else "updates"
    if n == v.keys == 1:
        return f"one key says nothing of another; at least {need} are needed (--keys)"
    if v.risk < limit:  # an interval narrows with the root of the number of draws
        likely = max(need, math.ceil(n * ((v.upper - v.risk) / (limit - v.risk)) ** 2))
    told = f"{n} {many} do not rule out a risk of up to {above(100 * v.upper, 3)} %"
    return f"{told}; at least {need} are needed, and roughly {likely} for scores like these"
