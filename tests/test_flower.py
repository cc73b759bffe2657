"""Federated rounds on an in-process grid: sums that equal plain FedAvg, and all that may go wrong with a message."""

from __future__ import annotations

import json
import logging
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CLS, SEP, batch_of, tiny
from torch import Tensor

from rasura.defenses.homomorphic import Context as Keys
from rasura.defenses.homomorphic import make_keys
from rasura.integrations.flower.agreement import Agreement, agree, local_part, next_scales, read_scales
from rasura.integrations.flower.capture import Capture
from rasura.integrations.flower.rounds import Collector, RoundFailed, Ticket, opened, protected
from rasura.interfaces import InputError
from rasura.updates import Local, changed
from rasura.values import Batch, Message
from rasura.wire import from_bytes, to_bytes

RATE = 0.1
FIRST = 0.25
DEFENSES = ("none", "sealing:param=0.1/embeddings=sealed/scheme=bfv", "sealing:all/scheme=bfv")


def model() -> torch.nn.Module:
    return tiny("bert", "classification", hidden=8, blocks=1)


@pytest.fixture(scope="module")
def keys() -> Keys:
    return make_keys(4)


def sides(defense: str, keys: Keys) -> tuple[Agreement, Agreement]:
    """The clients' agreement and the server's."""
    return agree(defense, model(), keys), agree(defense, model(), keys.public())


def texts(client: int) -> Batch:
    rows = [[CLS, 20 + 7 * client + k, 40 + client, 3, 60 + 2 * k, SEP] for k in range(2 + client % 2)]
    return batch_of(rows, "classification", [(client + k) % 3 for k in range(len(rows))])


def trained(client: int, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """One step of SGD on the client's own texts."""
    own = model()
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            parameter.copy_(weights[name])
    gradient, _ = changed(own, texts(client).inputs(), list(weights))
    return {n: w - RATE * gradient[n] if n in gradient else w.clone() for n, w in weights.items()}


def averaged(
    weights: dict[str, Tensor], clients: Iterable[int], shares: dict[int, float] | None = None
) -> dict[str, Tensor]:
    """Plain FedAvg of one round, in float64."""
    found = {c: trained(c, weights) for c in clients}
    total = sum((shares or {}).get(c, 1.0) for c in found)
    return {n: sum(t[n].double() * (shares or {}).get(c, 1.0) for c, t in found.items()) / total for n in weights}  # type: ignore[misc]


def largest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[n].double() - other[n].double()).abs().max()) for n in one)


@dataclass
class Side:
    """One federation without Flower: what clients send in a round, and what they have after it."""

    defense: str
    keys: Keys
    options: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clients, server = sides(self.defense, self.keys)
        self.server = Collector(server, first_scale=FIRST, log=self.said.append, **self.options)

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
        assert side.said == []
    moved = largest(side.model(), dict(side.clients.start))
    assert moved > 100 * side.step(defense)
    # The server's own part of the model says nothing of sealed entries.
    for name, hidden in side.clients.sealed.items():
        assert torch.equal(side.server.clear[name][hidden], side.clients.start[name][hidden])


def test_clients_weigh_by_their_texts_also_where_ciphertexts_are_added(keys: Keys) -> None:
    side = Side(DEFENSES[1], keys, {"most_examples": 4})
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


def of_schema_two(data: bytes) -> bytes:
    return data[:7] + b"\x02" + data[8:]


def announcing_too_much(data: bytes) -> bytes:
    (size,) = struct.unpack(">I", data[8:12])
    told = json.loads(data[12 : 12 + size])
    name = sorted(told["tensors"])[0]
    told["tensors"][name]["shape"] = [1 << 40]
    head = json.dumps(told).encode()
    return data[:8] + struct.pack(">I", len(head)) + head + data[12 + size :]


