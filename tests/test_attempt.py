"""However an attempt ends, it ends as an outcome; only what the caller asks for is raised."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import FrozenInstanceError, dataclass
from typing import NoReturn

import pytest

from rasura.core.errors import AttackFailed, InputError, NotApplicable
from rasura.core.values import Grant, Granted
from rasura.runs.attempt import MACHINE, Outcome, attempt, lacking, peak_mb


def raising(error: BaseException) -> NoReturn:
    raise error


def test_a_guess_is_kept_with_what_it_took() -> None:
    def call() -> str:
        end = time.process_time() + 0.01
        while time.process_time() < end:
            pass
        return "Lena"

    found = attempt(call)
    assert (found.status, found.reason, found.guess, found.details) == ("ok", "", "Lena", {})
    assert found.wall_seconds > 0 and found.cpu_seconds >= 0.01 and 1 < found.peak_mb <= peak_mb()
    with pytest.raises(FrozenInstanceError):
        found.status = "failed"  # type: ignore[misc]


@pytest.mark.parametrize("raises", [(), MACHINE, (Exception,)])
def test_what_attacks_say_of_themselves_is_never_raised(raises: tuple[type[Exception], ...]) -> None:
    found: Outcome[str] = attempt(lambda: raising(NotApplicable("no embeddings")), raises=raises)
    assert (found.status, found.reason, found.guess, found.details) == ("not_applicable", "no embeddings", None, {})
    found = attempt(lambda: raising(AttackFailed("nothing", {"steps": 3})), raises=raises)
    assert (found.status, found.reason, found.guess, found.details) == ("failed", "nothing", None, {"steps": 3})


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (InputError("no attention found"), "InputError: no attention found"),
        (KeyError("Ingrid"), "KeyError in raising (test_attempt.py, line "),
        (OSError("Ingrid"), "OSError in raising (test_attempt.py, line "),
        (MemoryError("Ingrid"), "MemoryError in raising (test_attempt.py, line "),
        (SystemExit("Ingrid"), "SystemExit in raising (test_attempt.py, line "),
    ],
)
def test_any_other_error_is_a_crash_without_words_that_are_not_ours(error: BaseException, says: str) -> None:
    found = attempt(lambda: raising(error))
    assert found.status == "crashed" and found.reason.startswith(says) and "Ingrid" not in found.reason
    assert found.guess is None


@pytest.mark.parametrize("error", [OSError("no space"), FileNotFoundError("gone"), MemoryError()])
def test_faults_of_the_machine_are_raised_where_asked_for(error: Exception) -> None:
    with pytest.raises(type(error)):
        attempt(lambda: raising(error), raises=MACHINE)
    assert attempt(lambda: raising(ValueError()), raises=MACHINE).status == "crashed"
    with pytest.raises(ValueError, match="bad"):
        attempt(lambda: raising(ValueError("bad")), raises=(Exception,))


def test_a_wrapped_program_that_exits_is_a_crash_whatever_is_raised() -> None:
    assert attempt(lambda: raising(SystemExit(0)), raises=(Exception,)).status == "crashed"


def test_an_interrupted_attempt_has_no_outcome() -> None:
    with pytest.raises(KeyboardInterrupt):
        attempt(lambda: raising(KeyboardInterrupt()))


@dataclass(frozen=True)
class Needy:
    name: str = "needy"
    needs: frozenset[Grant] = frozenset({Grant.MODEL, Grant.LABELS, Grant.LENGTHS})
    uses: frozenset[Grant] = frozenset()


class Some(Granted):
    def __init__(self, *grants: Grant) -> None:
        self.granted = dict.fromkeys(grants)


def test_an_attack_is_not_tried_without_what_it_needs() -> None:
    assert lacking(Needy(), Some(*Needy.needs), "honest-server") is None
    found = lacking(Needy(), Some(Grant.MODEL), "honest-server")
    assert found is not None and found.status == "not_applicable"
    assert found.reason == "honest-server does not grant LABELS, LENGTHS"


def test_the_peak_memory_is_not_that_of_the_program_that_started_this_one() -> None:
    """getrusage begins with it, so a small run that a large notebook had started was said to take as much."""
    held = bytearray(b"1") * 1_200_000_000
    code = "from rasura.runs.attempt import peak_mb; print(peak_mb())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 20 < float(done.stdout) < peak_mb() - 300 and len(held) > 10**9
