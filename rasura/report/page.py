"""The report as one self-contained HTML file: no network, no script, printable. The file is personal data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rasura.core.errors import InputError
from rasura.core.files import write_whole
from rasura.core.records import ACTIVE_THREATS
from rasura.core.run_store import RunStore, refused_if_damaged
from rasura.report.assessment import assessment
from rasura.report.calibration import finished, render_calibration
from rasura.report.compare import Run
from rasura.report.findings import column_of, findings, summary_of, unfinished
from rasura.report.head import Made, head, settings
from rasura.report.language import recorded, size, tell, written_in
from rasura.report.matrix import Findings
from rasura.report.membership import membership_findings, render_membership
from rasura.report.notes import attempts, masked, notes_in
from rasura.report.pooled import Level
from rasura.report.protections import plot, protection_rows
from rasura.report.scores import setting_of
from rasura.report.sentence import where
from rasura.report.services import MEASURES, continued, measures, service_findings
from rasura.report.sums import conclusion, curve, sum_rows
from rasura.report.template import filled
from rasura.report.training import is_training, render_training
from rasura.report.verdicts import plain
from rasura.report.ways import CLIENTS, SOURCE, VALUES, way_lines
from rasura.report.word import write_assessment

ACTIVE = "a server that sends a crafted model (active attacks)"
ACTIVE_SERVICE = "an operator who changes the model or its answers (active attacks)"
REMEMBERED = "membership inference and memorization by the trained model (rasura membership)"


def not_tested(records: Sequence[Mapping[str, Any]], *, service: bool = False) -> list[str]:
    """What the run of ``records`` did not test."""
    active = [recorded(ACTIVE_SERVICE)] if service else _not_attacked_actively(records)
    return [*active, recorded(REMEMBERED)]


def _not_attacked_actively(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """That active attacks were not tested, unless one ended on every update of every judged column that a server with
    crafted weights may attack; with the names of the columns where that is so of some alone."""
    due: dict[str, set[tuple[Any, ...]]] = defaultdict(set)
    ended: dict[str, set[tuple[Any, ...]]] = defaultdict(set)
    protected = [r for r in records if not plain(r["defense"])]
    for r in protected or records:
        name, place = column_of(r["update"], r["defense"]), (*setting_of(r), r["seed"], r["batch"])
        due[name].update({place} if r["threat"] in ACTIVE_THREATS else ())
        ended[name].update({place} if r.get("crafted") and r["status"] in ("ok", "failed") else ())
    left = [name for name, places in due.items() if not places or not places <= ended[name]]
    if not left and due:
        return []
    if len(left) == len(due):
        return [recorded(ACTIVE)]
    return [tell("{active} under {names}", active=recorded(ACTIVE), names=", ".join(left))]


def write_report(run_dir: str | Path, *, show_text: bool = False, language: str = "en") -> Path:
    """Write ``report.html`` (and ``records.jsonl``, ``summary.json``, and for texts a page for each in ``notes``) into
    ``run_dir`` from its store; returns its path.

    ``show_text`` reveals texts only where the run stored them (an audit with ``--show-text``); else they stay masked.
    ``language``: of the pages, a key of ``language.LANGUAGES``; the files for machines are in English.
    """
    path = Path(run_dir) / "report.html"
    if is_training(run_dir):
        with refused_if_damaged(run_dir), written_in(language):
            write_whole(path, render_training(run_dir))
        return path
    with closing(RunStore(run_dir)) as store, refused_if_damaged(run_dir):
        records, plan = list(store), store.plan
        made, kind = Made(store.sittings, store.about), plan.get("kind")
        with written_in(language):
            if kind == "calibration":
                page = render_calibration(finished(run_dir), plan, records, made)
            elif kind == "membership":
                page = render_membership(records, plan, made)
            else:
                found = found_in(records, plan, made)
                page = _rendered(found, records, plan, made, show_text)
                write_notes(run_dir, found, records, plan, show_text=show_text)
        if kind == "membership":
            store.export(asdict(membership_findings(records, plan)))
        elif kind != "calibration":
            store.export(summary_of(found_in(records, plan, made)))
    write_whole(path, page)
    return path


def write_notes(
    run_dir: str | Path, found: Findings, records: list[dict[str, Any]], plan: Mapping[str, Any], *, show_text: bool
) -> None:
    """Write a page for each text of a run, with what came back of it in every attack."""
    shown = show_text and bool(plan.get("show_text"))
    for note in notes_in(records, found):
        folder = Path(run_dir) / "notes"
        folder.mkdir(mode=0o700, exist_ok=True)
        attempted = attempts(note, records, found, shown)
        page = filled("note.html", note=note, attempts=attempted, f=found, words=found.words.here, shown=shown)
        write_whole(folder / f"{note + 1}.html", page)


def opened(run_dir: str | Path) -> Run:
    """An audit of updates or of a model service, as it was stored. Raises ``InputError`` for runs of other kinds."""
    with closing(RunStore(run_dir)) as store, refused_if_damaged(run_dir):
        records, plan = list(store), store.plan
        if plan.get("kind") not in (None, "service"):
            raise InputError(
                f"{run_dir} is a run of kind {plan['kind']}; expected an audit of updates or of a model service"
            )
        made = Made(store.sittings, store.about)
        return Run(records, plan, made, found_in(records, plan, made))


def write_dpia(run_dir: str | Path, path: Path, language: str = "en") -> Path:
    """Write the section of an impact assessment, ``.docx`` or ``.md``, that the run fills in; returns its path."""
    with written_in(language), refused_if_damaged(run_dir):
        run = opened(run_dir)
        untested = not_tested(run.records, service=run.plan.get("kind") == "service")
        return write_assessment(path, assessment(run.found, run.plan, run.records, run.made, untested))


def found_in(records: Sequence[Mapping[str, Any]], plan: Mapping[str, Any], made: Made | None = None) -> Findings:
    """What ``records`` say, of an audit of updates or of a model service. ``made``: what the run stored about itself, such
    as how many results it has; with fewer here, nothing is said for a protection."""
    found = service_findings(records, plan) if plan.get("kind") == "service" else findings(records, plan)
    asked = (made or Made()).asked
    return found if asked is None or asked <= len(records) else unfinished(found, len(records), asked)


def render(
    records: list[dict[str, Any]], plan: Mapping[str, Any], made: Made | None = None, *, show_text: bool = False
) -> str:
    """The page of an audit of updates or of a model service, as a string. ``made``: what the run stored about itself."""
    return _rendered(found_in(records, plan, made), records, plan, made or Made(), show_text)


def _rendered(f: Findings, records: list[dict[str, Any]], plan: Mapping[str, Any], made: Made, show_text: bool) -> str:
    service = plan.get("kind") == "service"
    rows = protection_rows(f, plan, records, made)
    shown = show_text and bool(plan.get("show_text"))
    evidence = [masked(e, shown) for e in f.evidence]
    return filled(
        "services.html" if service else "page.html",
        f=f,
        words=f.words.here,
        where=where,
        measured=tuple(MEASURES.values()),
        measures=measures(records, f) if service else (),
        continued=continued(records, f) if service else (),
        evidence=evidence,
        plan=plan,
        made=made,
        head=head(f, plan, records, made),
        settings=settings(plan),
        rows=rows,
        plot=plot(rows, f, made.limit),
        not_tested=not_tested(records, service=service),
        shown=shown,
        notes=notes_in(records, f),
        versions=records[0]["versions"] if records else {},
        device=", ".join(sorted({r["device"] for r in records})),
        schema=records[0]["schema"] if records else "",
        seconds=sum(r["wall_seconds"] for r in records),
        curves=_curves(f),
        frontier=None if service else _frontier(f),
        source={"millions": VALUES / 1e6, "clients": CLIENTS, "place": SOURCE},
        ways=() if service else way_lines(f),
        sums=sum_rows(summed) if (summed := curve(records, made.clients, f.metric, f.unfinished)) else (),
        least=conclusion(summed) if summed else "",
    )


NEAR = 12
"""Points of a plot that lie nearer than this, in both directions, share a label."""


def strength(defense: str) -> tuple[str, float] | None:
    """``pruning:0.9`` as ``pruning`` and 0.9, ``sealing:grad=0.1`` as ``sealing:grad`` and 0.1; None for all else."""
    cut = max(defense.rfind(":"), defense.rfind("="))
    try:
        return (defense[:cut], float(defense[cut + 1 :])) if cut > 0 else None
    except ValueError:
        return None


def _curves(f: Findings) -> list[dict[str, Any]]:
    """Defenses that were run at several strengths: best attack's risk against the strength."""
    families: dict[str, list[tuple[float, Level]]] = {}
    for defense in f.columns:
        found, entry = strength(defense), f.figure(defense)
        if found is not None and entry is not None and entry.level:
            families.setdefault(found[0], []).append((found[1], entry.level))
    out = []
    for name, points in families.items():
        if len(points) < 2:
            continue
        points.sort(key=lambda p: p[0])
        x = [60 + 420 * k / (len(points) - 1) for k in range(len(points))]
        y = [_height(p.mean) for _, p in points]
        band = [f"{a:.1f},{_height(p.high):.1f}" for a, (_, p) in zip(x, points)]
        band += [f"{a:.1f},{_height(p.low):.1f}" for a, (_, p) in reversed(list(zip(x, points)))]
        out.append(
            {
                "name": name,
                "line": " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y)),
                "band": " ".join(band),
                "points": [(a, b, v) for a, b, (v, _) in zip(x, y, points)],
                "blind": _height(f.blind.mean if f.blind else 0),
            }
        )
    return out


