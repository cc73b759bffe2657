"""What the clients and the server of a federation agree on before the first round, and what each message must match."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.interfaces import Defense, InputError
from rasura.core.values import Message, Stage
from rasura.core.wire import Limits, mask_digest
from rasura.defenses import sealing
from rasura.defenses.homomorphic_keys import LIMIT
from rasura.registry import parse_defense, parts


@dataclass(frozen=True)
class Agreement:
    """``start``: the public weights that training starts from, by parameter name; ``sealed``: true where an entry is sealed,
    for every name, or empty; ``keys``: the scheme's context, the clients' secret one or the server's public one.

    The mask is made once, from the public start, so it reveals nothing about any text and is the same in every round.
    """

    defense: str
    start: Mapping[str, Tensor]
    sealed: Mapping[str, Tensor]
    keys: Any
    start_digest: str
    mask_digest: str

    @property
    def count(self) -> int:
        """Sealed entries."""
        return sum(int(m.sum()) for m in self.sealed.values())

    @property
    def ciphertexts(self) -> int:
        """How many a message holds."""
        return -(-self.count // self.keys.parameters.values) if self.sealed else 0

    @property
    def limits(self) -> Limits:
        """What a receiver takes of one message, by what such a message holds."""
        entries, most = sum(t.numel() for t in self.start.values()), LIMIT
        header = 4096 + 256 * (len(self.start) + self.ciphertexts)
        total = header + 9 * entries + (1 << 16) * (1 + len(self.start)) + self.ciphertexts * (4 + most)
        return Limits(total, header, entries, len(self.start), self.ciphertexts, most)

    def whole(self, name: str) -> bool:
        """Whether every entry of a tensor is sealed, so that the server has nothing to send for it."""
        return name in self.sealed and bool(self.sealed[name].all())

    def wire(self, scales: Mapping[str, float], processes: int) -> Defense:
        """The transforms that the client's update goes through."""
        given = {"keys": self.keys, "scales": scales, "agreed": self.sealed, "processes": processes}
        return tuple(p for p in parse_defense(self.defense, given) if p.stage in (Stage.AGGREGATE, Stage.WIRE))


def local_part(defense: str) -> Defense:
    """What the app itself must do of ``defense``, in the steps that it trains (``rasura.step``): DATA and MODEL."""
    return tuple(p for p in parse_defense(defense) if p.stage in (Stage.DATA, Stage.MODEL))


def agree(defense: str, model: nn.Module, keys: Any = None, seed: int = 0) -> Agreement:
    """The agreement for training the parameters of ``model`` that require gradients.

    ``model`` must be the same for all: the published weights, with a head drawn from a seed. Raises ``InputError`` for a
    mask that clients cannot agree on, sealing without a scheme or without keys, and keys of another scheme.
    """
    start = {n: p.detach().cpu().clone() for n, p in model.named_parameters() if p.requires_grad}
    if not start:
        raise InputError("the model has no trainable parameter; expected at least one with requires_grad")
    if any(p.mechanism.name == "sign" for p in parse_defense(defense)):
        raise InputError("sign drops the size of an update, so every weight would move by 1; leave it out of the defense")
    wanted = [value for name, value in parts(defense) if name == "sealing"]
    if len(wanted) > 1:
        raise InputError(f"defense {defense!r} seals twice; remove one of the parts")
    sealed: dict[str, Tensor] = {}
    if wanted:
        settings = sealing.parsed(wanted[0])
        if settings.scheme == "none":
            raise InputError("sealing without a scheme loses the sealed entries; write sealing:.../scheme=bfv")
        if keys is None:
            raise InputError("sealing needs keys; make them with rasura keys, and pass clients.secret or server.public")
        if keys.parameters.scheme != settings.scheme:
            raise InputError(f"the keys are for {keys.parameters.scheme}, but the defense seals with {settings.scheme}")
        sealed = sealing.agreed_mask(settings, model, list(start), seed)
    mask = mask_digest({n: ~m for n, m in sealed.items()})
    return Agreement(defense, start, sealed, keys if wanted else None, _digest(start), mask)


def _digest(weights: Mapping[str, Tensor]) -> str:
    out = hashlib.sha256()
    for name, tensor in weights.items():
        out.update(f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode())
        out.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return out.hexdigest()[:16]


def next_scales(moved: Mapping[str, Tensor], first: float) -> str:
    """The scale of each tensor for the next round, from the last decrypted aggregate ``moved``, as text for a header.

    The largest entry of the aggregate plus ``first``, the agreed largest change of an entry in one round. A multiple of the
    aggregate would be finer for small updates. But when the clients' updates cancel out, the aggregate says nothing about
    their size, and clipping them would do more harm than rounding. Scales are powers of two: the server, which passes them
    to clients that join later, learns only the order of magnitude of each tensor.
    """
    if not 0 < first < math.inf:
        raise InputError(f"the scale of the first round is {first}; expected a number above 0")
    sizes = [float(m.abs().max()) if m.numel() else 0.0 for m in moved.values()]
    return json.dumps([math.ceil(math.log2(s + first)) for s in sizes])


def read_scales(text: object, agreement: Agreement) -> dict[str, float]:
    """Scales by parameter name. Raises ``InputError`` for what ``next_scales`` does not write."""
    try:
        found = json.loads(text) if isinstance(text, str) and len(text) < 16 * len(agreement.start) + 16 else None
    except (ValueError, RecursionError):
        found = None
    whole = isinstance(found, list) and len(found) == len(agreement.start)
    if not whole or not all(type(e) is int and -120 <= e <= 60 for e in found or []):
        raise InputError("the message does not state a scale for each tensor")
    return {n: 2.0**e for n, e in zip(agreement.start, found or [])}


def check_sums(message: Message, agreement: Agreement) -> None:
    """Check that ``message`` has these keys, this mask and this many ciphertexts. Otherwise raises ``InputError`` with one
    line."""
    told = message.header
    if told.get("start") != agreement.start_digest:
        raise InputError(f"it starts from other weights ({told.get('start')!r}; expected {agreement.start_digest})")
    if agreement.sealed:
        for name, expected in (("mask", agreement.mask_digest), ("key", agreement.keys.key)):
            if told.get(name) != expected:
                raise InputError(f"its {name} is {told.get(name)!r}; the agreed one is {expected}")
    if len(message.sealed) != agreement.ciphertexts:
        raise InputError(f"it holds {len(message.sealed)} ciphertexts; expected {agreement.ciphertexts}")
