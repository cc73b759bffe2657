"""What a report says of each protection: its verdict, what it is, what it costs, and what to do next. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rasura.core.options import name_of, names_of, parts_of
from rasura.report.commands import Step, next_step
from rasura.report.findings import recommended
from rasura.report.head import UNKNOWN, Made, per
from rasura.report.language import number, recorded, size, tell
from rasura.report.matrix import Entry, Findings
from rasura.report.missing import HOLDS_WITHIN
from rasura.report.pooled import Level
from rasura.report.sealed import sealed_about, sealed_promise, unencrypted
from rasura.report.verdicts import Verdict, plain

PRIVATE = "differential privacy"
"""What a guarantee is called that the registry records with epsilon."""


@dataclass(frozen=True)
class Row:
    """One protection: ``about`` in plain words by part, ``costs`` as name and value, ``step`` to take next.

    ``entry``: the strongest attack with its figure, see ``Findings.figure``. ``private``: whether a part of it is recorded
    with differential privacy.
    """

    name: str
    verdict: Verdict
    baseline: bool
    chosen: bool
    about: tuple[tuple[str, str], ...]
    entry: Entry | None
    costs: tuple[tuple[str, str], ...]
    step: Step
    private: bool = False

    @property
    def level(self) -> Level | None:
        """What the strongest attack read."""
        return None if self.entry is None else self.entry.level

    @property
    def silent(self) -> bool:
        """Whether no attack gave a guess that can be scored, so that ``level``, if there is one, is that of guessing."""
        return self.entry is not None and self.entry.silent


def protection_rows(
    f: Findings, plan: Mapping[str, Any], records: Sequence[Mapping[str, Any]], made: Made
) -> tuple[Row, ...]:
    """A row for each column of the run, in their order."""
    chosen = recommended(f)
    return tuple(
        Row(
            name,
            v,
            name in f.baseline and name not in f.judged,
            name == chosen,
            _about(v.defense, made),
            f.figure(name),
            _costs(name, f, made, plan),
            next_step(v, f, plan, records, made.protections),
            any(PRIVATE in promise for promise in _promises(v.defense, made)),
        )
        for name, v in ((c, f.verdicts[c]) for c in f.columns)
    )


def _about(defense: str, made: Made) -> tuple[tuple[str, str], ...]:
    def of(part: str) -> str:
        about = made.protections.get(name_of(part), {}).get("about")
        if about and name_of(part) == "sealing":
            about = sealed_about(part, about)
        return recorded(about) if about else tell("what it is was {unknown}", unknown=recorded(UNKNOWN))

    return tuple({(name_of(part), of(part)): None for part in parts_of(defense)})


def _costs(name: str, f: Findings, made: Made, plan: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    price, without = f.prices[name], next((f.prices[c] for c in f.baseline), None)
    what = per(plan)
    sent = f"{size(price.sent)} {what}" if price.sent else tell("nothing was sent, or its size is not known")
    if price.sent and unencrypted(f.verdicts[name].defense):
        sent += " " + tell("(without encryption, which adds to it)")
    elif price.sent and without is not None and without.sent and name not in f.baseline:
        ratio = price.sent / without.sent
        if round(ratio, 2) == 1:
            sent += " " + tell("(as many as without protection)")
        else:
            sent += " " + tell("({ratio:.3g} times those without protection)", ratio=ratio)
    least = tell("less than {seconds} s", seconds=number(0.01, "g"))
    seconds = least if price.seconds < 0.01 else f"{number(price.seconds, '.2g')} s"
    return (
        (tell("bytes"), sent),
        (tell("time"), tell("{seconds} {what} to apply", seconds=seconds, what=what)),
        (tell("accuracy"), tell("not measured in this run")),
        (tell("guarantee"), _guarantee(f.verdicts[name].defense, made)),
    )


def _guarantee(defense: str, made: Made) -> str:
    """The kind of formal guarantee. Its epsilon follows from a training run, which an audit does not have."""
    if plain(defense):
        return tell("none")
    if not all(n in made.protections for n in names_of(defense)):
        return recorded(UNKNOWN)
    kinds = _promises(defense, made)
    further = [
        tell("{name}: its author states “{stated}”. Rasura did not check this.", name=name, stated=k["guarantee"])
        for name in names_of(defense) if (k := made.protections[name]).get("unchecked") and _states(k)
    ]  # fmt: skip
    if any(PRIVATE in kind for kind in _recorded(defense, made)):
        if why := made.compositions.get(defense, recorded(UNKNOWN)):
            further.append(tell("No differential privacy is stated: {why}.", why=why))
        else:
            further.append(tell("Epsilon was not computed in this run: it depends on the whole training (rasura account)."))
    said = "; ".join(map(recorded, kinds)) or tell("none; the verdict is empirical")
    return " ".join((f"{said}.", *further)) if kinds or further else said


def _promises(defense: str, made: Made) -> list[str]:
    """The formal guarantees of ``defense``: of its parts, without differential privacy where the ledger would state none for
    the whole; of sealing, that of its scheme."""
    proven = made.compositions.get(defense) == ""
    kinds = [kind for kind in _recorded(defense, made) if proven or PRIVATE not in kind]
    return [*kinds, *(sealed_promise(part) for part in parts_of(defense) if name_of(part) == "sealing")]


def _recorded(defense: str, made: Made) -> list[str]:
    """What is recorded of the parts of ``defense`` that are Rasura's own, but of sealing."""
    known = [made.protections.get(name, {}) for name in names_of(defense) if name != "sealing"]
    return [one["guarantee"] for one in known if _states(one) and not one.get("unchecked")]


def _states(known: Mapping[str, Any]) -> bool:
    return known.get("guarantee", "none") not in ("", "none")


def plot(rows: Sequence[Row], f: Findings, limit: float | None = None) -> dict[str, Any]:
    """Places on the axis of the dot plot, in percent of its width: guessing as a band, the target as a line.

    The target is the ``limit`` of ``--fail-above`` if the run had one, otherwise what a verdict allows above guessing.
    """
    band = None if f.blind is None else (100 * f.blind.low, 100 * f.blind.high)
    target = None if f.blind is None else min(100.0, 100 * (f.blind.mean + HOLDS_WITHIN))
    target = target if limit is None else 100 * limit
    lines = [
        {
            "name": r.name, "anchor": f"protection-{place}", "baseline": r.baseline, "chosen": r.chosen,
            "word": recorded(r.verdict.word),
            "dot": r.level and tuple(100 * x for x in (r.level.mean, r.level.low, r.level.high)),
        }
        for place, r in enumerate(rows, 1)
    ]  # fmt: skip
    return {"band": band, "target": target, "lines": lines, "within": 100 * HOLDS_WITHIN, "limit": limit}
