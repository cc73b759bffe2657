"""Rasura: what can be read back from what a language model's training sends out, and how to stop it.

Public names are imported when first used, so that ``import rasura`` is fast and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "audit": "rasura.runs.audit",
    "calibrate": "rasura.runs.calibration",
    "CalibrationPlan": "rasura.runs.calibration",
    "capture": "rasura.victims.step",
    "chain": "rasura.defenses.compose",
    "load": "rasura.victims.loading",
    "infer_membership": "rasura.runs.membership",
    "MembershipPlan": "rasura.runs.membership",
    "observe": "rasura.core.threat",
    "ObfuscatedTokenizer": "rasura.service_protections.obfuslm.tokenizer",
    "obfuscate_embedding": "rasura.service_protections.obfuslm.model",
    "obfuscate_model": "rasura.service_protections.obfuslm.folder",
    "ObfuscationSettings": "rasura.service_protections.obfuslm.settings",
    "Obfuscator": "rasura.runs.protection",
    "Plan": "rasura.runs.plans",
    "protect": "rasura.runs.protection",
    "read_update": "rasura.runs.reading",
    "step": "rasura.victims.step",
    "train": "rasura.runs.training",
    "TrainPlan": "rasura.runs.training",
    "write_report": "rasura.report.page",
}

__all__ = [*sorted(_NAMES), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'rasura' has no attribute {name!r}")
    return getattr(import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return __all__
