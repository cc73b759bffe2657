"""The ledger of a training: every release that was made, what they spent, and how many more the plan allows.

Epsilon comes from here and from nowhere else: not from what a run was meant to be. Kept with checkpoints as plain JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rasura.accounting.compositions import composition
from rasura.accounting.guarantees import Guarantee, Run, guarantee, stated
from rasura.accounting.releases import UNPROVEN, Counted, Draw, Release
from rasura.core.errors import InputError
from rasura.core.values import Mechanism

VERSION = 1


class Ledger:
    """Counts the releases of ``defense`` against the plan ``run``.

    ``sizes``: entries of each trained tensor, for the planned guarantee alone, since what is counted is what was drawn;
    ``secure`` likewise: the noise will come from the operating system. ``planned`` is the guarantee if all goes as planned,
    ``spent()`` the one of what took place.
    """

    def __init__(self, defense: Sequence[Mechanism], run: Run, *, sizes: Sequence[int] = (), secure: bool = True) -> None:
        self.defense, self.run = tuple(defense), run
        standing = composition(self.defense)
        self.formal, self.why = standing.formal, standing.why
        self.planned: Guarantee = guarantee(self.defense, run, sizes=sizes, secure=secure)
        self.runs: list[Counted] = []
        self._passes = 0

    @property
    def releases(self) -> int:
        """How many releases were made."""
        return sum(count for _, count in self.runs)

    @property
    def passes(self) -> int:
        """How many passes over the texts have releases, where batches are disjoint within a pass."""
        return len({release.number for release, _ in self.runs if release.number is not None})

    def begin(self) -> int:
        """The number of a new pass over the texts."""
        self._passes += 1
        return self._passes

    def room(self, draw: Draw) -> None:
        """Raises ``InputError`` where a release for a batch drawn as ``draw`` would go beyond the plan."""
        if self.formal is None or draw.sampling == "unknown":
            return
        told = "pass a larger number of epochs to plan more; what was promised holds for the plan only"
        if draw.sampling == "disjoint":
            numbers = {release.number for release, _ in self.runs}
            if draw.number not in numbers and self.passes >= self.run.epochs:
                raise InputError(f"{self.run.epochs} passes over the texts were planned, {self.passes} were made: {told}")
        elif self.releases >= self.run.steps:
            raise InputError(
                f"{self.run.steps} releases were planned ({self.run.epochs} epochs), {self.releases} were made: {told}"
            )

    def append(self, release: Release) -> None:
        """Count a release that is handed out now. Raises ``InputError`` beyond the plan, and for another mechanism's."""
        expected = UNPROVEN if self.formal is None else self.formal.name
        if release.mechanism != expected:
            raise InputError(f"this ledger counts releases of {expected}, found one of {release.mechanism}")
        self.room(Draw(release.sampling, release.rate, release.number))
        self._add(release, 1)

    def made(self, draw: Draw, sizes: Iterable[int], *, secret: bool) -> None:
        """Count the release of a batch drawn as ``draw``, with tensors of ``sizes`` entries."""
        self.append(Release.of(self.formal, draw, sizes, secret=secret))

    def _add(self, release: Release, count: int) -> None:
        if self.runs and self.runs[-1][0] == release:
            count += self.runs.pop()[1]
        self.runs.append((release, count))

    @property
    def epsilon(self) -> float:
        """Epsilon of all releases made, at the plan's delta. Raises ``InputError`` where nothing is guaranteed."""
        found = self.spent()
        if found.epsilon is None:
            raise InputError(found.statement)
        return found.epsilon

    def spent(self) -> Guarantee:
        """What the releases that were made guarantee."""
        carrier = None if self.formal is None else self.formal.name
        return stated(self.runs, self.run, carrier=carrier, why=self.why, planned=False)

    def state_dict(self) -> dict[str, Any]:
        """All that was counted, as plain values for JSON."""
        return {
            "version": VERSION, "examples": self.run.examples, "batch_size": self.run.batch_size, "delta": self.run.fails,
            "passes": self._passes, "defense": [m.name for m in self.defense],
            "runs": [{"release": release.to_dict(), "count": count} for release, count in self.runs],
        }  # fmt: skip

    def load_state_dict(self, state: Any) -> None:
        """Go on from ``state``, as ``state_dict`` gave it. Raises ``InputError`` for anything else, for another data set or
        other protections, and where this ledger has counted releases already."""
        if self.runs:
            raise InputError(f"this ledger has counted {self.releases} releases; load a state before training begins")
        runs, passes = read(state)
        if state["examples"] != self.run.examples:
            raise InputError(f"the ledger is of {state['examples']} texts, this training of {self.run.examples}")
        if state["defense"] != [m.name for m in self.defense]:
            found, own = " + ".join(map(str, state["defense"])), " + ".join(m.name for m in self.defense)
            raise InputError(f"the ledger is of {found}, this training of {own}")
        self.runs, self._passes = runs, passes

    def save(self, path: str | Path) -> None:
        """Write ``state_dict`` as JSON."""
        Path(path).write_text(json.dumps(self.state_dict(), indent=1) + "\n", encoding="utf-8")

    def load(self, path: str | Path) -> None:
        """``load_state_dict`` of what ``save`` wrote. Raises ``InputError`` for a file that is missing or no ledger."""
        self.load_state_dict(parsed(path))


def parsed(path: str | Path) -> Any:
    """The state in a file of ``Ledger.save``, or in a ``result.json`` of ``rasura train``."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} is no ledger: {type(error).__name__}; expected a JSON file that a training wrote"
        ) from None
    return found["ledger"] if isinstance(found, Mapping) and "ledger" in found else found


def counted(path: str | Path, delta: float | None = None) -> Guarantee:
    """What the releases in a file of ``parsed`` have spent, at the training's delta or at another."""
    state = parsed(path)
    runs, _ = read(state)
    names = {release.mechanism for release, _ in runs}
    if len(names) != 1:
        raise InputError(f"{path} holds releases of {len(names)} mechanisms; expected one")
    run = Run(state["examples"], state["batch_size"], 1, state["delta"] if delta is None else delta)
    return stated(runs, run, carrier=names.pop(), planned=False)


def read(state: Any) -> tuple[list[Counted], int]:
    """The releases of a ``state_dict``, and the number of its last pass. Raises ``InputError`` for anything else."""
    names = {"version", "examples", "batch_size", "delta", "passes", "defense", "runs"}
    if not isinstance(state, Mapping) or set(state) != names or state["version"] != VERSION:
        raise InputError(f"no state of a ledger; expected an object of version {VERSION} with {', '.join(sorted(names))}")
    whole = (
        _count(state["passes"], 0)
        and _count(state["examples"], 1)
        and _count(state["batch_size"], 1)
        and isinstance(state["delta"], float)
    )
    if not whole or not isinstance(state["runs"], list):
        raise InputError("the state of a ledger holds no list of releases, or numbers that cannot be")
    runs = []
    for one in state["runs"]:
        if not isinstance(one, Mapping) or set(one) != {"release", "count"} or not _count(one["count"], 1):
            raise InputError("the state of a ledger holds an entry that is no release with its count")
        runs.append((Release.read(one["release"]), int(one["count"])))
    numbers = [release.number for release, _ in runs if release.number is not None]
    if max(numbers, default=0) > state["passes"]:
        raise InputError("the state of a ledger has a release of a pass that did not begin")
    return runs, state["passes"]


def _count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
