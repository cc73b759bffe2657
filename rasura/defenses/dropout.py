"""Active dropout: the client trains with random masks that the server does not know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from rasura.core.interfaces import InputError, Transform, made
from rasura.core.mechanisms import Dropout
from rasura.core.rng import Randomness
from rasura.core.specs import TEXT, DefenseSpec, Strength
from rasura.core.values import Stage
from rasura.defenses.compose import stateless

_RATES = ("attention_dropout", "dropout", "hidden_dropout", "activation_dropout")
"""Float attributes that some models pass to ``F.dropout`` (Llama, OPT), where others have an ``nn.Dropout``."""


@dataclass(frozen=True)
class Rates:
    """A model's original dropout: the probability by module and attribute, and the training flag of every module."""

    rates: tuple[tuple[nn.Module, str, float], ...]
    modes: tuple[tuple[nn.Module, bool], ...]


def _rates(model: nn.Module) -> Iterator[tuple[nn.Module, str, float]]:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            yield module, "p", module.p
        for name in _RATES:
            value = module.__dict__.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                yield module, name, value


def dropout(p: float) -> Transform[nn.Module, nn.Module, Rates | None]:
    """Train with every dropout of the model at probability ``p``, including attention dropout; ``undo`` restores everything.

    Models of transformers 5 draw attention dropout with ``F.dropout`` from a module's ``p`` or from a plain float, so both
    are set and the model is put in train mode. A family without hidden dropout (Llama) drops attention weights only. The
    masks come from the step's randomness (``rng.drawing``). Raises ``InputError`` unless ``0 <= p < 1``, and for a model
    without dropout.
    """
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p < 1:
        raise InputError(f"dropout: p is {p!r}; expected a probability of at least 0 and below 1")

    def apply(model: nn.Module, state: Rates | None, rng: Randomness) -> tuple[nn.Module, Rates | None]:
        before = Rates(tuple(_rates(model)), tuple((m, m.training) for m in model.modules()))
        if not before.rates:
            raise InputError(f"dropout: {type(model).__name__} has no dropout to set; use another defense")
        model.train()
        for module, name, _ in before.rates:
            setattr(module, name, float(p))
        return model, before

    def undo(model: nn.Module, state: Rates | None) -> nn.Module:
        if state is not None:
            for module, name, value in state.rates:
                setattr(module, name, value)
            for module, mode in state.modes:
                module.training = mode
        return model

    return made(Stage.MODEL, Dropout(p), stateless, apply, undo)


SPEC = DefenseSpec(
    name="dropout",
    about="trains with dropout of probability P",
    source="Srivastava et al. 2014; GRAB, sec. 5.3",
    make=dropout,
    example="dropout:0.2",
    parameter=float,
    tasks=TEXT,
    known_by=("span",),
    strength=Strength(name="probability", weakest=0.05, strongest=0.9, points=5),
    neutral=lambda: dropout(0.0),
    draws=True,
)
