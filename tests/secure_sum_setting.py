"""Clients and a server of one secure sum, without a network."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rasura.core.errors import InputError
from rasura.defenses.secure_aggregation.client import Client
from rasura.defenses.secure_aggregation.messages import Setting
from rasura.defenses.secure_aggregation.server import Opened, Server

VALUES = 40

Tamper = Callable[[str, int, bytes], object]
"""What becomes of a client's message on its way: stage, client, bytes."""


def setting_of(**given: object) -> Setting:
    told = {"session": os.urandom(16), "number": 1, "model": bytes(32), "values": VALUES, "bits": 16, "least": 2}
    return Setting(**{**told, **given})  # type: ignore[arg-type]


def update(client: int, values: int = VALUES) -> NDArray[np.int32]:
    """A client's encoded update, over the whole range."""
    rng = np.random.default_rng(client)
    return rng.integers(-((1 << 15) - 1), 1 << 15, values, dtype=np.int32)


@dataclass
class Side:
    """One round: ``gone`` maps a stage to the clients that do not answer from there on, ``tamper`` changes messages."""

    setting: Setting
    count: int
    gone: Mapping[str, Iterable[int]] = field(default_factory=dict)
    tamper: Tamper = lambda stage, client, data: data
    updates: dict[int, NDArray[np.int32]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.server: Server[int] = Server(self.setting)
        self.clients = {k: Client(self.setting) for k in range(self.count)}
        self.refused: list[tuple[str, int, str]] = []
        self.sent: list[tuple[str, int, bytes]] = []
        self.inboxes: dict[int, bytes] = {}

    def _stage(self, name: str, asked: dict[int, Callable[[], bytes]]) -> None:
        take = getattr(self.server, name)
        absent = set(self.gone.get(name, ()))
        for k in absent:
            self.clients.pop(k, None)
        for k, answer in asked.items():
            if k not in self.clients:
                continue
            try:
                data = answer()
                self.sent.append((name, k, data))
                take(k, self.tamper(name, k, data))
            except InputError as error:
                self.refused.append((name, k, str(error)))

    def run(self) -> Opened:
        """All stages; the sum."""
        clients = self.clients
        self._stage("keys", {k: c.keys for k, c in clients.items()})
        roster = self.server.roster()
        self._stage("shares", {k: lambda k=k: clients[k].shares(roster[k]) for k in roster})  # type: ignore[misc]
        self.inboxes = inbox = self.server.inboxes()
        of = {k: self.updates.get(k, update(k, self.setting.values)) for k in inbox}
        self._stage("masked", {k: lambda k=k: clients[k].masked(inbox[k], of[k]) for k in inbox})  # type: ignore[misc]
        survivors = self.server.survivors()
        if self.setting.identities:
            told = survivors
            self._stage("signed", {k: lambda k=k: clients[k].signed(told[k]) for k in told})  # type: ignore[misc]
            survivors = self.server.confirmed()
        self._stage("revealed", {k: lambda k=k: clients[k].revealed(survivors[k]) for k in survivors})  # type: ignore[misc]
        return self.server.opened()

    def expected(self) -> NDArray[np.int64]:
        """The sum of the updates of those whom the server counted."""
        found = [self.updates.get(k, update(k, self.setting.values)).astype(np.int64) for k in self.server.counted]
        return np.sum(found, axis=0, dtype=np.int64)
