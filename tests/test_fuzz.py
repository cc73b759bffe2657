"""The fuzzer keeps what fails, goes on and repeats itself; a few hundred inputs of every target fail nothing."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from fuzz import running, targets
from fuzz.mutations import VALUES, damaged, retyped
from fuzz.running import State, attempt, input_of, kept_seeds, run_here
from fuzz.target import Target
from rasura.core.interfaces import InputError

INPUTS = {"stores": 60, "uploads": 120}


@pytest.mark.parametrize("name", targets.TARGETS)
def test_a_few_hundred_inputs_of_each_target_fail_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    target = targets.TARGETS[name](tmp_path / "files")
    place = tmp_path / "place"
    place.mkdir()
    try:
        state = run_here(target, place, 1, INPUTS.get(name, 250), limited=False, warm=0)
    finally:
        target.close()
    assert state.failures == [] and state.failed == 0 and state.done == INPUTS.get(name, 250)
    # Inputs that nobody refuses would test nothing.
    assert name == "requests" or state.refused > state.done / 4


def test_the_shares_add_up() -> None:
    assert sum(target.share for target in targets.TARGETS.values()) == 1000


class Fragile(Target):
    """Refuses what has no comma, and fails on three kinds of input."""

    name, share = "fragile", 1

    def seeds(self) -> list[bytes]:
        return [b'{"a": [1, 2], "b": "x"}']

    def mutated(self, rng: Random, seeds: Sequence[bytes]) -> bytes:
        return seeds[0] if rng.random() < 0.5 else damaged(rng, seeds[0], seeds)

    def read(self, data: bytes) -> None:
        if b"," not in data:
            raise InputError("no comma")
        if data.endswith(b"2"):
            raise InputError("two\nlines")
        json.loads(data)


def run_to(place: Path, until: int) -> State:
    place.mkdir(exist_ok=True)
    return run_here(Fragile(place), place, 3, until, limited=False, warm=0)


def test_failures_are_kept_and_a_run_goes_on_as_it_would_have(tmp_path: Path) -> None:
    whole = run_to(tmp_path / "whole", 300)
    assert 0 < whole.refused < 300 and 0 < whole.failed <= 300
    assert all(why.startswith(("JSONDecodeError at ", "UnicodeDecodeError at ", "a refusal")) for _, why in whole.failures)
    run_to(tmp_path / "parts", 110)
    parts = run_to(tmp_path / "parts", 300)
    assert (parts.failures, parts.refused, parts.failed) == (whole.failures, whole.refused, whole.failed)
    number = whole.failures[0][0]
    kept = (tmp_path / "whole" / f"failure-{number}.bin").read_bytes()
    target = Fragile(tmp_path)
    assert kept == input_of(target, kept_seeds(target, tmp_path / "whole"), 3, number)
    assert attempt(target, kept)[1] == whole.failures[0][1]


def test_an_input_that_never_ends_or_takes_all_memory_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(Fragile):
        def read(self, data: bytes) -> None:
            if data == b"memory":
                raise MemoryError
            while True:
                pass

    monkeypatch.setattr(running, "SECONDS", 0.05)
    before = signal.signal(signal.SIGALRM, running._alarm)
    try:
        assert attempt(Endless(tmp_path), b"x") == (False, "TooSlow at outside: ''")
        assert attempt(Endless(tmp_path), b"memory")[1].startswith("MemoryError")
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_process_that_dies_is_told_by_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def worker(command: list[str], check: bool) -> object:
        place, until = Path(command[4]), int(command[6])
        state = State.read(place)

        class Ended:
            returncode = 0

        if state.done == 0:
            running._Current(place).note(7)
            Ended.returncode = -signal.SIGSEGV
        else:
            state.done = until
            state.write(place)
        return Ended

    monkeypatch.setattr(subprocess, "run", worker)
    state = running.run("fragile", tmp_path / "place", 0, 20)
    assert state.done == 20 and state.failures == [(7, "the process died of signal 11; repeat input 7")]


def test_values_stay_as_they_are_while_inputs_are_made() -> None:
    before = repr(VALUES)
    rng = Random(1)
    seen = {json.dumps(retyped(rng, {"a": [1, {"b": 2}], "c": {}})) for _ in range(500)}
    assert repr(VALUES) == before and len(seen) > 200
    assert retyped(Random(5), {"a": [1]}) == retyped(Random(5), {"a": [1]})
