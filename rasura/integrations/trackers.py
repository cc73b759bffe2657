"""Experiment trackers by name. Each has a module of its own, the only one that imports its library."""

from __future__ import annotations

from collections.abc import Mapping

from rasura.integrations import mlflow_tracker, wandb_tracker

TRACKERS = {"mlflow": mlflow_tracker, "wandb": wandb_tracker}
"""The module of each tracker, by the name of its library, which is also that of its extra."""


def ready(tracker: str) -> None:
    """Raise ``MissingExtra`` if the library of ``tracker`` is not installed."""
    TRACKERS[tracker].library()


def log(tracker: str, place: str, run: str, words: Mapping[str, str], figures: Mapping[str, float]) -> None:
    """Log a run called ``run`` to the experiment or project ``place``: ``words`` as its settings, and its ``figures``."""
    TRACKERS[tracker].log(place, run, words, figures)
