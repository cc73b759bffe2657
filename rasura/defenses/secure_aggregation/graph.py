"""Which clients are neighbours, and how many neighbours are enough.

Bell et al. 2020, sec. 3: a graph is good for a threshold if, except with a small probability, no honest client has
``threshold`` colluding neighbours, the honest clients that stay are connected, and every client keeps ``threshold``
neighbours who answer. Their graph is a ring in random order in which each client is joined to the nearest ``degree / 2``
on both sides. The probabilities are computed exactly, in whole numbers, instead of by a closed form:

- The neighbours of a client are a random subset of all others, so colluding or absent ones among them are hypergeometric.
- The honest clients that stay are connected unless ``degree / 2`` clients in a row collude or are gone.
- Each probability is summed over all clients.

Who colludes and who disappears must not depend on the graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import islice, repeat
from math import comb, floor, prod

from rasura.core.errors import InputError

PRIVACY, COMPLETION = 40, 30
"""An update is exposed with probability at most ``2 ** -PRIVACY``, and a round cannot be completed with at most
``2 ** -COMPLETION`` (sigma and eta of the paper)."""

MOST_CLIENTS = 1 << 14
"""Clients in a round, at most."""


@dataclass(frozen=True)
class Bounds:
    """What a round must bear: the fraction of clients that may work with the server, and that may be gone at its end."""

    corrupt: Fraction = Fraction(1, 3)
    gone: Fraction = Fraction(1, 3)

    def __post_init__(self) -> None:
        if min(self.corrupt, self.gone) < 0 or self.corrupt + self.gone >= 1:
            raise InputError(
                f"{self.corrupt} of the clients colluding and {self.gone} gone; expected fractions below 1 together"
            )


THIRDS = Bounds()
"""A third of each."""


@dataclass(frozen=True)
class Plan:
    """``degree`` neighbours for each of ``clients``, and shares of which ``threshold`` open a secret; at least ``stay`` of
    the clients must stay until the end."""

    clients: int
    degree: int
    threshold: int
    stay: int


@lru_cache(64)
def plan(clients: int, bounds: Bounds = THIRDS) -> Plan:
    """The graph and the threshold for a round of ``clients``.

    In a complete graph the bounds hold with certainty; a sparse one is taken where fewer neighbours are enough. The
    threshold is the largest that bears the absences. Raises ``InputError`` for fewer than 2 clients, for too many, and
    where absences and collusion leave no threshold.
    """
    if not 2 <= clients <= MOST_CLIENTS:
        raise InputError(f"a secure sum of {clients} clients; expected 2 to {MOST_CLIENTS}")
    corrupt, gone = counts(clients, bounds)
    if clients - gone <= corrupt:
        raise InputError(f"{corrupt} of {clients} clients colluding could open what the {clients - gone} who stay can open")
    found = Plan(clients, clients - 1, clients - gone, clients - gone)
    low, high = 1, (clients - 1) // 2  # halves of the degree; ``high`` is good or the complete graph
    while low < high:
        half = (low + high) // 2
        threshold = sparse_threshold(clients, 2 * half, bounds)
        if threshold:
            found, high = Plan(clients, 2 * half, threshold, clients - gone), half
        else:
            low = half + 1
    return found


def sparse_threshold(clients: int, degree: int, bounds: Bounds) -> int:
    """The largest threshold for which the graph with this even ``degree`` is good, or 0 where there is none."""
    corrupt, gone = counts(clients, bounds)
    if degree >= clients - 1:
        return 0
    threshold, seen, every = 0, 0, comb(clients - 1, degree)
    for answering, ways in enumerate(_ways(clients - 1, clients - 1 - gone, degree)):
        seen += clients * ways  # at most so many answer, which is the most that may be demanded
        if seen << COMPLETION > every:
            threshold = answering
            break
    colluding = sum(islice(_ways(clients - 1, corrupt, degree), threshold, None))
    exposed = apart(clients, degree, corrupt + gone) + Fraction(clients * colluding, every)
    return threshold if threshold and exposed * 2**PRIVACY <= 1 else 0


def counts(clients: int, bounds: Bounds) -> tuple[int, int]:
    """How many may collude, at least one, and how many may be gone."""
    return max(1, floor(bounds.corrupt * clients)), floor(bounds.gone * clients)


def apart(clients: int, degree: int, removed: int) -> Fraction:
    """A bound on the probability that the ring falls apart without ``removed`` clients: ``degree / 2`` of them in a row."""
    half = degree // 2
    return clients * Fraction(prod(max(0, removed - k) for k in range(half)), prod(clients - k for k in range(half)))


def _ways(population: int, marked: int, drawn: int) -> Iterator[int]:
    """In how many of all ``comb(population, drawn)`` draws there are 0, 1, ... ``drawn`` marked ones, each from the one
    before: for thousands of clients, these numbers have thousands of digits."""
    others = population - marked
    least = max(0, drawn - others)
    ways = comb(marked, least) * comb(others, drawn - least)
    yield from repeat(0, least)
    for found in range(least, drawn + 1):
        yield ways
        ways = ways * (marked - found) * (drawn - found) // ((found + 1) * (others - drawn + found + 1))


def neighbours(of: int, seed: bytes, shape: Plan) -> tuple[int, ...]:
    """The neighbours of a client, in ascending order. All who know ``seed`` derive the same graph.

    A server that follows the protocol does not choose the seed; a malicious one could try many lists of keys.
    """
    if shape.degree == shape.clients - 1:
        return tuple(k for k in range(shape.clients) if k != of)
    order = ring(seed, shape.clients)
    place, half = order.index(of), shape.degree // 2
    return tuple(sorted(order[(place + step) % shape.clients] for step in range(-half, half + 1) if step))


@lru_cache(8)
def ring(seed: bytes, clients: int) -> tuple[int, ...]:
    """The random order of the clients."""
    return tuple(sorted(range(clients), key=lambda k: hashlib.sha256(seed + k.to_bytes(4, "big")).digest()))
