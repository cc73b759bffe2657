"""What the clients and the server of a federation agree on before the first round, and what each message must match."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.ciphers import SIGNATURE
from rasura.core.interfaces import Defense, InputError
from rasura.core.values import Message, Stage
from rasura.core.wire import Limits, mask_digest
from rasura.defenses import sealing
from rasura.defenses.homomorphic_keys import LIMIT
from rasura.defenses.secure_aggregation.encoding import CHECKS
from rasura.defenses.secure_aggregation.messages import FEWEST, HEAD
from rasura.integrations.flower.library import log
from rasura.integrations.flower.scales import LEAST, MOST, Scale, each
from rasura.registry import parse_defense, parts
from rasura.victims.step import defended

MIN_CLIENTS = 3
"""Minimum number of clients in a round. With two, each could subtract its own update from the sum and obtain the other's."""

BITS, NOISY_BITS = 16, 24
"""Bits of a value that is summed securely, without noise and with room for noise."""

HELD = (torch.float16, torch.float32, torch.float64)
"""Types of weights that Flower's arrays hold: NumPy knows no bfloat16."""


@dataclass(frozen=True)
class Agreement:
    """``start``: the public weights that training starts from, by parameter name; ``sealed``: true where an entry is sealed,
    for every name, or empty; ``keys``: the scheme's context, the clients' secret one or the server's public one. ``masked``:
    true where an entry is summed securely instead. ``least``: a client never opens a sum of fewer clients. ``noise``:
    the deviation of the noise in the sum, as a multiple of ``clip``, the largest norm of a client's update; ``identities``:
    the public keys of all who may take part, empty where that is not checked. ``frozen``: the names that ``defense`` leaves
    as they are; what the app trained of them is never sent.

    The mask is made once, from the public start, so it reveals nothing about any text and is the same in every round.
    Raises ``InputError`` for noise under a mask with holes: it would bound nothing of the entries that are sent clear.
    """

    defense: str
    start: Mapping[str, Tensor]
    sealed: Mapping[str, Tensor]
    keys: Any
    start_digest: str
    mask_digest: str
    masked: Mapping[str, Tensor] = field(default_factory=dict)
    least: int = 3
    noise: float = 0.0
    clip: float = 1.0
    identities: tuple[bytes, ...] = ()
    frozen: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.noise:
            return
        total = sum(t.numel() for t in self.start.values())
        same = {n: m.shape for n, m in self.masked.items()} == {n: t.shape for n, t in self.start.items()}
        summed = sum(int(m.sum()) for m in self.masked.values() if m.dtype == torch.bool)
        if not same or summed != total:
            raise InputError(
                f"noise in the sum: {summed} of the {total} entries of an update are summed securely, and the rest would be "
                "sent in the clear, without noise; expected all of them, as with sealing:all/by=secagg"
            )

    @property
    def hidden(self) -> Mapping[str, Tensor]:
        """True for entries that are sealed, or summed securely; the server is shown none of them."""
        return self.masked or self.sealed

    @property
    def count(self) -> int:
        """How many entries are hidden."""
        return sum(int(m.sum()) for m in self.hidden.values())

    @property
    def bits(self) -> int:
        """Bits of a value that is summed securely."""
        return NOISY_BITS if self.noise else BITS

    @property
    def ciphertexts(self) -> int:
        """How many a message holds."""
        return -(-self.count // self.keys.parameters.values) if self.sealed else int(bool(self.masked))

    @property
    def limits(self) -> Limits:
        """What a receiver takes of one message, by what such a message holds."""
        entries = sum(t.numel() for t in self.start.values())
        most = HEAD + 4 * (self.count + CHECKS) + SIGNATURE if self.masked else LIMIT
        header = 4096 + 256 * (len(self.start) + self.ciphertexts)
        total = header + 9 * entries + (1 << 16) * (1 + len(self.start)) + self.ciphertexts * (4 + most)
        return Limits(total, header, entries, len(self.start), self.ciphertexts, most)

    def whole(self, name: str) -> bool:
        """Whether every entry of a tensor is sealed, so that the server has nothing to send for it."""
        return name in self.sealed and bool(self.sealed[name].all())

    def wire(self, scales: Mapping[str, float]) -> Defense:
        """The transforms that the client's update goes through."""
        given = {"keys": self.keys, "scales": scales, "agreed": self.sealed} if self.sealed else {}
        return tuple(p for p in parse_defense(self.defense, given) if p.stage in (Stage.AGGREGATE, Stage.WIRE))


def needs_keys(defense: str) -> bool:
    """Whether a defense encrypts with keys that somebody must make before the first round."""
    schemes = [sealing.parsed(value).scheme for name, value in parts(defense) if name == "sealing"]
    return any(scheme != "secagg" for scheme in schemes)


def local_part(defense: str) -> Defense:
    """What the app itself must do of ``defense``, in the steps that it trains (``rasura.step``): DATA and MODEL."""
    return tuple(p for p in parse_defense(defense) if p.stage in (Stage.DATA, Stage.MODEL))


def agree(
    defense: str,
    model: nn.Module,
    keys: Any = None,
    seed: int = 0,
    *,
    min_clients: int = MIN_CLIENTS,
    allow_few_clients: bool = False,
    identities: tuple[bytes, ...] = (),
    classes: Sequence[str] = (),
) -> Agreement:
    """The agreement for training the parameters of ``model`` that require gradients.

    ``model`` must be the same for all: the published weights, with a head drawn from a seed. So must ``classes``, the names
    of its classes in order, where labels are text: others are refused as other weights are. A client refuses to open a sum
    of fewer than ``min_clients``. Less than three are refused without ``allow_few_clients``, where a defense seals; with it,
    the log says here and in every such round that clients can obtain each other's updates.
    With secure aggregation and ``identities`` (``read_identities``), it checks that each key of a round was signed by one
    of them. Raises ``InputError`` for ``identities`` without secure aggregation, a mask that clients cannot agree on or that
    seals nothing, sealing without a scheme or without keys, keys of another scheme, and weights in bfloat16.
    """
    start = {n: p.detach().cpu().clone() for n, p in model.named_parameters() if p.requires_grad}
    if not start:
        raise InputError("the model has no trainable parameter; expected at least one with requires_grad")
    for name, tensor in start.items():
        if tensor.dtype not in HELD:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise InputError(f"{name} is in {kind}, which Flower's arrays cannot hold; load the model in float32")
    wanted = _checked(defense)
    if identities and not any(sealing.parsed(value).scheme == "secagg" for value in wanted):
        raise InputError(
            f"the {len(identities)} identities would not be checked under the defense {defense!r}: only secure aggregation "
            'checks them. Use sealing:all/by=secagg, or leave identities empty: identities = "" in the app\'s pyproject.toml'
        )
    sealed: dict[str, Tensor] = {}
    frozen = _frozen(defense, model, start)
    if wanted:
        settings = sealing.parsed(wanted[0])
        if settings.scheme == "none":
            raise InputError("sealing without a scheme loses the sealed entries; write sealing:.../scheme=bfv")
        if settings.scheme == "secagg" and min_clients < FEWEST:
            one = f"min_clients is {min_clients}: secure aggregation sums at least {FEWEST} clients"
            raise InputError(f"{one}, as the sum of one is its update; expected at least {MIN_CLIENTS}")
        check_few(min_clients, allow_few_clients)
        if told := few(min_clients):
            log(f"min_clients = {min_clients}: {told}")
        if settings.scheme == "secagg":
            masked = _mask(defense, settings, model, start, seed)
            digest = mask_digest({n: ~m for n, m in masked.items()})
            sums = (masked, min_clients, settings.noise, settings.clip, identities, frozen)
            return Agreement(defense, start, {}, None, _digest(start, classes), digest, *sums)
        if keys is None:
            raise InputError("sealing needs keys; make them with rasura keys, and pass clients.secret or server.public")
        if keys.parameters.scheme != settings.scheme:
            raise InputError(f"the keys are for {keys.parameters.scheme}, but the defense seals with {settings.scheme}")
        sealed = _mask(defense, settings, model, start, seed)
    mask = mask_digest({n: ~m for n, m in sealed.items()})
    held = keys if wanted else None
    return Agreement(defense, start, sealed, held, _digest(start, classes), mask, least=min_clients, frozen=frozen)


def _checked(defense: str) -> list[str]:
    """The settings of sealing in ``defense``, if any. Raises ``InputError`` for what does not go with rounds."""
    wire = [p.mechanism.name for p in parse_defense(defense) if p.stage in (Stage.AGGREGATE, Stage.WIRE)]
    if "sign" in wire:
        raise InputError("sign drops the size of an update, so every weight would move by 1; leave it out of the defense")
    if "dp-ftrl" in wire:
        raise InputError("dp-ftrl correlates the noise of all steps of a training, and a message is one of them by itself; "
            "protect the client's own training by rasura.protect_training, or use dp-sgd here")  # fmt: skip
    return [value for name, value in parts(defense) if name == "sealing"]


def _frozen(defense: str, model: nn.Module, start: Mapping[str, Tensor]) -> frozenset[str]:
    """The names in ``start`` that ``defense`` freezes."""
    with defended(model, local_part(defense)) as kept:
        trained = {n for n, p in kept.named_parameters() if p.requires_grad}
    return frozenset(start) - trained


def _mask(
    defense: str, settings: sealing.Sealing, model: nn.Module, start: Mapping[str, Tensor], seed: int
) -> dict[str, Tensor]:
    found = sealing.agreed_mask(settings, model, list(start), seed)
    if not any(bool(m.any()) for m in found.values()):
        entries = sum(m.numel() for m in found.values())
        raise InputError(
            f"defense {defense!r} seals none of the {entries} entries of an update, so all of them would be sent in the "
            "clear; name entries that are trained, as sealing:all does"
        )
    return found


def check_few(min_clients: int, allow_few_clients: bool) -> None:
    """Refuse rounds of so few clients that each learns about the others, unless they are asked for by name."""
    if min_clients < 1 or (min_clients < MIN_CLIENTS and not allow_few_clients):
        raise InputError(
            f"a round of {min_clients} clients: with two, each can subtract its own update from the sum and obtain the "
            f"other's; expected at least {MIN_CLIENTS}, or pass allow_few_clients=True (allow-few-clients = true in the app)"
        )


def few(clients: int) -> str:
    """What it means that a sum of ``clients`` can be opened; empty for enough of them."""
    if clients >= MIN_CLIENTS:
        return ""
    if clients == 1:
        return "a sum of 1 client can be opened, and is that client's update"
    return f"a sum of {clients} clients can be opened, and each can subtract its own update from it and obtain the other's"


def _digest(weights: Mapping[str, Tensor], classes: Sequence[str]) -> str:
    told = json.dumps(list(classes)).encode() if classes else b""
    return hashlib.sha256(weights_digest(weights) + told).hexdigest()[:16]


def weights_digest(weights: Mapping[str, Tensor]) -> bytes:
    """32 bytes that differ where a name, a shape, a type or an entry does."""
    out = hashlib.sha256()
    for name, tensor in weights.items():
        out.update(f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode())
        out.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return out.digest()


def next_scales(moved: Mapping[str, Tensor], first: Scale) -> str:
    """The scale of each tensor for the next round, from the last decrypted aggregate ``moved``, as text for a header.

    The largest entry of the aggregate plus ``first``, the agreed largest change of an entry in one round. A multiple of the
    aggregate would be finer for small updates. But when the clients' updates cancel out, the aggregate says nothing about
    their size, and clipping them would do more harm than rounding. Scales are powers of two: the server, which passes them
    to clients that join later, learns only the order of magnitude of each tensor.
    """
    sizes = each(first, moved)
    return json.dumps(
        [
            math.ceil(math.log2(size + (float(m.abs().max()) if m.numel() else 0.0)))
            for m, size in zip(moved.values(), sizes.values())
        ]
    )


def read_scales(text: object, agreement: Agreement) -> dict[str, float]:
    """Scales by parameter name. Raises ``InputError`` for what ``next_scales`` does not write."""
    try:
        found = json.loads(text) if isinstance(text, str) and len(text) < 16 * len(agreement.start) + 16 else None
    except (ValueError, RecursionError):
        found = None
    whole = isinstance(found, list) and len(found) == len(agreement.start)
    if not whole or not all(type(e) is int and LEAST <= e <= MOST for e in found or []):
        raise InputError("the message does not state a scale for each tensor")
    return {n: 2.0**e for n, e in zip(agreement.start, found or [])}


def check_sums(message: Message, agreement: Agreement) -> None:
    """Check that ``message`` has these keys, this mask and this many ciphertexts. Otherwise raises ``InputError`` with one
    line."""
    told = message.header
    if told.get("start") != agreement.start_digest:
        found = f"{told.get('start')!r}; expected {agreement.start_digest}"
        raise InputError(f"it starts from other weights, or has other names of classes ({found})")
    if agreement.sealed:
        for name, expected in (("mask", agreement.mask_digest), ("key", agreement.keys.key)):
            if told.get(name) != expected:
                raise InputError(f"its {name} is {told.get(name)!r}; the agreed one is {expected}")
    if agreement.masked and told.get("mask") != agreement.mask_digest:
        raise InputError(f"its mask is {told.get('mask')!r}; the agreed one is {agreement.mask_digest}")
    if len(message.sealed) != agreement.ciphertexts:
        raise InputError(f"it holds {len(message.sealed)} ciphertexts; expected {agreement.ciphertexts}")
