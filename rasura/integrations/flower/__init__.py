"""Federated training with Flower under any protection: a mod for clients, and a strategy for the server.

    app = ClientApp(mods=[protection_mod(setup)])  # setup(context) -> ClientSetup(agree("sealing:all/by=secagg", model))
    strategy(agree("sealing:all/by=secagg", model)).start(grid=grid, num_rounds=3)

``rasura new federated DIR`` writes a whole app. What is protected and what is not: ``docs/federated.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from rasura.accounting.distributed import SumLedger
from rasura.core.ciphers import SigningKey
from rasura.core.interfaces import InputError
from rasura.integrations.flower.agreement import MIN_CLIENTS, Agreement, agree, local_part, needs_keys
from rasura.integrations.flower.capture import Capture, as_tensors, check_folder
from rasura.integrations.flower.collector import Collector, RoundFailed
from rasura.integrations.flower.identities import UNKNOWN, load_identity, make_identity, read_identities
from rasura.integrations.flower.library import ARRAYS, EXAMPLES, METRICS, RECORD, flower, kept_here, log, record
from rasura.integrations.flower.refusals import REFUSED, SumRefused
from rasura.integrations.flower.rounds import Opened, Ticket, opened, protected
from rasura.integrations.flower.scales import Scale, block_scales, each, read_scale
from rasura.integrations.flower.secure_sums import KEYS, TRAIN, Call, Masking, State, answered
from rasura.integrations.flower.serving import Rounds

__all__ = [
    "Agreement", "Capture", "ClientSetup", "RoundFailed", "agree", "block_scales", "check_folder",
    "load_identity", "local_part", "make_identity", "needs_keys", "protection_mod", "read_identities", "strategy",
]  # fmt: skip

KEPT = "rasura-secure-sum"
"""Where a client keeps its part in a secure sum from one stage to the next: in the SuperNode's memory."""


@dataclass(frozen=True)
class ClientSetup:
    """What ``protection_mod`` needs: the agreement with the clients' secret keys, and this client's
    ``identity``, where the agreement has identities."""

    agreement: Agreement
    identity: SigningKey | None = field(default=None, repr=False)


