"""Secure sums: exact with clients gone at every stage, nothing but the sum for the server, and every fault refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chisquare, ks_2samp
from secure_sum_setting import Side, Tamper, setting_of, update

from rasura.core.ciphers import PrivateKey
from rasura.core.errors import InputError
from rasura.defenses.secure_aggregation import messages as wire
from rasura.defenses.secure_aggregation.client import Client
from rasura.defenses.secure_aggregation.masks import add_masks
from rasura.defenses.secure_aggregation.messages import Refused
from rasura.defenses.secure_aggregation.server import RoundEnded
from rasura.defenses.secure_aggregation.shamir import joined

pytest.importorskip("cryptography")

STAGES = ("keys", "shares", "masked", "revealed")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("count", [3, 8, pytest.param(64, marks=pytest.mark.slow)])
def test_the_sum_is_exact_with_a_third_gone_at_any_stage(count: int, stage: str) -> None:
    side = Side(setting_of(), count, gone={stage: range(count // 3)})
    found = side.run()
    assert np.array_equal(found.sums, side.expected())
    assert found.clients == (count if stage == "revealed" else count - count // 3)
    assert side.refused == []


def test_sixty_four_clients_lose_some_at_every_stage() -> None:
    gone = {"keys": range(4), "shares": range(4, 9), "masked": range(9, 15), "revealed": range(15, 20)}
    side = Side(setting_of(), 64, gone=gone)
    found = side.run()
    assert np.array_equal(found.sums, side.expected()) and found.clients == 64 - 15


def test_the_largest_updates_do_not_wrap_around() -> None:
    for count in (2, 3, 8):
        for sign in (-1, 1):
            most = {k: np.full(40, sign * ((1 << 15) - 1), np.int32) for k in range(count)}
            assert np.array_equal(Side(setting_of(), count, updates=most).run().sums, count * most[0].astype(np.int64))


# What the server and its accomplices hold


def stripped(side: Side, accomplices: set[int]) -> dict[int, NDArray[np.int64]]:
    """What is left of each honest client's masked update when everybody's own masks, which the server has opened, and all
    masks with accomplices are taken off: all that server and accomplices can compute."""
    server, found = side.server, {}
    index, near, context = server._index, server._near, server._context
    bits = server._round.encoding.modulus_bits
    for stage, k, data in side.sent:
        if stage != "masked" or k in accomplices:
            continue
        vector = wire_vector(data, server._round.encoding.values + 9, bits)
        masks = [(wire.own_key(server._own_seed(index[k]), context), -1)]
        for other in accomplices:
            if index[other] in near[index[k]]:
                shared = PrivateKey(side.clients[other]._derived(b"mask key")).agreed(server._round.keys[index[k]][0])
                masks.append((wire.pair_key(shared, context), -1 if index[k] < index[other] else 1))
        add_masks(vector, masks)
        found[k] = (vector[:-9] & np.uint32((1 << bits) - 1)).astype(np.int64)
    return found


def wire_vector(data: bytes, count: int, bits: int) -> NDArray[np.uint32]:
    from rasura.defenses.secure_aggregation.encoding import unpacked

    return unpacked(data[wire.HEAD :], count, bits)


def two_worlds() -> tuple[dict[int, NDArray[np.int32]], dict[int, NDArray[np.int32]]]:
    """The same sum of the honest clients 3 and 4, of very different updates."""
    common = {k: update(k) for k in range(3)}
    first, second = np.full(40, 20_000, np.int32), np.full(40, -20_000, np.int32)
    return {**common, 3: first, 4: second}, {**common, 3: np.zeros(40, np.int32), 4: np.zeros(40, np.int32)}


def kept_secrets(updates: dict[int, NDArray[np.int32]], accomplices: set[int]) -> tuple[Side, dict[int, NDArray[np.int64]]]:
    """A round whose clients are looked at before the last stage makes them forget."""
    side = Side(setting_of(), 5, updates=updates)
    secrets: dict[int, bytes] = {}

    def look(stage: str, k: int, data: bytes) -> bytes:
        if stage == "masked":
            secrets[k] = side.clients[k]._secret
        return data

    side.tamper = look
    assert np.array_equal(side.run().sums, side.expected())
    for k, secret in secrets.items():
        side.clients[k]._secret = secret
    return side, stripped(side, accomplices)


def test_what_the_server_and_its_accomplices_hold_is_the_same_for_all_updates_of_one_sum() -> None:
    """Five clients, of whom t - 1 = 3 work with the server. Two worlds with one sum and different updates look the same; the
    sum, which is what they may know, is there; and a fourth accomplice, one too many, sees everything."""
    accomplices, draws = {0, 1, 2}, 15
    views = []
    for updates in two_worlds():
        held = []
        for _ in range(draws):
            side, rest = kept_secrets(updates, accomplices)
            assert side.server._round.plan.threshold == len(accomplices) + 1
            modulus = 1 << side.server._round.encoding.modulus_bits
            assert np.array_equal((rest[3] + rest[4]) % modulus, (updates[3] + updates[4]).astype(np.int64) % modulus)
            held.append(rest[3])
        views.append(np.concatenate(held))
        assert chisquare(np.bincount(views[-1] * 32 // modulus, minlength=32)).pvalue > 1e-4
    assert ks_2samp(*views).pvalue > 1e-4
    _, open_view = kept_secrets(two_worlds()[0], {0, 1, 2, 4})
    assert set(open_view[3]) == {20_000}


def test_accomplices_below_the_threshold_cannot_join_their_shares() -> None:
    side, boxes = Side(setting_of(), 5), {}

    def look(stage: str, k: int, data: bytes) -> bytes:
        if stage == "masked":
            boxes[k] = dict(side.clients[k]._opened)
        return data

    side.tamper = look
    side.run()
    index = side.server._index
    shares = {index[k]: boxes[k][index[3]][33:] for k in (0, 1, 2)}
    with pytest.raises(InputError, match="3 shares; at least 4 are needed"):
        joined(shares, side.server._round.plan.threshold)
    # One more is enough: they are shares of the honest client's key.
    secret = joined({**shares, index[4]: boxes[4][index[3]][33:]}, 4)
    assert PrivateKey(secret).public == side.server._round.keys[index[3]][0]


# Refusals


BAD: dict[str, Callable[[bytes], object]] = {
    "nothing": lambda data: None,
    "text": lambda data: "shares",
    "empty": lambda data: b"",
    "garbage": lambda data: os.urandom(len(data)),
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "huge": lambda data: data + bytes(10_000_000),
    "another stage": lambda data: bytes([data[0] % 7 + 1]) + data[1:],
    "another session": lambda data: data[:1] + bytes(16) + data[17:],
}


def at_client(stage: str, client: int, change: Callable[[bytes], object]) -> Tamper:
    return lambda at, k, data: change(data) if (at, k) == (stage, client) else data


@pytest.mark.parametrize("stage", STAGES)
def test_a_bad_message_is_left_out_and_the_round_goes_on(stage: str) -> None:
    for name, change in BAD.items():
        side = Side(setting_of(), 4)
        side.tamper = at_client(stage, 2, change)
        found = side.run()
        assert np.array_equal(found.sums, side.expected()), name
        assert found.clients == (4 if stage == "revealed" else 3)
        assert [(at, k) for at, k, _ in side.refused][:1] == [(stage, 2)], name
        assert all("\n" not in why and len(why) < 200 for _, _, why in side.refused)


def test_late_and_repeated_messages_change_nothing() -> None:
    side = Side(setting_of(), 4)

    def again(stage: str, k: int, data: bytes) -> bytes:
        if k == 1:
            getattr(side.server, stage)(k, data)
        for earlier, who, old in side.sent[:-1]:
            with pytest.raises(Refused):
                getattr(side.server, earlier)(who, old)
        return data

    side.tamper = again
    assert np.array_equal(side.run().sums, side.expected())
    assert [(k, "already" in why) for _, k, why in side.refused] == [(1, True)] * 4


def test_a_key_of_low_order_or_of_another_client_is_refused() -> None:
    side = Side(setting_of(), 4)
    first = side.clients[0].keys()
    side.server.keys(0, first)
    with pytest.raises(Refused, match="keys of another client"):
        side.server.keys(1, first)
    for body in (bytes(64), side.clients[1].keys()[17:49] + bytes(32)):
        with pytest.raises(InputError, match="not a valid key"):
            side.server.keys(1, first[:17] + body[:32] + (body[32:] if body[:32] != body[32:] else b"\1" + bytes(31)))


def test_wrong_shares_are_left_out_and_a_wrong_dealer_is_named() -> None:
    side = Side(setting_of(), 8)
    side.tamper = lambda at, k, data: data[:-3] + b"abc" if at == "revealed" and k < 2 else data
    assert np.array_equal(side.run().sums, side.expected())
    side = Side(setting_of(), 8)
    # Its own mask is another one than it committed to.
    side.tamper = lambda at, k, data: data[:49] + bytes(32) + data[81:] if at == "shares" and k == 5 else data
    with pytest.raises(RoundEnded, match="client 5 dealt shares of another mask") as caught:
        side.run()
    assert caught.value.by == 5


def test_a_vector_that_is_no_sum_is_not_given_out() -> None:
    side = Side(setting_of(), 4)
    side.tamper = lambda at, k, data: data[:17] + os.urandom(len(data) - 17) if at == "masked" and k == 1 else data
    with pytest.raises(RoundEnded, match="is not a sum of 4 updates"):
        side.run()


def test_a_model_crafted_for_one_client_is_refused_by_it_before_it_sends_anything() -> None:
    side = Side(setting_of(), 4)
    side.clients[2] = Client(replace(side.setting, model=b"\1" * 32))
    # A server that crafts a model also hides that the client's view is another.
    context: list[bytes] = []

    def hidden(stage: str, k: int, data: bytes) -> bytes:
        context.extend([data[17:49]] * (stage == "shares" and k == 0))
        return data[:17] + context[0] + data[49:] if (stage, k) == ("shares", 2) else data

    side.tamper = hidden
    with pytest.raises(RoundEnded, match="client 2 left 0 valid shares"):
        side.run()
    assert ("masked", 2) not in [(stage, k) for stage, k, _ in side.sent]
    ((stage, who, why),) = side.refused
    assert (stage, who) == ("masked", 2) and "the neighbours train another model" in why


@pytest.mark.parametrize("told", [{"model": b"\1" * 32}, {"number": 2}, {"bits": 15}, {"least": 3}, {"noise": "x"}])
def test_a_client_of_another_setting_is_left_out(told: dict[str, object]) -> None:
    side = Side(setting_of(), 4)
    side.clients[2] = Client(replace(side.setting, **told))  # type: ignore[arg-type]
    found = side.run()
    assert found.clients == 3 and np.array_equal(found.sums, side.expected())
    ((stage, who, why),) = side.refused
    assert (stage, who) == ("shares", 2) and "another model" in why


def test_fewer_than_the_least_open_nothing() -> None:
    side = Side(setting_of(least=4), 8, gone={"masked": range(5)})
    with pytest.raises(RoundEnded, match="3 clients sent an update; at least 6 of 8 are needed"):
        side.run()
    side = Side(setting_of(), 8, gone={"revealed": range(3)})
    with pytest.raises(RoundEnded, match="left 5 valid shares of the 6"):
        side.run()
    side = Side(setting_of(least=3), 2)
    with pytest.raises(RoundEnded, match="2 clients sent keys; at least 3"):
        side.run()


def masked_side(count: int = 4) -> Side:
    """A round before its last stage."""
    side = Side(setting_of(least=3), count, gone={"revealed": range(count)})
    kept = dict(side.clients)
    with pytest.raises(RoundEnded):
        side.run()
    side.clients = kept
    return side


def survivors(side: Side, members: set[int], count: int = 4) -> bytes:
    return wire.headed(wire.SURVIVORS, side.setting.session, wire.bitmap(members, count))


def test_a_client_reveals_once_and_never_both_kinds() -> None:
    side = masked_side()
    places = side.server._index
    everybody = set(range(4))
    side.clients[0].revealed(survivors(side, everybody))
    with pytest.raises(Refused, match="this client is done"):
        side.clients[0].revealed(survivors(side, everybody - {places[1]}))
    assert side.clients[0].state()["secret"] == b""
    for k, members, bad in ((1, everybody - {places[1]}, b""), (2, {places[1], places[2]}, b""), (3, everybody, b"\xff")):
        request = survivors(side, members) if not bad else survivors(side, members)[:-1] + bad
        with pytest.raises(Refused, match=r"should be opened|malformed"):
            side.clients[k].revealed(request)
        assert side.clients[k].stage == "ended" and side.clients[k].state()["secret"] == b""


def test_a_client_masks_once_so_that_two_updates_never_differ_by_nothing_but_themselves() -> None:
    side = masked_side()
    with pytest.raises(Refused, match="this client is masked, and not shared"):
        side.clients[0].masked(side.inboxes[0], update(9))


def test_a_roster_without_oneself_or_with_a_key_twice_is_refused() -> None:
    setting = setting_of()
    side = Side(setting, 4)
    keys = {k: c.keys()[17:] for k, c in side.clients.items()}
    for chosen, why in (
        ([keys[1], keys[2], keys[3]], "does not hold this client's own"),
        ([keys[0], keys[0], keys[1]], "names a key twice"),
        ([], "names 0 clients"),
    ):
        client = Client(setting)
        own = client.keys()[17:]
        told = [own if k == keys[0] else k for k in chosen]
        with pytest.raises(Refused, match=why):
            client.shares(wire.headed(wire.ROSTER, setting.session, b"".join(sorted(told))))


def test_updates_outside_the_encoding_are_refused() -> None:
    least = np.full(40, np.iinfo(np.int32).min, np.int32)  # its own size in int32, and 0 in a sum of 18 bits
    for steps in (np.full(40, 1 << 15, np.int32), least, np.zeros(39, np.int32), np.zeros(40, np.int64)):
        side = Side(setting_of(), 4, updates={1: steps})  # type: ignore[dict-item]
        assert side.run().clients == 3 and "an update of" in side.refused[0][2]


def test_a_client_moves_between_processes_and_its_state_ends_with_the_round() -> None:
    side = Side(setting_of(), 3)

    def moved(stage: str, k: int, data: bytes) -> bytes:
        side.clients[k] = Client.restored(side.setting, side.clients[k].state())
        return data

    side.tamper = moved
    assert np.array_equal(side.run().sums, side.expected())
    assert all(not any(c.state()[n] for n in ("secret", "own_share", "inbox")) for c in side.clients.values())
    with pytest.raises(Refused, match="belongs to another round"):
        Client.restored(setting_of(), side.clients[0].state())
