"""Whose mask seals: each client's own, one for all, another each round; what stays clear, and what is read from it.

python benchmarks/masks.py whose TEXTS.parquet --texts 6
python benchmarks/masks.py rounds TEXTS.parquet --texts 4

``whose``: updates of one text each, embeddings frozen. ``rounds``: the same update in several rounds whose masks are drawn
again, as a client with few texts and a small step sends it; the adversary fills in what it saw in the clear in any of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.rng import generator
from rasura.core.threat import WITH_LABELS_AND_LENGTHS, adversary_copy, observe
from rasura.core.values import Transcript
from rasura.data.text import encode, load_examples
from rasura.defenses.sealing import Sealing, mask
from rasura.metrics.intervals import mean_interval
from rasura.registry import attack as make_attack
from rasura.registry import metric, parse_defense
from rasura.victims.batching import split
from rasura.victims.loading import Victim, load
from rasura.victims.step import step

Masks = Mapping[str, Tensor]
ATTACKS = ("blind", "lamp-cos", "span")


def updates(victim: Victim, path: str, count: int) -> list[Transcript]:
    """One update a text, all weights but the embeddings."""
    some = load_examples(path)[:count]
    batch = encode(some, victim.tokenizer, "classification", max_length=64, num_labels=2)
    defense = parse_defense("frozen-embeddings")
    sent = []
    for k, row in enumerate(split(batch)):
        rng = generator(0, "step", k)
        sent.append(step(victim.model, row, defense, task=victim.task, vocabulary=victim.vocabulary, rng=rng))
    return sent


def behind(sent: Transcript, sealed: Masks) -> Transcript:
    """The update as the server sees it with ``sealed`` left out."""
    clear = {n: g.masked_fill(sealed[n], 0) for n, g in sent.message.gradients.items()}
    return replace(sent, message=replace(sent.message, gradients=clear, visible={n: ~m for n, m in sealed.items()}))


def read(victim: Victim, sent: Sequence[Transcript], masks: Sequence[Masks]) -> list[str]:
    """ROUGE-1 of each attack with its interval; a silent attack has the score of guessing."""
    adversary, judge, cells = adversary_copy(victim.model), metric("rouge1"), []
    for name in ATTACKS:
        found: list[float] = []
        for k, (truth, sealed) in enumerate(zip(sent, masks)):
            seen = observe(behind(truth, sealed), WITH_LABELS_AND_LENGTHS, adversary_model=adversary)
            try:
                guess = make_attack(name)(seen, rng=generator(0, name, k), budget=Budget("quick"))
            except (AttackFailed, NotApplicable):
                guess = make_attack("blind")(seen, rng=generator(0, "blind", k), budget=Budget("quick"))
            found += judge(guess, truth)
        mean, low, high = mean_interval(found)
        cells.append(f"{100 * mean:.0f} [{100 * low:.0f}, {100 * high:.0f}]")
    return cells


def share(masks: Sequence[Masks], weights: Sequence[Masks] | None = None) -> float:
    """The mean share of entries that are true, or of ``weights`` there."""
    parts = []
    for k, m in enumerate(masks):
        w = {n: torch.ones(t.shape) for n, t in m.items()} if weights is None else weights[k]
        parts.append(sum(float(w[n][m[n]].sum()) for n in m) / sum(float(w[n].sum()) for n in m))
    return sum(parts) / len(parts)


def whose(victim: Victim, sent: Sequence[Transcript], ratio: float) -> None:
    """A row for each way to choose the mask."""
    found = [t.message.gradients for t in sent]

    def largest(metric_: str, of: Masks) -> Masks:
        return mask(Sealing(metric_, ratio), victim.model, of, None, generator(0, "mask"))

    own = [largest("grad", g) for g in found]
    aggregate = [
        largest("grad", {n: sum(g[n] for j, g in enumerate(found) if j != k) for n in found[0]})  # type: ignore[misc]
        for k in range(len(found))
    ]
    ways: dict[str, list[Masks]] = {
        "its own gradient": own,
        "another client's gradient": [own[(k + 1) % len(own)] for k in range(len(own))],
        "the others' summed gradient": aggregate,
        "the public weights": [largest("param", found[0])] * len(found),
        "chance": [largest("random", found[0])] * len(found),
        "the union of all own masks": [{n: torch.stack([m[n] for m in own]).any(0) for n in own[0]}] * len(found),
    }
    squares = [{n: g.square() for n, g in some.items()} for some in found]
    print(f"| mask of | sealed | of the own mask | squared gradient in the clear | {' | '.join(ATTACKS)} |")
    print("|---" * (4 + len(ATTACKS)) + "|")
    for name, masks in ways.items():
        common = share(masks, [{n: m.float() for n, m in o.items()} for o in own])
        clear = 1 - share(masks, squares)
        first = [name, f"{100 * share(masks):.0f} %", f"{100 * common:.0f} %", f"{100 * clear:.1f} %"]
        print(f"| {' | '.join([*first, *read(victim, sent, masks)])} |", flush=True)


def rounds(victim: Victim, sent: Sequence[Transcript], ratio: float) -> None:
    """A row for each number of rounds with new masks."""
    print(f"| rounds | still sealed | {' | '.join(ATTACKS)} |")
    print("|---" * (2 + len(ATTACKS)) + "|")
    sealed = [{n: torch.ones(g.shape, dtype=torch.bool) for n, g in t.message.gradients.items()} for t in sent]
    for number in range(1, 17):
        for k, t in enumerate(sent):
            drawn = mask(Sealing("random", ratio), victim.model, t.message.gradients, None, generator(0, "mask", k, number))
            sealed[k] = {n: m & drawn[n] for n, m in sealed[k].items()}
        if number in (1, 2, 4, 8, 16):
            print(f"| {number} | {100 * share(sealed):.0f} % | {' | '.join(read(victim, sent, sealed))} |", flush=True)


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("what", choices=("whose", "rounds"))
    parser.add_argument("data")
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--ratio", type=float, default=None, help="entries sealed; default .3, in rounds .9")
    options = parser.parse_args()
    victim = load("minilm", "classification")
    sent = updates(victim, options.data, options.texts)
    if options.what == "whose":
        whose(victim, sent, options.ratio or 0.3)
    else:
        rounds(victim, sent, options.ratio or 0.9)


if __name__ == "__main__":
    main()
