"""The client's side of a round: what it decrypts and sends. Plain values and bytes, without Flower.

Sealed entries are sent as their change since the public start, all others as the update of this round. The latest aggregate
then holds the whole model: a client that joins late, was absent or was killed decrypts it like every other client, and
neither clients nor server keep anything between rounds. Rounding errors do not accumulate over rounds either.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rasura.core.interfaces import InputError
from rasura.core.rng import secret_generator
from rasura.core.values import Message, Parameter, Stage
from rasura.core.wire import from_bytes, to_bytes
from rasura.defenses import homomorphic, sealing
from rasura.integrations.flower.agreement import Agreement, check_sums, few, next_scales, read_scales
from rasura.integrations.flower.library import log
from rasura.integrations.flower.scales import Scale
from rasura.integrations.flower.secure_sums import Masking
from rasura.victims.applying import applied, shapes_of
from rasura.victims.per_example import as_one

LEAST_WEIGHT = 1 / 16
"""The smallest weight of a client. Values are multiplied by the weight before they are rounded, and the sum is divided by
the sum of weights, so the rounding of the mean is at most 16 times as coarse as without weights."""

MOST_COARSE = 4
"""How many times as coarse weights may make the rounding of a mean before the log says so."""


@dataclass(frozen=True)
class Ticket:
    """The server's message to one client for one round. ``nonce`` is unique to this client and round, so a replayed message
    has another one. ``max_examples``: the number of texts with weight 1; 0: every client has the same weight.
    ``first_scale``: the largest change of an entry in one round, of all tensors or of each."""

    round: int
    nonce: str = field(repr=False)
    max_examples: int
    first_scale: Scale
    aggregate: bytes = b""

    def share(self, examples: float) -> float:
        """The weight of a client with ``examples`` texts, from ``LEAST_WEIGHT`` to 1. The client scales its sealed values by
        it, since a server that adds ciphertexts cannot weight them."""
        if not (isinstance(examples, int | float) and math.isfinite(examples) and examples > 0):
            raise InputError(f"{examples!r} examples; expected a number above 0")
        return min(1.0, max(LEAST_WEIGHT, examples / self.max_examples)) if self.max_examples else 1.0


def told_of_weights(shares: Sequence[float], max_examples: int, error: str) -> str:
    """What the weights ``shares`` of a round cost: clients that weigh more than by their texts, and how many times as large
    they make the ``error`` of the mean, such as rounding. Empty where that is nothing or little."""
    raised, times = sum(share <= LEAST_WEIGHT for share in shares), len(shares) / sum(shares)
    lines = []
    if raised:
        lines.append(
            f"{raised} of {len(shares)} clients trained on a 16th of max_examples = {max_examples} texts or fewer, and "
            "weigh a 16th"
        )
    if error and (raised or times > MOST_COARSE):
        lines.append(f"the mean of hidden entries has {times:.1f} times the {error} of equal weights")
    advice = "set max_examples (max-examples in the app) nearer to the most texts that any client trains on"
    return "; ".join([*lines, advice]) if lines else ""


@dataclass(frozen=True)
class Opened:
    """The client's model: its ``weights``, and how far sealed entries ``moved`` from the public start."""

    weights: Mapping[str, Tensor]
    moved: Mapping[str, Tensor]


def check_start(agreement: Agreement, weights: Mapping[str, Tensor]) -> None:
    """Raises ``InputError`` for weights that are not the agreed ones, from which the clients train."""
    start = {n: t.detach().cpu() for n, t in agreement.start.items()}
    if set(weights) != set(start) or not all(torch.equal(weights[n], start[n]) for n in start):
        raise InputError(
            "initial_arrays are not the agreed weights, from which the clients train; leave them out. To go on from other "
            "weights, load them into the model given to agree, on the server and on every client"
        )


