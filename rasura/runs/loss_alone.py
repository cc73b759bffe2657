"""What a protected model returns in training: its loss, and words where a loop asks for anything else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from rasura.core.errors import InputError


class NotInTraining(InputError, AttributeError, KeyError, IndexError):
    """Something other than the loss was asked for; ``hasattr`` and ``getattr`` with a default see that it is missing."""

    def __str__(self) -> str:
        return str(self.args[0])


def _missing(name: object) -> NotInTraining:
    return NotInTraining(
        f"the output of a protected model has no {name} in training, only the loss: the model computes it of each text by "
        "itself, and returns private gradients. A compute_loss may return outputs.loss, or a constant multiple of it. Put a "
        "loss of your own into the model's forward; for predictions, call the model under torch.no_grad()"
    )


@cache
def _output() -> Any:
    from transformers.utils import ModelOutput

    @dataclass
    class Output(ModelOutput):  # type: ignore[misc]  # transformers has no types here
        loss: Tensor | None = None

        def __getattr__(self, name: str) -> Any:
            raise _missing(name)

        def __getitem__(self, key: Any) -> Any:
            try:
                return super().__getitem__(key)
            except (KeyError, IndexError):
                raise _missing(f"entry {key!r}") from None

    return Output


def loss_alone(loss: Tensor) -> Any:
    """A ``ModelOutput`` that holds the scalar ``loss``. Anything else raises ``InputError`` where it is asked for."""
    return _output()(loss=loss)
