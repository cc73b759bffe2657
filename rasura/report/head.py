"""The head of a report: what makes it evidence that can be filed. What is not known is said in words. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rasura.core.provenance import Sitting
from rasura.core.records import MASK
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
    def limit(self) -> float | None:
        """The last ``--fail-above`` of the run; None without one."""
        found: float | None = self.about.get("fail_above")
        return found

    @property
    def date(self) -> str:
        """When the run was made, in UTC."""
        days = [_minute(str(one["began"])) for one in self.sittings]
        if not days:
            return UNKNOWN
        return (
            days[0] if len(days) == 1 else f"{days[0]}, resumed {len(days) - 1} time{'s' * (len(days) > 2)} until {days[-1]}"
        )

    @property
    def packages(self) -> str:
        """The versions of the packages, and a warning if they changed during the run."""
        told = [", ".join(f"{k} {v}" for k, v in dict(one["packages"]).items()) for one in self.sittings]  # type: ignore[arg-type]  # a mapping by its form
        different = list(dict.fromkeys(told))
        if len(different) > 1:
            return f"the versions changed during the run: {'; then '.join(different)}"
        return different[0] if different else UNKNOWN


def _minute(at: str) -> str:
    return f"{datetime.fromisoformat(at):%Y-%m-%d %H:%M} UTC"


def head(f: Findings, plan: Mapping[str, Any], records: Sequence[Mapping[str, Any]], made: Made) -> list[tuple[str, str]]:
    """The rows of the head: name and value, in the order in which they are read."""
    codes = made.kept("code")
    code = f"{codes[0]} (SHA-256 of the code, shortened)" if len(codes) == 1 else UNKNOWN
    if len(codes) > 1:
        code = f"the code changed during the run: {', then '.join(codes)}"
    model = f", fingerprint of the weights {made.about['model']}" if "model" in made.about else f", fingerprint {UNKNOWN}"
    data = "; ".join(sorted({str(r["data"]) for r in records})) or "no records"
    source = plan.get("data") or ("texts from the command line" if plan.get("texts") else f"demo {f.words.many}")
    return [
        ("made", made.date),
        ("who could do this", "; ".join(plain for plain in f.threats.values() if plain) or UNKNOWN),
        ("with what means", means(f, plan, made)),
        ("model", f"{plan.get('model', 'unknown')}{model}"),
        ("data", f"{source}, fingerprint {data}"),
        ("code", code),
        ("command", "; then ".join(made.kept("command")) or UNKNOWN),
        ("packages", made.packages),
    ]


def means(f: Findings, plan: Mapping[str, Any], made: Made) -> str:
    """How long the strongest attack on the worst column took, and on which machine."""
    worst = max(f.best.values(), key=lambda e: e.level.mean if e.level else 0.0, default=None)
    machine = "; ".join(made.kept("machine")) or f"a machine that was {UNKNOWN}"
    if worst is None:
        return f"no attack gave a result, on {machine}"
    where = "without protection" if worst.defense in f.baseline else f"under {worst.defense}"
    return f"{worst.attack} took {duration(worst.seconds)} {per(plan)} {where}, on {machine}"


def per(plan: Mapping[str, Any]) -> str:
    """What a time or a size is of: one update, or all that a service was sent."""
    return "for all notes together" if plan.get("kind") == "service" else "an update"


def duration(seconds: float) -> str:
    """Wall-clock time in the unit that fits."""
    if seconds < 1:
        return "less than a second"
    if seconds < 1.5:
        return "a second"
    return f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def settings(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The whole plan, texts masked."""
    rows = []
    for name, value in plan.items():
        if name == "texts":
            value = f"{len(value)} texts ({MASK})" if isinstance(value, list) else value
        rows.append((name.replace("_", " "), ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return rows