BAD: dict[str, tuple[Callable[[bytes], object], str]] = {
    "nothing": (lambda data: None, "no message of Rasura"),
    "garbage": (lambda data: os.urandom(5000), "no message of Rasura"),
    "empty": (lambda data: b"", "no message of Rasura"),
    "cut": (cut, "was cut or added to"),
    "schema": (of_schema_two, "has schema 2"),
    "announces too much": (announcing_too_much, "entries; at most"),
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
    "no scales": (header(scales="[1]"), "no scale for each tensor"),
    "huge scales": (header(scales="[" * 100_000), "no scale for each tensor|bytes of header; at most"),
    "other scales": (header(scales=None), "no scale for each tensor"),
    "not finite": (not_finite, "no finite numbers"),
    "shows sealed entries": (unveiled, "shows entries that were to be sealed"),
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
    assert len(side.said) == 1 and "client 0 is left out" in side.said[0]
    import re

    assert re.search(reason, side.said[0]), side.said[0]


def test_a_replayed_message_counts_once(keys: Keys) -> None:
    side = Side(DEFENSES[2], keys)
    first = side.message(1, 0)
    assert side.server.collect([(0, first, 1.0), (0, first, 1.0), (1, side.message(1, 1), 1.0)]) == [0, 1]
    assert side.said == ["round 1: client 0 is left out: it was not asked in this round, or has answered already"]
    side.server.ticket(2, 0)
    assert side.server.collect([(0, first, 1.0), (1, side.message(2, 1), 1.0)]) == [1]
    assert "it was replayed" in side.said[-1]
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
    side = Side(DEFENSES[2], keys, {"least": 2})
    before = side.model()
    side.server.ticket(1, 0)
    with pytest.raises(
        RoundFailed, match=r"round 1: 1 updates count, at least 2 are needed \(client 0: .*no message of Rasura"
    ):
        side.server.collect([(0, b"?", 1.0), (1, side.message(1, 1), 1.0)])
    assert side.server.aggregate == b"" and largest(side.model(), before) == 0
    with pytest.raises(RoundFailed, match="the others did not answer"):
        side.server.collect([])


def test_more_clients_than_the_keys_fit_are_refused_before_training(keys: Keys) -> None:
    _, server = sides(DEFENSES[2], keys)
    with pytest.raises(InputError, match="5 clients would train, these keys fit 4"):
        Collector(server, least=5)
    with pytest.raises(InputError, match="holds a secret key"):
        Collector(agree(DEFENSES[2], model(), keys))


def test_clients_whose_scales_differ_are_outvoted(keys: Keys) -> None:
    side = Side(DEFENSES[2], keys)
    replies = [(c, side.message(1, c), 1.0) for c in range(3)]
    scales = from_bytes(replies[0][1]).header["scales"]
    other = json.dumps([e + 1 for e in json.loads(str(scales))])
    odd = header(scales=other)(replies[0][1])
    assert side.server.collect([(0, odd, 1.0), *replies[1:]]) == [1, 2]
    assert "its scales are not those of the others" in side.said[0]
    with pytest.raises(RoundFailed, match="0 updates count"):
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
    with pytest.raises(InputError, match="scale of the first round"):
        next_scales(moved, float("nan"))


def test_masks_that_clients_cannot_agree_on_are_refused(keys: Keys) -> None:
    for defense, reason in (
        ("sealing:grad=0.1/scheme=bfv", "depends on a client's own texts"),
        ("sealing:sens=0.1/scheme=bfv", "depends on a client's own texts"),
        ("sealing:all", "loses the sealed entries"),
        ("sealing:all/scheme=ckks", "the keys are for bfv"),
        ("sealing:all/scheme=bfv+sealing:all/scheme=bfv", "seals twice"),
        ("sign", "every weight would move by 1"),
    ):
        with pytest.raises(InputError, match=reason):
            agree(defense, model(), keys)
    with pytest.raises(InputError, match="sealing needs keys"):
        agree(DEFENSES[2], model())
    assert [p.mechanism.name for p in local_part("dropout:0.1+gaussian:0.1+frozen-blocks:1")] == ["dropout", "frozen-blocks"]


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


class LocalGrid:
    """Nodes in this process: what Flower's strategies use of a grid. ``gone`` maps a round to nodes that do not answer."""

    def __init__(self, nodes: Iterable[int], app: Callable[[int, Any], Any]) -> None:
        self.nodes, self.app, self.sent = list(nodes), app, 0
        self.gone: dict[int, set[int]] = {}
        self.joins: dict[int, int] = {}

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> Iterator[Any]:
        replies = []
        for message in messages:
            self.sent += 1
            node, number = message.metadata.dst_node_id, message.content["config"]["server-round"]
            if node not in self.gone.get(number, set()):
                replies.append(self.app(node, message))
        for number, node in self.joins.items():
            if message_round(messages) == number and node not in self.nodes:
                self.nodes.append(node)
        return iter(replies)


def message_round(messages: Iterable[Any]) -> int:
    return max((m.content["config"]["server-round"] for m in messages), default=0)


def app_of(agreement: Agreement | None, change: Callable[[int, int, Any], Any] | None = None) -> Callable[[int, Any], Any]:
    """A client app, behind the mod where there is an agreement; ``change(node, round, reply)`` tampers with replies."""
    from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
    from flwr.app import Message as Reply
    from flwr.clientapp import ClientApp

    from rasura.integrations.flower import Client, protect

    mods = [] if agreement is None else [protect(lambda context: Client(agreement))]
    app = ClientApp(mods=mods)

    def weights(message: Any) -> dict[str, Tensor]:
        return {n: torch.tensor(a.numpy()) for n, a in message.content["arrays"].items()}

    @app.train()
    def train(message: Any, context: Any) -> Any:
        after = trained(message.metadata.dst_node_id, weights(message))
        record = ArrayRecord({n: Array(t.numpy()) for n, t in after.items()})
        return Reply(RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Any, context: Any) -> Any:
        size = sum(float(w.double().square().sum()) for w in weights(message).values())
        return Reply(RecordDict({"metrics": MetricRecord({"num-examples": 1, "size": size})}), reply_to=message)

    def answer(node: int, message: Any) -> Any:
        number = message.content["config"]["server-round"]
        reply = app(message, None)
        return change(node, number, reply) if change else reply

    return answer


@pytest.fixture
def flower(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    from flwr.supercore.task_identity import TaskIdentity

    # What Flower sets in the process of a server app, before any message can be made.
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.mark.usefixtures("flower")
@pytest.mark.parametrize("defense", DEFENSES)
def test_flower_trains_as_its_own_fedavg_does(defense: str, keys: Keys) -> None:
    from flwr.app import Array, ArrayRecord
    from flwr.serverapp.strategy import FedAvg

    from rasura.integrations.flower import strategy

    clients, server = sides(defense, keys)
    start = ArrayRecord({n: Array(t.numpy()) for n, t in clients.start.items()})
    plain = FedAvg(min_available_nodes=3).start(grid=LocalGrid(range(3), app_of(None)), initial_arrays=start, num_rounds=2)
    made = strategy(server, least=2, first_scale=FIRST)
    result = made.start(grid=LocalGrid(range(3), app_of(clients)), num_rounds=2)
    expected = {n: torch.tensor(a.numpy()) for n, a in plain.arrays.items()}
    found = opened(clients, made.collector.visible(), made.collector.aggregate).weights
    step = 1e-6
    if made.collector.aggregate:
        scales = read_scales(from_bytes(made.collector.aggregate).header["scales"], clients)
        step += 2 * max(scales.values()) / ((1 << 15) - 1)
    assert largest(dict(found), expected) <= step
    figures = result.train_metrics_clientapp[2]
    assert figures["rasura-beyond"] == 0 and figures["rasura-bytes"] > 1000
    # Clients evaluate the opened model: the figure is that of plain FedAvg.
    sizes = [r.evaluate_metrics_clientapp[2]["size"] for r in (plain, result)]
    assert sizes[0] == pytest.approx(sizes[1], abs=0.1)


@pytest.mark.usefixtures("flower")
def test_flower_goes_on_without_those_who_fail(keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    from flwr.app import ConfigRecord

    from rasura.integrations.flower import strategy

    clients, server = sides(DEFENSES[2], keys)

    def tamper(node: int, number: int, reply: Any) -> Any:
        if node == 1 and number == 2 and "rasura" in reply.content:
            reply.content["rasura"] = ConfigRecord({"message": b"garbage"})
        if node == 2 and number == 1 and "rasura" in reply.content:
            reply.content["rasura"] = ConfigRecord({"other": 1})
        return reply

    grid = LocalGrid(range(3), app_of(clients, tamper))
    grid.gone, grid.joins = {3: {0}}, {1: 3}
    made = strategy(server, least=1, first_scale=FIRST)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        logging.getLogger("flwr").addHandler(caplog.handler)
        made.start(grid=grid, num_rounds=3)
        logging.getLogger("flwr").removeHandler(caplog.handler)
    refused = {record.getMessage() for record in caplog.records if "is left out" in record.getMessage()}
    assert refused == {
        "round 1: client 2 is left out: its reply holds no message of Rasura",
        "round 2: client 1 is left out: these bytes are no message of Rasura",
    }
    weights = dict(clients.start)
    for present in ((0, 1), (0, 2, 3), (1, 2, 3)):
        weights = {n: w.float() for n, w in averaged(weights, present).items()}
    found = opened(clients, made.collector.visible(), made.collector.aggregate).weights
    assert largest(dict(found), weights) < 1e-3 * largest(weights, dict(clients.start))


@pytest.mark.usefixtures("flower")
def test_flower_refuses_too_many_clients_and_reports_clients_that_cannot_open(keys: Keys) -> None:
    from rasura.integrations.flower import strategy

    clients, server = sides(DEFENSES[2], keys)
    grid = LocalGrid(range(5), app_of(clients))
    with pytest.raises(InputError, match="5 clients would train, these keys fit 4"):
        strategy(server).start(grid=grid, num_rounds=1)
    assert grid.sent == 0
    other = agree(DEFENSES[2], model(), make_keys(4))
    mixed = {0: app_of(clients), 1: app_of(clients), 2: app_of(other)}
    with pytest.raises(RoundFailed, match="client 2: its key is"):
        strategy(server, least=3).start(grid=LocalGrid(range(3), lambda n, m: mixed[n](n, m)), num_rounds=1)
    # From the second round on the wrong key cannot open what it is sent.
    answers: list[Any] = []

    def kept(node: int, message: Any) -> Any:
        answers.append((node, mixed[node](node, message)))
        return answers[-1][1]

    strategy(server, least=2, first_scale=FIRST).start(grid=LocalGrid(range(3), kept), num_rounds=2)
    errors = {reply.error.reason for node, reply in answers if node == 2 and reply.has_error()}
    assert len(errors) == 1 and errors.pop().startswith("rasura: its key is")


# The app that ``rasura new federated`` writes.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A random model with a tokenizer, and texts."""
    from transformers import BertTokenizerFast

    place = tmp_path / "model"
    tiny("bert", "classification", num_labels=2, hidden=32).save_pretrained(str(place))  # type: ignore[operator]
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *(f"w{k}" for k in range(5, 300))]
    (place / "vocab.txt").write_text("\n".join(words) + "\n")
    BertTokenizerFast(vocab=str(place / "vocab.txt"), model_max_length=64).save_pretrained(str(place))
    rows = [{"text": f"w{20 + k} w{60 + 3 * k} w{100 + 5 * k} w{30 + k}", "label": k % 2} for k in range(10)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return tmp_path


@pytest.fixture
def app_modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    from rasura.integrations.flower.new_app import new_app

    place = new_app(folder / "app", 3)
    monkeypatch.syspath_prepend(str(place))
    yield place
    for name in [n for n in sys.modules if n.split(".")[0] == "federated"]:
        del sys.modules[name]


def simulated(place: Path, folder: Path, **given: Any) -> dict[str, Any]:
    """Two rounds of the generated app with two clients, in this process."""
    import importlib
    import tomllib

    from flwr.app import Context, RecordDict

    config = tomllib.loads((place / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    config |= {"num-server-rounds": 2, "model": str(folder / "model"), "data": str(folder / "texts.jsonl"), "local-steps": 2}
    config |= {"results": str(folder / "results.json"), **given}
    client, server = (importlib.import_module(f"federated.{n}_app") for n in ("client", "server"))
    contexts = {
        k: Context(1, k, {"partition-id": k, "num-partitions": 2}, RecordDict(), config) for k in range(2)
    }  # fmt: skip
    server.app(
        LocalGrid(range(2), lambda node, message: client.app(message, contexts[node])),
        Context(1, 0, {}, RecordDict(), config),
    )
    return dict(json.loads((folder / "results.json").read_text())["rounds"])


@pytest.mark.usefixtures("flower")
def test_the_app_trains_weights_and_adapters_behind_sealing(app_modules: Path, folder: Path) -> None:
    pytest.importorskip("peft")
    for lora in (0, 2):
        rounds = simulated(app_modules, folder, lora=lora, save=str(folder / f"kept-{lora}" / "{client}-{round}"))
        assert [r["server"]["counted"] for r in rounds.values()] == [2, 2]
        assert all(0 <= r["evaluate"]["accuracy"] <= 1 and r["train"]["rasura-beyond"] == 0 for r in rounds.values())
        # Everything is sealed: the server has nothing to send but the sum.
        assert rounds["1"]["server"]["bytes_down"] == 0 < rounds["2"]["server"]["bytes_down"]
        name = "adapter_model.safetensors" if lora else "model.safetensors"
        kept = [(folder / f"kept-{lora}" / k / name).read_bytes() for k in ("0-1", "0-2", "1-2")]
        assert kept[0] != kept[1] == kept[2]


@pytest.mark.usefixtures("flower")
def test_what_the_server_records_is_read_without_protection_and_not_behind_it(app_modules: Path, folder: Path) -> None:
    from rasura.interfaces import NotApplicable
    from rasura.reading import read_update
    from rasura.victims.loading import load

    texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").read_text().splitlines()]
    for update, steps in (("fedsgd", 1), ("fedavg-sgd", 2)):
        how = {"update": update, "local-steps": steps, "batch-size": 1, "learning-rate": 0.01, "limit": 1}
        how["test"] = str(folder / "texts.jsonl")
        seen = folder / f"seen-{update}"
        simulated(app_modules, folder, defense="none", record=str(seen), **how)
        for number in (1, 2):
            victim = load(seen / f"round-{number}" / "model", "classification")
            for k in range(2):
                file = seen / f"round-{number}" / f"client-{k}.safetensors"
                said = "fedsgd" if update == "fedsgd" else f"fedavg-sgd:{steps}:0.01"
                assert read_update(file, victim, batch_size=1, update=said)["texts"] == [texts[k]]
        hidden = folder / f"hidden-{update}"
        simulated(app_modules, folder, record=str(hidden), **how)
        victim = load(hidden / "round-1" / "model", "classification")
        file = hidden / "round-1" / "client-0.safetensors"
        with pytest.raises(NotApplicable, match="every entry of the update is hidden"):
            read_update(file, victim, batch_size=1, hidden=file.with_suffix(".hidden.safetensors"))
        with pytest.raises(InputError, match="holds another run's record"):
            simulated(app_modules, folder, record=str(hidden), **how)


@pytest.mark.usefixtures("flower")
def test_the_app_holds_keys_for_its_owner_and_sends_code_alone(tmp_path: Path) -> None:
    import io
    import zipfile

    from flwr.cli.build import build_fab_from_disk

    from rasura.integrations.flower.new_app import new_app

    place = new_app(tmp_path / "app", 5)
    assert (place / "keys/clients.secret").stat().st_mode & 0o077 == 0
    assert not Keys.load(place / "keys/server.public").secret
    assert Keys.load(place / "keys/clients.secret").parameters.most == 64
    (place / "notes.jsonl").write_text('{"text": "private"}\n')
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(place))) as packed:
        names = set(packed.namelist())
    assert {n for n in names if not n.startswith(("federated/", ".info"))} == {"pyproject.toml"}
    with pytest.raises(InputError, match="exists already"):
        new_app(place)
    with pytest.raises(InputError, match="fits 64 clients, found 65"):
        new_app(tmp_path / "other", 65)


@pytest.mark.slow
@pytest.mark.usefixtures("flower")
@pytest.mark.parametrize("where", ["simulation", "loopback"])
def test_flwr_run_trains_the_app(where: str, folder: Path) -> None:
    script = Path(__file__).resolve().parents[1] / "benchmarks" / "federated.py"
    command = [sys.executable, str(script), str(folder / "texts.jsonl"), "--model", str(folder / "model"), "--where", where]
    command += ["--clients", "2", "--rounds", "2", "--steps", "2", "--json", str(folder / "found.json")]
    done = subprocess.run(
        [*command, "--defense", "none,sealing:all/scheme=bfv"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "found.json").read_text())
    for one in found.values():
        assert one["clients_agree"] and [r["server"]["counted"] for r in one["rounds"].values()] == [2, 2]
    # A step of the first round's scale, and what float32 rounds; in the next AdamW has trained on from there.
    first, second = found["sealing:all/scheme=bfv"]["difference"].values()
    assert first < 1e-6 and second < 1e-4


@pytest.mark.slow
@pytest.mark.usefixtures("flower")
def test_a_supernode_killed_in_a_round_leaves_the_others_theirs(folder: Path) -> None:
    script = Path(__file__).resolve().parents[1] / "benchmarks" / "federated.py"
    command = [sys.executable, str(script), str(folder / "texts.jsonl"), "--model", str(folder / "model"), "--kill"]
    command += [
        "--where",
        "loopback",
        "--clients",
        "3",
        "--rounds",
        "2",
        "--steps",
        "2",
        "--json",
        str(folder / "left.json"),
    ]
    done = subprocess.run([*command, "--defense", "sealing:all/scheme=bfv"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "killed one SuperNode" in done.stdout
    (one,) = json.loads((folder / "left.json").read_text()).values()
    assert [r["server"]["counted"] for r in one["rounds"].values()] == [2, 2]
