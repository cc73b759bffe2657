"""What clients and the server agree on for a round, and the messages of its stages as bytes of known length.

Every message begins with its stage and the session. How long it may be follows from what the receiver already knows, so a
receiver compares lengths before it reads anything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rasura.core.ciphers import KEY, SIGNATURE, TAG, derived, verified
from rasura.core.errors import InputError
from rasura.defenses.secure_aggregation.consistency import quorum
from rasura.defenses.secure_aggregation.encoding import Encoding
from rasura.defenses.secure_aggregation.graph import MOST_CLIENTS, THIRDS, Bounds, Plan, counts, plan
from rasura.defenses.secure_aggregation.shamir import SHARE

SESSION = 16
HEAD = 1 + SESSION
FEWEST = 2
"""Clients of a sum, at least: the sum of one is its update."""
CHECK = 16
"""Bytes of the digest of a share."""

SEALED = 2 * SHARE + TAG
"""Bytes of two shares, encrypted for one neighbour."""

KEYS, ROSTER, SHARES, INBOX, MASKED, SURVIVORS, REVEALED, SIGNED, CONFIRMED = range(1, 10)
"""What the first byte of a message says."""

ENTRY = 4 + SHARE
"""Bytes of a revealed share: whose it is, and the share."""


class Refused(InputError):
    """A message that does not fit the protocol, in one line; nothing of it was used."""


@dataclass(frozen=True)
class Setting:
    """What all clients of a round must have in common.

    ``session``: 16 random bytes of the server, new for every round. ``model``: a digest of the model that clients train from
    and of all else that they should agree on. ``values``, ``bits``: the encoding. ``bounds``: what the round must bear.
    ``least``: a sum of fewer clients is never opened. ``noise``: a description of the noise that each client adds.
    ``identities``: the public keys (Ed25519) of all who may take part, in ascending order; empty: any client may, and the
    keys of a round could be the server's own, and it is not checked that all are told the same lists.
    """

    session: bytes
    number: int
    model: bytes
    values: int
    bits: int
    bounds: Bounds = THIRDS
    least: int = 3
    noise: str = ""
    identities: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if len(self.session) != SESSION or len(self.model) != KEY or self.number < 0 or self.least < FEWEST:
            raise InputError(
                f"a session of {len(self.session)} bytes, a model's digest of {len(self.model)}, round {self.number}, at "
                f"least {self.least} clients; expected {SESSION}, {KEY}, 0 or more, {FEWEST} or more"
            )
        if list(self.identities) != sorted(set(self.identities)) or any(len(k) != KEY for k in self.identities):
            raise InputError(f"the identities are not different keys of {KEY} bytes in ascending order")

    @property
    def entry(self) -> int:
        """Bytes of a client in the list of keys: its two keys and, with ``identities``, who signed them and the
        signature."""
        return 2 * KEY + (KEY + SIGNATURE if self.identities else 0)

    @property
    def signature(self) -> int:
        """Bytes of a signature under a message: none without ``identities``."""
        return SIGNATURE if self.identities else 0

    def digest(self) -> bytes:
        """32 bytes that differ where anything differs."""
        told = [
            self.session.hex(), self.number, self.model.hex(), self.values, self.bits, str(self.bounds.corrupt),
            str(self.bounds.gone), self.least, self.noise, [k.hex() for k in self.identities],
        ]  # fmt: skip
        return hashlib.sha256(b"rasura secure aggregation 1" + json.dumps(told).encode()).digest()


@dataclass(frozen=True)
class Round:
    """What follows from a setting and the list of all clients' keys: the same for all, or nothing fits. ``signers``: whose
    identity signed each pair of keys, where there are any."""

    setting: Setting
    keys: tuple[tuple[bytes, bytes], ...]
    signers: tuple[bytes, ...] = ()

    @property
    def plan(self) -> Plan:
        """The graph and the threshold."""
        return plan(len(self.keys), self.setting.bounds)

    @property
    def least(self) -> int:
        """How many clients must stay until the end."""
        return max(self.plan.stay, self.setting.least, self.quorum)

    @property
    def quorum(self) -> int:
        """How many clients must sign the list of survivors; 0 without identities, where no list is signed."""
        return quorum(len(self.keys), self.setting.bounds) if self.setting.identities else 0

    @property
    def noisy(self) -> int:
        """How many clients add noise that no colluding client knows, at least."""
        return self.least - counts(len(self.keys), self.setting.bounds)[0]

    @property
    def encoding(self) -> Encoding:
        """How values are sent."""
        return Encoding(self.setting.values, self.setting.bits, len(self.keys))

    def context(self) -> bytes:
        """32 bytes that all keys of the round depend on: clients with another setting or another list cannot read each
        other's shares, and their masks do not cancel out. It says whose keys they are, too: all who know it count the same
        identities."""
        pairs = b"".join(a + b for a, b in self.keys)
        return hashlib.sha256(self.setting.digest() + pairs + b"".join(self.signers)).digest()


def headed(stage: int, session: bytes, body: bytes) -> bytes:
    """A message."""
    return bytes([stage]) + session + body


def body_of(data: object, stage: int, session: bytes, length: int) -> bytes:
    """The body of a message, which must have ``length`` bytes. Raises ``Refused`` in one line otherwise."""
    if not isinstance(data, bytes):
        raise Refused("it is not a message of secure aggregation")
    if len(data) != HEAD + length:
        raise Refused(f"its message has {len(data)} bytes; expected {HEAD + length}")
    if data[0] != stage:
        raise Refused(f"its message belongs to stage {data[0]}; expected {stage}")
    if data[1:HEAD] != session:
        raise Refused("its message belongs to another round: it was replayed")
    return data[HEAD:]


def to_sign(setting: Setting, pair: tuple[bytes, bytes]) -> bytes:
    """What a client signs: its keys for this round, this model and this list of identities alone."""
    return b"rasura secure aggregation round keys 1" + setting.digest() + pair[0] + pair[1]


def read_entry(entry: bytes, setting: Setting) -> tuple[bytes, bytes]:
    """The two keys of one client. Raises ``Refused`` unless one of the setting's identities, where there are any, signed
    them for this round."""
    pair = (entry[:KEY], entry[KEY : 2 * KEY])
    if setting.identities:
        signer = entry[2 * KEY : 3 * KEY]
        if signer not in setting.identities:
            raise Refused("the keys of a client are signed by somebody who is not on the list of identities")
        if not verified(signer, entry[3 * KEY :], to_sign(setting, pair)):
            raise Refused("the signature of a client's keys is not valid for these keys, this round and this model")
    return pair


def read_roster(data: object, setting: Setting) -> Round:
    """The list of all clients' keys. Raises ``Refused`` for a list that is not in order, or that names a key twice, and
    where identities are known for keys that they did not sign for this round."""
    each = setting.entry
    count = (len(data) - HEAD) // each if isinstance(data, bytes) else 0
    if not 2 <= count <= MOST_CLIENTS:
        raise Refused(f"the list of keys names {count} clients; expected 2 to {MOST_CLIENTS}")
    body = body_of(data, ROSTER, setting.session, count * each)
    entries = [body[k : k + each] for k in range(0, len(body), each)]
    keys = tuple(read_entry(entry, setting) for entry in entries)
    if list(keys) != sorted(keys) or len({k for pair in keys for k in pair}) != 2 * count:
        raise Refused("the list of keys is not in order, or it names a key twice")
    return Round(setting, keys, signers_of(entries, setting))


def signers_of(entries: Sequence[bytes], setting: Setting) -> tuple[bytes, ...]:
    """Whose identity signed each entry of the list of keys. Raises ``Refused`` for one that is named twice."""
    signers = tuple(entry[2 * KEY : 3 * KEY] for entry in entries if setting.identities)
    if len(set(signers)) != len(signers):
        raise Refused("the list of keys names an identity twice")
    return signers


def bitmap(members: set[int], count: int) -> bytes:
    """One bit for each of ``count`` clients: whether it is among ``members``."""
    flags = np.zeros(count, bool)
    flags[sorted(members)] = True
    return np.packbits(flags).tobytes()


def members_of(bits: bytes, count: int) -> set[int]:
    """The members of a bitmap. Raises ``Refused`` for one that names others than the clients."""
    flags = np.unpackbits(np.frombuffer(bits, np.uint8))
    if len(flags) != 8 * -(-count // 8) or flags[count:].any():
        raise Refused("its list of clients is malformed")
    return {int(k) for k in np.flatnonzero(flags[:count])}


def leading(data: object, count: int) -> set[int]:
    """The members of the bitmap with which a message begins, whose length depends on them."""
    size = bitmap_bytes(count)
    if not isinstance(data, bytes) or len(data) < HEAD + size:
        raise Refused("its message is too short, or none of secure aggregation")
    return members_of(data[HEAD : HEAD + size], count)


def bitmap_bytes(count: int) -> int:
    """Bytes of a bitmap."""
    return -(-count // 8)


def share_check(owner: int, holder: int, kind: bytes, share: bytes) -> bytes:
    """What the server knows of a share before it is revealed. A share has 256 random bits, so this does not tell it."""
    return hashlib.sha256(b"share" + kind + owner.to_bytes(4, "big") + holder.to_bytes(4, "big") + share).digest()[:CHECK]


def commitment(seed: bytes) -> bytes:
    """What the server knows of a client's own mask before it is opened."""
    return derived(seed, b"commitment")


def pair_key(shared: bytes, context: bytes) -> bytes:
    """The key of the mask that two neighbours have in common, of what their key agreement gave."""
    return derived(shared, b"pair mask", context)


def own_key(seed: bytes, context: bytes) -> bytes:
    """The key of a client's own mask."""
    return derived(seed, b"own mask", context)


def box_key(shared: bytes, context: bytes, sender: int, receiver: int) -> bytes:
    """The key that encrypts one message: the shares that ``sender`` gives ``receiver``."""
    return derived(shared, b"shares", context, sender.to_bytes(4, "big"), receiver.to_bytes(4, "big"))