def opened(agreement: Agreement, clear: Mapping[str, Tensor], aggregate: bytes) -> Opened:
    """The model in ``clear`` (tensors that are not sealed as a whole) and ``aggregate``. Needs the secret key. Raises
    ``InputError`` if shapes, keys, the mask or counts differ from the agreement, and for a sum of too few clients.
    """
    for name, tensor in agreement.start.items():
        if name not in clear and not agreement.whole(name):
            raise InputError(f"the server did not send {name}, which is not sealed")
        if name in clear and (clear[name].shape != tensor.shape or clear[name].dtype != tensor.dtype):
            raise InputError(f"the server's {name} is {tuple(clear[name].shape)} {clear[name].dtype}; expected the start's")
    if set(clear) - set(agreement.start):
        raise InputError(f"the server sent {min(set(clear) - set(agreement.start))}, which is not trained here")
    weights = {n: clear.get(n, t) for n, t in agreement.start.items()}
    if not agreement.sealed:
        return Opened(weights, {})
    nothing = {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in agreement.start.items()}
    if not aggregate:
        return Opened(weights, nothing)
    message = from_bytes(aggregate, agreement.limits)
    check_sums(message, agreement)
    clients, shares = message.header.get("clients"), message.header.get("shares")
    if type(clients) is not int or not isinstance(shares, float) or not 0 < shares <= clients:
        raise InputError(f"the aggregate is for {clients!r} clients with {shares!r} shares")
    if clients < agreement.least:  # opening compares this number with the one inside the ciphertexts
        raise InputError(
            f"the aggregate is a sum of {clients} clients, of which each learns about the others; expected at least "
            f"{agreement.least}, as min_clients says in agree (min-clients in the app)"
        )
    if told := few(clients):
        log(f"the last round: {told}")
    _, scale = sealing.flattened(nothing, agreement.sealed, read_scales(message.header.get("scales"), agreement))
    held = homomorphic.Sealed(tuple(message.sealed.values()), clients)
    total = homomorphic.opened_sum(held, scale, agreement.keys) / shares
    moved = sealing.unflattened(total, nothing, {n: ~m for n, m in agreement.sealed.items()})
    weights = {n: torch.where(agreement.sealed[n], agreement.start[n] - moved[n], w) for n, w in weights.items()}
    return Opened(weights, moved)


def protected(
    agreement: Agreement,
    ticket: Ticket,
    before: Opened,
    trained: Mapping[str, Tensor],
    examples: float,
    masking: Masking | None = None,
) -> tuple[bytes, dict[str, float]]:
    """The message of a client whose training changed ``before`` into ``trained``, and figures about it.

    The update (received weights minus trained) goes through the AGGREGATE part of the defense as if it were one text, which
    protects the client as a whole, and then through the WIRE part. Raises ``InputError`` for other names or shapes, for
    weights that are not finite, and where the app trained what the defense freezes. ``masking``: this client's part in a
    secure sum, where the agreement has one.
    """
    start = time.process_time()
    if set(trained) != set(agreement.start):
        raise InputError(f"the app returned {len(trained)} tensors; expected the {len(agreement.start)} that it was given")
    update: dict[str, Tensor] = {}
    for name, weight in before.weights.items():
        if trained[name].shape != weight.shape or not bool(torch.isfinite(trained[name]).all()):
            raise InputError(f"the trained {name} has another shape, or entries that are not finite numbers")
        update[name] = weight - trained[name].to(weight.dtype)
        if name in agreement.frozen and bool(update[name].any()):
            raise InputError(
                f"{agreement.defense} leaves {name} as it is, but the app trained it; take its steps by rasura.step with "
                "local_part(defense), or freeze it in the model"
            )
    share = ticket.share(examples)
    header: dict[str, Parameter] = {"round": ticket.round, "nonce": ticket.nonce, "start": agreement.start_digest}
    scales: Mapping[str, float] = {}
    if agreement.masked and masking is None:
        raise InputError("the agreement is for secure aggregation, but the server began none")
    if agreement.sealed:
        header["scales"] = next_scales(before.moved, ticket.first_scale)
        scales = read_scales(header["scales"], agreement)
    rng = secret_generator()
    message = Message(update, kind="fedavg", header=header)
    for part in agreement.wire(scales):
        if masking is not None and part.mechanism.name == "sealing":
            message = masking.apply(message, share)
            continue
        # No model or inputs: masks are agreed, and what else acts on messages needs neither.
        state = part.init((None, {}))
        if part.stage is Stage.AGGREGATE:
            found = applied(part, as_one(update), state, rng, shapes_of(update))[0]
            message = replace(message, gradients={n: g.to(update[n].dtype) for n, g in found.items()})
            continue
        if part.mechanism.name == "sealing":
            moved = {
                n: torch.where(agreement.sealed[n], share * (g + before.moved[n]), g) for n, g in message.gradients.items()
            }  # fmt: skip
            message = replace(message, gradients=moved)
        message, _ = applied(part, message, state, rng)
    data = to_bytes(message)
    figures = {"bytes": float(len(data)), "cpu-seconds": time.process_time() - start}
    return data, {**figures, **_beyond(message, agreement.count, ticket.round)}


def _beyond(message: Message, hidden: int, number: int) -> dict[str, float]:
    """How many entries were cut to the agreed scale, where there is one; the log says so if any were."""
    beyond = message.header.get("beyond")
    if beyond:
        log(
            f"round {number}: {beyond} of this client's {hidden} hidden entries lie beyond the agreed scale, and are cut to "
            "it; a larger first_scale at the server keeps them"
        )
    return {} if beyond is None else {"beyond": float(beyond)}
