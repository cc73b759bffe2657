"""How many clients a secure sum needs before nothing is read from it: the curve, and the least number that holds. No torch.

The mean of K clients' gradients, one example each, is the gradient of a batch of K. In a causal model with texts of
different lengths that holds where clients weigh by their tokens. So an audit of batches of K measures what a server that
sees only the sum can read. The sum of one client is the yardstick: an attack counts where it reads the same examples there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rasura.core.errors import InputError
from rasura.core.rounding import percent
from rasura.report.language import tell
from rasura.report.missing import HOLDS_WITHIN
from rasura.report.sentence import HEADLINE
from rasura.report.verdicts import NOT_MEASURED, Verdict, unsaid, verdict

Record = Mapping[str, Any]


def checked_clients(clients: tuple[int, ...]) -> tuple[int, ...]:
    """The numbers of clients in ascending order. Raises ``InputError`` unless they hold 1 and a larger number."""
    found = tuple(sorted(set(clients)))
    if len(found) < 2 or found[0] != 1:
        raise InputError(
            f"--clients is {','.join(map(str, clients))}; expected 1, the yardstick, and larger numbers: 1,2,4,8"
        )
    return found


def curve(
    records: Iterable[Record], clients: Iterable[int], metric: str = HEADLINE, unfinished: str = ""
) -> dict[int, Verdict]:
    """The verdict on the sum of each number of ``clients``, from the records of unprotected updates of so many examples.
    ``unfinished``: as in ``Findings``."""
    every = [r for r in records if r["defense"] == "none" and r["update"] == "fedsgd"]
    single = [r for r in every if r["batch_size"] == 1]
    found = {}
    for count in clients:
        here = [r for r in every if r["batch_size"] == count]
        if not all(len(r["examples"]) == count for r in here):
            missing = (tell("the run has no {count} examples for each sum", count=count),)
            found[count] = Verdict(NOT_MEASURED, "none", 0, missing=missing)
            continue
        found[count] = unsaid(verdict("none", here, [{**r, "batch_size": count} for r in single], metric), unfinished)
    return found


def least(verdicts: Mapping[int, Verdict]) -> int | None:
    """The smallest number of clients that holds, as do all larger ones that were tested; None where there is none."""
    found = None
    for count in sorted(verdicts, reverse=True):
        if not verdicts[count].holds:
            break
        found = count
    return found


def curve_lines(verdicts: Mapping[int, Verdict]) -> list[str]:
    """One line for each number of clients, and what follows."""
    said = [
        tell("sum of 1 client: {says}", says=v.says) if count == 1
        else tell("sum of {count} clients: {says}", count=count, says=v.says)
        for count, v in sorted(verdicts.items())
    ]  # fmt: skip
    return [*said, conclusion(verdicts)]


def conclusion(verdicts: Mapping[int, Verdict]) -> str:
    """What follows from the curve."""
    best = least(verdicts)
    if best is None:
        return tell("No tested number of clients holds. Test more clients or more examples, or add noise to the sum.")
    held = ", ".join(str(count) for count in sorted(verdicts) if count >= best)
    return tell(
        "At least {best} clients with one example each: at the tested numbers from there on ({held}), no attack of this run "
        "read more than guessing, within {within} points. Other texts may need more clients: shorter ones, and those that "
        "share more words. This result is empirical, not a guarantee. It does not hold for clients who work with the server "
        "and subtract their own updates.", best=best, held=held, within=round(100 * HOLDS_WITHIN),
    )  # fmt: skip


@dataclass(frozen=True)
class Sum:
    """A number of clients on the page: the share that the strongest attack read of each text, where one has a figure."""

    clients: int
    read: str
    attack: str
    says: str


def sum_rows(verdicts: Mapping[int, Verdict]) -> tuple[Sum, ...]:
    """The curve as a table."""
    return tuple(
        Sum(count, "–" if v.read is None else f"{percent(v.read):.0f} %", v.attack, v.says)
        for count, v in sorted(verdicts.items())
    )
