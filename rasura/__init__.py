"""Rasura: what can be read back from what a language model's training sends out, and how to stop it.

Public names are imported when first used, so that ``import rasura`` is fast and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES = {
    "audit": "rasura.runs.audit",
    "calibrate": "rasura.runs.calibration",
    "CalibrationPlan": "rasura.runs.calibration",
    "capture": "rasura.victims.step",
    "chain": "rasura.defenses.compose",
    "infer_membership": "rasura.runs.membership",
    "load": "rasura.victims.loading",
    "MembershipPlan": "rasura.runs.membership",
    "obfuscate_embedding": "rasura.service_protections.obfuslm.model",
    "obfuscate_model": "rasura.service_protections.obfuslm.folder",
    "ObfuscatedTokenizer": "rasura.service_protections.obfuslm.tokenizer",
    "ObfuscationSettings": "rasura.service_protections.obfuslm.settings",
    "Obfuscator": "rasura.runs.protection",
    "observe": "rasura.core.threat",
    "Plan": "rasura.runs.plans",
    "protect": "rasura.runs.protection",
    "read_update": "rasura.runs.reading",
    "step": "rasura.victims.step",
    "train": "rasura.runs.training",
    "TrainPlan": "rasura.runs.training",
    "write_report": "rasura.report.page",
}
"""Every public name with the module that has it. The imports below say the same to type checkers and editors."""

__all__ = [*sorted(_NAMES), "__version__"]

if TYPE_CHECKING:
    from rasura.core.threat import observe as observe
    from rasura.defenses.compose import chain as chain
    from rasura.report.page import write_report as write_report
    from rasura.runs.audit import audit as audit
    from rasura.runs.calibration import CalibrationPlan as CalibrationPlan
    from rasura.runs.calibration import calibrate as calibrate
    from rasura.runs.membership import MembershipPlan as MembershipPlan
    from rasura.runs.membership import infer_membership as infer_membership
    from rasura.runs.plans import Plan as Plan
    from rasura.runs.protection import Obfuscator as Obfuscator
    from rasura.runs.protection import protect as protect
    from rasura.runs.reading import read_update as read_update
    from rasura.runs.training import TrainPlan as TrainPlan
    from rasura.runs.training import train as train
    from rasura.service_protections.obfuslm.folder import obfuscate_model as obfuscate_model
    from rasura.service_protections.obfuslm.model import obfuscate_embedding as obfuscate_embedding
    from rasura.service_protections.obfuslm.settings import ObfuscationSettings as ObfuscationSettings
    from rasura.service_protections.obfuslm.tokenizer import ObfuscatedTokenizer as ObfuscatedTokenizer
    from rasura.victims.loading import load as load
    from rasura.victims.step import capture as capture
    from rasura.victims.step import step as step
else:  # hidden from type checkers: they would take every misspelled name for Any

    def __getattr__(name: str) -> Any:
        if name not in _NAMES:
            raise AttributeError(f"module 'rasura' has no attribute {name!r}")
        return getattr(import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return __all__
