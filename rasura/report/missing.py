"""What a column lacks before anything is said for a protection, in words. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rasura.core.errors import UNSENT
from rasura.core.records import ACTIVE_THREATS
from rasura.report.language import recorded, tell
from rasura.report.readings import PORTFOLIO, Reading, readings
from rasura.report.scores import BLIND, Record, Setting, cells_of
from rasura.report.sealed import never_apply

AGAINST = "against an adversary who knows it"

HOLDS_WITHIN = 0.1
"""A setting holds when what is read above guessing is at most this share, by the upper end of its interval."""


def seen_to_work(baseline: Sequence[Record], notes: Collection[int], metric: str) -> dict[str, Reading]:
    """The attacks that read anything of ``notes`` without protection; some are yardsticks. The portfolio is one of them, as
    is each member whose guess it kept."""
    cells = cells_of(baseline, metric)
    if not notes or not set(notes) <= {n for some in cells.values() for n in some}:
        return {}
    own = [r for r in baseline if r["attack"] != PORTFOLIO]
    kept = [r for r in baseline if r["attack"] == PORTFOLIO and r["details"].get("attack")]
    by_winner = [{**r, "attack": str(r["details"]["attack"])} for r in kept]
    every = readings((r for r in baseline if r["attack"] == PORTFOLIO), cells, metric)
    every |= readings([*own, *by_winner], cells, metric)
    return {a: r for a, r in every.items() if r.works}


def nothing_sent(records: Sequence[Record]) -> list[str]:
    """What is said of a column in which no update was sent: then no attack is missing, but text."""
    reasons = sorted({str(r["reason"]) for r in records})
    if not all(reason.startswith(UNSENT) for reason in reasons):
        return []
    return [tell("{reason}; pass more texts (--limit)", reason=reason) for reason in reasons]


def no_yardstick(
    here: Mapping[str, Reading],
    finished: Collection[str],
    yardsticks: Collection[str],
    worked: Mapping[str, Reading],
    unprotected: Collection[str],
    many: str,
) -> list[str]:
    """What is said where no yardstick of the column finished, where none reads enough without protection to measure one, or
    where an attack that worked without protection did not finish or has no result here.

    An attack of which the records say that it applies to no text here is no gap beside a yardstick. ``unprotected``: the
    attacks with records without protection; a member that only the portfolio ran there is for the portfolio to answer for.
    ``many``: what the texts or images are called.
    """
    stopped = [a for a in worked if a in here and not (here[a].complete if a == PORTFOLIO else a in finished)]
    counted = [worked[a] for a in yardsticks if a in finished]
    if counted:
        stopped = [a for a in stopped if not here[a].inapplicable]
    absent = [a for a in worked if a in unprotected and a not in here and a not in finished]
    if stopped or absent:
        ended = [f"{a} {here[a].how_it_ended}" for a in stopped]
        told = ", ".join([*ended, *(tell("{attack} has no result", attack=a) for a in absent)])
        return [tell("of the attacks that work without protection, {stopped}", stopped=told)]
    if counted:
        # Where none reads more, a protection that stops nothing stays within the limit, too.
        enough = any(sum(r.gains) > HOLDS_WITHIN * len(r.gains) for r in counted)
        little = tell(
            "no attack of this run reads more than {within:.0f} % above guessing without protection",
            within=100 * HOLDS_WITHIN,
        )
        return [] if enough else [little]
    if not here:
        return [tell("no attack was run that looks for {many} in the data sent", many=many)]
    if not unprotected:
        return [tell("the run has no column without protection, so no attack was shown to work")]
    return [tell("no attack of this run was shown to work without protection")]


def not_run(here: Iterable[Setting], unprotected: Iterable[Setting]) -> list[str]:
    """What is said of each threat model and batch size that was begun without protection and has no record ``here``."""
    there = {*here}
    every = sorted({*unprotected, *there})
    several = len({threat for threat, _ in every}) > 1
    return [
        tell("{threat} was not run at batch size {size}", threat=threat, size=size) if several
        else tell("batch size {size} was not run", size=size)
        for threat, size in every
        if (threat, size) not in there
    ]  # fmt: skip


def no_active_attack(records: Sequence[Record], finished: Iterable[str], yardsticks: Collection[str]) -> list[str]:
    """What is said where the server may send crafted weights and no attack that does so measures anything."""
    if not any(r["threat"] in ACTIVE_THREATS for r in records):
        return []
    passive = {r["attack"] for r in records if not r.get("crafted")}
    crafted = {r["attack"] for r in records} & set(finished) - passive
    if not crafted:
        return [tell("no active attack was run to its end")]
    return [] if crafted & set(yardsticks) else [tell("no active attack was shown to work without protection")]


def adversaries_of(parts: tuple[str, ...], records: Iterable[Record]) -> dict[str, tuple[str, ...]]:
    """Which attacks know the protection with these ``parts``, by the records. A part of which a record does not say so is
    known to no attack. ``idle``: the attacks that can never apply to it, so that it is no use to add them."""
    records = list(records)
    told = {"attacks": (), "unknown": parts, "protection_readers": ()}
    every = [{**told, **r.get("known_by", {})} for r in records]
    found = {part: tuple(dict.fromkeys(a for one in every for a in one[part])) for part in told}
    return {**found, "idle": tuple({a for r in records for a in never_apply(str(r.get("defense", "")))})}


def not_by_one_who_knows(
    known_by: Mapping[str, tuple[str, ...]],
    here: Mapping[str, Reading],
    finished: Collection[str],
    yardsticks: Collection[str],
    images: bool,
) -> list[str]:
    """What is said where an attack that knows the protection did not run to its end or was not shown to work."""
    wanted, idle = known_by["attacks"], known_by["idle"]
    said = [
        tell("no attack on images knows {part}", part=part) if images else tell("no attack knows {part}", part=part)
        for part in known_by["unknown"]
    ]
    absent = [a for a in wanted if a not in finished and a not in here and a not in idle]
    said += [tell("{attack} cannot apply", attack=a) for a in wanted if a in idle and a not in finished and a not in here]
    said += [f"{a} {here[a].how_it_ended}" for a in wanted if a in here and a not in finished]
    ran = [a for a in wanted if a in finished and a not in known_by["protection_readers"]]
    silent = [a for a in ran if a not in yardsticks and a in here]
    said += [tell("{attack} was not shown to work without protection either", attack=a) for a in silent]
    # Only the portfolio ran it here; without protection that stops at the first text that is certain.
    alone = [a for a in ran if a not in yardsticks and a not in here]
    said += [tell("results without protection are missing for {attacks}", attacks=", ".join(alone))] if alone else []
    said += [tell("add --attack {attacks}", attacks=",".join((*absent, *alone)))] if absent or alone else []
    return [f"{recorded(AGAINST)}: {'; '.join(said)}"] if said else []


def of_a_trained_model(parts: tuple[str, ...], records: Sequence[Record], asked: Iterable[str], texts: int) -> list[str]:
    """What is missing before nothing is said to be found in a trained model, of which each attack of the ``records`` judged
    all ``texts`` or none. ``parts``: of its protection, none without one. ``asked``: the attacks of the plan."""
    here = {r["attack"]: _of_all(r["attack"], r["status"], texts) for r in records if r["attack"] != BLIND}
    finished = [a for a, r in here.items() if r.complete]
    known_by = adversaries_of(parts, records)
    left = [a for a in asked if a not in (BLIND, *finished, *known_by["attacks"])]
    said = [f"{a} {here[a].how_it_ended}" if a in here else tell("{attack} has no result", attack=a) for a in left]
    return [*said, *not_by_one_who_knows(known_by, here, finished, finished, images=False)]


def _of_all(attack: str, status: str, texts: int) -> Reading:
    none: frozenset[Any] = frozenset()
    return Reading(attack, texts, {}, {}, none, none, none, none, none, status == "ok", Counter({status: texts}))
