"""Sending an update only when it contains enough tokens. Nothing is added or hidden; the client waits.

Span attacks read a batch whose different tokens are fewer than the model is wide (DAGER's limit on the batch). With
``accumulate:1.0d`` no such update is sent. Words still stand out of the full space (``span.leverage``). It does not stop
attacks on the word embedding's gradient, whose rows name the words at any batch size (freeze the embeddings), or matching
attacks, which have no such limit.
"""

from __future__ import annotations

import math
from typing import Any

from rasura.core.accumulation import NAME, needed_tokens, tokens_in
from rasura.core.interfaces import InputError, NotSent, Transform, made
from rasura.core.mechanisms import Accumulate
from rasura.core.rng import Randomness
from rasura.core.specs import TEXT, DefenseSpec, Strength
from rasura.core.values import Message, Stage

Held = tuple[int, int]
"""The state: the number of different tokens in the step, and the number needed for sending."""


def accumulate(*, tokens: int | None = None, widths: float | None = None) -> Transform[Message, Message, Held]:
    """Send an update only if it was made of at least ``tokens`` different tokens, or ``widths`` times the hidden size d.

    Special tokens count; padding and tokens without a gradient do not (``accumulation.tokens_in``). Applied to a step with
    fewer tokens, it raises ``NotSent``: training and audits collect batches first (``rasura.core.accumulation``). Raises
    ``InputError`` unless exactly one of the two is given, above 0.
    """
    if (tokens is None) == (widths is None):
        raise InputError(f"{NAME}: expected either tokens or a multiple of the hidden size")
    given = tokens if tokens is not None else widths
    if isinstance(given, bool) or given is None or not 0 < given < math.inf or (tokens is not None and given != int(given)):
        raise InputError(f"{NAME}: {given!r}; expected a whole number of tokens, or a multiple of the hidden size, above 0")
    mechanism = Accumulate(tokens=None if tokens is None else int(tokens), widths=widths)

    def init(seen: Any) -> Held:
        model, inputs = seen
        return len(tokens_in(inputs)), needed_tokens([mechanism], model)

    def apply(message: Message, state: Held, rng: Randomness) -> tuple[Message, Held]:
        held, needed = state
        if held < needed:
            raise NotSent(f"the texts hold {held} different tokens, but {NAME} waits for {needed}")
        return message, state

    return made(Stage.WIRE, mechanism, init, apply)


def described(text: str) -> Transform[Message, Message, Held]:
    """``"768"`` (tokens) or ``"1.0d"`` (times the hidden size), as written on the command line."""
    try:
        return accumulate(widths=float(text[:-1])) if text.endswith("d") else accumulate(tokens=int(text))
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{NAME}:{text}: expected a number of tokens such as 768, or of hidden sizes such as 1.0d"
        ) from None


SPEC = DefenseSpec(
    name="accumulate",
    about="waits until the update covers N different tokens, or N times the hidden size: accumulate:768, accumulate:1.0d",
    source="Rasura",
    make=described,
    example="accumulate:8",
    parameter=str,
    tasks=TEXT,
    known_by=("embedding-rows", "span"),
    strength=Strength(name="hidden sizes", weakest=0.125, strongest=2.0, points=5, end="d"),
    waits=True,
)
