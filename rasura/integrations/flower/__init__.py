"""Federated training with Flower under any protection: a mod for clients, and a strategy for the server.

    app = ClientApp(mods=[protection_mod(setup)])  # setup(context) -> ClientSetup(agree(defense, model, keys))
    strategy(agree(defense, model, public_keys), min_clients=3).start(grid=grid, num_rounds=3)

``rasura new federated DIR`` writes a whole app. What is protected and what is not: ``docs/federated.md``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rasura.core.interfaces import InputError, MissingExtra
from rasura.integrations.flower.agreement import Agreement, agree, local_part
from rasura.integrations.flower.capture import Capture, as_tensors, check_folder
from rasura.integrations.flower.collector import MIN_CLIENTS, Collector, RoundFailed
from rasura.integrations.flower.rounds import Ticket, opened, protected

__all__ = [
    "Agreement", "Capture", "ClientSetup", "RoundFailed", "agree", "check_folder", "local_part", "protection_mod",
    "strategy",
]  # fmt: skip

RECORD, ARRAYS, METRICS, EXAMPLES = "rasura", "arrays", "metrics", "num-examples"
"""Names of the records of a message, and of the metric with the number of texts that a client trained on."""


@dataclass(frozen=True)
class ClientSetup:
    """What ``protection_mod`` needs: the agreement with the clients' secret keys, and how many ``processes`` encrypt."""

    agreement: Agreement
    processes: int = 1


def _flwr() -> tuple[Any, Any]:
    try:
        import flwr.app
        import flwr.serverapp.strategy
    except ImportError:
        raise MissingExtra("federated training needs Flower: pip install 'rasura[federated]'") from None
    return flwr.app, flwr.serverapp.strategy


def _log(text: str) -> None:
    import logging

    logging.getLogger("flwr").warning(text)


def _record(arrays: Mapping[str, Tensor]) -> Any:
    app, _ = _flwr()
    return app.ArrayRecord({n: app.Array(t.numpy()) for n, t in arrays.items()})


