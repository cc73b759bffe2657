"""The section of an impact assessment that a run can fill in: facts of the run beside what authorities ask. No torch.

It quotes the documents that it names in few words, and it is not legal advice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rasura.core.errors import InputError
from rasura.report.head import Made, head
from rasura.report.matrix import Findings
from rasura.report.protections import Row, protection_rows
from rasura.report.verdicts import HOLDS_WITHIN, WORDS

NO_ADVICE = (
    "This section states what was measured, beside what public documents ask. It is not legal advice. The controller "
    "completes it and decides."
)
OPEN = "To be completed by the controller; the run does not know it."


@dataclass(frozen=True)
class Section:
    """A part of the assessment: ``paragraphs``, then a ``table`` with its header first, then the ``source`` of what is
    asked."""

    title: str
    paragraphs: tuple[str, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
    source: str = ""


def assessment(
    f: Findings, plan: Mapping[str, Any], records: Sequence[Mapping[str, Any]], made: Made, untested: Sequence[str]
) -> tuple[Section, ...]:
    """The sections, from an audit of updates or of a model service. ``untested``: what the run did not test.

    Raises ``InputError`` for a run without records.
    """
    if not records:
        raise InputError("the run holds no records, so an assessment could state nothing; finish the run first")
    rows = protection_rows(f, plan, records, made)
    facts = head(f, plan, records, made)
    return (
        Section("Status of this text", (NO_ADVICE,)),
        Section("The processing that was measured", (), (("what", "fact"), *facts)),
        _personal_data(f, plan),
        _protections(f, rows),
        _formal(rows),
        _attacks(f, made),
        Section(
            "Residual risk and limits",
            (
                "“No attack here succeeded” does not mean “safe”. The figures describe these attacks with this budget, this "
                f"model and these {f.words.many}. The intervals are valid if the {f.words.many} were drawn independently.",
                f"Not tested: {'; '.join(untested)}.",
            ),
        ),
        Section("For the controller", (f"Purposes, legal basis, necessity, consultation and decision. {OPEN}",)),
    )


def _personal_data(f: Findings, plan: Mapping[str, Any]) -> Section:
    if plan.get("kind") == "service":
        asked = "The question here is what the operator of a model service can read from what its clients send."
        return Section("Can personal data be read back?", (*f.sentence, asked))
    return Section(
        "Can personal data be read back?",
        (
            *f.sentence,
            "The European Data Protection Supervisor says of federated learning that an attacker “could infer sensitive "
            "information by analysing the gradients or weights shared”. The figures above measure this for the updates of "
            "this run.",
            "The European Data Protection Board says that models trained on personal data “cannot, in all cases, be "
            "considered anonymous”. This run attacked updates and not the trained model, so it does not say whether the "
            "model is anonymous. For attacks on a trained model, see rasura membership.",
        ),
        source="EDPS TechDispatch 1/2025 on federated learning; EDPB Opinion 28/2024",
    )


def _protections(f: Findings, rows: Sequence[Row]) -> Section:
    table = [("protection", "verdict", "read by the strongest attack", "bytes", "formal guarantee")]
    for r in rows:
        costs, name = dict(r.costs), f"{r.name} (baseline)" if r.baseline else r.name
        table.append((name, r.verdict.says, r.level.text if r.level else "no figure", costs["bytes"], costs["guarantee"]))
    return Section(
        "Technical measures and their effect",
        (
            f.recommendation,
            f"A verdict is one of: {', '.join(WORDS)}. A protection is said to hold only with the last one, and if what is "
            f"read above guessing is at most {100 * HOLDS_WITHIN:.0f} %, by the upper end of its interval.",
            "What each measure costs in accuracy was not measured in this run.",
        ),
        tuple(table),
        "ICO guidance on privacy-enhancing technologies (PETs)",
    )


def _formal(rows: Sequence[Row]) -> Section:
    claimed = [(r.name, dict(r.costs)["guarantee"]) for r in rows if "differential privacy" in dict(r.costs)["guarantee"]]
    if claimed:
        said = tuple(f"{name}: {guarantee}" for name, guarantee in claimed)
    else:
        said = ("No protection of this run is recorded with differential privacy. The verdicts are empirical.",)
    missing = (
        "Epsilon, delta, the unit of privacy and the number of steps belong to a training run. This run has none of them."
    )
    return Section("Differential privacy", (*said, missing), source="NIST SP 800-226, on evaluating differential privacy")


def _attacks(f: Findings, made: Made) -> Section:
    known: Mapping[str, Mapping[str, str]] = made.about.get("attacks", {})
    unknown = {"about": "not recorded", "source": "not recorded"}
    told = [(a, known.get(a, unknown)) for a in f.attacks]
    return Section(
        "Attacks that were run",
        ("Gradient inversion reads training texts from updates; the baseline guesses without looking at what was sent.",),
        (("attack", "what it does", "published in"), *((a, one["about"], one["source"]) for a, one in told)),
        "NIST AI 100-2, on attacks and their terms; OWASP AI Testing Guide (gradient inversion)",
    )


def markdown(sections: Sequence[Section]) -> str:
    """The sections as Markdown."""
    out = ["# Impact assessment: what can be read back from the data that is sent", ""]
    for one in sections:
        out += [f"## {one.title}", ""]
        out += [line for text in one.paragraphs for line in (_plain(text), "")]
        if one.table:
            first, *rest = ([_plain(cell).replace("|", "\\|") for cell in row] for row in one.table)
            out += [f"| {' | '.join(row)} |" for row in (first, ["---"] * len(first), *rest)] + [""]
        out += [f"Source: {one.source}.", ""] if one.source else []
    return "\n".join(out)


def _plain(text: str) -> str:
    """``text`` on one line, with nothing that Markdown or HTML would take for a mark-up of its own."""
    one = " ".join(text.split())
    return "".join(f"\\{c}" if c in "\\`*_[]<>#" else c for c in one)
