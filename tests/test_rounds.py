"""Federated rounds: sums that equal plain FedAvg, and all that may go wrong with a message."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rounds_setting import DEFENSES, FIRST, RATE, averaged, keys, largest, model, sides, texts, trained
from torch import Tensor

from rasura.core.interfaces import InputError
from rasura.core.local import Local
from rasura.core.updates import changed
from rasura.core.values import Message
from rasura.core.wire import from_bytes, to_bytes
from rasura.defenses.homomorphic_keys import Context as Keys
from rasura.defenses.homomorphic_keys import make_keys
from rasura.integrations.flower.agreement import agree, local_part, next_scales, read_scales
from rasura.integrations.flower.capture import Capture
from rasura.integrations.flower.collector import Collector, RoundFailed
from rasura.integrations.flower.rounds import Ticket, opened, protected

__all__ = ["keys"]

FEW = {"min_clients": 1, "allow_few_clients": True}
"""Many rounds here are of one or two clients."""


@dataclass
class Side:
    """One federation without Flower: what clients send in a round, and what they have after it."""

    defense: str
    keys: Keys
    options: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clients, server = sides(self.defense, self.keys)
        self.server = Collector(server, first_scale=FIRST, log=self.said.append, **{**FEW, **self.options})

    @property
    def left_out(self) -> list[str]:
        """What was said of clients that are left out."""
        return [line for line in self.said if "can be opened" not in line]

    def model(self) -> dict[str, Tensor]:
        return dict(opened(self.clients, self.server.visible(), self.server.aggregate).weights)

    def message(self, number: int, client: int, examples: float = 1.0) -> bytes:
        ticket = self.server.ticket(number, client)
        before = opened(self.clients, self.server.visible(), ticket.aggregate)
        return protected(self.clients, ticket, before, trained(client, dict(before.weights)), examples)[0]

    def step(self, name: str) -> float:
        """The largest quantisation step of the last aggregate."""
        if not self.server.aggregate:
            return 0.0
        header = from_bytes(self.server.aggregate).header
        return max(read_scales(header["scales"], self.clients).values()) / ((1 << 15) - 1)


@pytest.mark.parametrize("defense", DEFENSES)
def test_the_aggregate_is_that_of_plain_fedavg_within_a_quantisation_step(defense: str, keys: Keys) -> None:
    side = Side(defense, keys)
    for number in (1, 2, 3):
        expected = averaged(side.model(), range(3))
        assert side.server.collect([(c, side.message(number, c), 1.0) for c in range(3)]) == [0, 1, 2]
        assert largest(side.model(), expected) <= side.step(defense) / 2 + 1e-6
        assert side.left_out == []
    moved = largest(side.model(), dict(side.clients.start))
    assert moved > 100 * side.step(defense)
    # The server's own part of the model says nothing of sealed entries.
    for name, hidden in side.clients.sealed.items():
        assert torch.equal(side.server.clear[name][hidden], side.clients.start[name][hidden])


def test_clients_weigh_by_their_texts_also_where_ciphertexts_are_added(keys: Keys) -> None:
    side = Side(DEFENSES[1], keys, {"max_examples": 4})
    examples = {0: 1.0, 1: 4.0, 2: 9.0}
    expected = averaged(side.model(), range(3), {0: 0.25, 1: 1.0, 2: 1.0})
    side.server.collect([(c, side.message(1, c, n), n) for c, n in examples.items()])
    assert largest(side.model(), expected) <= 2 * side.step("") / 2 + 1e-6


def test_late_and_absent_clients_open_the_same_model(keys: Keys) -> None:
    side = Side(DEFENSES[2], keys)
    side.server.collect([(c, side.message(1, c), 1.0) for c in (0, 1)])
    second = averaged(side.model(), (1, 2))
    # Client 0 is killed after it was asked; client 2 has never been asked before.
    side.server.ticket(2, 0)
    assert side.server.collect([(c, side.message(2, c), 1.0) for c in (1, 2)]) == [1, 2]
    assert largest(side.model(), second) <= side.step("") / 2 + 1e-6
    third = averaged(side.model(), (0,))
    side.server.collect([(0, side.message(3, 0), 1.0)])
    assert largest(side.model(), third) <= side.step("") / 2 + 1e-6


def cut(data: bytes) -> bytes:
    return data[:-10]


def shorter_ciphertext(data: bytes) -> bytes:
    message = from_bytes(data)
    return to_bytes(replace(message, sealed={n: c[:-100] for n, c in message.sealed.items()}))


def oversized_ciphertext(data: bytes) -> bytes:
    message = from_bytes(data)
    return to_bytes(replace(message, sealed={n: c + bytes(1 << 20) for n, c in message.sealed.items()}))


def garbage_ciphertext(data: bytes) -> bytes:
    message = from_bytes(data)
    return to_bytes(replace(message, sealed={n: bytes(range(256)) * 4 for n in message.sealed}))


def fewer_ciphertexts(data: bytes) -> bytes:
    message = from_bytes(data)
    return to_bytes(replace(message, sealed=dict(list(message.sealed.items())[1:])))


def header(**told: Any) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        message = from_bytes(data)
        return to_bytes(replace(message, header={**message.header, **told}))

    return change


def entries(change: Callable[[Message], dict[str, Tensor]]) -> Callable[[bytes], bytes]:
    return lambda data: to_bytes(replace(from_bytes(data), gradients=change(from_bytes(data))))


def not_finite(data: bytes) -> bytes:
    message = from_bytes(data)
    name = next(n for n, mask in message.visible.items() if bool(mask.any()))
    clear = torch.where(message.visible[name], torch.tensor(float("nan")), message.gradients[name])
    return to_bytes(replace(message, gradients={**message.gradients, name: clear}))


def unveiled(data: bytes) -> bytes:
    message = from_bytes(data)
    return to_bytes(replace(message, visible={}))


def of_another_schema(data: bytes) -> bytes:
    return data[:7] + b"\x01" + data[8:]


def announcing(shape: list[int]) -> Callable[[bytes], bytes]:
    return lambda data: announcing_too_much(data, shape)


def announcing_too_much(data: bytes, shape: Iterable[int] = (1 << 40,)) -> bytes:
    (size,) = struct.unpack(">I", data[8:12])
    told = json.loads(data[12 : 12 + size])
    name = sorted(told["tensors"])[0]
    told["tensors"][name]["shape"] = list(shape)
    head = json.dumps(told).encode()
    return data[:8] + struct.pack(">I", len(head)) + head + data[12 + size :]


BAD: dict[str, tuple[Callable[[bytes], object], str]] = {
    "nothing": (lambda data: None, "does not hold a message of Rasura"),
    "garbage": (lambda data: os.urandom(5000), "not a message of Rasura"),
    "empty": (lambda data: b"", "not a message of Rasura"),
    "cut": (cut, "was cut or added to"),
    "schema": (of_another_schema, "has schema 1; this version reads 2"),
    "announces too much": (announcing_too_much, "entries; at most"),
    "announces no entries": (announcing([0, 10**30]), "the shape of"),
    "announces less": (announcing([0]), "unlike the start"),
    "not even bytes": (lambda data: {"message": [data]}, "its reply does not hold a message"),
    "too long": (lambda data: data + bytes(100_000_000), "bytes; at most"),
    "truncated ciphertext": (shorter_ciphertext, "cannot be read"),
    "garbage ciphertext": (garbage_ciphertext, "cannot be read"),
    "oversized ciphertext": (oversized_ciphertext, "bytes of a ciphertext; at most|bytes; at most"),
    "too few ciphertexts": (fewer_ciphertexts, "ciphertexts; expected"),
    "another mask": (header(mask="0" * 16), "its mask is '0000000000000000'; the agreed one"),
    "another key": (header(key="0" * 16), "its key is '0000000000000000'; the agreed one"),
    "another start": (header(start="0" * 16), "starts from other weights"),
    "another round": (header(round=7), "it was replayed"),
    "another nonce": (header(nonce="x"), "it was replayed"),
    "no scales": (header(scales="[1]"), "not state a scale for each tensor"),
    "huge scales": (header(scales="[" * 100_000), "not state a scale for each tensor|bytes of header; at most"),
    "other scales": (header(scales=None), "not state a scale for each tensor"),
    "not finite": (not_finite, "not finite numbers"),
    "shows sealed entries": (unveiled, "shows entries that should be sealed"),
    "other shapes": (entries(lambda m: {**m.gradients, "classifier.bias": torch.zeros(2)}), "unlike the start"),
    "other names": (entries(lambda m: {**m.gradients, "more": torch.zeros(1)}), "tensors; (expected|at most)"),
    "fewer names": (entries(lambda m: dict(list(m.gradients.items())[1:])), "tensors; expected"),
    "float64": (entries(lambda m: {n: g.double() for n, g in m.gradients.items()}), "float64, unlike"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_message_is_refused_and_nothing_of_it_enters(name: str, keys: Keys) -> None:
    change, reason = BAD[name]
    side = Side(DEFENSES[1], keys)
    expected = averaged(side.model(), (1, 2))
    bad = change(side.message(1, 0))
    # Whether the bad message comes first or last makes no difference.
    replies = [(0, bad, 1.0), (1, side.message(1, 1), 1.0), (2, side.message(1, 2), 1.0)]
    assert side.server.collect(replies) == [1, 2]
    assert largest(side.model(), expected) <= side.step("") / 2 + 1e-6
    assert len(side.left_out) == 1 and "client 0 is left out" in side.left_out[0]
    import re

    assert re.search(reason, side.left_out[0]), side.left_out[0]


def test_any_failure_of_one_client_leaves_the_others(keys: Keys) -> None:
    for examples in (float("nan"), -1.0, 10**400, "3", None, [1], 0):
        side = Side(DEFENSES[2], keys, {"max_examples": 4})
        replies = [(0, side.message(1, 0, 2.0), examples), (1, side.message(1, 1, 2.0), 2.0)]
        assert side.server.collect(replies) == [1]  # type: ignore[arg-type]  # what a stranger may send
        assert len(side.left_out) == 1 and "client 0 is left out: " in side.left_out[0]
    # A header that decodes into what Python itself cannot compare or print.
    side = Side(DEFENSES[2], keys, {"min_clients": 2})
    sent: list[tuple[int, object, float]] = [
        (0, header(start="x" * 100_000)(side.message(1, 0)), 1.0),
        (1, side.message(1, 1), 1.0),
    ]
    with pytest.raises(RoundFailed, match="1 updates are valid, but at least 2 are needed") as caught:
        side.server.collect(sent)
    assert len(str(caught.value)) < 500 and str(caught.value).isprintable()


def test_a_replayed_message_counts_once(keys: Keys) -> None:
    side = Side(DEFENSES[2], keys)
    first = side.message(1, 0)
    assert side.server.collect([(0, first, 1.0), (0, first, 1.0), (1, side.message(1, 1), 1.0)]) == [0, 1]
    assert side.left_out == ["round 1: client 0 is left out: it was not asked in this round, or it has already answered"]
    side.server.ticket(2, 0)
    assert side.server.collect([(0, first, 1.0), (1, side.message(2, 1), 1.0)]) == [1]
    assert "it was replayed" in side.left_out[-1]
    # Another client's message is no better.
    one, two = side.message(3, 1), side.message(3, 2)
    assert side.server.collect([(2, one, 1.0), (1, two, 1.0), (0, side.message(3, 0), 1.0)]) == [0]


def test_keys_and_masks_of_others_are_refused(keys: Keys) -> None:
    side = Side(DEFENSES[2], keys)
    ticket = side.server.ticket(1, 0)
    for other, reason in (
        (agree(DEFENSES[2], model(), make_keys(4)), "its key is"),
        (agree(DEFENSES[2], model(), make_keys(64)), "its key is"),
        (agree("sealing:random=0.5/scheme=bfv", model(), keys, seed=1), "its mask is"),
        (agree("none", model()), "its mask is None"),
    ):
        data, _ = protected(other, ticket, opened(other, other.start, b""), trained(0, dict(other.start)), 1)
        with pytest.raises(InputError, match=reason):
            side.server.read(0, data, 1.0)
    # Ciphertexts of other parameters behind the right header.
    other = agree(DEFENSES[2], model(), replace(make_keys(64), key=keys.key))
    data, _ = protected(other, ticket, opened(other, other.start, b""), trained(0, dict(other.start)), 1)
    assert side.server.collect([(0, data, 1.0), (1, side.message(1, 1), 1.0)]) == [1]
    assert "client 0 is left out: ciphertext 0 cannot be read" in side.said[0]


def test_too_few_that_count_fail_the_round_and_change_nothing(keys: Keys) -> None:
    side = Side(DEFENSES[2], keys, {"min_clients": 2})
    before = side.model()
    side.server.ticket(1, 0)
    with pytest.raises(
        RoundFailed, match=r"round 1: 1 updates are valid, but at least 2 are needed \(client 0: .*not a message of Rasura"
    ):
        side.server.collect([(0, b"?", 1.0), (1, side.message(1, 1), 1.0)])
    assert side.server.aggregate == b"" and largest(side.model(), before) == 0
    with pytest.raises(RoundFailed, match="the others did not answer"):
        side.server.collect([])


def test_more_clients_than_the_keys_fit_are_refused_before_training(keys: Keys) -> None:
    _, server = sides(DEFENSES[2], keys)
    with pytest.raises(InputError, match="5 clients would train, but these keys fit 4"):
        Collector(server, min_clients=5)
    with pytest.raises(InputError, match="holds a secret key"):
        Collector(agree(DEFENSES[2], model(), keys))


def test_clients_whose_scales_differ_are_outvoted(keys: Keys) -> None:
    side = Side(DEFENSES[2], keys)
    replies = [(c, side.message(1, c), 1.0) for c in range(3)]
    scales = from_bytes(replies[0][1]).header["scales"]
    other = json.dumps([e + 1 for e in json.loads(str(scales))])
    odd = header(scales=other)(replies[0][1])
    assert side.server.collect([(0, odd, 1.0), *replies[1:]]) == [1, 2]
    assert "its scales differ from those of the others" in side.said[0]
    with pytest.raises(RoundFailed, match="0 updates are valid"):
        replies = [(c, side.message(2, c), 1.0) for c in range(2)]
        side.server.collect([(0, header(scales=other)(replies[0][1]), 1.0), replies[1]])


def test_values_beyond_the_agreed_scale_are_counted_and_cut(keys: Keys) -> None:
    clients, _ = sides(DEFENSES[2], keys)
    start = dict(clients.start)
    far = {n: w - (10.0 if n == "classifier.bias" else 0.0) for n, w in start.items()}
    _, figures = protected(clients, Ticket(1, "n", 0, FIRST), opened(clients, {}, b""), far, 1)
    assert figures["beyond"] == start["classifier.bias"].numel()


def test_scales_follow_from_the_last_aggregate() -> None:
    moved = {"a": torch.tensor([0.1, -0.2]), "b": torch.zeros(3), "c": torch.tensor([100.0])}
    assert json.loads(next_scales(moved, 0.25)) == [-1, -2, 7]
    with pytest.raises(InputError, match="the scale of a is nan"):
        next_scales(moved, float("nan"))


def test_masks_that_clients_cannot_agree_on_are_refused(keys: Keys) -> None:
    for defense, reason in (
        ("sealing:grad=0.1/scheme=bfv", "depends on a client's own texts"),
        ("sealing:sens=0.1/scheme=bfv", "depends on a client's own texts"),
        ("sealing:all", "loses the sealed entries"),
        ("sealing:all/scheme=ckks", "the keys are for bfv"),
        ("sealing:all/scheme=bfv+sealing:all/scheme=bfv", "seals twice"),
        (
            "sealing:all/scheme=bfv+gaussian:0.1",
            "gaussian behind sealing would change no entry that is sealed; write sealing last",
        ),
        ("sealing:all/by=secagg+gaussian:0.1", "gaussian behind sealing would change no entry that is sealed"),
        (
            "sealing:param=0.5/by=secagg+fp16+pruning:0.5",
            "fp16, pruning behind sealing would change no entry that is sealed",
        ),
        ("sign", "every weight would move by 1"),
        ("sealing:param=0/scheme=bfv", "seals none of the"),
        ("sealing:param=0/by=secagg", "seals none of the"),
    ):
        with pytest.raises(InputError, match=reason):
            agree(defense, model(), keys)
    with pytest.raises(InputError, match="sealing needs keys"):
        agree(DEFENSES[2], model())
    head = model()
    for name, weights in head.named_parameters():
        weights.requires_grad_(name.startswith("classifier"))
    with pytest.raises(InputError, match="'sealing:structural/scheme=bfv' seals none of the 27 entries of an update"):
        agree("sealing:structural/scheme=bfv", head, keys)
    half = model().to(torch.bfloat16)
    with pytest.raises(InputError, match=r"word_embeddings\.weight is in bfloat16, .* load the model in float32"):
        agree("none", half)
    assert [p.mechanism.name for p in local_part("dropout:0.1+gaussian:0.1+frozen-blocks:1")] == ["dropout", "frozen-blocks"]


def test_what_a_protection_freezes_is_not_sent_changed() -> None:
    for defense, frozen in (
        ("frozen-embeddings+gaussian:0.1", ".embeddings."),
        ("frozen-blocks:1+sealing:all/by=secagg", ".layer.0."),
    ):
        agreed = agree(defense, model())
        names = {n for n in agreed.start if ".embeddings." in n or frozen in n}
        assert agreed.frozen == names
        before = opened(agreed, agreed.start, b"")
        with pytest.raises(InputError, match=r"^frozen-\S+ leaves bert\.embeddings\.\S+ as it is, .* local_part"):
            protected(agreed, Ticket(1, "n", 0, FIRST), before, trained(0, dict(before.weights)), 1)
    agreed = agree("frozen-embeddings", model())
    before = opened(agreed, agreed.start, b"")
    kept = {n: t for n, t in before.weights.items() if n in agreed.frozen}
    sent = from_bytes(protected(agreed, Ticket(1, "n", 0, FIRST), before, trained(0, dict(before.weights)) | kept, 1)[0])
    assert not any(bool(sent.gradients[n].any()) for n in kept)
    assert bool(sent.gradients["classifier.weight"].any())


def test_other_protections_act_on_the_update_and_go_with_sealing(keys: Keys) -> None:
    side = Side("pruning:0.9+sealing:param=0.5/scheme=bfv", keys)
    data = [(c, side.message(1, c), 1.0) for c in range(2)]
    assert side.server.collect(data) == [0, 1]
    shown = sum(int(m.sum()) for m in from_bytes(data[0][1]).visible.values())
    total = sum(t.numel() for t in side.clients.start.values())
    assert 0 < shown <= 0.1 * total + 1
    # A client's update moved at most a tenth of the entries.
    start = dict(side.clients.start)
    moved = sum(int((side.model()[n] - start[n]).abs().gt(side.step("")).sum()) for n in start)
    assert 0 < moved <= 0.2 * total + 2
    noisy = Side("gaussian:0.01", keys)
    noisy.server.collect([(0, noisy.message(1, 0), 1.0)])
    assert largest(noisy.model(), dict(noisy.clients.start)) > 0.005


def test_a_capture_holds_what_the_server_saw(tmp_path: Path, keys: Keys) -> None:
    from safetensors.torch import load_file

    side = Side("none", keys, {"seen": Capture(tmp_path / "clear", Local("fedsgd", learning_rate=1.0))})
    replies = [(7, side.message(1, 7), 1.0)]
    gradient, _ = changed(model(), texts(7).inputs(), list(side.clients.start))
    side.server.collect(replies)
    found = load_file(str(tmp_path / "clear/round-1/client-7.safetensors"))
    assert max(float((found[n] - RATE * g).abs().max()) for n, g in gradient.items()) < 1e-6
    assert (tmp_path / "clear/round-1/client-7.safetensors").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "clear/round-1/client-7.hidden.safetensors").exists()
    side = Side(DEFENSES[1], keys, {"seen": Capture(tmp_path / "sealed", Local("fedavg-sgd", 1, RATE))})
    side.server.collect([(7, side.message(1, 7), 1.0)])
    found = load_file(str(tmp_path / "sealed/round-1/client-7.safetensors"))
    hidden = load_file(str(tmp_path / "sealed/round-1/client-7.hidden.safetensors"))
    for n, g in gradient.items():
        mask = side.clients.sealed[n]
        assert torch.equal(hidden[n], mask) if bool(mask.any()) else n not in hidden
        assert not bool(found[n][mask].any()) and torch.allclose(found[n], -RATE * g * ~mask, atol=1e-6)
    told = json.loads((tmp_path / "sealed/round-1/client-7.json").read_text())
    assert told["visible"] == sum(int((~m).sum()) for m in side.clients.sealed.values()) and told["ciphertexts"] > 0


# With Flower.


# --- how few may add up


@pytest.mark.parametrize("min_clients", [1, 2])
def test_two_clients_have_each_others_update_and_are_refused_unless_asked_for(min_clients: int, keys: Keys) -> None:
    side = Side(DEFENSES[2], keys)
    side.server.collect([(c, side.message(1, c), 1.0) for c in (0, 1)])
    start = dict(side.clients.start)
    own, others = trained(0, start), trained(1, start)
    subtracted = {n: 2 * w - own[n] for n, w in side.model().items()}
    assert largest(subtracted, others) < 3 * side.step("") + 1e-6, "the sum less one's own is the other's"
    assert [line for line in side.said if "obtain the other's" in line] == [
        "round 1: a sum of 2 clients can be opened, and each can subtract its own update from it and obtain the other's"
    ]
    for defense in (DEFENSES[0], DEFENSES[2]):
        _, server = sides(defense, keys)
        refused = f"a round of {min_clients} clients: with two, .*at least 3, or pass allow_few_clients"
        with pytest.raises(InputError, match=refused):
            Collector(server, min_clients=min_clients)
        assert Collector(server, min_clients=min_clients, allow_few_clients=True).min_clients == min_clients


def test_three_clients_are_the_least_unless_said_otherwise(keys: Keys) -> None:
    side = Side(DEFENSES[2], keys)
    server = Collector(sides(DEFENSES[2], keys)[1], first_scale=FIRST)
    assert server.min_clients == 3
    replies = []
    for client in range(3):
        ticket = server.ticket(1, client)
        before = opened(side.clients, server.visible(), b"")
        replies.append((client, protected(side.clients, ticket, before, trained(client, dict(before.weights)), 1)[0], 1.0))
    with pytest.raises(RoundFailed, match="2 updates are valid, but at least 3 are needed"):
        server.collect([*replies[:2], (2, b"", 1.0)])
    for client in range(2):  # those who answered are asked anew
        ticket = server.ticket(1, client)
        replies[client] = (client, protected(side.clients, ticket, before, dict(before.weights), 1)[0], 1.0)
    assert server.collect(replies) == [0, 1, 2]


@pytest.mark.parametrize(("count", "defense"), [(1, DEFENSES[1]), (2, DEFENSES[2])])
def test_a_client_does_not_open_a_sum_of_fewer_than_it_agreed_on(count: int, defense: str, keys: Keys) -> None:
    side = Side(defense, keys)
    side.server.collect([(c, side.message(1, c), 1.0) for c in range(count)])
    usual = agree(defense, model(), keys)
    told = header(clients=3, shares=float(count))(side.server.aggregate)
    for aggregate, reason in (
        (side.server.aggregate, f"the aggregate is a sum of {count} clients, .* expected at least 3, as min_clients"),
        (told, f"is the sum of {count} clients, not of 3 as claimed"),
    ):
        with pytest.raises(InputError, match=reason):
            opened(usual, side.server.visible(), aggregate)
    with pytest.raises(InputError, match=r"a round of 2 clients: with two, .*at least 3, or pass allow_few_clients"):
        agree(defense, model(), keys, min_clients=2)


@pytest.mark.parametrize("min_clients", [0, -1])
def test_a_round_of_nobody_is_refused(min_clients: int, keys: Keys) -> None:
    with pytest.raises(InputError, match="expected"):
        Collector(sides(DEFENSES[0], keys)[1], min_clients=min_clients, allow_few_clients=True)


# --- the count of a sum is checked by who opens it


@pytest.mark.parametrize("said", [1, 2, 4])
def test_an_aggregate_of_another_number_of_clients_does_not_open(said: int, keys: Keys) -> None:
    side = Side(DEFENSES[2], keys)
    side.server.collect([(c, side.message(1, c), 1.0) for c in range(3)])
    changed_header = header(clients=said, shares=float(said))(side.server.aggregate)
    with pytest.raises(InputError, match=f"is the sum of 3 clients, not of {said} as claimed"):
        opened(side.clients, side.server.visible(), changed_header)