def protection_mod(setup: Callable[[Any], ClientSetup]) -> Callable[[Any, Any, Callable[[Any, Any], Any]], Any]:
    """A Flower mod for clients: it decrypts the server's message, calls the app, and protects the trained weights.

    ``setup(context)`` gives the ``ClientSetup``. It is called with every message, so cache its result. The app sees plain
    weights under ``arrays`` and returns trained weights with the metric ``num-examples``. One Rasura message leaves the
    client, with the app's metrics and three more: ``rasura-beyond`` (entries clipped to the agreed scale), ``rasura-bytes``
    and ``rasura-cpu-seconds``. Other records are dropped. If a message cannot be decrypted or protected, the client answers
    with an error of one line.
    """

    def mod(message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
        app, _ = _flwr()
        try:
            return handled(message, context, call_next, app)
        except InputError as error:
            return app.Message(app.Error(code=0, reason=f"rasura: {error}"), reply_to=message)

    def handled(message: Any, context: Any, call_next: Callable[[Any, Any], Any], app: Any) -> Any:
        client = setup(context)
        if RECORD not in message.content:
            raise InputError("the server sent no record of Rasura; use rasura.integrations.flower.strategy on the server")
        told = message.content[RECORD]
        ticket = Ticket(
            int(told["round"]), str(told["nonce"]), int(told["max-examples"]), float(told["first-scale"]), told["aggregate"]
        )
        received = as_tensors({n: a.numpy() for n, a in message.content[ARRAYS].items()})
        before = opened(client.agreement, received, ticket.aggregate)
        # Flower may give the same records to several clients.
        plain = app.RecordDict({k: v for k, v in message.content.items() if k not in (RECORD, ARRAYS)})
        plain[ARRAYS] = _record(before.weights)
        message.content = plain
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        found = list(reply.content.metric_records.values())
        metrics = app.MetricRecord(dict(found[0])) if found else app.MetricRecord()
        content = app.RecordDict({METRICS: metrics})
        if message.metadata.message_type.startswith("train"):
            arrays = list(reply.content.array_records.values())
            if len(arrays) != 1 or not isinstance(metrics.get(EXAMPLES), int | float):
                raise InputError(f"the app returned {len(arrays)} array records; expected one, and the metric {EXAMPLES}")
            trained = as_tensors({n: a.numpy() for n, a in arrays[0].items()})
            data, figures = protected(client.agreement, ticket, before, trained, metrics[EXAMPLES], client.processes)
            for name, value in figures.items():
                metrics[f"rasura-{name}"] = value
            content[RECORD] = app.ConfigRecord({"message": data})
        reply.content = content
        return reply

    return mod


def strategy(
    agreement: Agreement,
    *,
    min_clients: int = MIN_CLIENTS,
    max_examples: int = 0,
    first_scale: float = 1e-3,
    allow_few_clients: bool = False,
    capture: Capture | None = None,
    **options: Any,
) -> Any:
    """A ``FedAvg`` strategy that checks the clients' messages, adds up sealed values without reading them, and distributes
    the sum.

    ``agreement`` has the public keys. A round needs ``min_clients`` clients to start, and as many valid updates to count;
    fewer than three are refused without ``allow_few_clients``, since each of two clients can subtract itself from the sum. A
    client with ``max_examples`` texts or more has the weight 1; with 0 all clients weigh the same. ``first_scale`` is the
    largest change of an entry in one round, from which the scales of sealed entries start. ``capture`` keeps what the server
    sees. ``options`` are FedAvg's.

    The strategy's ``figures`` hold, by round, the number of clients asked and counted, the bytes to each client and from all
    clients, the wall-clock seconds of waiting and the CPU seconds of adding. Its ``collector`` holds everything that the
    server knows.

    Raises ``InputError`` for a secret context and for more clients than the keys fit, before anything is sent.
    ``RoundFailed`` ends a run whose round has fewer than ``min_clients`` valid updates.
    """
    _, strategies = _flwr()
    collector = Collector(
        agreement, min_clients, max_examples, first_scale, _log, seen=capture, allow_few_clients=allow_few_clients
    )
    options = {**dict.fromkeys(("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"), min_clients), **options}

    class Protected(_Protected, strategies.FedAvg):  # type: ignore[misc, name-defined]  # imported here alone
        pass

    told = {"max-examples": max_examples, "first-scale": float(first_scale)}
    return Protected(agreement, collector, capture, told, **options)


_Base: Any = object


class _Protected(_Base):  # type: ignore[misc]  # its other base is Flower's FedAvg, which ``strategy`` adds
    """What ``strategy`` does otherwise than FedAvg; ``told``: what each ticket says beside what its round says."""

    def __init__(
        self, agreement: Agreement, collector: Collector, capture: Capture | None, told: dict[str, Any], **options: Any
    ) -> None:
        super().__init__(**options)
        self.agreement, self.collector, self.capture, self.told = agreement, collector, capture, told
        self.figures: dict[int, dict[str, float]] = {}

    def start(self, grid: Any, initial_arrays: Any = None, **rest: Any) -> Any:
        return super().start(grid, _record(self.agreement.start) if initial_arrays is None else initial_arrays, **rest)

    def _ticketed(self, number: int, messages: Iterable[Any]) -> list[Any]:
        app, _ = _flwr()
        arrays, out = _record(self.collector.visible()), []
        for message in messages:
            ticket = self.collector.ticket(number, message.metadata.dst_node_id)
            told = {**self.told, "round": number, "nonce": ticket.nonce, "aggregate": ticket.aggregate}
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
        messages = list(super().configure_train(server_round, arrays, config, grid))
        if self.capture is not None:
            self.capture.model(server_round, self.collector.clear)
        # Clients that join later wait for a place: the run goes on.
        sent = self._ticketed(server_round, messages[: self.collector.max_clients])
        clear = sum(t.numel() * t.element_size() for t in self.collector.visible().values())
        down = clear + len(self.collector.aggregate)
        self.figures[server_round] = {"asked": len(sent), "bytes_down": down, "start": time.time()}
        return sent

    def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> tuple[Any, Any]:
        valid, _ = self._check_and_log_replies(replies, is_train=True, validate=False)
        sent = [(m, _metrics(m)) for m in valid]
        triples = [(m.metadata.src_node_id, _bytes(m), found.get(EXAMPLES, 0)) for m, found in sent]
        told = self.figures[server_round]
        told["bytes_up"] = sum(len(data) for _, data, _ in triples if isinstance(data, bytes))
        told["waited_seconds"] = time.time() - told.pop("start")
        begun = time.process_time()
        counted = set(self.collector.collect(triples))
        told |= {"counted": len(counted), "adding_cpu_seconds": time.process_time() - begun}
        return _record(self.collector.clear), _weighed([f for m, f in sent if m.metadata.src_node_id in counted])

    def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Any) -> list[Any]:
        return self._ticketed(server_round, super().configure_evaluate(server_round, arrays, config, grid))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Any]) -> Any:
        valid, _ = self._check_and_log_replies(replies, is_train=False, validate=False)
        return _weighed([_metrics(m) for m in valid])


def _bytes(message: Any) -> object:
    try:
        return message.content[RECORD]["message"]
    except Exception:  # whatever one client sent, the others go on: the collector refuses what is not bytes
        return None


def _metrics(message: Any) -> dict[str, float]:
    """The plain finite numbers of a reply's one metric record; nothing where the reply has another number of them."""
    try:
        (found,) = message.content.metric_records.values()
        return {n: float(v) for n, v in found.items() if isinstance(v, int | float) and math.isfinite(v)}
    except Exception:  # as above: without examples, the reply counts for nothing
        return {}


def _weighed(found: list[dict[str, float]]) -> Any:
    """The means, by examples, of the metrics that all clients report; None where none does."""
    told = [f for f in found if f.get(EXAMPLES, 0) > 0]
    names = set.intersection(*(set(f) for f in told)) - {EXAMPLES} if told else set()
    if not names:
        return None
    total = sum(f[EXAMPLES] for f in told)
    app, _ = _flwr()
    return app.MetricRecord({n: float(sum(f[n] * f[EXAMPLES] for f in told) / total) for n in sorted(names)})
