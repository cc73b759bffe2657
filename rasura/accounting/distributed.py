"""What noise inside a secure sum guarantees: each client adds discrete Gaussian noise, and only the sum is seen.

Kairouz, Liu and Steinke 2021 (The Distributed Discrete Gaussian Mechanism), Proposition 14: the sum of ``n`` clients' noise
of deviation sigma is close to discrete Gaussian noise of deviation ``sqrt(n) * sigma``. With ``d`` entries and a sensitivity
``D``, the Renyi divergence of every order ``a`` is at most the smaller of ``a D**2 / (2 n sigma**2) + tau d`` and
``a / 2 * (D / (sqrt(n) sigma) + tau sqrt(d))**2``. There, tau is ``10 * sum(exp(-2 pi**2 sigma**2 k / (k + 1)))`` for k
from 1 to n - 1. So a round satisfies rho-concentrated differential privacy, rho being the smaller of both at order 1.

Neighbours: one client's update in one round is replaced by zeros; the unit is a client, with all that it sent. Every client
takes part in every round, so no sampling makes epsilon smaller.

Noise of clients that disappeared is not in the sum, and clients that work with the server know their own: ``n`` counts those
whose update was summed, less those that may collude.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rasura.accounting.epsilon import checked_delta, finite
from rasura.core.errors import InputError
from rasura.core.files import write_whole
from rasura.core.rounding import above

VERSION = 1


def _whole(what: str, value: object, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InputError(f"accounting: {what} is {value!r}; expected a whole number of at least {minimum}")
    return value


def round_rho(norm: int, sigma: int, clients: int, entries: int) -> float:
    """Concentrated differential privacy (rho) of one sum with the noise of ``clients``.

    ``norm``: the largest Euclidean norm of a client's update, ``sigma``: the deviation of one client's noise, both in steps;
    ``entries`` of an update. Raises ``InputError`` for invalid figures: without the noise of one client nothing holds.
    """
    for what, value in (("the norm", norm), ("sigma", sigma), ("the number of clients", clients), ("entries", entries)):
        _whole(what, value, 1)
    tau = 10 * sum(math.exp(-2 * math.pi**2 * sigma * sigma * k / (k + 1)) for k in range(1, clients))
    plain = norm / (math.sqrt(clients) * sigma)
    rho = min(plain**2 / 2 + tau * entries, (plain + tau * math.sqrt(entries)) ** 2 / 2)
    return finite("rho", rho * (1 + 1e-12))


def rho_epsilon(rho: float, delta: float) -> float:
    """Epsilon at ``delta`` of ``rho`` concentrated differential privacy (Canonne, Kamath and Steinke 2020, Proposition 12).

    Every order gives a bound; the best of a grid is taken, so the result is never below the true value.
    """
    if not 0 <= rho < math.inf:
        raise InputError(f"accounting: rho is {rho}; expected a number of at least 0")
    checked_delta(delta)
    orders = [1 + 10 ** (k / 50) for k in range(-150, 400)]
    bounds = [a * rho + (math.log(1 / delta) - math.log(a)) / (a - 1) + math.log1p(-1 / a) for a in orders]
    return max(0.0, finite("epsilon", min(bounds)))


@dataclass
class SumLedger:
    """The rounds that were made, each with the noise of one client and the number of clients whose noise counts.
    ``norm`` and ``entries`` as in ``round_rho``. It counts one run, and others only if it goes on from their state
    (``read``) or counts in the same ``file`` (``kept``)."""

    norm: int
    entries: int
    rounds: list[tuple[int, int]] = field(default_factory=list)
    file: Path | None = field(default=None, compare=False)

    def made(self, sigma: int, summed: int, colluding: int) -> None:
        """Count a round in which the updates of ``summed`` clients were opened, each with noise of ``sigma`` steps, and
        ``colluding`` of them may know their own. Raises ``InputError`` where no noise is left, and where the file cannot be
        written or another run counts in it: ask before the sum is opened."""
        _whole("sigma", sigma, 1)
        left = _whole("the number of clients", summed, 1) - _whole("the number of colluding clients", colluding, 0)
        if left < 1:
            raise InputError(f"accounting: {colluding} of {summed} clients may know their own noise, and none is left")
        if self.file is not None:
            self._add_to(self.file, (sigma, left))
        self.rounds.append((sigma, left))

    def _add_to(self, file: Path, one: tuple[int, int]) -> None:
        # Lines are added and never written anew, so that of two runs at once neither loses what the other counts.
        if not self.rounds and not file.exists():
            write_whole(file, json.dumps(self.state_dict()) + "\n", replace=False)
        try:
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(one) + "\n")
                out.flush()
                os.fsync(out.fileno())
        except OSError as error:
            raise InputError(f"{file} cannot be written ({error.strerror})") from None
        if _in_file(file).rounds != [*self.rounds, one]:
            raise InputError(f"{file} has other rounds than this run counted: another run counts in it")

    @property
    def rho(self) -> float:
        """Of all rounds together; concentrated differential privacy adds up."""
        return sum(round_rho(self.norm, sigma, left, self.entries) for sigma, left in self.rounds)

    def epsilon(self, delta: float) -> float:
        """Epsilon of all rounds made. Raises ``InputError`` if none was."""
        if not self.rounds:
            raise InputError("accounting: no round was made; there is nothing to state")
        return rho_epsilon(self.rho, delta)

    def statement(self, delta: float) -> str:
        """The guarantee in words, and what it is a guarantee of."""
        spent = above(self.epsilon(delta))
        return (
            f"({spent}, {above(delta)}) differential privacy of a client's updates in the {len(self.rounds)} "
            "rounds that this ledger counted, seen as sums. Rounds of other runs with the same clients are not counted, and "
            "metrics that an app sends in the clear beside the sum are not covered. Neighbours differ in whether the "
            "updates of one client are zero. As many clients collude as was assumed, and all others add the agreed noise"
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"version": VERSION, "norm": self.norm, "entries": self.entries, "rounds": [list(r) for r in self.rounds]}

    @classmethod
    def read(cls, state: Any) -> SumLedger:
        """What ``state_dict`` gave. Raises ``InputError`` for anything else."""
        if not isinstance(state, Mapping) or set(state) != {"version", "norm", "entries", "rounds"}:
            raise InputError("no state of a ledger of sums")
        if state["version"] != VERSION or not isinstance(state["rounds"], list):
            raise InputError(f"a ledger of sums of version {state['version']!r}; expected {VERSION}")
        found = cls(_whole("the norm", state["norm"], 1), _whole("entries", state["entries"], 1))
        for one in state["rounds"]:
            if not isinstance(one, list | tuple) or len(one) != 2:
                raise InputError("the state of a ledger of sums holds an entry that is not a round")
            found.made(one[0], one[1], 0)
        return found

    @classmethod
    def kept(cls, file: str | Path, norm: int, entries: int) -> SumLedger:
        """The ledger in ``file``, or a new one if there is none. Each round is added there when it is counted: a line behind
        those of the ledger that it went on from. Raises ``InputError`` for a damaged file; other sums are for the caller to
        refuse."""
        path = Path(file)
        if not path.parent.is_dir():
            raise InputError(f"{path} cannot be written: its folder does not exist")
        found = _in_file(path) if path.exists() else cls(norm, entries)
        found.file = path
        return found


def _in_file(path: Path) -> SumLedger:
    try:
        start, *counted = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return SumLedger.read({**start, "rounds": [*start["rounds"], *counted]})
    except (OSError, ValueError, TypeError, LookupError, InputError) as error:
        raise InputError(
            f"{path} holds no ledger of sums ({error}); a copy of it lacks the rounds that were counted afterwards"
        ) from None
