"""The server's side of a round: it takes what clients send by stages, and opens the sum, or nothing.

What one client sends never ends a round: a message that is malformed, too long, late or sent twice raises ``Refused``, and
changes nothing. A stage ends with ``RoundEnded`` where too few clients are left.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from rasura.core.ciphers import KEY, PrivateKey
from rasura.core.errors import InputError
from rasura.defenses.secure_aggregation import messages as wire
from rasura.defenses.secure_aggregation.consistency import all_signed, masked_text, survivors_text
from rasura.defenses.secure_aggregation.encoding import CHECKS, unpacked
from rasura.defenses.secure_aggregation.graph import MOST_CLIENTS, neighbours
from rasura.defenses.secure_aggregation.masks import add_masks
from rasura.defenses.secure_aggregation.messages import Refused, Round, Setting
from rasura.defenses.secure_aggregation.shamir import joined

Who = TypeVar("Who", bound=Hashable)


class RoundEnded(RuntimeError):
    """Too few clients are left, or the sum cannot be opened; nothing was opened. ``by``: the client whose fault it is, where
    the server can tell."""

    def __init__(self, reason: str, by: Hashable = None) -> None:
        super().__init__(reason)
        self.by = by


@dataclass(frozen=True)
class Opened:
    """The ``sums`` ``(values,)`` int64 of the steps of ``clients`` clients."""

    sums: NDArray[np.int64]
    clients: int


@dataclass
class _Sent:
    """What a client sent with its shares: the commitment to its own mask, checks by holder, encrypted shares by holder."""

    commitment: bytes
    own: dict[int, bytes]
    key: dict[int, bytes]
    boxes: dict[int, bytes]


@dataclass
class Server(Generic[Who]):
    """The server of one round. ``Who``: how the caller names clients, such as Flower's node ids.

    ``keys``, ``shares``, ``masked`` and ``revealed`` take one client's message; ``roster``, ``inboxes``, ``survivors`` and
    ``opened`` end a stage, and give what is sent to the clients next. With identities there is a stage more before the last:
    ``signed`` takes a client's signature under the list of survivors, and ``confirmed`` ends it.
    """

    setting: Setting
    stage: int = wire.KEYS
    _public: dict[Who, tuple[bytes, bytes]] = field(default_factory=dict)
    _entries: dict[Who, bytes] = field(default_factory=dict)
    _index: dict[Who, int] = field(default_factory=dict)
    _sent: dict[int, _Sent] = field(default_factory=dict)
    _near: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _stayed: set[int] = field(default_factory=set)
    _masked_for: dict[int, bytes] = field(default_factory=dict)
    _signatures: dict[int, bytes] = field(default_factory=dict)
    _shares: dict[int, dict[int, bytes]] = field(default_factory=dict, repr=False)
    _answered: set[int] = field(default_factory=set)

    def keys(self, who: Who, data: object) -> None:
        """Take a client's public keys. One that is not on the list of identities is refused here, or all others would refuse
        the round."""
        body = self._body(who, data, wire.KEYS, self.setting.entry)
        pair = wire.read_entry(body, self.setting)
        taken = {k for p in self._public.values() for k in p}
        if self.setting.identities and any(body[2 * KEY : 3 * KEY] == e[2 * KEY : 3 * KEY] for e in self._entries.values()):
            raise Refused("its identity has already sent keys")
        if who in self._public or pair[0] == pair[1] or set(pair) & taken:
            raise Refused("it has already sent its keys, or the keys of another client")
        for key in pair:
            PrivateKey(bytes(KEY)).agreed(
                key
            )  # a key of low order is refused here, or its neighbours would refuse the round
        if len(self._public) >= MOST_CLIENTS:
            raise Refused(f"{MOST_CLIENTS} clients take part already")
        self._public[who], self._entries[who] = pair, body

    def roster(self) -> dict[Who, bytes]:
        """End stage 1: the list of all keys, the same for all."""
        self._at(wire.KEYS)
        keys = tuple(sorted(self._public.values()))
        if len(keys) < self.setting.least:
            raise RoundEnded(f"{len(keys)} clients sent keys; at least {self.setting.least} are needed")
        self._round = Round(self.setting, keys, wire.signers_of(sorted(self._entries.values()), self.setting))
        try:
            _ = self._round.plan, self._round.encoding
        except InputError as error:
            raise RoundEnded(f"{len(keys)} clients sent keys: {error}") from None
        self._context, places = self._round.context(), {pair: k for k, pair in enumerate(keys)}
        self._index = {who: places[pair] for who, pair in self._public.items()}
        self._near = {k: neighbours(k, self._context, self._round.plan) for k in range(len(keys))}
        self.stage = wire.SHARES
        message = wire.headed(wire.ROSTER, self.setting.session, b"".join(sorted(self._entries.values())))
        return dict.fromkeys(self._index, message)

    def shares(self, who: Who, data: object) -> None:
        """Take a client's encrypted shares."""
        index, degree = self._index.get(who, -1), self._round.plan.degree
        start = len(self._context) + KEY
        checks = start + wire.CHECK * (1 + 2 * degree)
        body = self._body(who, data, wire.SHARES, checks + wire.SEALED * degree)
        if index < 0 or index in self._sent:
            raise Refused("it did not send keys, or it has already sent its shares")
        if body[: len(self._context)] != self._context:
            raise Refused("it trains another model, or has another setting or list of clients")
        parts = [body[k : k + wire.CHECK] for k in range(start, checks, wire.CHECK)]
        boxes = [body[k : k + wire.SEALED] for k in range(checks, len(body), wire.SEALED)]
        near = self._near[index]
        own = dict(zip((index, *near), (parts[0], *parts[1::2])))
        self._sent[index] = _Sent(
            body[len(self._context) : start], own, dict(zip(near, parts[2::2])), dict(zip(near, boxes))
        )

    def inboxes(self) -> dict[Who, bytes]:
        """End stage 2: for each client, who takes part, and its neighbours' shares."""
        self._at(wire.SHARES)
        self._enough(len(self._sent), "sent shares")
        present, found = self._bits(self._sent), {}
        for who, index in self._index.items():
            if index in self._sent:
                boxes = [self._sent[k].boxes[index] for k in self._near[index] if k in self._sent]
                found[who] = wire.headed(wire.INBOX, self.setting.session, present + b"".join(boxes))
        self._total = np.zeros(self.setting.values + CHECKS, np.uint32)
        self.stage = wire.MASKED
        return found

    def masked(self, who: Who, data: object) -> None:
        """Take a client's masked update, and add it to the sum."""
        index, encoding = self._index.get(who, -1), self._round.encoding
        body = self._body(who, data, wire.MASKED, encoding.packed_bytes + self.setting.signature)
        if index not in self._sent or index in self._stayed:
            raise Refused("it did not send shares, or it has already sent its update")
        body, signature = body[: encoding.packed_bytes], body[encoding.packed_bytes :]
        if signature and not all_signed(
            masked_text(self._context, self._bits(self._sent)), self._signers, [index], signature
        ):
            raise Refused("it did not sign for which clients it masked its update")
        self._total += unpacked(body, len(self._total), encoding.modulus_bits)
        self._stayed.add(index)
        self._masked_for[index] = signature

    def survivors(self) -> dict[Who, bytes]:
        """End stage 3: whose updates are in the sum; with identities, what their neighbours signed with them."""
        self._at(wire.MASKED)
        self._enough(len(self._stayed), "sent an update")
        self.stage = wire.SIGNED if self.setting.identities else wire.REVEALED
        bits, found = self._bits(self._stayed), {}
        for who, index in self._index.items():
            if index in self._stayed:
                near = b"".join(self._masked_for[k] for k in self._near[index] if k in self._stayed)
                found[who] = wire.headed(wire.SURVIVORS, self.setting.session, bits + near)
        return found

    def signed(self, who: Who, data: object) -> None:
        """Take a client's signature under the list of survivors."""
        index, body = self._index.get(who, -1), self._body(who, data, wire.SIGNED, self.setting.signature)
        if index not in self._stayed or index in self._signatures:
            raise Refused("its update is not in the sum, or it has already signed the list of survivors")
        text = survivors_text(self._context, self._bits(self._sent), self._bits(self._stayed))
        if not all_signed(text, self._signers, [index], body):
            raise Refused("its signature is not valid for the list of survivors")
        self._signatures[index] = body

    def confirmed(self) -> dict[Who, bytes]:
        """End the stage of signatures: as many of them as each client demands, for those who signed."""
        self._at(wire.SIGNED)
        self._enough(len(self._signatures), "signed the list of survivors")
        self.stage = wire.REVEALED
        chosen = sorted(self._signatures)[: self._round.quorum]
        body = self._bits(chosen) + b"".join(self._signatures[k] for k in chosen)
        message = wire.headed(wire.CONFIRMED, self.setting.session, body)
        return {who: message for who, index in self._index.items() if index in self._signatures}

    def _bits(self, members: Iterable[int]) -> bytes:
        return wire.bitmap(set(members), len(self._round.keys))

    @property
    def _signers(self) -> tuple[bytes, ...]:
        return self._round.signers

    def revealed(self, who: Who, data: object) -> None:
        """Take the shares that a client reveals; one that differs from the share that was dealt is left out."""
        index = self._index.get(who, -1)
        length = len(data) - wire.HEAD if isinstance(data, bytes) else 0
        if not 0 <= length <= wire.ENTRY * (1 + self._round.plan.degree) or length % wire.ENTRY:
            raise Refused(f"its shares have {length} bytes; expected {wire.ENTRY} for each neighbour")
        body = self._body(who, data, wire.REVEALED, length)
        if index not in self._stayed or index in self._answered:
            raise Refused("its update is not in the sum, or it has already revealed its shares")
        found: dict[int, bytes] = {}
        for place in range(0, length, wire.ENTRY):
            owner, share = int.from_bytes(body[place : place + 4], "big"), body[place + 4 : place + wire.ENTRY]
            kind = b"own" if owner in self._stayed else b"key"
            dealt = self._sent.get(owner)
            known = {} if dealt is None else (dealt.own if kind == b"own" else dealt.key)
            if known.get(index) == wire.share_check(owner, index, kind, share):
                found[owner] = share
        self._answered.add(index)
        for owner, share in found.items():
            self._shares.setdefault(owner, {})[index] = share

    def opened(self) -> Opened:
        """End stage 4: the sum. Raises ``RoundEnded`` where shares are missing or the sum does not check: the opened vector
        then was never the sum of these clients, and nothing of it is given."""
        self._at(wire.REVEALED)
        self.stage = 0
        encoding = self._round.encoding
        total = self._total
        own = [(wire.own_key(self._own_seed(k), self._context), -1) for k in sorted(self._stayed)]
        left = [mask for k in sorted(set(self._sent) - self._stayed) for mask in self._pair_masks(k)]
        for mask in own + left:
            add_masks(total, [mask])
        shift = np.uint32(32 - encoding.modulus_bits)
        sums = ((total << shift).view(np.int32) >> shift.astype(np.int32)).astype(np.int64)
        checks, sums = sums[encoding.values :], sums[: encoding.values]
        clients = len(self._stayed)
        if checks[0] != clients or checks[1:].any() or int(np.abs(sums).max()) > clients * encoding.half:
            raise RoundEnded(
                f"the opened vector is not a sum of {clients} updates: a client sent another number of masks, or none"
            )
        return Opened(sums, clients)

    def _own_seed(self, index: int) -> bytes:
        seed = self._secret(index)
        if wire.commitment(seed) != self._sent[index].commitment:
            raise self._ended(index, "dealt shares of another mask than its own")
        return seed

    def _pair_masks(self, index: int) -> list[tuple[bytes, int]]:
        """The masks that the neighbours of a client that disappeared have added for it, to be taken out again."""
        key = PrivateKey(self._secret(index))
        if key.public != self._round.keys[index][0]:
            raise self._ended(index, "dealt shares of another key than its own")
        found = []
        for other in set(self._near[index]) & self._stayed:
            shared = key.agreed(self._round.keys[other][0])
            found.append((wire.pair_key(shared, self._context), -1 if other < index else 1))
        return found

    def _secret(self, index: int) -> bytes:
        found, threshold = self._shares.get(index, {}), self._round.plan.threshold
        if len(found) < threshold:
            raise self._ended(index, f"left {len(found)} valid shares of the {threshold} that are needed")
        try:
            return joined(found, threshold)
        except InputError as error:
            raise self._ended(index, f"dealt shares that cannot be joined ({error})") from None

    def _ended(self, index: int, why: str) -> RoundEnded:
        who = next(w for w, k in self._index.items() if k == index)
        return RoundEnded(f"client {who} {why}; the sum cannot be opened", by=who)

    def _body(self, who: Who, data: object, stage: int, length: int) -> bytes:
        if self.stage != stage:
            raise Refused("its message came too late or too early")
        return wire.body_of(data, stage, self.setting.session, length)

    def _at(self, stage: int) -> None:
        if self.stage != stage:
            raise InputError("the stages of a round end once, in their order")

    def _enough(self, count: int, what: str) -> None:
        if count < self._round.least:
            raise RoundEnded(f"{count} clients {what}; at least {self._round.least} of {len(self._round.keys)} are needed")

    @property
    def round(self) -> Round:
        """What follows from the list of keys, from the end of stage 1 on."""
        return self._round

    @property
    def counted(self) -> list[Who]:
        """Whose updates are in the sum, as the caller names them."""
        return [who for who, index in self._index.items() if index in self._stayed]
