"""A server that tells clients different lists: with identities, no two honest clients answer two lists of one round."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from secure_sum_setting import Side, setting_of, update

from rasura.core.ciphers import SIGNATURE, PrivateKey, SigningKey
from rasura.core.errors import InputError
from rasura.defenses.secure_aggregation import messages as wire
from rasura.defenses.secure_aggregation.client import Client
from rasura.defenses.secure_aggregation.consistency import masked_text, quorum, survivors_text
from rasura.defenses.secure_aggregation.encoding import unpacked
from rasura.defenses.secure_aggregation.graph import THIRDS, Bounds, counts
from rasura.defenses.secure_aggregation.masks import add_masks
from rasura.defenses.secure_aggregation.messages import Refused
from rasura.defenses.secure_aggregation.server import RoundEnded
from rasura.defenses.secure_aggregation.shamir import SHARE, joined

pytest.importorskip("cryptography")

KEYS = [SigningKey(bytes([k + 1]) * 32) for k in range(64)]
STAGES = ("keys", "shares", "masked", "signed", "revealed")


def side_of(count: int, identities: bool = True, **given: Any) -> Side:
    known = tuple(sorted(k.public for k in KEYS[:count])) if identities else ()
    gone = given.pop("gone", {})
    made = Side(setting_of(identities=known, **given), count, gone=gone)
    made.clients = {k: Client(made.setting, KEYS[k] if identities else None) for k in range(count)}
    return made


def before_the_opening(made: Side) -> dict[int, bytes]:
    """All stages up to the masked update; what each client sent then."""
    clients, server = made.clients, made.server
    made._stage("keys", {k: c.keys for k, c in clients.items()})
    roster = server.roster()
    made._stage("shares", {k: lambda k=k: clients[k].shares(roster[k]) for k in roster})  # type: ignore[misc]
    made.inboxes = inbox = server.inboxes()
    made._stage("masked", {k: lambda k=k: clients[k].masked(inbox[k], update(k)) for k in inbox})  # type: ignore[misc]
    return {k: data for stage, k, data in made.sent if stage == "masked"}


def told(made: Side, to: int, members: set[int], sent: Mapping[int, bytes]) -> bytes:
    """A list of survivors as a server makes it for the client ``to``; members as places in the list of keys."""
    who = {place: k for k, place in made.server._index.items()}
    near = [k for k in made.server._near[made.server._index[to]] if k in members]
    size = made.setting.signature
    signatures = b"".join(sent[who[k]][-size:] for k in near) if size else b""
    return wire.headed(wire.SURVIVORS, made.setting.session, wire.bitmap(members, made.count) + signatures)


def confirmed(made: Side, signatures: Mapping[int, bytes]) -> bytes:
    """Signatures by place, as many as a client demands where there are so many."""
    chosen = sorted(signatures)[: made.server.round.quorum]
    body = wire.bitmap(set(chosen), made.count) + b"".join(signatures[k] for k in chosen)
    return wire.headed(wire.CONFIRMED, made.setting.session, body)


def answers(made: Side, lists: Mapping[int, set[int]], sent: Mapping[int, bytes], colluding: set[int]) -> dict[int, bytes]:
    """What honest clients reveal that are told one list of places each; colluding clients sign whatever helps."""
    index, lists = made.server._index, {k: set(v) for k, v in lists.items()}
    context, everybody = made.server.round.context(), wire.bitmap(set(range(made.count)), made.count)
    signed: dict[frozenset[int], dict[int, bytes]] = {}
    if made.setting.identities:
        for k, members in lists.items():
            text = survivors_text(context, everybody, wire.bitmap(members, made.count))
            group = signed.setdefault(frozenset(members), {index[j]: KEYS[j].signed(text) for j in colluding})
            try:
                group[index[k]] = made.clients[k].signed(told(made, k, members, sent))[wire.HEAD :]
            except InputError:
                continue
    found = {}
    for k, members in lists.items():
        given = confirmed(made, signed[frozenset(members)]) if signed else told(made, k, members, sent)
        try:
            found[k] = made.clients[k].revealed(given)[wire.HEAD :]
        except InputError:
            continue
    return found


def two_lists(made: Side, victim: int, colluding: set[int], told_gone: set[int]) -> NDArray[np.int64] | None:
    """The server tells the honest clients ``told_gone`` that the victim disappeared, and all others that nobody did; what
    it and the colluding clients open of the victim's update."""
    sent, server = before_the_opening(made), made.server
    index, at, everybody = server._index, server._index[victim], set(range(made.count))
    boxes = {index[k]: made.clients[k]._opened[at] for k in colluding}
    own, key = {k: box[:SHARE] for k, box in boxes.items()}, {k: box[SHARE:] for k, box in boxes.items()}
    lists = {k: everybody - ({at} if k in told_gone else set()) for k in everybody - colluding}
    for k, body in answers(made, lists, sent, colluding).items():
        for entry in (body[p : p + wire.ENTRY] for p in range(0, len(body), wire.ENTRY)):
            if int.from_bytes(entry[:4], "big") == at:
                (key if k in told_gone else own)[index[k]] = entry[4:]
    threshold = server.round.plan.threshold
    if min(len(own), len(key)) < threshold:
        return None
    bits, context = server.round.encoding.modulus_bits, server.round.context()
    vector = unpacked(sent[victim][wire.HEAD :][: server.round.encoding.packed_bytes], made.setting.values + 9, bits)
    secret = PrivateKey(joined(key, threshold))
    masks = [(wire.own_key(joined(own, threshold), context), -1)]
    for other, (public, _) in enumerate(server.round.keys):
        if other != at:
            masks.append((wire.pair_key(secret.agreed(public), context), -1 if at < other else 1))
    add_masks(vector, masks)
    shift = np.uint32(32 - bits)
    return ((vector << shift).view(np.int32) >> shift.astype(np.int32)).astype(np.int64)[: made.setting.values]


