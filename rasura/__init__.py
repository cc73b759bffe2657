"""Rasura: what can be read back from what a language model's training sends out, and how to stop it.

Public names are imported when first used, so that ``import rasura`` is fast and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES = {
    "ActiveAttack": "rasura.core.interfaces",
    "Attack": "rasura.core.interfaces",
    "AttackFailed": "rasura.core.errors",
    "AttackSpec": "rasura.core.specs",
    "audit": "rasura.runs.audit",
    "audit_service": "rasura.runs.services",
    "Budget": "rasura.core.interfaces",
    "calibrate": "rasura.runs.calibration",
    "CalibrationPlan": "rasura.runs.calibration_plan",
    "capture": "rasura.victims.step",
    "chain": "rasura.defenses.compose",
    "Client": "rasura.server.client",
    "DefenseSpec": "rasura.core.specs",
    "GhostObfuscator": "rasura.runs.ghost_obfuscator",
    "diagnose_training": "rasura.runs.diagnosis",
    "Diagnosis": "rasura.runs.diagnosis",
    "GradientCanaries": "rasura.runs.gradient_canaries",
    "Grant": "rasura.core.values",
    "Guarantee": "rasura.accounting.guarantees",
    "infer_membership": "rasura.runs.membership",
    "InputError": "rasura.core.errors",
    "Ledger": "rasura.accounting.ledger",
    "load": "rasura.victims.loading",
    "Mechanism": "rasura.core.values",
    "MembershipPlan": "rasura.runs.membership_plan",
    "Metric": "rasura.core.interfaces",
    "MetricSpec": "rasura.core.specs",
    "MissingExtra": "rasura.core.errors",
    "NotApplicable": "rasura.core.errors",
    "obfuscate_embedding": "rasura.service_protections.obfuslm.model",
    "obfuscate_file": "rasura.runs.ghost_file",
    "obfuscate_model": "rasura.service_protections.obfuslm.folder",
    "ObfuscatedTokenizer": "rasura.service_protections.obfuslm.tokenizer",
    "ObfuscationSettings": "rasura.service_protections.obfuslm.settings",
    "Observation": "rasura.core.values",
    "observe": "rasura.core.threat",
    "parse_defense": "rasura.registry",
    "Plan": "rasura.runs.plans",
    "PrivateTrainer": "rasura.integrations.transformers",
    "protect_training": "rasura.runs.private",
    "ProtectedTraining": "rasura.runs.private",
    "read_update": "rasura.runs.reading",
    "ReadRequest": "rasura.runs.reading",
    "ReadResult": "rasura.runs.reading",
    "Reconstruction": "rasura.core.values",
    "Record": "rasura.core.records",
    "ServicePlan": "rasura.runs.service_plan",
    "step": "rasura.victims.step",
    "ThreatModel": "rasura.core.threat",
    "train": "rasura.runs.training",
    "TrainPlan": "rasura.runs.train_plan",
    "Transform": "rasura.core.interfaces",
    "write_report": "rasura.report.page",
}
"""Every public name with the module that has it. The imports below say the same to type checkers and editors."""

__all__ = [*sorted(_NAMES), "__version__"]

if TYPE_CHECKING:
    from rasura.accounting.guarantees import Guarantee as Guarantee
    from rasura.accounting.ledger import Ledger as Ledger
    from rasura.core.errors import AttackFailed as AttackFailed
    from rasura.core.errors import InputError as InputError
    from rasura.core.errors import MissingExtra as MissingExtra
    from rasura.core.errors import NotApplicable as NotApplicable
    from rasura.core.interfaces import ActiveAttack as ActiveAttack
    from rasura.core.interfaces import Attack as Attack
    from rasura.core.interfaces import Budget as Budget
    from rasura.core.interfaces import Metric as Metric
    from rasura.core.interfaces import Transform as Transform
    from rasura.core.records import Record as Record
    from rasura.core.specs import AttackSpec as AttackSpec
    from rasura.core.specs import DefenseSpec as DefenseSpec
    from rasura.core.specs import MetricSpec as MetricSpec
    from rasura.core.threat import ThreatModel as ThreatModel
    from rasura.core.threat import observe as observe
    from rasura.core.values import Grant as Grant
    from rasura.core.values import Mechanism as Mechanism
    from rasura.core.values import Observation as Observation
    from rasura.core.values import Reconstruction as Reconstruction
    from rasura.defenses.compose import chain as chain
    from rasura.integrations.transformers import PrivateTrainer as PrivateTrainer
    from rasura.registry import parse_defense as parse_defense
    from rasura.report.page import write_report as write_report
    from rasura.runs.audit import audit as audit
    from rasura.runs.calibration import calibrate as calibrate
    from rasura.runs.calibration_plan import CalibrationPlan as CalibrationPlan
    from rasura.runs.diagnosis import Diagnosis as Diagnosis
    from rasura.runs.diagnosis import diagnose_training as diagnose_training
    from rasura.runs.ghost_file import obfuscate_file as obfuscate_file
    from rasura.runs.ghost_obfuscator import GhostObfuscator as GhostObfuscator
    from rasura.runs.gradient_canaries import GradientCanaries as GradientCanaries
    from rasura.runs.membership import infer_membership as infer_membership
    from rasura.runs.membership_plan import MembershipPlan as MembershipPlan
    from rasura.runs.plans import Plan as Plan
    from rasura.runs.private import ProtectedTraining as ProtectedTraining
    from rasura.runs.private import protect_training as protect_training
    from rasura.runs.reading import ReadRequest as ReadRequest
    from rasura.runs.reading import ReadResult as ReadResult
    from rasura.runs.reading import read_update as read_update
    from rasura.runs.service_plan import ServicePlan as ServicePlan
    from rasura.runs.services import audit_service as audit_service
    from rasura.runs.train_plan import TrainPlan as TrainPlan
    from rasura.runs.training import train as train
    from rasura.server.client import Client as Client
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
