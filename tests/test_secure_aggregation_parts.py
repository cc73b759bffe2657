"""The parts of secure sums beside slow and obvious references: secret sharing, the graph, the encoding."""

from __future__ import annotations

import itertools
import os
import random
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import hypergeom

from rasura.core.errors import InputError
from rasura.defenses.secure_aggregation.encoding import Blocks, Encoding, decoded, encoded, packed, packed_bytes, unpacked
from rasura.defenses.secure_aggregation.graph import MOST_CLIENTS, Bounds, Plan, apart, neighbours, plan
from rasura.defenses.secure_aggregation.shamir import PRIME, joined, split


def is_prime(n: int) -> bool:
    """Miller and Rabin, 40 random bases."""
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for _ in range(40):
        x = pow(random.randrange(2, n - 1), odd, n)
        if x not in (1, n - 1) and all((x := x * x % n) != n - 1 for _ in range(twos - 1)):
            return False
    return True


def test_the_field_has_the_smallest_prime_above_every_secret() -> None:
    assert is_prime(PRIME) and not any(is_prime(n) for n in range((1 << 256) + 1, PRIME, 2))


def solved(points: list[tuple[int, int]]) -> list[int]:
    """The polynomial through ``points``, its constant first, by elimination: the obvious way."""
    rows = [[pow(x, k, PRIME) for k in range(len(points))] + [y] for x, y in points]
    for k in range(len(rows)):
        pivot = next(r for r in range(k, len(rows)) if rows[r][k])
        rows[k], rows[pivot] = rows[pivot], rows[k]
        inverse = pow(rows[k][k], PRIME - 2, PRIME)
        rows[k] = [v * inverse % PRIME for v in rows[k]]
        for r in range(len(rows)):
            if r != k:
                rows[r] = [(v - rows[r][k] * w) % PRIME for v, w in zip(rows[r], rows[k])]
    return [row[-1] for row in rows]


@pytest.mark.parametrize(("count", "threshold"), [(1, 1), (3, 2), (8, 6), (12, 12)])
def test_any_shares_of_the_threshold_give_the_secret_and_fewer_fit_every_secret(count: int, threshold: int) -> None:
    holders = [3 * k for k in range(count)]
    for secret in (bytes(32), b"\xff" * 32, os.urandom(32)):
        shares = split(secret, holders, threshold)
        for chosen in itertools.islice(itertools.combinations(holders, threshold), 30):
            some = {h: shares[h] for h in chosen}
            assert joined(some, threshold) == secret
            assert solved([(h + 1, int.from_bytes(s, "big")) for h, s in some.items()])[0].to_bytes(32, "big") == secret
        # One share less, and any other secret: there is a polynomial through them all.
        other = [(0, int.from_bytes(os.urandom(32), "big"))]
        fewer = [(h + 1, int.from_bytes(shares[h], "big")) for h in holders[: threshold - 1]]
        fitted = solved(other + fewer)
        assert all(sum(c * x**k for k, c in enumerate(fitted)) % PRIME == y for x, y in other + fewer)
        with pytest.raises(InputError, match="are needed"):
            joined({h: shares[h] for h in holders[: threshold - 1]}, threshold)


def test_wrong_shares_are_refused_or_give_another_secret() -> None:
    secret = os.urandom(32)
    shares = split(secret, range(5), 3)
    with pytest.raises(InputError, match="below the prime"):
        joined({**shares, 0: b"\xff" * 33}, 3)
    with pytest.raises(InputError, match="below the prime"):
        joined({**shares, 0: shares[0][:-1]}, 3)
    assert joined({0: shares[0], 1: shares[1], 2: shares[3]}, 3) != secret
    for holders, threshold in (([0, 0], 1), ([0, 1], 3), ([0], 0), ([-1], 1)):
        with pytest.raises(InputError):
            split(secret, holders, threshold)


# The graph


