"""The server's side of a round: the messages of the clients, and the sum that the server cannot read.

Plain values and bytes, without Flower.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rasura.accounting.distributed import SumLedger
from rasura.core.interfaces import InputError
from rasura.core.values import Message, Parameter
from rasura.core.wire import from_bytes, to_bytes
from rasura.defenses import homomorphic, homomorphic_keys, sealing
from rasura.defenses.secure_aggregation.noise import NORM
from rasura.defenses.secure_aggregation.server import RoundEnded
from rasura.integrations.flower.agreement import MIN_CLIENTS, Agreement, check_few, check_sums, few, read_scales
from rasura.integrations.flower.identities import UNKNOWN
from rasura.integrations.flower.refusals import Failure, grouped, one_line
from rasura.integrations.flower.rounds import Ticket, told_of_weights
from rasura.integrations.flower.scales import Scale, each
from rasura.integrations.flower.secure_sums import Ask, SecureSums, terms_digest


class RoundFailed(RuntimeError):
    """Too few clients sent a valid update, or clients refuse one sum after the other. The message gives the reasons."""


Taken = tuple[int, Message, float]
"""A node, its message and its share."""


@dataclass(frozen=True)
class Sum:
    """What the server holds after a round: the clear part of the model, and the sum that it cannot read."""

    round: int
    clear: dict[str, Tensor]
    aggregate: bytes


@dataclass
class Collector:
    """The server's side: what it knows of the model, and the sum that it cannot read.

    ``agreement.keys`` is the public context; a secret one is refused. ``min_clients``: how many clients a round needs, at
    least ``MIN_CLIENTS`` unless ``allow_few_clients``: in a sum of few clients, each learns about the others. ``seen`` is
    called with every valid message. ``lost``: the rounds whose sum clients refused. ``ledger`` counts the rounds whose sum
    had noise. A run that goes on from another counts on in ``earlier``, a ledger or its file; ``InputError`` for one of
    other sums.
    """

    agreement: Agreement
    min_clients: int = MIN_CLIENTS
    max_examples: int = 0
    first_scale: Scale = 1e-3
    log: Callable[[str], None] = print
    seen: Callable[[int, int, Message], None] | None = None
    allow_few_clients: bool = False
    clear: dict[str, Tensor] = field(default_factory=dict)
    aggregate: bytes = b""
    round: int = 0
    tickets: dict[int, Ticket] = field(default_factory=dict)
    secure: SecureSums | None = None
    earlier: SumLedger | str | Path | None = None
    ledger: SumLedger = field(init=False)
    lost: list[int] = field(default_factory=list)
    _sum_of: int = 0  # the round of the latest sum
    _opened_before: Sum | None = None  # the sum before it, from which clients trained
    _again: bool = False  # whether clients refused a sum, and have trained from no newer one since

    def __post_init__(self) -> None:
        self.clear = dict(self.agreement.start)
        sums = NORM, max(1, self.agreement.count)
        given = SumLedger(*sums) if self.earlier is None else self.earlier
        self.ledger = given if isinstance(given, SumLedger) else SumLedger.kept(given, *sums)
        if (self.ledger.norm, self.ledger.entries) != sums:
            raise InputError(
                f"the earlier ledger counts sums of {self.ledger.entries} entries of the norm {self.ledger.norm}; expected "
                f"{self.agreement.count} entries of the norm {NORM}"
            )
        if self.agreement.sealed:
            homomorphic_keys.server_context(self.agreement.keys)
            self.check_clients(self.min_clients)
        each(self.first_scale, self.agreement.start)
        if self.min_clients < 1 or self.max_examples < 0:
            raise InputError(
                f"min_clients {self.min_clients}, max_examples {self.max_examples}; expected at least 1, and at least 0"
            )
        check_few(self.min_clients, self.allow_few_clients)

    @property
    def max_clients(self) -> int | None:
        """Maximum number of clients in a sum with these keys; None if nothing is sealed."""
        fits: int = self.agreement.keys.parameters.max_clients if self.agreement.sealed else 0
        return fits or None

    def check_clients(self, count: int) -> None:
        """Refuse more clients than the keys fit, with the number that fits."""
        if self.max_clients is not None and count > self.max_clients:
            raise InputError(
                f"{count} clients would train, but these keys fit {self.max_clients}; make new keys: rasura "
                f"keys --clients {count}"
            )

    def visible(self) -> dict[str, Tensor]:
        """The tensors that the server sends: those that are not sealed as a whole."""
        return {n: t for n, t in self.clear.items() if not self.agreement.whole(n)}

    def begin(self, number: int, nodes: Sequence[int], ask: Ask) -> dict[int, bytes]:
        """Start the secure sum of a round: what each client that goes on needs to mask. Raises ``RoundFailed`` where too few
        clients answer."""
        if not self.agreement.identities:
            self.log(f"round {number}: {UNKNOWN}")
        model = terms_digest(self.agreement, self.clear, self.max_examples, self.first_scale)
        self.secure = SecureSums(self.agreement, number, model, self.log, ask, self.ledger)
        try:
            return self.secure.begin(nodes)
        except RoundEnded as error:
            raise RoundFailed(f"round {number}: {error}") from None

    def ticket(self, number: int, node: int) -> Ticket:
        """A new ticket for ``node``; tickets of earlier rounds become invalid."""
        if number != self.round:
            self.round, self.tickets = number, {}
        made = Ticket(number, secrets.token_hex(16), self.max_examples, self.first_scale, self.aggregate)
        self.tickets[node] = made
        return made

    def read(self, node: int, data: object, examples: float) -> tuple[Message, float]:
        """A client's message and its weight, checked except for the ciphertexts. Raises ``InputError`` with the fault."""
        ticket = self.tickets.get(node)
        if ticket is None:
            raise InputError("it was not asked in this round, or it has already answered")
        if not isinstance(data, bytes):
            raise InputError("its reply does not hold a message of Rasura")
        share = ticket.share(examples)
        message = from_bytes(data, self.agreement.limits)
        if message.header.get("round") != ticket.round or message.header.get("nonce") != ticket.nonce:
            raise InputError("the message belongs to another round or client: it was replayed")
        check_sums(message, self.agreement)
        if self.agreement.sealed:
            read_scales(message.header.get("scales"), self.agreement)
        start = self.agreement.start
        if set(message.gradients) != set(start):
            raise InputError(f"it holds {len(message.gradients)} tensors; expected the {len(start)} that are trained")
        for name, gradient in message.gradients.items():
            if gradient.shape != start[name].shape or gradient.dtype != start[name].dtype:
                raise InputError(f"{name} is {tuple(gradient.shape)} {gradient.dtype}, unlike the start's")
            if name in self.agreement.hidden:
                shown = message.visible.get(name)
                hidden = self.agreement.hidden[name]
                if bool(hidden.any()) and (shown is None or bool((shown & hidden).any())):
                    raise InputError(f"{name} shows entries that should be sealed")
        del self.tickets[node]
        return message, share

    def judged(self, answered: Iterable[int], failed: Iterable[Failure]) -> bool:
        """Whether the clients refuse the latest sum; the server then goes back to the sum before it, and its round is lost.

        ``answered`` are the nodes that went on from the sum, ``failed`` the replies with an error. It takes as many refusals
        as a round needs clients, and more than went on: one client's refusal may be false. Each is logged. Raises
        ``RoundFailed`` if clients refused the sum before, too, or had opened this one.
        """
        refused = {f.node: f.why for f in failed if f.refused and f.node in self.tickets} if self.aggregate else {}
        if not refused:
            return False
        others = set(answered).intersection(self.tickets) - set(refused)
        told = (
            f"round {self.round}: {len(refused)} clients refuse the sum of round {self._sum_of}, {len(others)} went on from "
            f"it ({grouped(refused.items())})"
        )
        if len(refused) < self.min_clients or len(refused) <= len(others):
            self.log(f"{told}; it is kept, since going back takes {self.min_clients} refusals, and more than went on")
            return False
        before = self._opened_before
        if before is None:
            raise RoundFailed(f"{told}, which clients had opened before")
        self.lost.append(self._sum_of)
        self.clear, self.aggregate, self._sum_of, self._opened_before = before.clear, before.aggregate, before.round, None
        kept = f"what round {before.round} left" if before.round else "the start"
        told = f"{told}; round {self.lost[-1]} is lost, and the server goes back to {kept}"
        if self._again:
            raise RoundFailed(f"{told}, for the second time")
        self._again = True
        self.log(told)
        return True

    def collect(self, replies: Sequence[tuple[int, object, float]], failed: Sequence[Failure] = ()) -> list[int]:
        """Take a round's ``replies`` (node, bytes, examples), and those that ``failed``; the nodes whose update counts, in
        order. None counts where clients refuse the sum that they were to train from (``judged``).

        A client with any fault is refused with a logged reason: nothing from it enters the aggregate, and the others
        continue. Raises ``RoundFailed`` if fewer than ``min_clients`` are left; the server's state is then unchanged.
        """
        if self.judged([node for node, _, _ in replies], failed):
            return []
        taken: list[Taken] = []
        refused: list[tuple[int, str]] = []
        for node, data, examples in replies:
            try:
                taken.append((node, *self.read(node, data, examples)))
            except Exception as error:
                refused.append((node, _reason(error)))
        if self.agreement.sealed and taken:
            votes = Counter(str(m.header["scales"]) for _, m, _ in taken).most_common(2)
            agreed = None if len(votes) > 1 and votes[0][1] == votes[1][1] else votes[0][0]
            refused += [
                (n, "its scales differ from those of the others") for n, m, _ in taken if m.header["scales"] != agreed
            ]
            taken = [t for t in taken if t[1].header["scales"] == agreed]
        counted, sums = self._added(taken, refused)
        for node, why in refused:
            self.log(f"round {self.round}: client {node} is left out: {why}")
        if len(counted) < self.min_clients:
            reasons = grouped([*refused, *((f.node, f.why) for f in failed)]) or "the others did not answer"
            raise RoundFailed(
                f"round {self.round}: {len(counted)} updates are valid, but at least {self.min_clients} are "
                f"needed ({reasons})"
            )
        weights = [share for _, _, share in counted]
        grown = "noise" if self.agreement.noise else "rounding error" if self.agreement.count else ""
        for told in (few(len(counted)), told_of_weights(weights, self.max_examples, grown)):
            if told:
                self.log(f"round {self.round}: {told}")
        shares = sum(weights)
        summed = self._opened(shares)
        if self.seen is not None:
            for node, message, _ in counted:
                self.seen(self.round, node, message)
        clear = {}
        for name, before in self.clear.items():
            step = torch.zeros(before.shape, dtype=torch.float64)
            for _, message, share in counted:
                step += message.gradients[name].double() * (share / shares)
            clear[name] = (before.double() - step - summed.get(name, 0.0)).to(before.dtype)
        if self.agreement.sealed:
            self._again = self._again and self._opened_before is None
            self._opened_before = Sum(self._sum_of, self.clear, self.aggregate)
            header: dict[str, Parameter] = {
                "start": self.agreement.start_digest, "mask": self.agreement.mask_digest, "key": self.agreement.keys.key,
                "clients": len(counted), "shares": float(shares), "scales": counted[0][1].header["scales"],
            }  # fmt: skip
            scheme = self.agreement.keys.parameters.scheme
            sealed = {f"{scheme}/{k:06d}": data for k, data in enumerate(sums.ciphertexts)}
            self.aggregate = to_bytes(Message({}, {}, sealed, "aggregate", header))
        self.clear, self._sum_of = clear, self.round
        return [node for node, _, _ in counted]

    def _added(self, taken: Sequence[Taken], refused: list[tuple[int, str]]) -> tuple[list[Taken], Any]:
        """Who counts, and the sum of their ciphertexts; one after the other, so that a bad one is known by its client."""
        if not self.agreement.sealed and self.secure is None:
            return list(taken), None
        counted: list[Taken] = []
        sums: Any = None
        for node, message, share in taken:
            own = homomorphic.Sealed(tuple(message.sealed.values()))
            try:
                if self.secure is not None:
                    self.secure.add(node, own.ciphertexts[0])
                    counted.append((node, message, share))
                    continue
                self.check_clients(len(counted) + 1)
                sums = homomorphic.added([sums, own] if counted else [own], self.agreement.keys)
            except Exception as error:
                refused.append((node, _reason(error)))
                continue
            counted.append((node, message, share))
        return counted, sums

    def _opened(self, shares: float) -> dict[str, Tensor]:
        """The mean, by weights, of the entries that were summed securely, in tensors that are zero elsewhere."""
        if self.secure is None:
            return {}
        try:
            total = self.secure.opened(self.first_scale, shares) / shares
        except RoundEnded as error:
            raise RoundFailed(f"round {self.round}: {error}") from None
        nothing = {n: torch.zeros(t.shape, dtype=torch.float64) for n, t in self.clear.items()}
        return sealing.unflattened(total, nothing, {n: ~m for n, m in self.agreement.masked.items()})


def _reason(error: Exception) -> str:
    """Why a client is left out."""
    if not isinstance(error, InputError):
        return f"its message could not be read ({type(error).__name__})"
    return one_line(str(error))
