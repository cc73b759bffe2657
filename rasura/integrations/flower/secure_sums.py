"""Secure aggregation in a federated round: what both sides do beside training. Plain values and bytes, without Flower.

A round has four stages, of which the third is the training, and with identities one more before the last, in which clients
sign the list of survivors. Each is one message to every client and one answer. What a client must keep between them lies
in a mapping of bytes, for the caller to hold in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rasura.accounting.distributed import SumLedger
from rasura.core.ciphers import SigningKey
from rasura.core.interfaces import InputError
from rasura.core.values import Message
from rasura.core.wire import mask_digest
from rasura.defenses.sealing import flattened
from rasura.defenses.secure_aggregation.client import Client
from rasura.defenses.secure_aggregation.encoding import Blocks, decoded, encoded
from rasura.defenses.secure_aggregation.messages import SESSION, Round, Setting
from rasura.defenses.secure_aggregation.noise import NORM, TAIL, clipped, discrete_gaussian, sigma_of
from rasura.defenses.secure_aggregation.server import RoundEnded, Server
from rasura.integrations.flower.agreement import Agreement, few, weights_digest
from rasura.integrations.flower.library import log
from rasura.integrations.flower.scales import Scale, each, exponents

KEYS, SHARES, TRAIN, SIGNED, REVEALED = "keys", "shares", "train", "signed", "revealed"
"""The stages, as the server calls them."""

State = Mapping[str, bytes]
"""What a client keeps in memory from one stage to the next."""

Ask = Callable[[str, Mapping[int, bytes]], Iterable[tuple[int, object]]]
"""Send each client the bytes of a stage, and give the clients' answers as they come."""


@dataclass(frozen=True)
class Call:
    """What the server says to a client in a stage. ``model``: the digest of the model and the terms of this round."""

    stage: str
    number: int
    session: bytes
    model: bytes
    data: bytes = b""


def terms_digest(agreement: Agreement, weights: Mapping[str, Tensor], max_examples: int, first_scale: Scale) -> bytes:
    """32 bytes that differ where clients would train another model, or on other terms."""
    scales = list(map(float, each(first_scale, agreement.start).values()))
    told = json.dumps([agreement.defense, agreement.mask_digest, agreement.start_digest, max_examples, scales])
    return hashlib.sha256(told.encode() + weights_digest(weights)).digest()


def setting_of(agreement: Agreement, number: int, session: bytes, model: bytes) -> Setting:
    """The setting of a round, from the receiver's own agreement."""
    if not agreement.masked:
        raise InputError("the server sums securely, but the defense of this client does not")
    if len(session) != SESSION:
        raise InputError(f"a session of {len(session)} bytes; expected {SESSION}")
    noise = f"discrete Gaussian, {agreement.noise} times the clip {agreement.clip}" if agreement.noise else ""
    return Setting(
        session, number, model, agreement.count, agreement.bits, least=agreement.least, noise=noise,
        identities=agreement.identities,
    )  # fmt: skip


def blocks_of(agreement: Agreement, first_scale: Scale) -> Blocks:
    """One block for each tensor: its scale is the largest change of its entries in one round, up to a power of two."""
    lengths = tuple(int(agreement.masked[n].sum()) for n in agreement.start)
    return Blocks(lengths, exponents(first_scale, agreement.start))


# The client


def answered(
    agreement: Agreement, call: Call, state: State | None, identity: SigningKey | None = None
) -> tuple[bytes, State]:
    """The answer to any stage but the training, and what to keep. Raises ``InputError`` where the client refuses."""
    setting = setting_of(agreement, call.number, call.session, call.model)
    if call.stage == KEYS:
        client = Client(setting, identity)
        return client.keys(), client.state()
    client = _resumed(setting, state, identity)
    if call.stage == SHARES:
        sent = client.shares(call.data)
        if told := few(client.round.least):
            log(f"round {call.number}: {told}")
        return sent, client.state()
    if call.stage == SIGNED:
        return client.signed(call.data), client.state()
    if call.stage == REVEALED:
        return client.revealed(call.data), client.state()
    raise InputError(f"unknown stage {call.stage!r} of secure aggregation")


def _resumed(setting: Setting, state: State | None, identity: SigningKey | None) -> Client:
    if not state:
        raise InputError("this client took no part in the earlier stages of this round")
    return Client.restored(setting, state, identity)