def protection_mod(setup: Callable[[Any], ClientSetup]) -> Callable[[Any, Any, Callable[[Any, Any], Any]], Any]:
    """A Flower mod for clients: it decrypts the server's message, calls the app, and protects the trained weights.

    ``setup(context)`` gives the ``ClientSetup``. It is called with every message, so cache its result. The app sees plain
    weights under ``arrays`` and returns trained weights with the metric ``num-examples``. One Rasura message leaves the
    client, with the app's metrics and more: ``rasura-bytes``, ``rasura-cpu-seconds`` and, where there is an agreed scale,
    ``rasura-beyond`` (entries clipped to it). Other records are dropped. If a message cannot be decrypted or protected, the
    client answers with an error of one line; of what the app or ``setup`` raises, the server learns the kind alone.
    """

    def mod(message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
        app, _ = flower()
        try:
            return handled(message, context, call_next, app)
        except InputError as error:
            code = REFUSED if isinstance(error, SumRefused) else 0
            return app.Message(app.Error(code=code, reason=f"rasura: {error}"), reply_to=message)

    def handled(message: Any, context: Any, call_next: Callable[[Any, Any], Any], app: Any) -> Any:
        with kept_here("setup"):
            client = setup(context)
        if RECORD not in message.content:
            raise InputError("the server sent no record of Rasura; use rasura.integrations.flower.strategy on the server")
        told = message.content[RECORD]
        call = _called(told)
        # Taken away first: where the client refuses, its secret is gone.
        kept = {} if call is None else dict(context.state.pop(KEPT, {}))
        if call is not None and call.stage != TRAIN:
            return app.Message(_staged(client, call, kept, context), reply_to=message)
        first = read_scale(told["first-scale"], client.agreement.start)
        ticket = Ticket(int(told["round"]), str(told["nonce"]), int(told["max-examples"]), first, told["aggregate"])
        received = as_tensors({n: a.numpy() for n, a in message.content[ARRAYS].items()})
        before = _opened(client.agreement, received, ticket.aggregate)
        masking = None if call is None else _masking(client, call, kept, ticket, before.weights)
        # Flower may give the same records to several clients.
        plain = app.RecordDict({k: v for k, v in message.content.items() if k not in (RECORD, ARRAYS)})
        plain[ARRAYS] = record(before.weights)
        message.content = plain
        with kept_here("app"):
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
            data, figures = protected(client.agreement, ticket, before, trained, metrics[EXAMPLES], masking)
            _keep(context, masking.state if masking is not None else None)
            for name, value in figures.items():
                metrics[f"rasura-{name}"] = value
            content[RECORD] = app.ConfigRecord({"message": data})
        reply.content = content
        return reply

    return mod


def _staged(client: ClientSetup, call: Call, kept: State, context: Any) -> Any:
    """The records that answer any stage of a secure sum but the training."""
    app, _ = flower()
    if call.stage == KEYS and not client.agreement.identities:
        log(f"round {call.number}: {UNKNOWN}")
    answer, state = answered(client.agreement, call, kept, client.identity)
    _keep(context, state)
    return app.RecordDict({RECORD: app.ConfigRecord({"message": answer})})


def _opened(agreement: Agreement, clear: Mapping[str, Tensor], aggregate: bytes) -> Opened:
    """The model. Raises ``SumRefused`` where there is a sum that does not open: the server counts such refusals."""
    try:
        return opened(agreement, clear, aggregate)
    except Exception as error:
        if not aggregate:
            raise
        why = str(error) if isinstance(error, InputError) else f"the sum could not be opened ({type(error).__name__})"
        raise SumRefused(why) from None


def _keep(context: Any, state: State | None) -> None:
    app, _ = flower()
    if state is not None:
        context.state[KEPT] = app.ConfigRecord(dict(state))


def _masking(client: ClientSetup, call: Call, kept: State, ticket: Ticket, weights: Mapping[str, Tensor]) -> Masking:
    """This client's part in the sum. Raises ``InputError`` for weights other than those that the clients agreed on."""
    made = Masking(client.agreement, call, kept, ticket.first_scale, ticket.max_examples, client.identity)
    made.check(weights)
    return made


def _called(told: Any) -> Call | None:
    """The stage of a secure sum that a message belongs to."""
    if "stage" not in told:
        return None
    return Call(str(told["stage"]), int(told["round"]), told["session"], told["model"], told["data"])


def strategy(
    agreement: Agreement,
    *,
    min_clients: int = MIN_CLIENTS,
    max_examples: int = 0,
    first_scale: Scale = 1e-3,
    allow_few_clients: bool = False,
    capture: Capture | None = None,
    ledger: SumLedger | str | Path | None = None,
    **options: Any,
) -> Any:
    """A ``FedAvg`` strategy that checks the clients' messages, adds up sealed values without reading them, and distributes
    the sum.

    ``agreement`` has the public keys. A round needs ``min_clients`` clients to start, and as many valid updates to count;
    fewer than three are refused without ``allow_few_clients``, since each of two clients can subtract itself from the sum. A
    client with ``max_examples`` texts or more has the weight 1, one with a 16th of them or fewer 1/16; with 0 all weigh the
    same. ``first_scale`` is the largest change of an entry in one round, of all tensors or by name, from which the scales of
    sealed entries start: see ``block_scales``. ``capture`` keeps what the server sees. ``options`` are FedAvg's. Secure
    aggregation has three more exchanges in a round, with identities four. Each ends at ``start``'s ``timeout``.

    The strategy's ``figures`` hold, by round, the number of clients asked, counted and ``evaluated`` (who measured),
    the bytes to each client and from all, the seconds of waiting and the CPU seconds of adding. With noise, ``rho``
    (concentrated differential privacy) is that of all rounds of the run so far; ``lost`` is 1 where clients refused the sum.
    ``collector`` holds what the server knows.
    ``ledger`` is a file that counts each round with noise before it is opened, and in which a later run counts on; or it is
    another run's ledger (``SumLedger.read`` of ``collector.ledger.state_dict()``).

    ``start`` takes no other ``initial_arrays`` than the agreed weights. Where keys seal anything, it refuses ``evaluate_fn``
    and returns no ``arrays``. Raises ``InputError`` for a secret context and for more clients than the keys fit, before
    anything is sent, and ``RoundFailed`` for a round of fewer than ``min_clients`` valid updates, and where
    clients refuse two sums in a row.
    """
    _, strategies = flower()
    collector = Collector(agreement, min_clients, max_examples, first_scale, log, capture, allow_few_clients, earlier=ledger)
    options = {**dict.fromkeys(("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"), min_clients), **options}

    class Protected(Rounds, strategies.FedAvg):  # type: ignore[misc, name-defined]  # imported here alone
        pass

    scales = each(first_scale, agreement.start)
    stated = list(map(float, scales.values())) if isinstance(first_scale, Mapping) else float(first_scale)
    told = {"max-examples": max_examples, "first-scale": stated}
    return Protected(agreement, collector, capture, told, **options)
