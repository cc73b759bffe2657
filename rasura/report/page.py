"""The report as one self-contained HTML file: no network, no script, printable. It is itself personal data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rasura.records import RunStore, write_whole
from rasura.report.findings import findings, summarise
from rasura.report.membership import membership_findings, render_membership

NOT_TESTED = (
    "a server that sends a crafted model (active attacks)",
    "membership inference and what the trained model itself remembers (`rasura membership`)",
)


def write_report(run_dir: str | Path, *, show_text: bool = False) -> Path:
    """Write ``report.html`` (and ``records.jsonl``, ``summary.json``) into ``run_dir`` from its store; returns its path.

    ``show_text`` reveals texts only where the run stored them (an audit with ``--show-text``); else they stay masked.
    """
    store = RunStore(run_dir)
    try:
        records, plan = list(store), store.plan
        trained = plan.get("kind") == "membership"
        store.export(asdict(membership_findings(records, plan)) if trained else summarise(records, plan))
    finally:
        store.close()
    path = Path(run_dir) / "report.html"
    write_whole(path, render_membership(records, plan) if trained else render(records, plan, show_text=show_text))
    return path


def render(records: list[dict[str, Any]], plan: Mapping[str, Any], *, show_text: bool = False) -> str:
    """The page as a string."""
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader("rasura", "report")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    f = findings(records, plan)
    evidence = [_evidence(e, show_text) for e in f.evidence]
    return environment.get_template("page.html").render(
        f=f,
        evidence=evidence,
        plan=plan,
        not_tested=NOT_TESTED,
        shown=show_text and bool(plan.get("show_text")),
        versions=records[0]["versions"] if records else {},
        data=records[0]["data"] if records else "",
        device=records[0]["device"] if records else "",
        schema=records[0]["schema"] if records else "",
        seconds=sum(r["wall_seconds"] for r in records),
        curves=_curves(f),
    )


def _evidence(row: Mapping[str, Any], show: bool) -> dict[str, Any]:
    if row.get("image"):
        return dict(row) if show else dict(row, sent="", read="")
    return dict(row, words=_words(row["words"], show), read=_shown(row["read"], show))


def _words(words: list[list[Any]], show: bool) -> list[tuple[str, bool, bool]]:
    return [(str(w) if show else "█" * len(str(w)), bool(hit), bool(hurts)) for w, hit, hurts in words]


def _shown(text: str, show: bool) -> str:
    return text if show else " ".join("█" * len(w) for w in text.split())


def _curves(f: Any) -> list[dict[str, Any]]:
    """Defenses that were run at several strengths: best attack's risk against the strength."""
    families: dict[str, list[tuple[float, Any]]] = {}
    for defense, entry in f.best.items():
        name, _, value = defense.partition(":")
        if value and "+" not in defense and entry.level:
            families.setdefault(name, []).append((float(value), entry.level))
    out = []
    for name, points in families.items():
        if len(points) < 2:
            continue
        points.sort(key=lambda p: p[0])
        x = [60 + 420 * k / (len(points) - 1) for k in range(len(points))]
        y = [170 - 150 * p.mean for _, p in points]
        band = [f"{a:.1f},{170 - 150 * p.high:.1f}" for a, (_, p) in zip(x, points)]
        band += [f"{a:.1f},{170 - 150 * p.low:.1f}" for a, (_, p) in reversed(list(zip(x, points)))]
        out.append(
            {
                "name": name,
                "line": " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y)),
                "band": " ".join(band),
                "points": [(a, b, v) for a, b, (v, _) in zip(x, y, points)],
                "blind": 170 - 150 * (f.blind.mean if f.blind else 0),
            }
        )
    return out
