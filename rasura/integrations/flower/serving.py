"""The server's rounds in Flower: what the strategy sends, and what it does with replies."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from rasura.core.interfaces import InputError
from rasura.integrations.flower.agreement import Agreement
from rasura.integrations.flower.capture import Capture, as_tensors
from rasura.integrations.flower.collector import Collector
from rasura.integrations.flower.library import (
    ARRAYS,
    EXAMPLES,
    RECORD,
    flower,
    log,
    record,
    sent_bytes,
    sent_metrics,
    weighed,
)  # fmt: skip
from rasura.integrations.flower.refusals import failures
from rasura.integrations.flower.rounds import check_start
from rasura.integrations.flower.secure_sums import TRAIN

_Base: Any = object


class Rounds(_Base):  # type: ignore[misc]  # its other base is Flower's FedAvg, which ``strategy`` adds
    """What ``strategy`` does otherwise than FedAvg; ``told``: what each ticket says beside what its round says."""

    def __init__(
        self, agreement: Agreement, collector: Collector, capture: Capture | None, told: dict[str, Any], **options: Any
    ) -> None:
        super().__init__(**options)
        self.agreement, self.collector, self.capture, self.told = agreement, collector, capture, told
        self.figures: dict[int, dict[str, float]] = {}
        self.timeout, self.stage_bytes = 3600.0, 0

    def start(self, grid: Any, initial_arrays: Any = None, **rest: Any) -> Any:
        if initial_arrays is not None:
            check_start(self.agreement, as_tensors({n: a.numpy() for n, a in initial_arrays.items()}))
        if self.agreement.sealed and rest.get("evaluate_fn") is not None:
            raise InputError(
                "evaluate_fn would measure a model that the server does not have: it is sealed; let clients do it"
            )
        self.timeout = rest.get("timeout", 3600.0)
        return super().start(grid, record(self.agreement.start), **rest)

    def _ask(self, grid: Any, number: int, stage: str, data: Mapping[int, bytes]) -> list[tuple[int, object]]:
        """One stage of a secure sum: what each client answers; nothing of those who do not."""
        app, _ = flower()
        config = app.ConfigRecord({"server-round": number})
        messages = []
        for node, one in data.items():
            content = {self.configrecord_key: config, RECORD: app.ConfigRecord(self._call(stage, number, one))}
            messages.append(app.Message(app.RecordDict(content), message_type="train", dst_node_id=node))
        replies = list(grid.send_and_receive(messages, timeout=self.timeout))
        for reply in replies:
            if reply.has_error():
                log(f"round {number}: client {reply.metadata.src_node_id} failed at the stage {stage}: {reply.error.reason}")
        found = [(r.metadata.src_node_id, sent_bytes(r)) for r in replies if not r.has_error()]
        self.stage_bytes += sum(map(len, data.values())) + sum(len(d) for _, d in found if isinstance(d, bytes))
        return found

    def _call(self, stage: str, number: int, data: bytes) -> dict[str, Any]:
        secure = self.collector.secure
        assert secure is not None  # the collector made it before it asks
        return {"stage": stage, "round": number, "data": data, "session": secure.session, "model": secure.model}

    def _ticketed(self, number: int, messages: Iterable[Any], inboxes: Mapping[int, bytes] | None = None) -> list[Any]:
        app, _ = flower()
        arrays, out = record(self.collector.visible()), []
        for message in messages:
            ticket = self.collector.ticket(number, message.metadata.dst_node_id)
            told = {**self.told, "round": number, "nonce": ticket.nonce, "aggregate": ticket.aggregate}
            if inboxes is not None:
                told |= self._call(TRAIN, number, inboxes[message.metadata.dst_node_id])
            # One RecordDict is shared by all messages of a round.
            config = app.ConfigRecord(dict(message.content[self.configrecord_key]))
            content = {ARRAYS: arrays, self.configrecord_key: config, RECORD: app.ConfigRecord(told)}
            kind, node = message.metadata.message_type, message.metadata.dst_node_id
            out.append(app.Message(app.RecordDict(content), message_type=kind, dst_node_id=node))
        return out

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> list[Any]:
        count = max(int(len(list(grid.get_node_ids())) * self.fraction_train), self.min_train_nodes)
        if server_round == 1:
            self.collector.check_clients(count)
        messages, inboxes = list(super().configure_train(server_round, arrays, config, grid)), None
        self.stage_bytes = 0
        if self.agreement.masked:
            nodes = [m.metadata.dst_node_id for m in messages]
            inboxes = self.collector.begin(server_round, nodes, partial(self._ask, grid, server_round))
            messages = [m for m in messages if m.metadata.dst_node_id in inboxes]
        if self.capture is not None:
            self.capture.model(server_round, self.collector.clear)
        # Clients that join later wait for a place: the run goes on.
        sent = self._ticketed(server_round, messages[: self.collector.max_clients], inboxes)
        clear = sum(t.numel() * t.element_size() for t in self.collector.visible().values())
        down = clear + len(self.collector.aggregate) + max(map(len, (inboxes or {}).values()), default=0)
        self.figures[server_round] = {"asked": len(sent), "bytes_down": down, "start": time.time()}
        return sent

    def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> tuple[Any, Any]:
        valid, failed = self._check_and_log_replies(replies, is_train=True, validate=False)
        sent = [(m, sent_metrics(m)) for m in valid]
        triples = [(m.metadata.src_node_id, sent_bytes(m), found.get(EXAMPLES, 0)) for m, found in sent]
        told = self.figures[server_round]
        told["bytes_up"] = sum(len(data) for _, data, _ in triples if isinstance(data, bytes))
        told["waited_seconds"] = time.time() - told.pop("start")
        begun = time.process_time()
        counted = set(self.collector.collect(triples, failures(failed)))
        self._mark_lost()
        told |= {"counted": len(counted), "adding_cpu_seconds": time.process_time() - begun}
        told["other_stages_bytes"] = self.stage_bytes
        if self.collector.ledger.rounds:
            told["rho"] = self.collector.ledger.rho
        kept = [f for m, f in sent if m.metadata.src_node_id in counted]
        # Of a sealed model the server has no more than a mixture with the public start.
        found = None if self.agreement.sealed else record(self.collector.clear)
        return found, weighed(kept, f"round {server_round}, training")[0]

    def _mark_lost(self) -> None:
        for number in self.collector.lost:
            self.figures[number]["lost"] = 1

    def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Any) -> list[Any]:
        return self._ticketed(server_round, super().configure_evaluate(server_round, arrays, config, grid))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Any]) -> Any:
        valid, failed = self._check_and_log_replies(replies, is_train=False, validate=False)
        self.collector.judged([m.metadata.src_node_id for m in valid], failures(failed))
        self._mark_lost()
        found = [sent_metrics(m) for m in valid]
        means, self.figures[server_round]["evaluated"] = weighed(found, f"round {server_round}, evaluation")
        return means
