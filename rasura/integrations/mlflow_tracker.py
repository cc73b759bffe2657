"""Runs in MLflow. Where they go is set as MLflow says: ``MLFLOW_TRACKING_URI``, otherwise the folder it runs in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rasura.core.errors import MissingExtra


def library() -> Any:
    """The library. Raises ``MissingExtra`` without it."""
    try:
        import mlflow
    except ImportError:
        raise MissingExtra("--mlflow needs the extra: pip install 'rasura[mlflow]'") from None
    return mlflow


def log(experiment: str, run: str, words: Mapping[str, str], figures: Mapping[str, float]) -> None:
    """Log one run: ``words`` as parameters, ``figures`` as metrics. Signs that MLflow forbids in names become ``_``."""
    mlflow = library()
    mlflow.set_experiment(experiment)
    with mlflow.start_run(run_name=run):
        mlflow.log_params({_name(k): v for k, v in words.items()})
        mlflow.log_metrics({_name(k): v for k, v in figures.items()})


def _name(text: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", text)
