"""The head of a report: what makes it evidence that can be filed. What is not known is said in words. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rasura.core.provenance import Sitting
from rasura.core.records import MASK
from rasura.report.language import recorded, tell
from rasura.report.matrix import Findings

UNKNOWN = "not recorded (the run was made by an older version)"


@dataclass(frozen=True)
class Made:
    """What a run stored about itself: each time that a command added results, and the facts that it described."""

    sittings: Sequence[Sitting] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    def kept(self, name: str) -> list[str]:
        """The different values of a fact over all sittings."""
        return list(dict.fromkeys(str(one[name]) for one in self.sittings))

    @property
    def protections(self) -> Mapping[str, Mapping[str, str]]:
        """What each protection is, from its spec; empty if the run did not store it."""
        found: Mapping[str, Mapping[str, str]] = self.about.get("protections", {})
        return found

    @property
    def compositions(self) -> Mapping[str, str]:
        """Why no differential privacy is proven for each protection, empty where it is; nothing of a run that did not store
        it."""
        found: Mapping[str, str] = self.about.get("compositions", {})
        return found

    @property
    def limit(self) -> float | None:
        """The last ``--fail-above`` of the run; None without one."""
        found: float | None = self.about.get("fail_above")
        return found

    @property
    def asked(self) -> int | None:
        """How many results the run has when it is finished; None for a run that did not store it."""
        found: int | None = self.about.get("cells")
        return found

    @property
    def clients(self) -> tuple[int, ...]:
        """The numbers of clients whose sums were audited (``--clients``); none for another run."""
        return tuple(self.about.get("clients", ()))

    @property
    def date(self) -> str:
        """When the run was made, in UTC."""
        days = [_minute(str(one["began"])) for one in self.sittings]
        if not days:
            return recorded(UNKNOWN)
        if len(days) == 1:
            return days[0]
        if len(days) == 2:
            return tell("{first}, resumed 1 time until {last}", first=days[0], last=days[-1])
        return tell("{first}, resumed {times} times until {last}", first=days[0], times=len(days) - 1, last=days[-1])

    @property
    def packages(self) -> str:
        """The versions of the packages, and a warning if they changed during the run."""
        told = [", ".join(f"{k} {v}" for k, v in dict(one["packages"]).items()) for one in self.sittings]  # type: ignore[arg-type]  # a mapping by its form
        different = list(dict.fromkeys(told))
        if len(different) > 1:
            return tell("the versions changed during the run: {versions}", versions=then(different))
        return different[0] if different else recorded(UNKNOWN)


def _minute(at: str) -> str:
    return tell("{at:%Y-%m-%d %H:%M} UTC", at=datetime.fromisoformat(at))


def then(parts: Sequence[str]) -> str:
    """What came one after the other."""
    return tell("; then ").join(parts)


def head(f: Findings, plan: Mapping[str, Any], records: Sequence[Mapping[str, Any]], made: Made) -> list[tuple[str, str]]:
    """The rows of the head of an audit: name and value, in the order in which they are read."""
    source = plan.get("data") or (
        tell("texts from the command line") if plan.get("texts") else tell("demo {many}", many=f.words.here.many)
    )
    who = "; ".join(recorded(plain) for plain in f.threats.values() if plain)
    return origin(plan, records, made, who=who, means=means(f, plan, made), source=str(source))


def origin(
    plan: Mapping[str, Any], records: Sequence[Mapping[str, Any]], made: Made, *, who: str, means: str, source: str
) -> list[tuple[str, str]]:
    """What every report says of its run: when, with which command, packages and code it was made, of which model and data,
    and the threat model: ``who`` could do this, and with which ``means``. ``source``: where the data came from."""
    unknown, codes = recorded(UNKNOWN), made.kept("code")
    code = tell("{code} (SHA-256 of the code, shortened)", code=codes[0]) if len(codes) == 1 else unknown
    if len(codes) > 1:
        code = tell("the code changed during the run: {codes}", codes=tell(", then ").join(codes))
    data = "; ".join(sorted({str(r["data"]) for r in records})) or tell("no records")
    model = str(plan.get("model") or tell("unknown"))
    weights = tell("{model}, fingerprint {unknown}", model=model, unknown=unknown)
    if "model" in made.about:
        weights = tell("{model}, fingerprint of the weights {weights}", model=model, weights=made.about["model"])
    asked = len(records) if made.asked is None else made.asked
    partly = tell(
        "{done} of {asked} results are here, and all that this page says is about these", done=len(records), asked=asked
    )
    return [
        *([(tell("unfinished"), partly)] if len(records) < asked else []),
        (tell("made"), made.date),
        (tell("who could do this"), who or unknown),
        (tell("with what means"), means),
        (tell("model"), weights),
        (tell("data"), tell("{source}, fingerprint {data}", source=source, data=data)),
        (tell("code"), code),
        (tell("command"), then(made.kept("command")) or unknown),
        (tell("packages"), made.packages),
    ]


def means(f: Findings, plan: Mapping[str, Any], made: Made) -> str:
    """How long the strongest attack on the worst column took, and on which machine."""
    told = (e for e in f.best.values() if not e.silent)
    worst = max(told, key=lambda e: e.level.mean if e.level else 0.0, default=None)
    if worst is None:
        return tell("no attack gave a result, on {machine}", machine=machine(made))
    where = tell("without protection") if worst.defense in f.baseline else tell("under {name}", name=worst.defense)
    return tell(
        "{attack} took {duration} {per} {where}, on {machine}", attack=worst.attack, duration=duration(worst.seconds),
        per=per(plan), where=where, machine=machine(made),
    )  # fmt: skip


def machine(made: Made) -> str:
    """The machine of the run."""
    return "; ".join(made.kept("machine")) or tell("a machine that was {unknown}", unknown=recorded(UNKNOWN))


def per(plan: Mapping[str, Any]) -> str:
    """What a time or a size is of: one update, or all that a service was sent."""
    return tell("for all notes together") if plan.get("kind") == "service" else tell("an update")


def duration(seconds: float) -> str:
    """Wall-clock time in the unit that fits."""
    if seconds < 1:
        return tell("less than a second")
    if seconds < 1.5:
        return tell("a second")
    if seconds < 120:
        return tell("{seconds:.0f} seconds", seconds=seconds)
    return tell("{minutes:.0f} minutes", minutes=seconds / 60)


def settings(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The whole plan, texts masked."""
    rows = []
    for name, value in plan.items():
        if name == "texts":
            value = tell("{count} texts ({mask})", count=len(value), mask=MASK) if isinstance(value, list) else value
        rows.append((name.replace("_", " "), ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return rows
