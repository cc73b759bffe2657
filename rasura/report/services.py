"""From the Records of an audit of a model service to what a person needs to know. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rasura.core.records import CLIENT
from rasura.report.findings import column_of, findings, recommendation
from rasura.report.language import tell
from rasura.report.matrix import Findings, Wording
from rasura.report.pooled import Level, pooled
from rasura.report.readings import reading
from rasura.report.scores import gave_up, notes_of, without_a_figure
from rasura.report.sentence import RISK, covered, left_out, of_what_is_left, partly, told_first, unknown_words, where
from rasura.report.verdicts import Verdict, worst_of

ANSWERS = "answer_bag_f1"
"""``RISK`` of what a model that generates answered."""

WORDS = Wording("note", "notes", "of the tokens (F1)", "Tokens recovered (F1), %")

MEASURES = {"top1": "top-1", "top3": "top-3", "rougeL": "ROUGE-L", RISK: "tokens (F1)"}
"""Metrics of the table beside the matrix, with their names there."""


@dataclass(frozen=True)
class Measure:
    """One attack behind one protection: of each of ``MEASURES`` what was read and what guessing scores; None where the
    attack has no such figure."""

    attack: str
    defense: str
    figures: tuple[tuple[Level | None, Level | None], ...]


def service_findings(records: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> Findings:
    """What the records of a service say, as ``findings`` of an audit of updates. ``plan``: the identity of the run.

    A verdict is the worst of those on what was asked and, of a model that generates, on what it answered. It says behind how
    many keys; no record says which protections have one, so all verdicts on protections do.
    """
    attacked = [r for r in records if r["attack"] != CLIENT]
    order = {"defenses": plan["protections"], "updates": plan["weights"], "attacks": plan["attacks"]}
    found = replace(findings(attacked, order, RISK), words=WORDS)
    said: list[str] = []
    if any(ANSWERS in r["scores"] or ANSWERS in r["blind"] for r in attacked):
        answers = findings(attacked, order, ANSWERS)
        worst = {c: worst_of([v, answers.verdicts[c]]) for c, v in found.verdicts.items()}
        said = [*_answers_read(found, answers, worst), *_answers_left_out(found, attacked)]
        found = replace(found, verdicts=worst)
    said = [*_sentence(found, attacked), *said]
    return replace(found, sentence=tuple(said), recommendation=recommendation(found))


def _sentence(f: Findings, records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    name = told_first((*f.baseline, *f.columns), f.best)
    guess = [] if f.blind is None else [tell("Guessing without looking at the data sent: {level}.", level=f.blind.text)]
    if name is None or f.blind is None or f.best[name].silent:
        if f.all_gave_up:
            yield tell("Every attack on the service gave up: none gave a guess at the {many}.", many=f.words.here.many)
        else:
            yield tell("No attack on the service gave a result that can be scored; the table gives the reasons.")
        yield from (*left_out(f), *of_what_is_left(f, records), *(() if name is None else (*partly(f, name), *guess)))
        return
    entry = f.best[name]
    assert entry.level is not None
    yield tell(
        "Of {notes} notes sent {where}, the operator of the service read back {level} {share}.", notes=entry.notes,
        where=where(name), level=entry.level.text, share=f.words.here.share,
    )  # fmt: skip
    yield from partly(f, name)
    if entry.coverage:
        yield covered(*entry.coverage, f.words.here.many)
    yield from (*left_out(f), *of_what_is_left(f, records))
    yield from (*guess, *unknown_words(records))


def _answers_read(f: Findings, answers: Findings, worst: Mapping[str, Verdict]) -> Iterator[str]:
    """What was read of the answers where the verdict on them is the ``worst``, so that the figures of what was asked do not
    show why."""
    for column in f.columns:
        entry = answers.best.get(column)
        if worst[column].word == f.verdicts[column].word or entry is None or entry.silent:
            continue
        if entry.level is None or answers.blind is None:
            continue
        yield tell(
            "Of the answers {where}, the operator of the service read back {level} {share}; guessing: {blind}.",
            where=where(column), level=entry.level.text, share=WORDS.here.share, blind=answers.blind.text,
        )  # fmt: skip


def _answers_left_out(f: Findings, records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Of a model that generates: how many answers in each column could not be scored; nothing where all could."""
    for column in f.columns:
        here = [r for r in records if column_of(r["update"], r["defense"]) == column]
        if count := len(without_a_figure(here, ANSWERS)):
            yield tell(
                "{count} of {of} answers {where} could not be scored and do not count: they hold no word that the tokenizer "
                "knows.", count=count, of=len({n for r in here for n in notes_of(r)}), where=where(column),
            )  # fmt: skip


def measures(records: Sequence[Mapping[str, Any]], f: Findings) -> list[Measure]:
    """Every figure of every attack, in the order of the matrix."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for r in records:
        if r["status"] == "ok" and r["attack"] != CLIENT and not gave_up(r):
            groups[r["attack"], column_of(r["update"], r["defense"])].append(r)
    out = []
    for (attack, column), some in groups.items():
        read = [reading(attack, some, {}, metric) for metric in MEASURES]
        out.append(Measure(attack, column, tuple((one.level, pooled(one.guessed.values())) for one in read)))
    return sorted(out, key=lambda m: (f.columns.index(m.defense), f.attacks.index(m.attack)))


def continued(records: Sequence[Mapping[str, Any]], f: Findings) -> list[tuple[str, Level]]:
    """Of a model that generates, by protection: how near the client's continuations are to the true ones (ROUGE-1)."""
    found = {
        r["defense"]: pooled(r["scores"].get("continuation_rouge1", {}).get("per_record", []))
        for r in records
        if r["attack"] == CLIENT
    }
    names = dict.fromkeys(v.defense for v in f.verdicts.values())
    return [(name, level) for name in names if (level := found.get(name)) is not None]
