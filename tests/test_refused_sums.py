"""A sum that clients cannot open costs its round: the server goes back to the sum before it, and says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flower_setting import LocalGrid, app_of, flower
from rounds_setting import DEFENSES, FIRST, averaged, keys, largest, model, sides
from torch import Tensor

from rasura.core.wire import from_bytes, to_bytes
from rasura.defenses.homomorphic import seal
from rasura.defenses.homomorphic_keys import Context as Keys
from rasura.defenses.homomorphic_keys import make_keys
from rasura.integrations.flower.agreement import agree
from rasura.integrations.flower.collector import RoundFailed
from rasura.integrations.flower.refusals import Failure
from rasura.integrations.flower.rounds import opened

__all__ = ["flower", "keys"]

pytestmark = pytest.mark.usefixtures("flower")

CLOSE = 1e-3 * FIRST


def damaging(*rounds: int) -> Callable[[int, int, Any], Any]:
    """Client 3's first ciphertext is damaged on its way in these rounds. It can still be read, as after most flips of a bit,
    and holds noise: it is one of another key pair."""
    from flwr.app import ConfigRecord

    other = make_keys(4)
    (noise,) = seal(np.zeros(1), np.ones(1), other)[0].ciphertexts

    def change(node: int, number: int, reply: Any) -> Any:
        if node == 3 and number in rounds and not reply.has_error() and "rasura" in reply.content:
            message = from_bytes(reply.content["rasura"]["message"])
            damaged = replace(message, sealed={**message.sealed, next(iter(message.sealed)): noise})
            reply.content["rasura"] = ConfigRecord({"message": to_bytes(damaged)})
        return reply

    return change


def run(
    keys: Keys,
    app: Callable[[int, Any], Any],
    caplog: pytest.LogCaptureFixture,
    rounds: int,
    failed: str = "",
    **options: Any,
) -> tuple[Any, list[str]]:
    """The strategy after a run of four clients, and what it said of refused sums. ``failed``: how the run ends."""
    from rasura.integrations.flower import strategy

    defense = options.pop("defense", DEFENSES[2])
    made = strategy(sides(defense, keys)[1], first_scale=FIRST, **options)
    logging.getLogger("flwr").addHandler(caplog.handler)
    try:
        if failed:
            with pytest.raises(RoundFailed, match=failed):
                made.start(grid=LocalGrid(range(4), app), num_rounds=rounds)
        else:
            made.start(grid=LocalGrid(range(4), app), num_rounds=rounds)
    finally:
        logging.getLogger("flwr").removeHandler(caplog.handler)
    return made, list(dict.fromkeys(m for m in caplog.messages if "refuse the sum" in m))


def of_rounds(start: dict[str, Tensor], *who: range) -> dict[str, Tensor]:
    """Plain FedAvg of rounds of these clients."""
    for clients in who:
        start = {n: w.float() for n, w in averaged(start, clients).items()}
    return start


@pytest.mark.parametrize("defense", DEFENSES[1:])
@pytest.mark.parametrize(("damaged", "evaluated"), [(1, True), (2, True), (2, False), (4, True)])
def test_a_damaged_ciphertext_costs_its_round_and_not_the_training(
    defense: str, damaged: int, evaluated: bool, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    """From the round after it on every round failed, without a reason, and the rounds before it were gone as well."""
    clients, _ = sides(defense, keys)
    options: dict[str, Any] = {"defense": defense} | ({} if evaluated else {"fraction_evaluate": 0.0})
    made, (said,) = run(keys, app_of(clients, damaging(damaged)), caplog, 4, **options)
    # Without evaluation it is the next training that finds out, and trains nothing.
    left = 3 if evaluated else 2
    found = dict(opened(clients, made.collector.visible(), made.collector.aggregate).weights)
    assert largest(found, of_rounds(dict(clients.start), *[range(4)] * left)) < CLOSE
    assert [n for n, f in made.figures.items() if f.get("lost")] == [damaged] == made.collector.lost
    assert [f["counted"] for f in made.figures.values()] == [4, 4, 4 if evaluated else 0, 4]
    assert said.startswith(
        f"round {damaged if evaluated else 3}: 4 clients refuse the sum of round {damaged}, 0 went on from it "
        "(clients 0, 1, 2, 3: ciphertext 0 "
    )
    kept = f"what round {damaged - 1} left" if damaged > 1 else "the start"
    assert said.endswith(f"; round {damaged} is lost, and the server goes back to {kept}")


def test_two_lost_sums_in_a_row_end_the_run_with_the_clients_words(keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    clients, _ = sides(DEFENSES[2], keys)
    reason = (
        r"round 3: 4 clients refuse .* \(clients 0, 1, 2, 3: ciphertext 0 .* goes back to what round 1 left, for the second"
    )
    made, _ = run(keys, app_of(clients, damaging(2, 3, 4)), caplog, 4, reason)
    assert made.collector.lost == [2, 3]
    found = dict(opened(clients, made.collector.visible(), made.collector.aggregate).weights)
    assert largest(found, of_rounds(dict(clients.start), range(4))) < CLOSE
    # With a round between them that clients open, the run goes on.
    made, _ = run(keys, app_of(clients, damaging(2, 4)), caplog, 5)
    assert made.collector.lost == [2, 4]


@pytest.mark.parametrize(("wrong", "least"), [(1, 1), (2, 2), (2, 3)])
def test_fewer_refusals_than_a_round_needs_or_than_go_on_do_not_roll_back(
    wrong: int, least: int, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients that hold other keys, or lie, are told apart from a sum that is damaged by their number alone."""
    clients, _ = sides(DEFENSES[2], keys)
    other = agree(DEFENSES[2], model(), make_keys(4))
    apps = [app_of(other if node < wrong else clients) for node in range(4)]
    few: dict[str, Any] = {"min_clients": least, "allow_few_clients": True}
    if least > 4 - wrong:
        run(keys, lambda n, m: apps[n](n, m), caplog, 1, r"2 updates are valid, .*clients 0, 1: its key is ", **few)
        return
    made, said = run(keys, lambda n, m: apps[n](n, m), caplog, 2, **few)
    expected = of_rounds(dict(clients.start), range(wrong, 4), range(wrong, 4))
    found = dict(opened(clients, made.collector.visible(), made.collector.aggregate).weights)
    assert largest(found, expected) < CLOSE and made.collector.lost == []
    assert len(said) == 3 and said[0].startswith(f"round 1: {wrong} clients refuse the sum of round 1, {4 - wrong} went on")
    assert all("; it is kept, since going back takes" in line for line in said)