@dataclass
class Masking:
    """The training stage of one client. ``state`` is what to keep afterwards; ``identity`` signs, where there are any."""

    agreement: Agreement
    call: Call
    state: State | None = field(repr=False)
    first_scale: Scale
    max_examples: int
    identity: SigningKey | None = field(default=None, repr=False)

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Refuse a model other than the one that this client and its neighbours agreed on, before it is trained."""
        if terms_digest(self.agreement, weights, self.max_examples, self.first_scale) != self.call.model:
            raise InputError("the server sent another model, or other terms, than those that the clients agreed on")

    def apply(self, message: Message, share: float) -> Message:
        """``message`` without the entries that are summed securely, which it carries masked. Values beyond the scale are
        cut, and counted in the header; then all are multiplied by the client's weight ``share``. With noise there is no
        such count: the whole update is made shorter, and noise would not cover a figure of that."""
        setting = setting_of(self.agreement, self.call.number, self.call.session, self.call.model)
        client, masked = _resumed(setting, self.state, self.identity), self.agreement.masked
        values, _ = flattened(message.gradients, masked, dict.fromkeys(masked, 1.0))
        steps, beyond = self._steps(values, share, client.round)
        vector = client.masked(self.call.data, steps)
        self.state = client.state()
        visible = {n: ~m & message.visible[n] if n in message.visible else ~m for n, m in masked.items()}
        header = {**message.header, "mask": mask_digest({n: ~m for n, m in masked.items()}), "scheme": "secagg"}
        if beyond is not None:
            header["beyond"] = beyond
        clear = {n: g.masked_fill(masked[n], 0) for n, g in message.gradients.items()}
        return Message(clear, visible, {"secagg/000000": vector}, message.kind, header)

    def _steps(self, values: NDArray[np.float64], share: float, shared: Round) -> tuple[NDArray[np.int32], int | None]:
        """The weighted values in whole steps, with this client's noise where there is any; and how many were beyond the
        scale, None where there is noise and no scale. A client that is not honest may send anything else: what the server
        checks is ``SecureSums.opened``."""
        if not self.agreement.noise:
            blocks = blocks_of(self.agreement, self.first_scale)
            cut = np.clip(values, -blocks.scales, blocks.scales)  # values that are not finite stay so, and are refused
            return encoded(cut * share, blocks, shared.encoding)[0], int(np.count_nonzero(cut != values))
        sigma = sigma_of(self.agreement.noise, shared.noisy, shared.encoding.half)
        noisy = clipped(values * share, self.agreement.clip) + discrete_gaussian(len(values), sigma)
        return noisy.astype(np.int32), None


# The server


@dataclass
class SecureSums:
    """The server's side of one round. ``ask`` reaches the clients; ``log`` gets a line for each who is left out; ``ledger``
    counts the rounds with noise, of updates of as many entries as are summed; another one raises ``InputError``."""

    agreement: Agreement
    number: int
    model: bytes
    log: Callable[[str], None]
    ask: Ask
    ledger: SumLedger
    session: bytes = field(default_factory=lambda: secrets.token_bytes(SESSION))

    def __post_init__(self) -> None:
        if self.agreement.noise and self.ledger.entries != self.agreement.count:
            raise InputError(
                f"the ledger counts sums of {self.ledger.entries} entries, and an update has {self.agreement.count}"
            )
        self.server: Server[int] = Server(setting_of(self.agreement, self.number, self.session, self.model))

    def begin(self, nodes: Iterable[int]) -> dict[int, bytes]:
        """Stages 1 and 2: for each client that stays, what it needs to mask. Raises ``RoundEnded`` where too few do."""
        self._stage(KEYS, dict.fromkeys(nodes, b""), self.server.keys)
        self._stage(SHARES, self.server.roster(), self.server.shares)
        return self.server.inboxes()

    def add(self, node: int, data: bytes) -> None:
        """Stage 3: take a client's masked update."""
        self.server.masked(node, data)

    def opened(self, first_scale: Scale, shares: float) -> NDArray[np.float64]:
        """The last stages: the sum ``(entries,)`` of the updates that were taken, whose weights add up to ``shares``.

        Raises ``RoundEnded`` if it cannot be opened, and where an entry is larger than honest clients can make it: the mean
        that is given out stays within the scale of its tensor, whatever some of the clients sent. Below that bound, the
        server cannot tell whose part is which.
        """
        survivors = self.server.survivors()
        if self.agreement.identities:
            self._stage(SIGNED, survivors, self.server.signed)
            survivors = self.server.confirmed()
        self._stage(REVEALED, survivors, self.server.revealed)
        shared, clients = self.server.round, len(self.server.counted)
        if self.agreement.noise:
            # Counted before it is opened: a sum that does not check was seen nevertheless.
            sigma = sigma_of(self.agreement.noise, shared.noisy, shared.encoding.half)
            self.ledger.made(sigma, clients, shared.least - shared.noisy)
            sums = self.server.opened().sums
            self._check(sums, math.ceil(clients * NORM + TAIL * math.sqrt(clients) * sigma))
            return np.multiply(sums, self.agreement.clip / NORM, dtype=np.float64)
        sums = self.server.opened().sums
        self._check(sums, math.ceil(shares * shared.encoding.half + clients / 2))
        return decoded(sums, blocks_of(self.agreement, first_scale), shared.encoding)

    @staticmethod
    def _check(sums: NDArray[np.int64], most: int) -> None:
        if int(np.abs(sums).max(initial=0)) > most:
            raise RoundEnded(
                f"an entry of the sum is {int(np.abs(sums).max())} steps, and honest clients reach {most} at most: a client "
                "sent values beyond the agreed scale"
            )

    def _stage(self, name: str, messages: Mapping[int, bytes], take: Callable[[int, object], None]) -> None:
        for node, data in self.ask(name, messages):
            try:
                take(node, data)
            except Exception as error:
                why = (
                    str(error)
                    if isinstance(error, InputError)
                    else f"its message could not be read ({type(error).__name__})"
                )
                self.log(f"round {self.number}: client {node} is left out at the stage {name}: {why}")
