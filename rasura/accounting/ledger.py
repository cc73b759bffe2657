"""The ledger of a training: all releases, the privacy budget they spent, and how many more the plan allows.

Epsilon is computed only from this ledger, never from what a run was meant to be. It is kept with checkpoints as plain JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rasura.accounting.beside import beside
from rasura.accounting.compositions import BANDED, composition
from rasura.accounting.guarantees import Guarantee, Run, guarantee, planned_releases, stated
from rasura.accounting.releases import UNPROVEN, Counted, Draw, Release, alike
from rasura.accounting.states import VERSION, beside_weights, copies_in, earlier_in, less, parted, read
from rasura.core.errors import InputError
from rasura.core.values import Mechanism


class Ledger:
    """Counts the releases of ``defense`` against the plan ``run``.

    ``sizes``: entries of each trained tensor; ``secure``: the noise will come from the operating system. Both are only for
    the planned guarantee; the counted one uses the actual draws. ``planned`` is the guarantee of the plan, which includes
    the releases of a state that was loaded; ``spent()`` is that of the releases made. ``target``: the epsilon that the whole
    must not exceed. Raises ``InputError`` for a plan that exceeds it.
    """

    def __init__(
        self, defense: Sequence[Mechanism], run: Run, *, sizes: Sequence[int] = (), secure: bool = True,
        target: float | None = None,
    ) -> None:  # fmt: skip
        self.defense, self.run, self.target = tuple(defense), run, target
        standing = composition(self.defense)
        self.formal, self.why = standing.formal, standing.why
        self.planned: Guarantee = guarantee(self.defense, run, sizes=sizes, secure=secure)
        self._plan = [] if self.formal is None else planned_releases(self.formal, run, sizes=sizes, secure=secure)
        self._sized = bool(sizes)
        self.runs: list[Counted] = []
        self.unmade: list[Counted] = []
        self.later: list[Counted] = []  # made after the weights from which this training goes on, and not in its own
        self.copies = (0, 0)  # texts that were seen in several rows, and in how many at most
        self.earlier = ""  # what to say of an earlier training of the model, whose releases are not counted here
        self._passes = 0
        self._check_target(self.planned)

    @property
    def releases(self) -> int:
        """Number of releases made, without those of other weights (``later``)."""
        return sum(count for _, count in self.runs)

    @property
    def passes(self) -> int:
        """Number of passes over the texts with releases, if batches are disjoint within a pass."""
        return len({release.number for release, _ in self.runs if release.number is not None})

    def begin(self) -> int:
        """The number of a new pass over the texts."""
        self._passes += 1
        return self._passes

    def room(self, draw: Draw) -> None:
        """Raises ``InputError`` if a release for a batch drawn as ``draw`` would exceed the plan."""
        if self.formal is None or draw.sampling == "unknown":
            return
        told = "plan a larger number of epochs; the guarantee holds only for the planned number"
        if draw.sampling == "disjoint":
            numbers = {release.number for release, _ in self.runs}
            if draw.number not in numbers and self.passes >= self.run.epochs:
                raise InputError(f"all {self.run.epochs} planned passes over the texts were made ({self.passes}); {told}")
            return
        if self.releases >= self.run.steps:
            raise InputError(
                f"all {self.run.steps} planned releases ({self.run.epochs} epochs) were made ({self.releases}); {told}"
            )
        if draw.sampling == "fixed" and draw != self.turn():
            raise InputError(f"a batch of pass {draw.number} out of turn; expected one of pass {self.turn().number}")

    def turn(self) -> Draw:
        """The draw of the next batch in a fixed order: the one after all that were released."""
        every = self.run.steps_an_epoch
        return Draw("fixed", number=self.releases // every + 1, separation=every)

    def check_resumable(self, first: str = "") -> None:
        """Raises ``InputError`` for a training that cannot go on from earlier releases: DP-FTRL, whose noise depends on
        the noise of the steps before, which is kept nowhere. The message begins with ``first``."""
        if any(m.name == BANDED for m in self.defense):
            raise InputError(
                f"{first}a training under dp-ftrl cannot be resumed: the noise of its next step depends on that of earlier "
                "steps, which is stored nowhere. Two runs that go on from it would release the same noise. Start over from "
                "the first weights; what was released before counts beside the new training"
            )

    def end(self) -> None:
        """The training ends before its plan, and its own releases may have decided that. ``spent`` is then of the whole
        plan: how many releases there are depends on the texts, and epsilon of those made would hold only for a number that
        does not (Rogers et al. 2016: a bound that is set beforehand holds, one that is read off afterwards does not)."""
        self.unmade = self._open(self.runs, self._passes, self.unmade)
        self._passes = max([self._passes, *(release.number or 0 for release, _ in self.unmade)])

    def _rest(self, runs: Sequence[Counted], passes: int) -> list[Counted]:
        """What the plan still allows after ``runs``, in ``passes`` passes."""
        if not self._plan:
            return []
        planned, made = self._plan[0][0], sum(count for _, count in runs)
        if planned.sampling == "disjoint":
            begun = len({release.number for release, _ in runs if release.number is not None})
            numbers = range(passes + 1, passes + 1 + self.run.epochs - begun)
            return [(replace(planned, number=number), 1) for number in numbers]
        if planned.sampling != "fixed":
            return [(planned, self.run.steps - made)] if made < self.run.steps else []
        every, rest = self.run.steps_an_epoch, []
        like = runs[-1][0] if runs else planned
        while made < self.run.steps:
            count = min(every - made % every, self.run.steps - made)
            rest.append((replace(like, number=made // every + 1), count))
            made += count
        return rest

    def _open(self, runs: Sequence[Counted], passes: int, unmade: Sequence[Counted]) -> list[Counted]:
        """What counts beside ``runs``, in ``passes`` passes: what the plan still allows, and those ``unmade`` by an earlier
        plan whose place it does not take."""
        rest = self._rest(runs, passes)
        for release, count in rest:
            unmade = less(unmade, release, count)
        return [*rest, *unmade]

    def _whole(self, runs: Sequence[Counted], passes: int, unmade: Sequence[Counted], later: Sequence[Counted]) -> Guarantee:
        """The guarantee of ``runs``, of those made ``later``, and of all that ``_open`` counts beside them."""
        every = [*runs, *later, *self._open(runs, passes, unmade)]
        carrier = None if self.formal is None else self.formal.name
        return stated(every, self.run, carrier=carrier, why=self.why, planned=True, sized=self._sized)

    def _check_target(self, whole: Guarantee, of: str = "") -> None:
        """Raises ``InputError`` unless ``whole``, which is ``of`` something, keeps to the target, if there is one."""
        if self.target is not None and (whole.epsilon is None or not whole.epsilon <= self.target):
            raise InputError(f"epsilon {self.target:g} was not reached: {of}{whole.statement}")

    def append(self, release: Release) -> None:
        """Count a release that is made now. Of an unknown draw, the larger rate counts, its own or the plan's. Raises
        ``InputError`` beyond the plan, and for a release of another mechanism."""
        expected = UNPROVEN if self.formal is None else self.formal.name
        if release.mechanism != expected:
            raise InputError(f"this ledger counts releases of {expected}, but this is a release of {release.mechanism}")
        if self.formal is not None and release.sampling == "unknown":
            release = replace(release, rate=max(release.rate or 0.0, self.run.rate))
        self.room(Draw(release.sampling, release.rate, release.number, release.separation))
        if self.target is not None and not any(alike(release, planned) for planned, _ in self._plan):
            whole = self._whole([*self.runs, (release, 1)], self._passes, self.unmade, self.later)
            self._check_target(whole, "with a release apart from the plan, ")
        if release.sampling == "fixed" and release.number is not None:
            self._passes = release.number  # a pass begins with its first release: a look at a batch is none
        known = {one.number for one, _ in self.runs}
        if release.sampling != "disjoint" or release.number not in known:
            self.unmade = less(self.unmade, release, 1)  # the training goes on
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
        """Epsilon of all releases made, at the plan's delta. Raises ``InputError`` if nothing is guaranteed."""
        found = self.spent()
        if found.epsilon is None:
            raise InputError(found.statement)
        return found.epsilon

    def spent(self) -> Guarantee:
        """The guarantee of the releases made, here and ``later``; after ``end``, of the whole plan."""
        carrier = None if self.formal is None else self.formal.name
        found = stated(self._all(), self.run, carrier=carrier, why=self.why, planned=False)
        return beside(found, self._missing, self.copies, self.earlier)

    @property
    def _missing(self) -> tuple[int, int]:
        """How many releases count and are not in the weights: never made, and made later."""
        return sum(count for _, count in self.unmade), sum(count for _, count in self.later)

    def state_dict(self) -> dict[str, Any]:
        """All that was counted, as plain values for JSON: the releases made, those of other weights, those not made."""
        unmade, later = self._missing
        return {
            **({} if self.run.unit == "text" else {"unit": self.run.unit}),
            **({"unmade": unmade, "later": later} if unmade or later else {}),
            **({"copies": list(self.copies)} if any(self.copies) else {}),
            **({"earlier": self.earlier} if self.earlier else {}),
            "version": VERSION, "examples": self.run.examples, "batch_size": self.run.batch_size, "delta": self.run.fails,
            "passes": self._passes, "defense": [m.name for m in self.defense],
            "runs": [{"release": release.to_dict(), "count": count} for release, count in self._all()],
        }  # fmt: skip

    def _all(self) -> list[Counted]:
        return [*self.runs, *self.later, *self.unmade]

    def load_state_dict(self, state: Any, *, done: bool = False) -> None:
        """Resume from ``state``, as returned by ``state_dict``. The plan is then its releases and the remaining ones. Those
        of its plan that were not made count until others like them take their place; those made later than the weights
        beside it always count.
        ``done``: the training made its last release, so that even one that cannot be resumed can be stated. Raises
        ``InputError`` for anything else, for another data set or other protections, if this ledger has already counted
        releases or begun a pass, and if the plan exceeds the target."""
        if not done:
            self.check_resumable()
        if self.runs:
            raise InputError(
                f"this ledger has already counted {self.releases} releases; load a state before training begins"
            )
        if self._passes:
            raise InputError("a pass has begun under this ledger; load a state before the first batch is trained on")
        runs, passes = read(state)
        theirs, own = (state["examples"], state.get("unit", "text")), (self.run.examples, self.run.unit)
        if theirs != own:
            has = f"{own[0]}" if theirs[1] == own[1] else f"{own[0]} {own[1]}s"
            raise InputError(f"the ledger is for {theirs[0]} {theirs[1]}s, but this training has {has}")
        if state["defense"] != [m.name for m in self.defense]:
            found, used = " + ".join(map(str, state["defense"])), " + ".join(m.name for m in self.defense)
            raise InputError(f"the ledger is for {found}, but this training uses {used}")
        missing = beside_weights(state)
        runs, unmade = parted(runs, missing[0])
        runs, later = parted(runs, missing[1])
        whole = self._whole(runs, passes, unmade, later)
        says = "the loaded releases count as well. Plan fewer epochs, or pass more noise in place of a target; now it is "
        self._check_target(whole, says)
        self.runs, self._passes, self.planned, self.copies = runs, passes, whole, copies_in(state)
        self.unmade, self.later, self.earlier = unmade, later, earlier_in(state)

    def save(self, path: str | Path, *, made: int | None = None) -> None:
        """Write ``state_dict`` as JSON. ``made``: beside weights that hold the first so many releases alone, for which all
        others count as well, since those may have decided that these weights are kept."""
        state = self.state_dict()
        if made is not None:
            unmade, later = self._missing
            state.update(unmade=unmade, later=later + self.releases - made)
        Path(path).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")

    def load(self, path: str | Path) -> None:
        """``load_state_dict`` of what ``save`` wrote. Raises ``InputError`` if the file is missing or not a ledger."""
        self.load_state_dict(parsed(path)[0])


