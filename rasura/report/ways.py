"""The ways to hide clients' updates from the server, beside each other: what each costs, and who can read what. No torch.

Bytes of a way that the run has are the run's own. All other figures are those of one measurement, which ``SOURCE`` names;
what was not measured is said in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rasura.core.options import name_of
from rasura.report.language import number, recorded, size, tell
from rasura.report.matrix import Findings
from rasura.report.sealed import SUMMED_WITH_NOISE, scheme_of, sealed_promise

SOURCE = "benchmarks/README.md, Secure aggregation"
"""Where the figures are from; ``tests/test_ways.py`` compares them."""

VALUES, CLIENTS = 22_713_986, 8

FLOAT = 4.0
"""Bytes of a value in the clear."""


@dataclass(frozen=True)
class Measured:
    """``each``: bytes a value; CPU seconds of one ``client`` and of the ``server``. Opening the sum is among the seconds of
    those who do it: of each client under BFV."""

    each: float
    client: float
    server: float


@dataclass(frozen=True)
class Way:
    """One way: its ``name`` and ``setting`` as ``--defense`` takes it, what was ``measured``, and the rest in words.

    ``reads``: what the server alone reads; ``colluders``: who must work together to read one update; ``gone``: clients that
    may disappear in a round.
    """

    name: str
    setting: str
    measured: Measured | None
    reads: str
    colluders: str
    gone: str


UPDATE, NOTHING, SUM = "every update", "nothing", "the sum of all clients"
ALONE, SHARED = "the server alone", "the server and any one client"
THIRD = "the server and more than a third of the clients (6 of 8)"
ALL_BUT = "all but the least number that was set"
A_THIRD = "a third of the clients; with identities, one fewer of 3, 6, 9 and so on"

WAYS = (
    Way("plain", "none", Measured(4.000, 0.0, 2.1), UPDATE, ALONE, ALL_BUT),
    Way("BFV for a tenth of the entries", "sealing:param=0.1/by=bfv", Measured(4.403, 0.9, 2.7),
        "the entries that are not sealed of every update", "the server alone, for the entries that are not sealed", ALL_BUT),
    Way("BFV for all entries", "sealing:all/by=bfv", Measured(8.012, 8.4, 1.7), NOTHING, SHARED, ALL_BUT),
    Way("threshold keys", "sealing:all/by=threshold", None, "no library installs on Linux, macOS and Windows", "", ""),
    Way("secure aggregation", "sealing:all/by=secagg", Measured(2.375, 0.8, 2.9), SUM, THIRD, A_THIRD),
    Way("secure aggregation with noise", "sealing:all/by=secagg/noise=1.0", Measured(3.375, 30.4, 2.7),
        "the sum of all clients, with noise", THIRD, A_THIRD),
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A way as the page shows it."""

    name: str
    setting: str
    each: str
    size: str
    client: str
    server: str
    reads: str
    colluders: str
    gone: str


def way_of(defense: str) -> str | None:
    """The setting of the way that a defense of a run is; None for any other."""
    if defense in ("none", ""):
        return "none"
    if "+" in defense or name_of(defense) != "sealing":
        return None
    scheme = scheme_of(defense)
    whole = defense.partition("/")[0] == "sealing:all" and "embeddings=clear" not in defense
    if scheme == "bfv":
        return "sealing:all/by=bfv" if whole else None
    if scheme == "secagg" and whole:
        noisy = sealed_promise(defense) == SUMMED_WITH_NOISE
        return "sealing:all/by=secagg/noise=1.0" if noisy else "sealing:all/by=secagg"
    return None


def way_lines(f: Findings) -> tuple[Line, ...]:
    """The table; sizes are those of an update of this run where it sent one without protection."""
    plain = next((f.prices[c].sent for c in f.baseline if c in f.prices and f.prices[c].sent), None)
    own = {way: f.prices[c].sent for c in f.columns if (way := way_of(f.verdicts[c].defense)) and f.prices[c].sent}
    return tuple(_line(way, plain, own) for way in WAYS)


def _line(way: Way, plain: float | None, own: Mapping[str, float]) -> Line:
    unmeasured, told = tell("not measured"), ""
    each, client, server = unmeasured, unmeasured, unmeasured
    if way.measured is not None:
        share = way.measured.each
        if plain is not None:
            sent, here = own.get(way.setting, plain * share / FLOAT), way.setting in own
            share, told = FLOAT * sent / plain, size(sent)
            told = tell("{size} in this run", size=told) if here else tell("{size} computed", size=told)
        each = number(share, ".2f")
        client, server = (f"{number(s, '.1f')} s" for s in (way.measured.client, way.measured.server))
    return Line(
        recorded(way.name), way.setting, each, told, client, server,
        recorded(way.reads), recorded(way.colluders), recorded(way.gone),
    )  # fmt: skip