@pytest.mark.parametrize(
    "bounds", [Bounds(), Bounds(Fraction(1, 5), Fraction(1, 5)), Bounds(Fraction(1, 10), Fraction(1, 4))]
)
@pytest.mark.parametrize("clients", [150, 400, 1000, MOST_CLIENTS])
def test_the_degree_keeps_the_papers_bounds_and_no_smaller_one_does(clients: int, bounds: Bounds) -> None:
    """The three events of Bell et al., by SciPy's distributions instead of whole numbers."""
    corrupt, gone = int(bounds.corrupt * clients), int(bounds.gone * clients)

    def good(degree: int, threshold: int) -> bool:
        exposed = clients * hypergeom.sf(threshold - 1, clients - 1, corrupt, degree)
        exposed += clients * np.prod([(corrupt + gone - k) / (clients - k) for k in range(degree // 2)])
        lost = clients * hypergeom.cdf(threshold - 1, clients - 1, clients - 1 - gone, degree)
        return bool(exposed <= 2.0**-40 * 1.0001 and lost <= 2.0**-30 * 1.0001)

    found = plan(clients, bounds)
    assert found.stay == clients - gone
    if found.degree < clients - 1:
        assert good(found.degree, found.threshold) and not good(found.degree, found.threshold + 1)
    else:
        assert found.threshold == found.stay > corrupt
    smaller = found.degree - 2
    assert not any(good(smaller, t) for t in range(1, smaller + 1))


def test_the_known_figures() -> None:
    assert plan(3) == Plan(3, 2, 2, 2)
    assert plan(8) == Plan(8, 7, 6, 6)
    assert plan(64) == Plan(64, 63, 43, 43)
    assert plan(1000) == Plan(1000, 318, 163, 667)
    assert plan(1000, Bounds(Fraction(1, 10), Fraction(1, 10))) == Plan(1000, 52, 28, 900)
    for count in (0, 1, 1 << 20):
        with pytest.raises(InputError, match="a secure sum of"):
            plan(count)
    with pytest.raises(InputError, match="colluding could open"):
        plan(2, Bounds(Fraction(0), Fraction(1, 2)))
    with pytest.raises(InputError, match="below 1 together"):
        Bounds(Fraction(1, 2), Fraction(1, 2))


def test_the_graph_is_regular_symmetric_and_the_same_for_all() -> None:
    for shape in (Plan(7, 6, 5, 5), Plan(30, 8, 4, 20)):
        seed = os.urandom(32)
        near = {k: neighbours(k, seed, shape) for k in range(shape.clients)}
        assert all(len(n) == shape.degree and k not in n and list(n) == sorted(set(n)) for k, n in near.items())
        assert all(k in near[other] for k, n in near.items() for other in n)
    assert near[0] == neighbours(0, seed, shape) and near != {k: neighbours(k, bytes(32), shape) for k in near}


def test_the_bound_on_falling_apart_holds_in_every_small_graph() -> None:
    """All ways to remove some of ten clients of a ring in order, counted one by one."""
    for degree, removed in ((2, 3), (4, 5), (4, 6), (6, 7)):
        broken, every = 0, 0
        for gone in itertools.combinations(range(10), removed):
            left = [k for k in range(10) if k not in gone]
            reached, new = {left[0]}, [left[0]]
            while new:
                here = new.pop()
                near = {(here + s) % 10 for s in range(-degree // 2, degree // 2 + 1)} & set(left) - reached
                reached |= near
                new += list(near)
            broken, every = broken + (len(reached) < len(left)), every + 1
        assert 0 < broken / every <= apart(10, degree, removed)


# The encoding


@pytest.mark.parametrize(("bits", "clients"), [(16, 8), (16, 2), (8, 1000), (29, 8), (2, 3), (20, 4096)])
def test_a_sum_is_off_by_at_most_half_a_step_for_each_client(bits: int, clients: int) -> None:
    rng = np.random.default_rng(bits)
    blocks = Blocks((100, 0, 57), (-9, 0, 3))
    encoding = Encoding(157, bits, clients)
    scale = np.repeat([2.0**-9, 1.0, 2.0**3], blocks.lengths)
    values = [rng.uniform(-1, 1, 157) * scale for _ in range(3)] + [scale, -scale]
    steps = [encoded(v, blocks, encoding) for v in values]
    assert all(beyond == 0 and s.dtype == np.int32 and abs(s).max() <= encoding.half for s, beyond in steps)
    total = decoded(np.sum([s for s, _ in steps], axis=0, dtype=np.int64), blocks, encoding)
    bound = len(values) * scale / encoding.half / 2
    assert (np.abs(total - np.sum(values, axis=0)) <= bound * (1 + 1e-9)).all()
    # The sum of all clients' largest values is below the modulus on both sides.
    assert clients * encoding.half < 1 << (encoding.modulus_bits - 1)


def test_what_cannot_be_sent_is_refused_and_never_wrapped() -> None:
    blocks, encoding = Blocks((3,), (0,)), Encoding(3, 16, 4)
    for bad in (np.nan, np.inf, -np.inf):
        for clip in (False, True):
            with pytest.raises(InputError, match="not finite"):
                encoded(np.array([0.0, bad, 0.0]), blocks, encoding, clip=clip)
    with pytest.raises(InputError, match="1 values are larger than the agreed scale"):
        encoded(np.array([0.0, 1.1, 0.0]), blocks, encoding)
    steps, beyond = encoded(np.array([1e300, 1.1, -7.0], np.float64), blocks, encoding, clip=True)
    assert beyond == 3 and steps.tolist() == [32767, 32767, -32767]
    for made in (lambda: Encoding(3, 30, 8), lambda: Encoding(0, 16, 8), lambda: Encoding(3, 1, 8)):
        with pytest.raises(InputError):
            made()
    with pytest.raises(InputError, match="blocks need"):
        Blocks((1,), (1000,))
    with pytest.raises(InputError, match="expected 3"):
        encoded(np.zeros(4), blocks, encoding)


@pytest.mark.parametrize("bits", [1, 7, 8, 16, 19, 24, 27, 32])
def test_packed_numbers_are_the_bits_that_were_asked_for(bits: int) -> None:
    numbers = np.random.default_rng(bits).integers(0, 1 << 32, 29, dtype=np.uint32)
    data = packed(numbers, bits)
    assert len(data) == packed_bytes(29, bits) <= -(-29 * bits // 8) + bits % 8
    assert unpacked(data, 29, bits).tolist() == [int(n) % (1 << bits) for n in numbers]
    for wrong in (data[:-1], data + b"\0", b""):
        with pytest.raises(InputError, match="a vector of"):
            unpacked(wrong, 29, bits)
