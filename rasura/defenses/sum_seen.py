"""What a server sees of a secure sum in an audit: the mean of the clients' gradients, one example each, in whole steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rasura.core.errors import InputError, Unseen
from rasura.core.rng import Randomness, SecretGenerator
from rasura.core.values import Message
from rasura.core.wire import AUDITED
from rasura.defenses.secure_aggregation.encoding import Blocks, Encoding, decoded, encoded
from rasura.defenses.secure_aggregation.messages import HEAD

LEAST = 3
"""Clients whose sum is opened, at least, unless fewer were asked for by name."""

BITS = 16


def check_sum(whole: bool, noise: float, clients: int) -> None:
    """Refuse what an audit cannot show as a sum of ``clients``, one example each. Raises ``Unseen`` with what to do."""
    if noise:
        raise Unseen(
            "noise in the sum has a guarantee, which the training's ledger states; audit sealing:all/by=secagg, without "
            "noise"
        )
    if not whole:
        raise Unseen("entries that stay clear come from each client alone; audit them with sealing:.../by=bfv")
    if clients < LEAST:
        raise Unseen(
            "secure aggregation shows the server the sum of the clients, so the message of one client does not tell what "
            f"can be read. A sum of {clients} is opened only where it was asked for by name, and shows clients each other's "
            f"updates: add --clients 1,2,4,8,16,32, or --batch-size {LEAST} or more"
        )


def seen_sum(message: Message, clients: int, rng: Randomness) -> Message:
    """``message``, the mean of ``clients`` gradients, as the opened sum gives it: rounded to 16 bits of each tensor's scale,
    twice its largest entry and up to a power of two. Its header states the bytes that one client sent.

    Departure from a round: the mean is rounded once, where each client rounds its own part; either way, the error is at most
    half a step. Raises ``Unseen`` for an update that is not one gradient of all examples, and ``InputError`` where ``rng``
    is a deployment's: there the message would be sent.
    """
    if isinstance(rng, SecretGenerator):
        raise InputError(
            "secure aggregation sums the updates of several clients; one step has a single client's, which would be sent in "
            "the clear. Use the Flower app (rasura new federated), or rasura.defenses.secure_aggregation.client.Client; an "
            "audit of the sum passes a seeded generator (rasura.core.rng.generator)"
        )
    if message.kind != "fedsgd":
        raise Unseen(f"a message of kind {message.kind} is that of one client; the sum of several is audited as fedsgd")
    entries = {}
    for name, g in message.gradients.items():
        largest = float(g.abs().max()) if g.numel() else 0.0
        exponent = min(60, max(-120, math.ceil(math.log2(2 * largest)))) if largest > 0 else 0
        blocks, encoding = Blocks((g.numel(),), (exponent,)), Encoding(max(1, g.numel()), BITS, clients)
        if g.numel():
            steps, _ = encoded(g.detach().double().cpu().numpy().ravel(), blocks, encoding)
            g = torch.from_numpy(decoded(steps.astype("int64"), blocks, encoding)).to(g).view_as(g)
        entries[name] = g
    whole = Encoding(max(1, sum(g.numel() for g in entries.values())), BITS, clients)
    return replace(message, gradients=entries, header={**message.header, AUDITED: HEAD + whole.packed_bytes})


def examples_of(inputs: Mapping[str, Tensor]) -> int:
    """How many examples a batch of model ``inputs`` holds."""
    return max((len(t) for t in inputs.values() if t.dim()), default=1)
