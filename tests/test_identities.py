"""Identities: whose the keys of a round are. A replaced key, a replayed signature and a stranger are refused."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flower_setting import LocalGrid, app_of, flower, grid_of, of_stage
from rounds_setting import FIRST, averaged, largest, model
from secure_sum_setting import Side, setting_of

from rasura.core.ciphers import SIGNATURE, SigningKey, verified
from rasura.core.errors import InputError
from rasura.defenses.secure_aggregation import messages as wire
from rasura.defenses.secure_aggregation.client import Client
from rasura.defenses.secure_aggregation.messages import Refused, Setting

pytest.importorskip("cryptography")

__all__ = ["flower"]

KEYS = [SigningKey(bytes([k + 1]) * 32) for k in range(5)]
KNOWN = tuple(sorted(k.public for k in KEYS[:4]))


def side(count: int = 4, **given: Any) -> Side:
    """A round of clients who have identities."""
    made = Side(setting_of(identities=KNOWN, **given), count)
    made.clients = {k: Client(made.setting, KEYS[k]) for k in range(count)}
    return made


def with_entry(roster: bytes, setting: Setting, place: int, entry: bytes) -> bytes:
    """The list of keys with another client in the ``place``, in order."""
    body = roster[wire.HEAD :]
    entries = [body[k : k + setting.entry] for k in range(0, len(body), setting.entry)]
    entries[place] = entry
    return roster[: wire.HEAD] + b"".join(sorted(entries))


def test_a_signature_is_of_one_key_and_one_text() -> None:
    signature = KEYS[0].signed(b"one")
    assert len(signature) == SIGNATURE and verified(KEYS[0].public, signature, b"one")
    assert not verified(KEYS[1].public, signature, b"one") and not verified(KEYS[0].public, signature, b"two")
    assert not verified(KEYS[0].public, b"", b"one") and not verified(b"short", signature, b"one")


def test_a_round_of_identities_is_exact() -> None:
    made = side()
    assert np.array_equal(made.run().sums, made.expected()) and made.refused == []


def test_a_key_that_the_server_put_in_is_refused_by_every_client() -> None:
    """The server exchanges one client's keys for its own: with the old signature, with that of a key it made, and with
    none."""
    made = side()
    for k, client in made.clients.items():
        made.server.keys(k, client.keys())
    roster = made.server.roster()[0]
    own = Client(made.setting, KEYS[4])
    pair = own._publics()
    old = roster[wire.HEAD + 64 : wire.HEAD + made.setting.entry]
    stranger = KEYS[4].public + KEYS[4].signed(wire.to_sign(made.setting, pair))
    lent = old[:32] + KEYS[4].signed(wire.to_sign(made.setting, pair))
    honest = dict(made.clients)
    for signed, why in ((old, "not valid"), (stranger, "not on the list"), (lent, "not valid"), (bytes(96), "not on the")):
        changed = with_entry(roster, made.setting, 0, b"".join(pair) + signed)
        for client in honest.values():
            fresh = Client.restored(made.setting, client.state())
            if b"".join(fresh._publics()) in changed:
                with pytest.raises(Refused, match=why):
                    fresh.shares(changed)
                assert fresh.stage == "ended" and fresh._secret == b""


def test_a_signature_of_another_round_or_model_is_refused_as_a_replay() -> None:
    for change in ({"session": os.urandom(16)}, {"number": 2}, {"model": b"\1" * 32}):
        earlier = side()
        message = earlier.clients[0].keys()
        later = replace(earlier.setting, **change)  # type: ignore[arg-type]
        made = Side(later, 4)
        made.clients = {k: Client(later, KEYS[k]) for k in range(4)}
        replayed = message[:1] + later.session + message[17:]
        with pytest.raises(Refused, match="this round and this model"):
            made.server.keys(0, replayed)
        # Nor do clients take it from a server that does not check.
        for k in (1, 2, 3):
            made.server.keys(k, made.clients[k].keys())
        roster = made.server.roster()[1]
        with pytest.raises(Refused, match="this round and this model"):
            made.clients[1].shares(roster[: wire.HEAD] + b"".join(_entries(roster, later, message[17:])))


def _entries(roster: bytes, setting: Setting, more: bytes) -> list[bytes]:
    body = roster[wire.HEAD :]
    return sorted([*(body[k : k + setting.entry] for k in range(0, len(body), setting.entry)), more])


def test_a_stranger_is_left_out_and_an_identity_counts_once() -> None:
    made = side()
    made.clients[3] = Client(replace(made.setting, identities=tuple(sorted([*KNOWN[:3], KEYS[4].public]))), KEYS[4])
    found = made.run()
    assert found.clients == 3 and "not on the list of identities" in made.refused[0][2]
    with pytest.raises(Refused, match="no identity"):
        Client(made.setting, KEYS[4]).keys()
    with pytest.raises(Refused, match="no identity"):
        Client(made.setting).keys()
    again = side()
    again.server.keys(0, again.clients[0].keys())
    twice = Client(again.setting, KEYS[0]).keys()
    with pytest.raises(Refused, match="already sent keys"):
        again.server.keys(1, twice)
    for k in (1, 2):
        again.server.keys(k, again.clients[k].keys())
    roster = again.server.roster()[1]
    with pytest.raises(Refused, match="an identity twice"):
        again.clients[1].shares(roster[: wire.HEAD] + b"".join(_entries(roster, again.setting, twice[17:])))


def test_clients_with_other_lists_do_not_take_part_together() -> None:
    made = side()
    made.clients[2] = Client(replace(made.setting, identities=KNOWN[:3]), KEYS[2])
    if KEYS[2].public in KNOWN[:3]:
        assert made.run().clients == 3 and made.refused[0][1] == 2
    with pytest.raises(InputError, match="ascending order"):
        replace(made.setting, identities=(KNOWN[1], KNOWN[0]))
    with pytest.raises(InputError, match="ascending order"):
        replace(made.setting, identities=(b"short",))


def test_files_of_identities_are_private_and_read_strictly(tmp_path: Path) -> None:
    from rasura.integrations.flower.identities import load_identity, make_identities, make_identity, read_identities

    *_, listed = make_identities(tmp_path, 3)
    keys = [load_identity(tmp_path / f"identity-{k}.secret") for k in range(3)]
    assert read_identities(listed) == tuple(sorted(k.public for k in keys))
    assert all((tmp_path / f"identity-{k}.secret").stat().st_mode & 0o777 == 0o600 for k in range(3))
    with pytest.raises(InputError, match="already exists"):
        make_identity(tmp_path / "identity-0.secret")
    (tmp_path / "identity-0.secret").chmod(0o644)
    with pytest.raises(InputError, match="can be read by other users"):
        load_identity(tmp_path / "identity-0.secret")
    first = listed.read_text().splitlines()[0]
    for wrong in ("", "abc\n", f"{first}\n{first}\n", "zz" * 32):
        (tmp_path / "wrong").write_text(wrong)
        with pytest.raises(InputError):
            read_identities(tmp_path / "wrong")


def test_a_secret_file_is_no_list_of_public_keys(tmp_path: Path) -> None:
    from rasura.integrations.flower.identities import load_identity, make_identities, read_identities

    own, _, listed = make_identities(tmp_path, 2)
    key = load_identity(own)
    old = tmp_path / "old.secret"
    old.touch(0o600)
    old.write_text(own.read_text().removeprefix("secret "))
    assert load_identity(old).public == key.public
    mixed = tmp_path / "mixed"
    for text in (own.read_text(), old.read_text(), own.read_text() + listed.read_text()):
        mixed.write_text(text)
        with pytest.raises(InputError, match="looks like a client's secret key"):
            read_identities(mixed)
    mixed.write_text(old.read_text() + listed.read_text())
    with pytest.raises(InputError, match="holds the secret keys of 1 of its identities"):
        read_identities(mixed)


def started(count: int, lost: dict[tuple[int, str], set[int]], change: Any = None, rounds: int = 1) -> tuple[Any, Any]:
    """A run of ``count`` clients with identities; the strategy, and how to start it."""
    from rasura.integrations.flower import agree, strategy

    keys = [SigningKey(bytes([k + 1]) * 32) for k in range(count)]
    agreed = agree("sealing:all/by=secagg", model(), identities=tuple(sorted(k.public for k in keys)))
    apps = {k: app_of(agreed, identity=key) for k, key in enumerate(keys)}
    made = strategy(agreed, first_scale=FIRST)
    grid = grid_of(count, lambda node, message: apps[node](node, message), lost)
    grid.change = change or grid.change
    return made, lambda: made.start(grid=grid, num_rounds=rounds)


@pytest.mark.usefixtures("flower")
@pytest.mark.parametrize("stage", ["keys", "shares", "train", "signed", "revealed"])
def test_rounds_with_identities_finish_with_two_of_eight_lost_at_any_stage(stage: str) -> None:
    made, start = started(8, {(1, stage): {2, 5}}, rounds=2)
    start()
    left = [k for k in range(8) if k not in (2, 5)]
    first = range(8) if stage in ("signed", "revealed") else left
    expected = {n: w.float() for n, w in averaged(dict(made.agreement.start), first).items()}
    step = FIRST / ((1 << 15) - 1) / 2
    assert largest(dict(made.collector.clear), averaged(expected, left)) <= 2 * step + 1e-6
    assert [f["counted"] for f in made.figures.values()] == [len(first), 6]


@pytest.mark.usefixtures("flower")
def test_a_flower_server_that_tells_two_lists_opens_nothing() -> None:
    """Half of the clients are told that one more disappeared. None of them finds enough signatures under its own list."""
    from flwr.app import ConfigRecord

    from rasura.integrations.flower.collector import RoundFailed

    answered: list[int] = []

    def other_list(node: int, message: Any) -> None:
        if of_stage(message) == "signed" and node >= 4:
            told = dict(message.content["rasura"])
            server = made.collector.secure.server
            places = set(server._index.values()) - {server._index[0]}
            near = [k for k in server._near[server._index[node]] if k in places]
            signed = b"".join(server._masked_for[k] for k in near)
            message.content["rasura"] = ConfigRecord({**told, "data": told["data"][:17] + wire.bitmap(places, 8) + signed})
        if of_stage(message) == "revealed":
            answered.append(node)

    made, start = started(8, {}, other_list)
    with pytest.raises(RoundFailed, match="4 clients signed the list of survivors; at least 6 of 8"):
        start()
    assert answered == [] and largest(dict(made.collector.clear), dict(made.agreement.start)) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("flower")
def test_flower_sums_with_identities_and_says_where_there_are_none(caplog: pytest.LogCaptureFixture) -> None:
    from rasura.integrations.flower import agree, strategy
    from rasura.integrations.flower.collector import RoundFailed

    def signed_by(keys: dict[int, SigningKey | None], identities: tuple[bytes, ...] = KNOWN) -> Any:
        agreed = agree("sealing:all/by=secagg", model(), identities=identities)
        apps = {k: app_of(agreed, identity=key) for k, key in keys.items()}
        made = strategy(agreed, first_scale=FIRST)
        made.start(grid=LocalGrid(keys, lambda node, message: apps[node](node, message)), num_rounds=1)
        return made.figures[1]["counted"]

    assert signed_by(dict(enumerate(KEYS[:4]))) == 4
    assert "not authenticated" not in caplog.text
    assert signed_by({**dict(enumerate(KEYS[:3])), 3: KEYS[4]}) == 3
    assert "no identity that is on the list" in caplog.text and "not authenticated" not in caplog.text
    with pytest.raises(RoundFailed, match="2 clients sent keys"):
        signed_by({0: KEYS[0], 1: KEYS[1], 2: None})
    assert signed_by(dict.fromkeys(range(3)), ()) == 3
    # The server says it, and so does each client.
    assert caplog.text.count("the keys of the clients are not authenticated") == 4


@pytest.mark.parametrize("defense", ["none", "gaussian:0.1", "sealing:all/by=bfv", "sealing:param=0.5/scheme=ckks"])
def test_identities_that_are_not_checked_are_refused(defense: str) -> None:
    """They were dropped in silence, and clients ran without a check of each other."""
    from rasura.defenses.homomorphic_keys import make_keys
    from rasura.integrations.flower import agree, needs_keys

    scheme: Any = "ckks" if "ckks" in defense else "bfv"
    keys = make_keys(4, scheme) if needs_keys(defense) else None
    with pytest.raises(InputError, match=r"identities would not be checked .* leave identities empty"):
        agree(defense, model(), keys, identities=KNOWN)
    assert agree(defense, model(), keys).identities == ()


def test_the_command_makes_identities(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rasura.cli.keys import keys
    from rasura.integrations.flower.identities import load_identity, read_identities

    keys(tmp_path / "k", 2, "identity", True)
    told = json.loads(capsys.readouterr().out)
    assert {load_identity(p).public for p in told["secret"]} == set(read_identities(told["public"]))
    keys(tmp_path / "one", 1, "identity", False)
    assert "identity-0.secret" in capsys.readouterr().out
    with pytest.raises(InputError, match="expected at least 1"):
        keys(tmp_path / "none", 0, "identity", False)
