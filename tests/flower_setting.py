"""Flower on an in-process grid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rounds_setting import trained
from torch import Tensor

from rasura.core.ciphers import SigningKey
from rasura.integrations.flower.agreement import Agreement


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


def of_stage(message: Any) -> str:
    told = message.content.get("rasura", {})
    return str(told["stage"]) if "stage" in told else ""


class StagedGrid(LocalGrid):
    """A grid whose clients vanish for good at a stage: ``lost`` maps a round and a stage to clients. ``change`` tampers with
    what the server sends."""

    lost: dict[tuple[int, str], set[int]]
    change: Callable[[int, Any], None] = staticmethod(lambda node, message: None)

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        kept = []
        for message in messages:
            node, number = message.metadata.dst_node_id, message.content["config"]["server-round"]
            self.nodes = [n for n in self.nodes if n not in self.lost.get((number, of_stage(message)), set())]
            if node in self.nodes:
                self.change(node, message)
                kept.append(message)
        return super().send_and_receive(kept, timeout=timeout)


def grid_of(count: int, app: Any, lost: dict[tuple[int, str], set[int]] | None = None) -> StagedGrid:
    grid = StagedGrid(range(count), app)
    grid.lost = lost or {}
    return grid


def app_of(
    agreement: Agreement | None,
    change: Callable[[int, int, Any], Any] | None = None,
    *,
    examples: Callable[[int], int] = lambda node: 1,
    trains: Callable[[int], None] = lambda node: None,
    identity: SigningKey | None = None,
) -> Callable[[int, Any], Any]:
    """A client app, behind the mod where there is an agreement; ``change(node, round, reply)`` tampers with replies.
    ``examples`` gives a node's number of texts; ``trains`` is called with each node that trains; ``identity`` signs its
    keys."""
    from flwr.app import Array, ArrayRecord, Context, MetricRecord, RecordDict
    from flwr.app import Message as Reply
    from flwr.clientapp import ClientApp

    from rasura.integrations.flower import ClientSetup, protection_mod

    mods = [] if agreement is None else [protection_mod(lambda context: ClientSetup(agreement, identity=identity))]
    app = ClientApp(mods=mods)

    def weights(message: Any) -> dict[str, Tensor]:
        return {n: torch.tensor(a.numpy()) for n, a in message.content["arrays"].items()}

    @app.train()  # type: ignore[untyped-decorator]  # of Flower
    def train(message: Any, context: Any) -> Any:
        node = message.metadata.dst_node_id
        trains(node)
        after = trained(node, weights(message))
        record = ArrayRecord({n: Array(t.numpy()) for n, t in after.items()})
        told = MetricRecord({"num-examples": examples(node)})
        return Reply(RecordDict({"arrays": record, "metrics": told}), reply_to=message)

    @app.evaluate()  # type: ignore[untyped-decorator]  # of Flower
    def evaluate(message: Any, context: Any) -> Any:
        size = sum(float(w.double().square().sum()) for w in weights(message).values())
        return Reply(RecordDict({"metrics": MetricRecord({"num-examples": 1, "size": size})}), reply_to=message)

    contexts: dict[int, Any] = {}

    def answer(node: int, message: Any) -> Any:
        number = message.content["config"]["server-round"]
        reply = app(message, contexts.setdefault(node, Context(1, node, {}, RecordDict(), {})))
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