def test_a_failed_round_names_what_each_client_said(keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    clients, _ = sides(DEFENSES[2], keys)

    def raises(node: int) -> None:
        if node:
            raise ValueError("a row of a private file")

    reason = (
        r"1 updates are valid, but at least 3 are needed \(clients 1, 2, 3: the app of this client failed \(ValueError\)"
    )
    made, said = run(keys, app_of(clients, trains=raises), caplog, 2, reason)
    assert said == [] and made.collector.lost == []


def test_a_refusal_counts_once_and_only_of_those_who_were_asked(keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    clients, _ = sides(DEFENSES[2], keys)
    made, _ = run(keys, app_of(clients), caplog, 2)
    server = made.collector
    before = server.aggregate
    strangers = [Failure(node, "it does not open", True) for node in (7, 8, 9, 10)]
    others = [Failure(node, "the app of this client failed", False) for node in range(4)]
    for failed in (strangers, others, [Failure(0, "it does not open", True)] * 4):
        assert not server.judged([], failed) and server.aggregate == before
    refusals = [Failure(node, "it does not open", True) for node in range(3)]
    assert server.judged([3], refusals) and server.lost == [2] and server.aggregate != before
    # There is nothing before a sum that clients opened once.
    with pytest.raises(RoundFailed, match=r"3 clients refuse the sum of round 1, .* which clients had opened before"):
        server.judged([3], refusals)
