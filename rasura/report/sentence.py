"""The sentences that the report of an audit of updates begins with. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rasura.report.cut import OF_WHAT_IS_LEFT, cut_off
from rasura.report.labels import label_sentence
from rasura.report.language import recorded, tell
from rasura.report.matrix import IMAGES, Entry, Findings
from rasura.report.scores import gave_up, notes_of, setting_of, shares_of

HEADLINE, RISK = "token_recall", "bag_f1"
"""The headlines of audits of updates and of model services. The second is of tokens wherever they stand: every attack on a
service has it, and it is never below the share in their places."""

OF_TOKENS = (HEADLINE, RISK)
"""Metrics that have a value for every text of which the tokenizer knows a word."""


def told_first(columns: Iterable[str], best: Mapping[str, Entry]) -> str | None:
    """The first of ``columns`` under which an attack gave a guess, else the first that has a figure; None without any."""
    named = [c for c in columns if c in best]
    return next((c for c in named if not best[c].silent), named[0] if named else None)


def headline(
    columns: Iterable[str], best: Mapping[str, Entry], records: Sequence[Mapping[str, Any]]
) -> tuple[str | None, list[Mapping[str, Any]]]:
    """``told_first``, and its records in the setting where most was read. None where no column has a figure: the records of
    one setting then."""
    name = told_first(columns, best)
    if name is None:
        return None, [r for r in records if setting_of(r) == setting_of(records[0])]
    return name, [r for r in records if r["column"] == name and setting_of(r) == best[name].setting]


def sentence(f: Findings, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The sentences that a report of an audit begins with."""
    name, here = headline((*f.baseline, *f.columns), f.best, records)
    blank, labels = [*left_out(f), *of_what_is_left(f, records)], _labels(f)
    if name is None or f.blind is None or f.best[name].silent:
        return [_no_guess(f), *blank, *_guessing_alone(f, name), *labels]
    entry, words = f.best[name], f.words.here
    assert entry.level is not None
    held = [len(r["examples"]) or r["batch_size"] for r in here]
    few, many = min(held), max(held)
    sizes = f"{many} {words.many}" if few == many else tell("{few} to {many} {what}", few=few, many=many, what=words.many)
    sizes = tell("a single {what}", what=words.one) if many == 1 else sizes
    out = [
        tell(
            "From one update of {sizes} {where}, the server read back {level} {share}.", sizes=sizes, where=where(name),
            level=entry.level.text, share=words.share,
        )
    ]  # fmt: skip
    out += partly(f, name)
    if f.settings > 1:
        threat, size = entry.setting
        out.append(
            tell(
                "Of the threat models and batch sizes of this run, most was read under {threat} at batch size {size}.",
                threat=threat, size=size,
            )
        )  # fmt: skip
    if entry.coverage:
        out.append(covered(*entry.coverage, words.many))
    out += [*blank, tell("Guessing without the update: {level}.", level=f.blind.text)]
    out += _named([r for r in here if r["attack"] == entry.attack])
    return [*out, *unknown_words(records), *_unruled(records), *labels]


def _no_guess(f: Findings) -> str:
    many = f.words.here.many
    if f.all_gave_up:
        return tell("Every attack on the updates gave up: none gave a guess at the {many}.", many=many)
    return tell(
        "No attack on the updates gave a guess at the {many} that can be scored; the table gives the reasons.", many=many
    )


def _guessing_alone(f: Findings, column: str | None) -> list[str]:
    """What stands in place of a figure where attacks on ``column`` gave up; nothing where none has a figure."""
    if column is None or f.blind is None:
        return []
    return [*partly(f, column), tell("Guessing without the update: {level}.", level=f.blind.text)]


def partly(f: Findings, column: str) -> list[str]:
    """That the figure of a column is not all that could be read; nothing where the verdict bears it."""
    if f.figure(column) is not None:
        return []
    return [tell("More may be readable: this was not fully measured, and the verdict says why.")]


def _labels(f: Findings) -> list[str]:
    """What is said of labels: in the first column where guessing at them was scored too."""
    told = [one for one in f.labels if one.guess is not None]
    said = label_sentence(told, where(told[0].column)) if told else []
    if told and f.settings > 1:
        threat, size = told[0].threat, told[0].batch_size
        said.append(tell("Most labels were named under {threat} at batch size {size}.", threat=threat, size=size))
    return said


def _unruled(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """In how many notes the rules cannot tell names; nothing where they can in all."""
    texts = [(n, row) for r in records for n, row in zip(notes_of(r), r["recovered"])]
    count = len({n for n, row in texts if row.get("tells_names") is False})
    of = len({n for r in records for n in notes_of(r)})
    if not count:
        return []
    return [
        tell(
            "In {count} of {of} notes the rules cannot tell names: they know only capitals of the Latin, Greek, Cyrillic "
            "and Armenian scripts.", count=count, of=of,
        )
    ]  # fmt: skip


def unknown_words(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many words the tokenizer does not know, where it does not know some."""
    found = {n: row["unknown"] for r in records for n, row in zip(notes_of(r), r["recovered"]) if row.get("unknown")}
    of = len({n for r in records for n in notes_of(r)})
    if not found:
        return []
    count, tokens = (sum(some) for some in zip(*found.values()))
    return [
        tell(
            "In {notes} of {of} notes {count} of {tokens} tokens are words that the tokenizer does not know. They count as "
            "not recovered.", notes=len(found), of=of, count=count, tokens=tokens,
        )
    ]  # fmt: skip


def _named(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """In how many of the notes with names, numbers or dates an attack recovered all of them, by its ``records``. A note that
    stands in several updates counts once; one on which the attack gave up has what guessing recovered."""
    found: dict[int, float] = {}
    there: set[int] = set()
    for r in records:
        notes = notes_of(r)
        guessed, read = (shares_of(r[side], "sensitive", len(notes)) for side in ("blind", "scores"))
        there.update(n for n, *values in zip(notes, guessed, read) if values != [None, None])
        known = guessed if gave_up(r) else read if r["status"] == "ok" else []
        found |= {n: max(found.get(n, 0.0), v) for n, v in zip(notes, known) if v is not None}
    whole, left = sum(v >= 1.0 for v in found.values()), len(there) - len(found)
    said = [
        tell(
            "Every name, number and date that the rules find was recovered in {whole} of the {n} notes with any.",
            whole=whole, n=len(found),
        )
    ]  # fmt: skip
    more = tell("Of the notes with any, {left} have no figure.", left=left)
    return [*(said if found else []), *([more] if left else [])]


def where(column: str) -> str:
    """Under which protection, within a sentence."""
    return tell("with no protection") if column == "none" else tell("behind {name}", name=column)


def covered(count: int, of: int, many: str) -> str:
    """That a figure leaves examples out."""
    return tell("This figure covers {count} of {of} {many}; the others have no figure.", count=count, of=of, many=many)


def of_what_is_left(f: Findings, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """That examples were cut before they were sent; nothing where all were sent as they are."""
    cut = cut_off(records, images=f.words == IMAGES)
    return [f"{cut}. {recorded(OF_WHAT_IS_LEFT)}"] if cut else []


def left_out(f: Findings) -> list[str]:
    """That some examples could not be scored, and why; nothing where all could."""
    count, of = f.without_a_figure
    if not count:
        return []
    told = {"count": count, "of": of, "many": f.words.here.many}
    if f.metric in OF_TOKENS:
        why = tell("the tokenizer knows no word of them")
    else:
        why = tell("{metric} has no value for them", metric=f.metric)
    return [tell("{count} of {of} {many} could not be scored and do not count: {why}.", **told, why=why)]