# Two lists


@pytest.mark.parametrize(("count", "colluding", "told_gone"), [(3, {2}, {1}), (6, {4, 5}, {1, 2})])
def test_two_lists_of_survivors_open_no_update(count: int, colluding: set[int], told_gone: set[int]) -> None:
    """A third of the clients collude; the victim is client 0. Without identities this is left open, and said so."""
    assert two_lists(side_of(count), 0, colluding, told_gone) is None
    found = two_lists(side_of(count, identities=False), 0, colluding, told_gone)
    assert found is not None and np.array_equal(found, update(0))


def test_with_more_colluding_clients_than_are_assumed_two_lists_open_an_update() -> None:
    """Half of eight clients sign both lists. With three, which is more than a third already, they are one too few."""
    found = two_lists(side_of(8), 0, {4, 5, 6, 7}, {1, 2})
    assert found is not None and np.array_equal(found, update(0))
    for told_gone in ({1}, {1, 2}, {1, 2, 3}, {1, 2, 3, 4}):
        assert two_lists(side_of(8), 0, {5, 6, 7}, told_gone) is None


@pytest.mark.parametrize("count", range(3, 10))
def test_whatever_two_lists_are_told_at_most_one_is_answered(count: int) -> None:
    colluding = set(range(count - counts(count, THIRDS)[0], count))
    honest = sorted(set(range(count)) - colluding)
    for some in range(1, len(honest)):
        made = side_of(count)
        sent, everybody = before_the_opening(made), set(range(count))
        first, second = set(honest[:some]), set(honest[some:])
        # Each list leaves one of the other group out, if that leaves enough of them.
        lists = {k: everybody - {made.server._index[min(second)]} for k in first}
        lists |= dict.fromkeys(second, everybody)
        found = set(answers(made, lists, sent, colluding))
        assert not (found & first and found & second)


def test_the_quorum_is_more_than_any_two_lists_share_and_bears_a_third_gone() -> None:
    for n in range(2, 3000):
        for bounds in (THIRDS, Bounds(Fraction(1, 10), Fraction(1, 10)), Bounds(Fraction(1, 2), Fraction(1, 3))):
            enough, (colluding, gone) = quorum(n, bounds), counts(n, bounds)
            assert n >= enough and 2 * enough - n > colluding >= 2 * (enough - 1) - n  # the smallest that is enough
            if bounds is THIRDS and n > 2:
                assert n - enough == (gone - 1 if n % 3 == 0 else gone)


def test_no_two_sets_of_signers_have_colluding_clients_alone_in_common() -> None:
    for n in range(2, 8):
        places, enough = range(n), quorum(n, THIRDS)
        for one in combinations(places, enough):
            assert all(len(set(one) & set(two)) > counts(n, THIRDS)[0] for two in combinations(places, enough))


