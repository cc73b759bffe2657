"""One attempt of an attack: however it ends, it ends as an ``Outcome``."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch

from rasura.core.errors import FAULTS, AttackFailed, NotApplicable, broken
from rasura.core.interfaces import Adversary
from rasura.core.unchanged import CHANGED
from rasura.core.values import Granted, Parameter

G = TypeVar("G")

STATUS = Path("/proc/self/status")
"""What Linux says of this process."""

Status = Literal["ok", "failed", "crashed", "not_applicable"]

MACHINE: tuple[type[Exception], ...] = (OSError, MemoryError, torch.OutOfMemoryError)
"""Faults of the machine, not of an attack. Once they are fixed, the same command resumes."""


@dataclass(frozen=True)
class Outcome(Generic[G]):
    """How an attempt ended: with its guess if ``ok``, otherwise with the reason in words.

    ``details``: plain figures of a failed attack; those of a guess are in the guess. ``wall_seconds``, ``cpu_seconds``: time
    of the call. ``peak_mb``: the peak memory of the process so far, in MiB.
    """

    status: Status
    reason: str = ""
    guess: G | None = None
    details: Mapping[str, Parameter] = field(default_factory=dict)
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_mb: float = 0.0


def attempt(
    call: Callable[[], G],
    *,
    raises: tuple[type[Exception], ...] = (),
) -> Outcome[G]:
    """Call ``call`` and report how it ended.

    ``NotApplicable`` ends as ``not_applicable``, ``AttackFailed`` as ``failed``, any other exception and ``sys.exit`` as
    ``crashed``. A crash is a finding about the attack: it does not end the run and is no evidence of protection. ``raises``:
    exceptions that are raised to the caller instead, such as ``MACHINE``. ``NotApplicable`` and ``AttackFailed`` never are.
    """
    wall, cpu = time.perf_counter(), time.process_time()
    guess: G | None = None
    details: Mapping[str, Parameter] = {}
    status: Status = "ok"
    reason = ""
    try:
        guess = call()
    except NotApplicable as error:
        status, reason = "not_applicable", str(error)
    except AttackFailed as error:
        status, reason, details = "failed", str(error), error.details
    except raises:
        raise
    except FAULTS as error:
        status, reason = "crashed", broken(error)
    return Outcome(
        status, reason, guess, details, time.perf_counter() - wall, time.process_time() - cpu, peak_mb()
    )  # fmt: skip


def meddled(outcome: Outcome[G]) -> Outcome[G]:
    """``outcome`` of an attack that changed what it was given: a crash, whatever it guessed."""
    return Outcome("crashed", CHANGED, None, {}, outcome.wall_seconds, outcome.cpu_seconds, outcome.peak_mb)


def lacking(attack: Adversary, seen: Granted, threat: str) -> Outcome[Any] | None:
    """The outcome of an attack that needs something that the threat model ``threat`` does not grant; None if nothing is
    missing."""
    missing = sorted(g.name for g in attack.needs if g not in seen)
    if not missing:
        return None
    return Outcome("not_applicable", f"{threat} does not grant {', '.join(missing)}", peak_mb=peak_mb())


def peak_mb() -> float:
    """The peak memory of this process so far, in MiB.

    On Linux as /proc counts it: getrusage begins with the peak of the program that started this one. Elsewhere as getrusage
    counts it, on macOS in bytes.
    """
    if STATUS.exists():
        peaks = (line.split() for line in STATUS.read_text(encoding="utf-8").splitlines())
        if found := next((int(words[1]) for words in peaks if words[:1] == ["VmHWM:"]), None):
            return found / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
