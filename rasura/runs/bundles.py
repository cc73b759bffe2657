"""A run in one file, and whether its figures come back. A bundle is personal data, as the run is."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from rasura.core.errors import InputError
from rasura.core.files import read_limited, write_whole
from rasura.core.records import SCHEMA, Record, canonical, wrong_in
from rasura.core.run_store import RunStore, changed
from rasura.report.scores import BLIND, gave_up
from rasura.runs.audit import Audit
from rasura.runs.cells import Cell
from rasura.runs.plans import plan_of

FORMAT = "rasura bundle 1"
MAX_BYTES = 1 << 30
ROUNDING = 1e-6
"""Differences of scores up to this come from the order of sums on another machine."""

EQUAL, CLOSE, DIFFERENT, NOTHING = "equal", "equal but for rounding", "different", "nothing to compare"

SCORED, GAVE_UP = "with a score", "gave up"
"""How a cell ended that has a figure: an attack that gave up has the score of guessing."""


def bundle(run_dir: str | Path, path: str | Path) -> Path:
    """Write the records, the plan, the versions and the hashes of a run into one JSON file with a digest; returns its path.

    An unfinished run is taken as far as it is (``missing``). Raises ``InputError`` if the run is damaged or holds no
    records.
    """
    with closing(RunStore(run_dir)) as store:
        held = {"format": FORMAT, "schema": SCHEMA, "plan": store.plan, "sittings": store.sittings, "about": store.about}
        content = {**held, "records": list(store)}
    if not content["records"]:
        raise InputError(f"{run_dir} holds no records yet; expected a run with results")
    text = canonical(content)
    write_whole(path, canonical({"digest": _digest(text), "content": text}) + "\n")
    return Path(path)


def missing(content: Mapping[str, Any]) -> str:
    """What a bundle lacks of its run, in words; empty if the run was finished."""
    done, asked = len(content["records"]), content["about"].get("cells")
    if asked is None:
        return "the run did not store how many results it has, so it may be unfinished"
    return f"the run is unfinished: {done} of its {asked} results are here" if done < asked else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_bundle(path: str | Path) -> dict[str, Any]:
    """The content of a bundle. Raises ``InputError`` if it was changed, or is not a bundle of this version."""
    data, _ = read_limited(path, "bundle", MAX_BYTES)
    try:
        outer = json.loads(data)
        text = outer["content"]
        if outer["digest"] != _digest(text):
            raise InputError(f"{path} was changed: its digest does not match; use the original file")
        found: dict[str, Any] = json.loads(text)
        form, schema, records = found["format"], found["schema"], found["records"]
    except InputError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise InputError(f"{path} is not a bundle; expected a file that rasura bundle wrote") from None
    if form != FORMAT or schema != SCHEMA:
        raise InputError(f"{path} is {form!r} with schema {schema}; this version reads {FORMAT!r} with schema {SCHEMA}")
    if wrong := next((why for r in records if (why := wrong_in(r))), ""):
        raise InputError(f"{path}: a record is not valid ({wrong})")
    return found


@dataclass(frozen=True)
class Returned:
    """One cell that was run again: ``word`` is ``EQUAL``, ``CLOSE``, ``DIFFERENT``, or ``NOTHING`` where the cell has no
    figure, then or now. ``says`` names what differs, or why there is no figure."""

    attack: str
    defense: str
    key: str
    word: str
    says: str


class Reproduction:
    """The audit of a bundle, ready to run its cells again. ``data``, ``model``, ``reference``: where they are on this
    machine.

    Raises ``InputError`` for a bundle that is no audit of updates, and if the data, the weights, the reference text or the
    code of own methods here are not those of the run: another figure would then say nothing.
    """

    def __init__(
        self, content: Mapping[str, Any], *, data: str | None = None, model: str | None = None,
        reference: str | None = None, device: str = "cpu",
    ) -> None:  # fmt: skip
        held = {k: v for k, v in content["plan"].items() if k != "label_names" and v is not None}
        if "kind" in held:
            raise InputError(f"the bundle is of a run of kind {held['kind']}; only audits of updates can be run again")
        plan = plan_of(held, "the bundle's plan")
        plan = replace(plan, data=data or plan.data, model=model or plan.model, reference=reference or plan.reference)
        self.records = {_place(r): r for r in content["records"]}
        self.prepared = Audit(plan, device=device)
        (name,) = {r["data"] for r in content["records"]}
        if self.prepared.data_name != name:
            raise InputError(
                f"the data here is not that of the run (fingerprint {self.prepared.data_name}, expected {name})"
            )
        told, here = content["about"], self.prepared.fixed
        for name in (name for name in here if name in told):
            if said := changed(told[name], here[name]):
                raise InputError(f"the {name} here is not that of the run ({said})")
        self._untold = tuple(f"the run did not store a fingerprint of its {name}" for name in here if name not in told)
        self._then = {m for r in self.records.values() for m in (*r["scores"], *r["blind"])}
        self._left: dict[str, str] = {}

    @property
    def unchecked(self) -> tuple[str, ...]:
        """What could not be checked so far, in words."""
        return (*self._untold, *(f"{name} was not compared: {why}" for name, why in self._left.items()))

    def cells(self, attack: str | None = None, defense: str | None = None, count: int | None = None) -> list[Cell]:
        """The cells of the bundle with a figure, by attack and defense; at most ``count``. Those with a score and those in
        which the attack gave up take turns, and of each kind those that took least time come first. Guessing only where
        ``attack`` names it, or nothing else was run. Where no such cell has a figure, those without."""
        found = [c for c in self.prepared.cells if _place(vars(c)) in self.records]
        found = [c for c in found if attack in (None, c.attack) and defense in (None, c.defense)]
        if not found:
            raise InputError("the bundle has no such cell; see its attacks and defenses in the report of the run")
        found = [c for c in found if attack or c.attack != BLIND] or found
        found.sort(key=lambda c: (self.records[_place(vars(c))]["wall_seconds"], c.key))
        scored, silent = ([c for c in found if _ended(self.records[_place(vars(c))]) == how] for how in (SCORED, GAVE_UP))
        # Attacks that give up may be quick; by time alone they could be all that is run.
        turns = [c for c in chain.from_iterable(zip_longest(scored, silent)) if c is not None]
        return (turns or found)[:count]

    def not_run(self, cells: Iterable[Cell]) -> dict[str, int]:
        """How many cells of the bundle are not among ``cells``, by how they ended in the run."""
        places = {_place(vars(c)) for c in cells}
        left = [r for place, r in self.records.items() if place not in places]
        return dict(sorted(Counter("guessing" if r["attack"] == BLIND else _ended(r) for r in left).items()))

    def again(self, cell: Cell) -> Returned:
        """Run ``cell`` and compare its figures with those of the bundle."""
        (new,) = self.prepared.records([cell])
        self._left |= {name: why for name, why in self.prepared.unavailable.items() if name in self._then}
        later = {*new.scores, *new.blind} - self._then if self._then else set()
        self._left |= dict.fromkeys(sorted(later), "no result of the run has it")
        return returned(self.records[_place(vars(cell))], new, self._left)


def _place(one: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(one[name] for name in ("attack", "update", "defense", "threat", "batch_size", "seed", "batch"))


def returned(old: Mapping[str, Any], new: Record, left_out: Container[str] = ()) -> Returned:
    """Whether the figures of the record ``old`` came back in ``new``: status, confidence, and every score of every text but
    of metrics ``left_out``, which one of both machines cannot compute. An attack that gives up again has the figures of
    guessing. A cell that crashed has no figure that could come back."""
    now = new.to_dict()
    differs = [
        f"{what} {old[what]}, now {now[what]}" for what in ("status", "confidence", "examples") if old[what] != now[what]
    ]
    exact, compared = not differs, False
    for side in ("scores", "blind"):
        for metric in sorted(name for name in {*old[side], *now[side]} if name not in left_out):
            was, found = (_known(one[side].get(metric, {}).get("per_record")) for one in (old, now))
            exact, compared = exact and was == found, True
            if not _alike(was, found):
                differs.append(f"{metric} ({side}) {was}, now {found}")
    word, says, ended = EQUAL if exact else CLOSE, "all scores came back", _ended(old)
    if differs:
        word, says = DIFFERENT, "; ".join(differs)
    elif ended not in (SCORED, GAVE_UP):
        word, says = NOTHING, f"no score{_reasons(old, now)}"
    elif not compared:
        word, says = NOTHING, "no metric of the run can be computed here"
    elif ended == GAVE_UP:
        says = f"it gave up again{_reasons(old, now)}"
    return Returned(new.attack, new.defense, str(old["key"]), word, says)


def _ended(record: Mapping[str, Any]) -> str:
    """How a cell ended: with a score of any text or label, or why without."""
    if gave_up(record):
        return GAVE_UP
    if any(v is not None for one in record["scores"].values() for v in _known(one["per_record"]) or ()):
        return SCORED
    return {"crashed": "crashed", "not_applicable": "does not apply"}.get(record["status"], "without a score")


def _reasons(old: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    was, found = (f"{r['status']}: {r['reason']}" if r["reason"] else str(r["status"]) for r in (old, now))
    return f" ({was}; now: {found})"


def _known(values: Sequence[float | None] | None) -> list[float | None] | None:
    """The values, with None for NaN, as they are stored."""
    return None if values is None else [None if v is None or v != v else v for v in values]


def _alike(was: Sequence[float | None] | None, found: Sequence[float | None] | None) -> bool:
    if was is None or found is None or len(was) != len(found):
        return was is None and found is None
    pairs = list(zip(was, found))
    return all(a is b is None or (a is not None and b is not None and abs(a - b) <= ROUNDING) for a, b in pairs)
