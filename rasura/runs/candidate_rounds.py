"""Simulated rounds of reference texts: what the scores of candidates are worth, measured where the truth is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from torch import Tensor

from rasura.core.batches import Batch
from rasura.core.interfaces import InputError
from rasura.core.local import Local
from rasura.core.rng import generator, permutation
from rasura.core.updates import changed
from rasura.core.values import Observation
from rasura.metrics.intervals import pairs_interval
from rasura.metrics.membership import Rate, auc, needed, tpr_at
from rasura.registry.candidates import scores
from rasura.runs.reading import ReadRequest
from rasura.runs.update_files import Update
from rasura.victims.batching import joined
from rasura.victims.loading import Victim

LEVEL = 0.01
"""Maximum false positive rate, among texts that were not in the round, of the answer that a candidate was in it."""

Text = Mapping[str, Tensor]
"""One text, as keyword arguments of the model."""

V = TypeVar("V")

Round = tuple[list[float], list[bool]]
"""The score of each reference text in a simulated round, and whether the round trained on it."""


def by_label(values: Sequence[V], labels: Sequence[int | None]) -> dict[int | None, list[V]]:
    """``values`` by the label of each, in order."""
    out: dict[int | None, list[V]] = {}
    for value, label in zip(values, labels, strict=True):
        out.setdefault(label, []).append(value)
    return out


def not_simulated(request: ReadRequest, update: Update, seen: Observation) -> list[str]:
    """What the round had by the ``request`` and simulated rounds have not, in words: their AUC is of other rounds."""
    local, wire = request.parsed_update
    out = ["dropout"] if request.dropout or local.adapter.dropout else []
    out += [f"{part.mechanism.name}, which --update appends to the message" for part in wire]
    if local.kind != "fedsgd" and set(update.entries) != set(seen.gradients):
        out.append("training of the embeddings, which --frozen-embeddings leaves out of this update")
    return out


def simulate(
    victim: Victim,
    rows: Sequence[Batch],
    names: Sequence[str],
    local: Local,
    size: int | None,
    rounds: int,
    seed: int,
    visible: Mapping[str, Tensor] | None = None,
    signed: bool = True,
    counted: Callable[[Iterable[Text]], Iterable[Text]] = iter,
) -> list[Round]:
    """The scores of ``rows`` in each of ``rounds`` rounds that trained the parameters ``names`` on ``size`` of them (half if
    the size is unknown), and which of them were in it. Of what a round sends, only the entries in ``visible`` are seen, and
    their sign only if ``signed``."""
    inside = size or len(rows) // 2
    if inside < 1 or len(rows) - inside < 1:
        raise InputError(
            f"{len(rows)} different reference texts for rounds of {inside} texts; expected more, so that some stay outside "
            "each round"
        )
    out: list[Round] = []
    for number in range(rounds):
        rng = generator(seed, "candidates", number)
        order = permutation(len(rows), rng).tolist()
        batch = joined([rows[k] for k in order[:inside]], victim.vocabulary.pad_id or 0)
        device = next(victim.model.parameters()).device
        order_of = partial(permutation, rng=rng)
        sent, _ = changed(victim.model, batch.to(device).inputs(), names, local, order_of)
        sent = {n: g * visible[n] if visible and n in visible else g for n, g in sent.items()}
        found = scores(victim.model, counted(row.inputs() for row in rows), sent, local, visible, signed)
        out.append((found, [k in order[:inside] for k in range(len(rows))]))
    return out


def reliability(rounds: Sequence[Round], labels: Sequence[int | None] | None = None) -> tuple[Rate | None, Rate | None]:
    """The mean AUC and true positive rate of ``rounds`` of the same texts, each compared with those that have the same one
    of ``labels`` (None: with all), as candidates are; None where no label has texts enough.

    More rounds are no more texts, so both intervals are as wide as those of one round: that of the AUC is of its mean with
    as many pairs of texts as the round with the fewest, and that of the rate holds the intervals of all rounds and labels.
    """
    areas, pairs, texts, rates = [], [], [], []
    for values, inside in rounds:
        every = by_label(list(zip(values, inside)), labels or [None] * len(values)).values()
        apart: list[Round] = [([value for value, _ in part], [member for _, member in part]) for part in every]
        both = [(values, members) for values, members in apart if len(set(members)) == 2]
        if not both:
            continue
        sizes = [min(sum(members), len(members) - sum(members)) for _, members in both]
        areas.append(sum(size * auc(*part).mean for part, size in zip(both, sizes)) / sum(sizes))
        pairs.append(sum(sizes))
        texts.append(sum(len(members) for _, members in both))
        rates += [[tpr_at(*part, LEVEL) for part, size in zip(both, sizes) if size >= needed(LEVEL)]]
    if not areas:
        return None, None
    fewest, measured = min(pairs), [some for some in rates if some]
    ranked = Rate(sum(areas) / len(areas), *pairs_interval(sum(areas) / len(areas), fewest, fewest), min(texts))
    if not measured:
        return ranked, None
    every_rate = [rate for some in measured for rate in some]
    found = sum(rate.n * rate.mean for rate in every_rate) / sum(rate.n for rate in every_rate)
    n = min(sum(rate.n for rate in some) for some in measured)
    return ranked, Rate(found, min(rate.low for rate in every_rate), max(rate.high for rate in every_rate), n)
