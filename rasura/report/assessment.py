"""The section of an impact assessment that a run can fill in: facts of the run beside what authorities ask. No torch.

It quotes the documents that it names in few words, and it is not legal advice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rasura.core.errors import InputError
from rasura.report.head import Made, head
from rasura.report.language import recorded, tell
from rasura.report.matrix import Findings
from rasura.report.missing import HOLDS_WITHIN
from rasura.report.protections import Row, protection_rows
from rasura.report.verdicts import WORDS

NO_ADVICE = (
    "This section states what was measured, beside what public documents ask. It is not legal advice. The controller "
    "completes it and decides."
)
TITLE = "Impact assessment: what can be read back from the data that is sent"
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
    many = f.words.here.many
    return (
        Section(tell("Status of this text"), (recorded(NO_ADVICE),)),
        Section(tell("The processing that was measured"), (), ((tell("what"), tell("fact")), *facts)),
        _personal_data(f, plan),
        _protections(f, rows),
        _formal(rows),
        _attacks(f, made),
        Section(
            tell("Residual risk and limits"),
            (
                tell(
                    "“No attack here succeeded” does not mean “safe”. The figures describe these attacks with this budget, "
                    "this model and these {many}. The intervals are valid if the {many} were drawn independently.",
                    many=many,
                ),
                tell("Not tested: {untested}.", untested="; ".join(untested)),
            ),
        ),
        Section(
            tell("For the controller"),
            (f"{tell('Purposes, legal basis, necessity, consultation and decision.')} {recorded(OPEN)}",),
        ),
    )  # fmt: skip


def _personal_data(f: Findings, plan: Mapping[str, Any]) -> Section:
    title = tell("Can personal data be read back?")
    if plan.get("kind") == "service":
        asked = tell("The question here is what the operator of a model service can read from what its clients send.")
        return Section(title, (*f.sentence, asked))
    return Section(
        title,
        (
            *f.sentence,
            tell(
                "The European Data Protection Supervisor says of federated learning that an attacker “could infer "
                "sensitive information by analysing the gradients or weights shared”. The figures above measure this for "
                "the updates of this run."
            ),
            tell(
                "The European Data Protection Board says that models trained on personal data “cannot, in all cases, be "
                "considered anonymous”. This run attacked updates and not the trained model, so it does not say whether the "
                "model is anonymous. For attacks on a trained model, see rasura membership."
            ),
        ),
        source=tell("EDPS TechDispatch 1/2025 on federated learning; EDPB Opinion 28/2024"),
    )


def _protections(f: Findings, rows: Sequence[Row]) -> Section:
    table = [
        (tell("protection"), tell("verdict"), tell("read by the strongest attack"), tell("bytes"), tell("formal guarantee"))
    ]
    for r in rows:
        costs, name = dict(r.costs), f"{r.name} {tell('(baseline)')}" if r.baseline else r.name
        read = r.level.text if r.level else tell("no figure")
        if r.level and r.silent:
            read = tell("no guess that can be scored, which counts as guessing: {level}", level=r.level.text)
        table.append((name, r.verdict.says, read, costs[tell("bytes")], costs[tell("guarantee")]))
    return Section(
        tell("Technical measures and their effect"),
        (
            f.recommendation,
            tell(
                "A verdict is one of: {words}. A protection is said to hold only with the last one, and if what is read "
                "above guessing is at most {within:.0f} %, by the upper end of its interval.",
                words=", ".join(map(recorded, WORDS)), within=100 * HOLDS_WITHIN,
            ),
            tell("What each measure costs in accuracy was not measured in this run."),
        ),
        tuple(table),
        tell("ICO guidance on privacy-enhancing technologies (PETs)"),
    )  # fmt: skip


def _formal(rows: Sequence[Row]) -> Section:
    said = tuple(f"{r.name}: {dict(r.costs)[tell('guarantee')]}" for r in rows if r.private)
    none = tell("No protection of this run is recorded with differential privacy. The verdicts are empirical.")
    missing = tell(
        "Epsilon, delta, the unit of privacy and the number of steps belong to a training run. This run has none of them."
    )
    source = tell("NIST SP 800-226, on evaluating differential privacy")
    return Section(tell("Differential privacy"), (*(said or (none,)), missing), source=source)


def _attacks(f: Findings, made: Made) -> Section:
    known: Mapping[str, Mapping[str, str]] = made.about.get("attacks", {})
    nothing = tell("not recorded")
    table = [
        (
            a,
            _ended(a, f),
            recorded(known[a]["about"]) if a in known else nothing,
            known[a]["source"] if a in known else nothing,
        )
        for a in f.attacks
    ]
    reads = tell(
        "Gradient inversion reads training texts from updates; the baseline guesses without looking at what was sent."
    )
    source = tell("NIST AI 100-2, on attacks and their terms; OWASP AI Testing Guide (gradient inversion)")
    header = (tell("attack"), tell("how it ended"), tell("what it does"), tell("published in"))
    return Section(tell("Attacks that were run"), (reads,), (header, *table), source)


def _ended(attack: str, f: Findings) -> str:
    """How often the attack ended in which way, under all protections together."""
    every = [e for (name, _), e in f.matrix.items() if name == attack]
    tried, scored, gave_up, crashed = (sum(getattr(e, n) for e in every) for n in ("cells", "scored", "gave_up", "crashed"))
    labels = sum(e.labels for e in every)
    absent = tried - scored - labels - gave_up - crashed
    said = tell(
        "of {tried} attempts {scored} gave a guess, {gave_up} gave up, {crashed} crashed, {absent} did not apply",
        tried=tried, scored=scored, gave_up=gave_up, crashed=crashed, absent=absent,
    )  # fmt: skip
    return f"{said}; {tell('{count} named labels and no text', count=labels)}" if labels else said


def markdown(sections: Sequence[Section]) -> str:
    """The sections as Markdown."""
    out = [f"# {recorded(TITLE)}", ""]
    for one in sections:
        out += [f"## {one.title}", ""]
        out += [line for text in one.paragraphs for line in (_plain(text), "")]
        if one.table:
            first, *rest = ([_plain(cell).replace("|", "\\|") for cell in row] for row in one.table)
            out += [f"| {' | '.join(row)} |" for row in (first, ["---"] * len(first), *rest)] + [""]
        out += [tell("Source: {source}.", source=one.source), ""] if one.source else []
    return "\n".join(out)


def _plain(text: str) -> str:
    """``text`` on one line, with nothing that Markdown or HTML would take for a mark-up of its own."""
    one = " ".join(text.split())
    return "".join(f"\\{c}" if c in "\\`*_[]<>#" else c for c in one)
