"""The client's side of a round: its stages, each once and in this order. A refusal ends the round for this client."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from rasura.core.ciphers import KEY, SIGNATURE, PrivateKey, SigningKey, WrongKey, decrypted, derived, encrypted
from rasura.core.errors import InputError
from rasura.defenses.secure_aggregation import messages as wire
from rasura.defenses.secure_aggregation.consistency import all_signed, masked_text, survivors_text
from rasura.defenses.secure_aggregation.encoding import CHECKS, packed
from rasura.defenses.secure_aggregation.graph import neighbours
from rasura.defenses.secure_aggregation.masks import add_masks
from rasura.defenses.secure_aggregation.messages import Refused, Round, Setting
from rasura.defenses.secure_aggregation.shamir import SHARE, split

NONCE = bytes(12)
"""Every key that encrypts shares encrypts one message only."""

STAGES = ("invited", "keyed", "shared", "masked", "signed", "done", "ended")

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class _Known:
    """What a client knows once it has the list of keys; recomputed from its secret whenever it is needed."""

    round: Round
    context: bytes
    index: int
    neighbours: tuple[int, ...]


class Client:
    """One client in one round. ``setting`` is its own view of what all agree on, never the server's word. ``identity`` signs
    its keys and the lists that it answers, where the setting has identities; every stage needs it then.

    Its secret lies in memory only, and is forgotten with the last stage and with every refusal. ``state`` and ``restored``
    move a client between processes: with that state and its message, one can read this client's update of this round.

    Every stage raises ``Refused`` for what does not fit, with the reason in one line.
    """

    def __init__(self, setting: Setting, identity: SigningKey | None = None) -> None:
        self.setting, self.stage, self._identity = setting, STAGES[0], identity
        self._secret = os.urandom(KEY)
        self._roster = self._own_share = self._inbox = self._list = b""

    def state(self) -> dict[str, bytes]:
        """Everything but the setting, as bytes."""
        return {
            "stage": self.stage.encode(), "setting": self.setting.digest(), "secret": self._secret, "roster": self._roster,
            "own_share": self._own_share, "inbox": self._inbox, "list": self._list,
        }  # fmt: skip

    @classmethod
    def restored(cls, setting: Setting, state: Mapping[str, bytes], identity: SigningKey | None = None) -> Client:
        """The client of a ``state``, which holds no ``identity``. Raises ``Refused`` for a state of another setting."""
        if state.get("setting") != setting.digest():
            raise Refused("the kept state belongs to another round, model or setting")
        made = cls(setting, identity)
        made.stage, made._secret, made._roster = state["stage"].decode(), state["secret"], state["roster"]
        made._own_share, made._inbox, made._list = state["own_share"], state["inbox"], state["list"]
        return made

    def keys(self) -> bytes:
        """Stage 1: two fresh public keys, signed where the setting has identities.

        Refused: a setting with identities, of which this client has none.
        """
        return self._step("invited", "keyed", self._keys)

    def shares(self, roster: bytes) -> bytes:
        """Stage 2: with the list of all keys, the encrypted shares for each neighbour, and what the server checks them by.

        Refused: a list without this client's keys, or with keys that no identity of the setting signed for this round, and
        fewer clients than the setting demands.
        """
        return self._step("keyed", "shared", self._shares, roster)

    def masked(self, inbox: bytes, steps: NDArray[np.int32]) -> bytes:
        """Stage 3: the encoded update ``steps`` ``(values,)``, masked; with identities, signed for whom it was masked.

        Refused: an inbox with fewer readable shares than the threshold: the neighbours have another model or another list of
        clients, so that this client would stand alone.
        """
        return self._step("shared", "masked", self._masked, inbox, steps)

    def signed(self, survivors: bytes) -> bytes:
        """Stage 4, with identities alone: a signature under the list of the ``survivors``. The client never answers another.

        Refused: what ``revealed`` refuses, and a neighbour on the list whose update was masked for other clients than those
        that this client knows of.
        """
        return self._step("masked", "signed", self._signed, survivors)

    def revealed(self, survivors: bytes) -> bytes:
        """The last stage: the shares that open the sum of the ``survivors``: for each neighbour among them that of its own
        mask, and for each that disappeared that of its key. One list says which, so a request cannot ask for both. With
        identities, the message holds the signatures under the list that this client signed (``consistency``).

        Refused: a sum of fewer clients than the setting demands, of clients who did not send shares, or without this client;
        with identities, a list that too few have signed.
        """
        return self._step("signed" if self.setting.identities else "masked", "done", self._revealed, survivors)

    @property
    def round(self) -> Round:
        """What follows from the list of keys, from stage 2 on."""
        return self._known.round

    def _step(self, before: str, after: str, what: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        if self.stage != before:
            raise Refused(f"this client is {self.stage}, and not {before}; a stage is answered once, in its order")
        self.stage = STAGES[-1]
        try:
            found = what(*given, **named)
        except InputError as error:
            self._forget()
            raise error if isinstance(error, Refused) else Refused(str(error)) from None
        self.stage = after
        if after == "done":
            self._forget()
        return found

    def _forget(self) -> None:
        self._secret = self._roster = self._own_share = self._inbox = self._list = b""
        for kept in ("_known", "_mask_key", "_box", "_agreements", "_opened"):
            self.__dict__.pop(kept, None)

    def _derived(self, purpose: bytes) -> bytes:
        return derived(self._secret, purpose)

    @cached_property
    def _mask_key(self) -> PrivateKey:
        return PrivateKey(self._derived(b"mask key"))

    @cached_property
    def _box(self) -> PrivateKey:
        return PrivateKey(self._derived(b"box key"))

    @cached_property
    def _agreements(self) -> dict[int, bytes]:
        return {}

    def _publics(self) -> tuple[bytes, bytes]:
        return self._mask_key.public, self._box.public

    @cached_property
    def _known(self) -> _Known:
        found = wire.read_roster(self._roster, self.setting)
        own = self._publics()
        if own not in found.keys:
            raise Refused("the list of keys does not hold this client's own")
        index = found.keys.index(own)
        if found.signers and (self._identity is None or found.signers[index] != self._identity.public):
            raise Refused("the list of keys names somebody else for this client's own keys")
        return _Known(found, found.context(), index, neighbours(index, found.context(), found.plan))

    def _keys(self) -> bytes:
        pair, setting = self._publics(), self.setting
        signed = b""
        if setting.identities:
            if self._identity is None or self._identity.public not in setting.identities:
                raise Refused("this client has no identity that is on the list of identities")
            signed = self._identity.public + self._identity.signed(wire.to_sign(setting, pair))
        return wire.headed(wire.KEYS, setting.session, b"".join(pair) + signed)

    def _shares(self, roster: bytes) -> bytes:
        self._roster = roster
        known, seed = self._known, self._derived(b"own mask")
        if len(known.round.keys) < known.round.least:
            raise Refused(f"{len(known.round.keys)} clients take part; expected at least {known.round.least}")
        _ = known.round.encoding  # raises for more clients than the encoding fits
        holders, threshold = (*known.neighbours, known.index), known.round.plan.threshold
        own, key = split(seed, holders, threshold), split(self._derived(b"mask key"), holders, threshold)
        self._own_share = own[known.index]
        checks = [known.context, wire.commitment(seed), wire.share_check(known.index, known.index, b"own", self._own_share)]
        boxes = []
        for holder in known.neighbours:
            box = self._box_key(holder, known.index, holder)
            boxes.append(encrypted(box, NONCE, own[holder] + key[holder], known.context))
            checks += [wire.share_check(known.index, holder, b"own", own[holder])]
            checks += [wire.share_check(known.index, holder, b"key", key[holder])]
        return wire.headed(wire.SHARES, self.setting.session, b"".join(checks + boxes))

    def _box_key(self, other: int, sender: int, receiver: int) -> bytes:
        shared = self._agreements.get(other) or self._box.agreed(self._known.round.keys[other][1])
        self._agreements[other] = shared
        return wire.box_key(shared, self._known.context, sender, receiver)

    def _present(self) -> tuple[set[int], list[int], bytes]:
        """Who sent shares, which of them are neighbours, and their encrypted shares."""
        known, count = self._known, len(self._known.round.keys)
        size, present = wire.bitmap_bytes(count), wire.leading(self._inbox, count)
        near = [k for k in known.neighbours if k in present]
        body = wire.body_of(self._inbox, wire.INBOX, self.setting.session, size + wire.SEALED * len(near))
        return present, near, body[size:]

    @cached_property
    def _opened(self) -> dict[int, bytes]:
        """The neighbours' shares that can be read: of another setting or list of keys, none can."""
        _, near, boxes = self._present()
        found = {}
        for place, sender in enumerate(near):
            box = boxes[place * wire.SEALED : (place + 1) * wire.SEALED]
            try:
                key = self._box_key(sender, sender, self._known.index)
                found[sender] = decrypted(key, NONCE, box, self._known.context)
            except WrongKey:
                continue
        return found

    def _masked(self, inbox: bytes, steps: NDArray[np.int32]) -> bytes:
        self._inbox = inbox
        known, encoding = self._known, self._known.round.encoding
        present, near, _ = self._present()
        if len(present) < known.round.least or known.index not in present:
            raise Refused(f"{len(present)} clients sent shares; expected this one and {known.round.least} in all")
        readable = 1 + len(self._opened)
        if readable < known.round.plan.threshold:
            raise Refused(
                f"{readable} shares can be read, and {known.round.plan.threshold} are needed: the neighbours train another "
                "model, or have another list of clients"
            )
        right = steps.shape == (encoding.values,) and steps.dtype == np.int32
        if not right or max(int(steps.max()), -int(steps.min())) > encoding.half:
            raise Refused(f"an update of {steps.shape} steps; expected {encoding.values} within {encoding.half} of zero")
        vector = np.zeros(encoding.values + CHECKS, np.uint32)
        vector[: encoding.values] = steps.view(np.uint32)
        vector[encoding.values] = 1
        masks = [(wire.own_key(self._derived(b"own mask"), known.context), 1)]
        for other in near:
            shared = self._mask_key.agreed(known.round.keys[other][0])
            masks.append((wire.pair_key(shared, known.context), 1 if known.index < other else -1))
        add_masks(vector, masks)
        signature = self._signature(masked_text(known.context, self._lists()[0]))
        return wire.headed(wire.MASKED, self.setting.session, packed(vector, encoding.modulus_bits) + signature)

    def _signature(self, text: bytes) -> bytes:
        return self._identity.signed(text) if self.setting.identities and self._identity is not None else b""

    def _lists(self) -> tuple[bytes, bytes]:
        """The bitmaps of who sent shares, and of the survivors that this client was told."""
        return wire.bitmap(self._present()[0], len(self._known.round.keys)), self._list

    def _check(self, stayed: set[int]) -> None:
        least = self._known.round.least
        if self._known.index not in stayed or not stayed <= self._present()[0] or len(stayed) < least:
            raise Refused(
                f"the sum of {len(stayed)} clients should be opened; expected at least {least} of those who "
                "sent shares, and this client among them"
            )

    def _signed(self, survivors: bytes) -> bytes:
        if not self.setting.identities:
            raise Refused("a list of survivors is signed with an identity, and this setting has none")
        known, count = self._known, len(self._known.round.keys)
        stayed, size = wire.leading(survivors, count), wire.bitmap_bytes(count)
        self._check(stayed)
        near = set(known.neighbours) & stayed
        body = wire.body_of(survivors, wire.SURVIVORS, self.setting.session, size + SIGNATURE * len(near))
        self._list = body[:size]
        present, told = self._lists()
        if not all_signed(masked_text(known.context, present), known.round.signers, near, body[size:]):
            raise Refused("a neighbour masked its update for other clients than those that sent shares to this one")
        text = survivors_text(known.context, present, told)
        return wire.headed(wire.SIGNED, self.setting.session, self._signature(text))

    def _agreed(self, confirmed: bytes) -> set[int]:
        """The survivors on the list that this client signed, if enough others signed the same."""
        shared, size = self._known.round, len(self._list)
        signers, stayed = wire.leading(confirmed, len(shared.keys)), wire.members_of(self._list, len(shared.keys))
        body = wire.body_of(confirmed, wire.CONFIRMED, self.setting.session, size + SIGNATURE * shared.quorum)
        text = survivors_text(self._known.context, *self._lists())
        enough = len(signers) == shared.quorum and signers <= stayed
        if not enough or not all_signed(text, shared.signers, signers, body[size:]):
            raise Refused(f"the list of survivors that this client signed is not signed by {shared.quorum} of those on it")
        return stayed

    def _revealed(self, told: bytes) -> bytes:
        known, count = self._known, len(self._known.round.keys)
        if self.setting.identities:
            stayed = self._agreed(told)
        else:
            body = wire.body_of(told, wire.SURVIVORS, self.setting.session, wire.bitmap_bytes(count))
            stayed = wire.members_of(body, count)
            self._check(stayed)
        found = {k: b[:SHARE] if k in stayed else b[SHARE:] for k, b in self._opened.items()}
        entries = [k.to_bytes(4, "big") + share for k, share in sorted({**found, known.index: self._own_share}.items())]
        return wire.headed(wire.REVEALED, self.setting.session, b"".join(entries))