# Drop-outs


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("count", [3, 4, 6, 8, pytest.param(64, marks=pytest.mark.slow)])
def test_the_sum_is_exact_with_as_many_gone_at_any_stage_as_the_round_bears(count: int, stage: str) -> None:
    bears = count - quorum(count, THIRDS)
    assert bears == (count // 3 - 1 if count % 3 == 0 else count // 3)
    made = side_of(count, gone={stage: range(bears)})
    found = made.run()
    assert np.array_equal(found.sums, made.expected()) and made.refused == []
    assert found.clients == (count if stage in ("signed", "revealed") else count - bears)


def test_with_one_more_gone_the_round_ends_and_opens_nothing() -> None:
    for count, stage, why in (
        (8, "signed", "5 clients signed the list of survivors; at least 6 of 8"),
        (6, "masked", "4 cl"),
    ):
        made = side_of(count, gone={stage: range(count - quorum(count, THIRDS) + 1)})
        with pytest.raises(RoundEnded, match=why):
            made.run()
        assert not any(stage == "revealed" for stage, _, _ in made.sent)


# What a client refuses


def signed_side(count: int = 4) -> tuple[Side, dict[int, bytes], dict[int, bytes]]:
    """A round whose clients signed the list of all; the signatures by place, and what was sent masked."""
    made = side_of(count)
    sent, index = before_the_opening(made), made.server._index
    everybody = set(range(count))
    found = {index[k]: c.signed(told(made, k, everybody, sent))[wire.HEAD :] for k, c in made.clients.items()}
    return made, found, sent


def test_a_client_signs_one_list_and_answers_it_once() -> None:
    made, signatures, sent = signed_side()
    everybody, index = set(range(4)), made.server._index
    for members in (everybody, everybody - {index[3]}):
        client = Client.restored(made.setting, made.clients[0].state(), KEYS[0])
        with pytest.raises(Refused, match="is signed, and not masked"):
            client.signed(told(made, 0, members, sent))
    made.clients[0].revealed(confirmed(made, signatures))
    with pytest.raises(Refused, match="is done"):
        made.clients[0].revealed(confirmed(made, signatures))
    assert made.clients[0].state()["secret"] == made.clients[0].state()["list"] == b""


def test_signatures_that_do_not_prove_the_clients_own_list_are_refused() -> None:
    made, good, _ = signed_side()
    context, everybody = made.server.round.context(), wire.bitmap({0, 1, 2, 3}, 4)
    who = {place: k for k, place in made.server._index.items()}

    def by_all(text: bytes) -> dict[int, bytes]:
        return {place: KEYS[k].signed(text) for place, k in who.items()}

    other = survivors_text(context, everybody, wire.bitmap({0, 1, 2}, 4))
    hidden = survivors_text(context, wire.bitmap({0, 1, 2}, 4), everybody)
    earlier = survivors_text(bytes(32), everybody, everybody)
    for wrong in (other, hidden, earlier, masked_text(context, everybody)):
        assert_refused(made, confirmed(made, by_all(wrong)))
    assert_refused(made, confirmed(made, {**good, 0: good[1]}))
    assert_refused(made, confirmed(made, {k: good[k] for k in (0, 1)}), "its message has|is not signed by")
    assert_refused(made, confirmed(made, good)[:-1], "its message has")
    assert_refused(made, confirmed(made, good)[:1] + os.urandom(16) + confirmed(made, good)[17:], "another round")
    assert_refused(made, told(made, 0, {0, 1, 2, 3}, dict.fromkeys(range(4), bytes(SIGNATURE))), "belongs to stage|has")
    full = confirmed(made, good)
    assert_refused(made, full[:17] + wire.bitmap({0, 1, 2, 3}, 4) + full[18:])  # four signers, signatures of three
    assert len(made.clients[0].revealed(full)) == wire.HEAD + 4 * wire.ENTRY


def assert_refused(made: Side, message: bytes, why: str = "is not signed by 3 of those on it") -> None:
    client = Client.restored(made.setting, made.clients[0].state(), KEYS[0])
    with pytest.raises(Refused, match=why):
        client.revealed(message)
    assert client.stage == "ended" and client.state()["secret"] == b""


def test_signers_who_are_not_on_the_list_do_not_count() -> None:
    made = side_of(8)
    sent, index = before_the_opening(made), made.server._index
    members = set(range(8)) - {index[6], index[7]}
    text = survivors_text(made.server.round.context(), wire.bitmap(set(range(8)), 8), wire.bitmap(members, 8))
    client = made.clients[0]
    client.signed(told(made, 0, members, sent))
    # Five on the list and one that is not: six are needed.
    signatures = {index[k]: KEYS[k].signed(text) for k in (0, 1, 2, 3, 4, 6)}
    with pytest.raises(Refused, match="is not signed by 6 of those on it"):
        client.revealed(confirmed(made, signatures))


def hidden_from_the_victim(made: Side, hidden: set[int]) -> dict[int, bytes]:
    """What clients send masked where the server hides the shares of ``hidden`` from client 0."""
    clients, server = made.clients, made.server
    made._stage("keys", {k: c.keys for k, c in clients.items()})
    roster = server.roster()
    made._stage("shares", {k: lambda k=k: clients[k].shares(roster[k]) for k in roster})  # type: ignore[misc]
    inbox, index = server.inboxes(), server._index
    shown = {index[k] for k in clients} - {index[k] for k in hidden}
    boxes = b"".join(server._sent[k].boxes[index[0]] for k in server._near[index[0]] if k in shown)
    inbox[0] = wire.headed(wire.INBOX, made.setting.session, wire.bitmap(shown, made.count) + boxes)
    return {k: c.masked(inbox[k], update(k)) for k, c in clients.items()}


def test_a_hidden_neighbour_is_seen_before_shares_are_given() -> None:
    """The server hides shares from the victim, which then adds no masks with their clients, and says that the only honest
    client whose mask it added disappeared."""
    made = side_of(6)
    sent, members = hidden_from_the_victim(made, {2}), set(range(6)) - {made.server._index[1]}
    with pytest.raises(Refused, match="did not sign for which clients"):
        made.server.masked(0, sent[0])
    with pytest.raises(Refused, match="a neighbour masked its update for other clients"):
        made.clients[2].signed(told(made, 2, members, sent))
    # Without identities it is left open: the others give shares of the victim's own mask, and of that client's key.
    made = side_of(6, identities=False)
    sent, members = hidden_from_the_victim(made, {2, 3}), set(range(6)) - {made.server._index[1]}
    assert all(len(made.clients[k].revealed(told(made, k, members, sent))) == 17 + 6 * wire.ENTRY for k in (2, 3, 4, 5))


def test_a_list_of_keys_that_gives_a_clients_keys_to_another_identity_is_refused() -> None:
    """A colluding identity signs an honest client's keys, so that this client's own signature would count for nothing."""
    made = side_of(4)
    for k, client in made.clients.items():
        made.server.keys(k, client.keys())
    roster = made.server.roster()[0]
    entries = [roster[p : p + made.setting.entry] for p in range(wire.HEAD, len(roster), made.setting.entry)]
    pair = b"".join(made.clients[0]._publics())
    mine = next(e for e in entries if e.startswith(pair))
    theirs = next(e for e in entries if e[64:96] == KEYS[3].public)
    text = wire.to_sign(made.setting, made.clients[0]._publics())
    changed = sorted([*(e for e in entries if e not in (mine, theirs)), pair + KEYS[3].public + KEYS[3].signed(text)])
    with pytest.raises(Refused, match="names somebody else for this client's own keys"):
        made.clients[0].shares(roster[: wire.HEAD] + b"".join(changed))
    # All who know one digest count the same identities.
    honest = wire.read_roster(roster, made.setting)
    assert replace(honest, signers=honest.signers[::-1]).context() != honest.context()


def test_without_identities_no_list_is_signed_and_with_them_none_is_answered_unsigned() -> None:
    made = side_of(4, identities=False)
    sent = before_the_opening(made)
    with pytest.raises(Refused, match="this setting has none"):
        made.clients[0].signed(told(made, 0, {0, 1, 2, 3}, sent))
    made = side_of(4)
    sent = before_the_opening(made)
    with pytest.raises(Refused, match="is masked, and not signed"):
        made.clients[0].revealed(told(made, 0, {0, 1, 2, 3}, sent))
    with pytest.raises(Refused, match="names somebody else"):
        Client.restored(made.setting, made.clients[1].state()).signed(told(made, 1, {0, 1, 2, 3}, sent))


# What the server leaves out


BAD: dict[str, Callable[[bytes], object]] = {
    "garbage": lambda data: data[:-SIGNATURE] + os.urandom(SIGNATURE),
    "cut": lambda data: data[:-1],
    "nothing": lambda data: None,
    "another session": lambda data: data[:1] + bytes(16) + data[17:],
    "another stage": lambda data: b"\1" + data[1:],
}


@pytest.mark.parametrize("stage", ["signed", "masked"])
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_signature_is_left_out_and_the_round_goes_on(bad: str, stage: str) -> None:
    made = side_of(4)
    made.tamper = lambda at, k, data: BAD[bad](data) if (at, k) == (stage, 2) else data
    found = made.run()
    assert found.clients == (4 if stage == "signed" else 3) and np.array_equal(found.sums, made.expected())
    assert [(at, k) for at, k, _ in made.refused] == [(stage, 2)]


def test_a_repeated_or_late_signature_changes_nothing() -> None:
    made = side_of(4)

    def again(stage: str, k: int, data: bytes) -> bytes:
        if (stage, k) == ("signed", 1):
            made.server.signed(k, data)
        return data

    made.tamper = again
    assert made.run().clients == 4 and [(at, k) for at, k, _ in made.refused] == [("signed", 1)]
    with pytest.raises(Refused, match="too late or too early"):
        made.server.signed(1, b"")


def test_a_client_moves_between_processes_with_its_list() -> None:
    made = side_of(4)

    def moved(stage: str, k: int, data: bytes) -> bytes:
        made.clients[k] = Client.restored(made.setting, made.clients[k].state(), KEYS[k])
        return data

    made.tamper = moved
    assert np.array_equal(made.run().sums, made.expected()) and made.refused == []