def releases_in(path: str | Path) -> int:
    """The number of releases in the weights beside a file of ``parsed``."""
    state, _ = parsed(path)
    return sum(count for _, count in read(state)[0]) - sum(beside_weights(state))


def parsed(path: str | Path) -> tuple[Any, list[str]]:
    """The state in a file of ``Ledger.save``, or in a ``result.json`` of ``rasura train`` with what that says beside its
    guarantee."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = f"{path} is not a ledger: {type(error).__name__}"
        raise InputError(f"{why}; expected a JSON file that a training wrote") from None
    if isinstance(found, Mapping) and "ledger" in found:
        privacy = found.get("privacy", {})
        warnings = privacy.get("warnings", []) if isinstance(privacy, Mapping) else None
        if not isinstance(warnings, list) or not all(isinstance(one, str) for one in warnings):
            raise InputError(f"{path}: the entry privacy holds no list of warnings; expected what rasura train wrote")
        return found["ledger"], warnings
    return found, []


def counted(path: str | Path, delta: float | None = None) -> Guarantee:
    """The privacy budget spent by the releases in a file of ``parsed``, at the training's delta or at another; with what a
    ``result.json`` says beside its guarantee, such as that canaries refute it."""
    state, said = parsed(path)
    runs, _ = read(state)
    names = {release.mechanism for release, _ in runs}
    if len(names) != 1:
        raise InputError(f"{path} holds releases of {len(names)} mechanisms; expected one")

    def at(fails: float) -> Guarantee:
        run = Run(state["examples"], state["batch_size"], 1, fails, unit=state.get("unit", "text"))
        said = stated(runs, run, carrier=next(iter(names)), planned=False)
        return beside(said, beside_weights(state), copies_in(state), earlier_in(state))

    own = at(state["delta"])
    more = [one for one in said if one not in own.warnings]
    found = own if delta is None else at(delta)
    return replace(found, warnings=(*found.warnings, *more))
