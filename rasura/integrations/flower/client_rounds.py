"""A client's private training over many rounds: its ledger and its canaries go on from round to round, in its own file.

A client protects each round's training by ``rasura.protect_training``, planned for all rounds. What was released in earlier
rounds is spent, so a round whose past is unknown is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rasura.accounting import Ledger
from rasura.core.files import read_limited, write_whole
from rasura.core.interfaces import InputError
from rasura.runs.gradient_canaries import MAX_BYTES, GradientCanaries

VERSION = 1

ASSUMES = (
    "It is about this client's own examples and all of its rounds. It takes every step for seen: a server sees less, the "
    "change of a round or a sum of clients, for which no tighter epsilon is claimed. It says nothing of other clients, of "
    "the protection that the mod applies, or of figures that are reported."
)
"""What a client's bound is about, in words."""


def begin_rounds(path: str | Path) -> None:
    """Make the file of a client that took part in no round yet. It is the client's own, and stays secret: it may hold the
    coins of canaries. Raises ``InputError`` if the file exists: its rounds were counted."""
    write_whole(path, json.dumps({"version": VERSION, "rounds": 0, "ledger": None, "canaries": None}), replace=False)


@contextmanager
def next_round(path: str | Path, ledger: Ledger, canaries: GradientCanaries | None = None) -> Iterator[None]:
    """Inside the block, ``ledger`` and ``canaries`` go on from the client's earlier rounds; after it, they are kept.

    ``with next_round(path, ledger, canaries): ...  # all of the round's steps``

    ``path``: what ``begin_rounds`` made. Both objects are new ones, of this round's ``rasura.protect_training``, whose plan
    is for all rounds. They are kept as well where the block raises: a release that may have left is never forgotten. While
    the block runs there is a file ``path`` + ``.running``; it stays after a kill, and where the state could not be written.
    Raises ``InputError`` where it exists: two rounds at once would each forget the other's releases, and those of a round
    that was killed are unknown. Also for a missing or damaged file, for a ledger without a guarantee, and where canaries
    would have missed rounds, or would miss this one.
    """
    if ledger.formal is None:
        raise InputError(f"a client's rounds are counted by a guarantee, and there is none: {ledger.why}")
    ledger.check_resumable()  # a later round would be such a training
    place = Path(path).resolve()
    running = _entered(place)
    try:
        state = _read(place)
        if state["rounds"]:
            _go_on(place, state, ledger, canaries)
    except BaseException:
        running.unlink()  # nothing was released yet
        raise
    try:
        yield
    finally:
        after = {
            "version": VERSION, "rounds": state["rounds"] + 1, "ledger": ledger.state_dict(),
            "canaries": None if canaries is None else canaries.state_dict(),
        }  # fmt: skip
        write_whole(place, json.dumps(after))
        running.unlink()


def _entered(place: Path) -> Path:
    """The file that says that a round of ``place`` runs, made now. Raises ``InputError`` if it exists."""
    running = place.with_name(f"{place.name}.running")
    try:
        write_whole(running, f"{os.getpid()}\n", replace=False)
    except InputError:
        if not running.exists():
            raise
        raise InputError(f"{running} exists: another process is in a round of this client, or one was killed in a round, "
            "and what that one released is unknown. Wait for it; if no process is left, remove the file only where nothing "
            "of that round left this machine, and otherwise train no further on these examples") from None  # fmt: skip
    return running


def _go_on(place: Path, state: Mapping[str, Any], ledger: Ledger, canaries: GradientCanaries | None) -> None:
    if (state["canaries"] is None) != (canaries is None):
        raise InputError(f"{place}: canaries see all rounds of a client or none; {state['rounds']} rounds were "
            f"{'without' if state['canaries'] is None else 'with'} them")  # fmt: skip
    ledger.load_state_dict(state["ledger"])
    if canaries is not None:
        canaries.load_state_dict(state["canaries"])


def client_bound(ledger: Ledger, canaries: GradientCanaries) -> str:
    """The client's lower bound of epsilon beside what its ledger counted, in words, with what it is about. Raises
    ``InputError`` as ``GradientCanaries.measure`` does."""
    return f"{canaries.measure(ledger).statement} {ASSUMES}"


def _read(path: str | Path) -> Mapping[str, Any]:
    if not Path(path).exists():
        raise InputError(f"{path} is missing, so it is not known what this client released in earlier rounds; before its "
            "first round, make it by rasura.integrations.flower.client_rounds.begin_rounds")  # fmt: skip
    content, _ = read_limited(Path(path), "file of a client's rounds", 2 * MAX_BYTES)
    try:
        state = json.loads(content)
        rounds = state["rounds"]
        whole = (
            set(state) == {"version", "rounds", "ledger", "canaries"}
            and state["version"] == VERSION
            and isinstance(rounds, int)
            and not isinstance(rounds, bool)
            and rounds >= 0
            and (state["ledger"] is None) == (rounds == 0)
            and (state["canaries"] is None or rounds > 0)
        )
    except (ValueError, LookupError, TypeError):
        whole = False
    if not whole:
        raise InputError(f"{path} holds no state of a client's rounds")
    found: Mapping[str, Any] = state
    return found
