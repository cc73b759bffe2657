"""Smaller messages with fewer bits per entry. They are meant to save traffic; what they hide is measured as for any
protection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rasura.core.interfaces import Transform, made
from rasura.core.mechanisms import Bf16, Fp16, Sign
from rasura.core.protection import Protection
from rasura.core.rng import Randomness
from rasura.core.specs import DefenseSpec
from rasura.core.values import Message, Stage
from rasura.defenses.compose import stateless


def _each(told: Protection, change: Callable[[Tensor], Tensor]) -> Transform[Message, Message, None]:
    def apply(message: Message, state: None, rng: Randomness) -> tuple[Message, None]:
        changed = {n: change(g) for n, g in message.gradients.items()}
        return replace(message, gradients=changed), None

    return made(Stage.WIRE, told, stateless, apply)


def fp16() -> Transform[Message, Message, None]:
    """Entries in half precision: 11 bits; values below 6e-8 are lost."""
    return _each(Fp16(), lambda g: g.to(torch.float16).to(g.dtype))


def bf16() -> Transform[Message, Message, None]:
    """Entries in bfloat16: 8 bits, with the range of float32."""
    return _each(Bf16(), lambda g: g.to(torch.bfloat16).to(g.dtype))


def sign() -> Transform[Message, Message, None]:
    """Only the signs, one bit per entry (signSGD, Bernstein et al. 2018); zeros stay zero."""
    return _each(Sign(), torch.sign)


FP16 = DefenseSpec(
    name="fp16",
    about="sends entries in half precision (float16)",
    source="Zhu et al. 2019 (DLG), sec. 5: low precision",
    make=fp16,
    example="fp16",
    known_by=(),
    known_by_on_images=(),
)

BF16 = DefenseSpec(
    name="bf16",
    about="sends entries in bfloat16",
    source="Zhu et al. 2019 (DLG), sec. 5: low precision",
    make=bf16,
    example="bf16",
    known_by=(),
    known_by_on_images=(),
)

SIGN = DefenseSpec(
    name="sign",
    about="sends only the signs",
    source="Bernstein et al. 2018 (signSGD), Algorithm 1",
    make=sign,
    example="sign",
    known_by=("pursuit",),
)
