"""Runs in Weights & Biases. Where they go is set as its client says: ``WANDB_MODE=offline`` keeps them on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rasura.core.errors import MissingExtra


def library() -> Any:
    """The library. Raises ``MissingExtra`` without it."""
    try:
        import wandb
    except ImportError:
        raise MissingExtra("--wandb needs the extra: pip install 'rasura[wandb]'") from None
    return wandb


def log(project: str, run: str, words: Mapping[str, str], figures: Mapping[str, float]) -> None:
    """Log one run: ``words`` as its configuration, ``figures`` as its summary.

    The client collects neither the command line, which may hold texts, nor code, console output or the state of the machine.
    """
    wandb = library()
    settings = wandb.Settings(
        console="off", disable_code=True, disable_git=True, save_code=False, silent=True, x_disable_meta=True,
        x_disable_stats=True,
    )  # fmt: skip
    with wandb.init(project=project, name=run, config=dict(words), settings=settings) as made:
        made.summary.update(dict(figures))