def _height(share: float) -> float:
    return 170 - 150 * share


def _frontier(f: Findings) -> dict[str, Any] | None:
    """Risk against bytes sent, a point a defense; None where all send the same."""
    sizes = {d: p.sent for d, p in f.prices.items() if p.sent}
    if not sizes or max(sizes.values()) < 1.01 * min(sizes.values()):
        return None
    most = max(sizes.values())
    risks = {d: e.level.mean for d in f.columns if (e := f.figure(d)) and e.level}
    points: list[dict[str, Any]] = []
    labels: list[dict[str, Any]] = []
    for number, (name, sent) in enumerate(sizes.items(), 1):
        price, entry = f.prices[name], f.figure(name)
        points.append({"number": number, "name": name, "sent": size(sent), "seconds": price.seconds, "entry": entry})
        if name in risks:
            x, y = 60 + 410 * sent / most, _height(risks[name])
            points[-1] |= {"x": x, "y": y}
            near = [t for t in labels if abs(t["x"] - x) < NEAR and abs(t["y"] - y) < NEAR]
            if near:
                near[0]["text"] += f", {number}"
            else:
                labels.append({"x": x, "y": y, "text": str(number)})
    return {"points": points, "labels": labels, "most": size(most), "blind": _height(f.blind.mean if f.blind else 0)}
