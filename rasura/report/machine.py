"""Verdicts for machines: JUnit XML and SARIF for continuous integration, and plain figures for trackers. No torch.

What a run could not judge is an error, never a test that passed. No file holds a text, nor the folder of a protection's
file.
"""

from __future__ import annotations

import hashlib
import json
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rasura.core.files import write_whole
from rasura.core.options import public_names
from rasura.report.gate import ABOVE_LIMIT, NOT_JUDGED, PASSED, judged, outcomes
from rasura.report.matrix import Findings
from rasura.report.verdicts import ABOVE, READS, Verdict

RULES = {
    ABOVE_LIMIT: ("text-recovered", "An attack recovered more of the private text than is allowed."),
    NOT_JUDGED: ("not-judged", "The run cannot say whether the protection holds."),
}


@dataclass(frozen=True)
class Outcome:
    """What one protection is judged to be: an exit code of ``report.gate``, and why in one line."""

    name: str
    code: int
    says: str


def judgements(f: Findings, limit: float | None) -> list[Outcome]:
    """Every judged protection: against ``limit``, or without a limit by its verdict. Never empty."""
    if limit is not None:
        found = [Outcome(name, code, says) for name, (code, says) in outcomes(f.verdicts, limit).items()]
    else:
        found = [Outcome(name, _code(v), f"{name}: {v.says}") for name, v in judged(f.verdicts).items()]
    shown = public_names(one.name for one in found)
    found = [Outcome(shown[one.name], one.code, _told(one.says, shown)) for one in found]
    return found or [Outcome("run", NOT_JUDGED, "the run contains no protection and no baseline")]


def _told(text: str, shown: Mapping[str, str]) -> str:
    """``text`` with every protection as it is ``shown``."""
    for name in sorted(shown, key=len, reverse=True):
        text = text.replace(name, shown[name])
    return text


def _code(v: Verdict) -> int:
    """By the verdict alone: it passes only where the protection may be said to hold."""
    return ABOVE_LIMIT if v.word in (READS, ABOVE) else PASSED if v.holds else NOT_JUDGED


def write_junit(path: Path, f: Findings, limit: float | None, seconds: float) -> None:
    """Write a JUnit test suite to ``path``: a test case for each protection, a failure where text came back, and an error
    where nothing could be judged."""
    found = judgements(f, limit)
    count = {code: str(sum(o.code == code for o in found)) for code in (ABOVE_LIMIT, NOT_JUDGED)}
    about = {"name": "rasura audit", "tests": str(len(found)), "time": f"{seconds:.1f}"}
    suite = ET.Element("testsuite", {**about, "failures": count[ABOVE_LIMIT], "errors": count[NOT_JUDGED]})
    for one in found:
        case = ET.SubElement(suite, "testcase", {"classname": "rasura", "name": one.name})
        if one.code == PASSED:
            ET.SubElement(case, "system-out").text = one.says
        else:
            kind = "failure" if one.code == ABOVE_LIMIT else "error"
            ET.SubElement(case, kind, {"type": RULES[one.code][0], "message": one.says}).text = one.says
    root = ET.Element("testsuites")
    root.append(suite)
    write_whole(path, ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n")


def write_sarif(path: Path, f: Findings, limit: float | None, plan: Mapping[str, Any], version: str) -> None:
    """Write SARIF 2.1.0 to ``path``: a result for each protection that did not pass, placed at the data file of the run."""
    place = quote(Path(str(plan.get("data") or "notes")).as_posix())
    results = []
    for one in (o for o in judgements(f, limit) if o.code != PASSED):
        rule = RULES[one.code][0]
        same = hashlib.sha256(json.dumps([rule, one.name, plan.get("model"), plan.get("data")]).encode()).hexdigest()
        results.append({
            "ruleId": rule, "level": "error", "message": {"text": one.says},
            "partialFingerprints": {"rasura/v1": same},
            "locations": [{"physicalLocation": {"artifactLocation": {"uri": place}, "region": {"startLine": 1}}}],
        })  # fmt: skip
    rules = [{"id": name, "shortDescription": {"text": text}} for name, text in RULES.values()]
    driver = {"name": "rasura", "version": version, "rules": rules}
    whole = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }  # fmt: skip
    write_whole(path, json.dumps(whole, indent=2, ensure_ascii=False) + "\n")


FILES = ("data", "reference", "language_model", "model")
"""Settings that may name a file or a folder."""


def tracked(f: Findings, plan: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, float]]:
    """What a tracker keeps of a run: the settings and verdicts as text, and the figures of every column. No texts, and of
    files and folders the names alone: where they lie may say whose they are.

    A figure that the run does not have, or that rests on less than was to be measured, is left out.
    """
    shown = public_names([*f.verdicts, *plan.get("protections", ()), *plan.get("defenses", ())])
    kept = {k: v for k, v in plan.items() if k not in ("texts", "label_names") and v not in (None, (), [], "")}
    words = {k: ",".join(map(str, v)) if isinstance(v, list | tuple) else str(v) for k, v in kept.items()}
    words = {k: Path(v).name if k in FILES else _told(v, shown) for k, v in words.items()}
    words |= {f"verdict {shown[name]}": _told(v.says, shown) for name, v in f.verdicts.items()}
    figures: dict[str, float] = {}
    for name, v in f.verdicts.items():
        values = {"risk": v.read, "upper": v.bound, "guessing": None if v.guess is None else v.guess.mean, "examples": v.n}
        figures |= {f"{what} {shown[name]}": float(value) for what, value in values.items() if value is not None}
    return words, figures
