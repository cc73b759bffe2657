"""What LoRA updates give away: rank x tokens x round x what is sent, one text each.

python benchmarks/lora_map.py TEXTS.parquet --models MODELS --model smollm2 --out runs/lora_map.jsonl
python benchmarks/lora_map.py TEXTS.parquet --model minilm

Adapters are on queries and values; every earlier round was 4 steps of AdamW on eight other texts. ``gradient``: one
gradient; ``adamw``: the difference after four epochs of AdamW on the text. The attacks are ``span``, and ``joint-pursuit``
where span verified nothing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_setting import (
    Lines,
    bag_scores,
    common_words,
    earlier_round,
    figure,
    in_round,
    options,
    rows_of,
    seen_of,
    sent_as,
    sent_by,
    tried,
    victim_of,
)
from torch import nn

from rasura.core.batches import Batch
from rasura.core.local import Adapter
from rasura.victims.loading import Victim


def cell(model: nn.Module, victim: Victim, row: Batch, others: Sequence[Batch], where: dict[str, Any]) -> dict[str, Any]:
    """One text behind one kind of update in one round: what the attacks read."""
    start, draw = time.perf_counter(), where["draw"]
    local = sent_as(where["kind"], where["rank"])
    seen = seen_of(model, victim, sent_by(model, victim, [row], local, draw), local, 1)
    truth = list(row.ids(0))
    found: dict[str, Any] = {"words": len(set(truth)), "attack": "", "confidence": "none", "exact": False}
    found |= {"recall": 0.0, "precision": 0.0, "in_place": 0.0, "cpu_seconds": 0.0}
    for name in ("span", "joint-pursuit"):
        guess, how, seconds = tried(name, seen, draw)
        found["cpu_seconds"] += seconds
        found[name] = how
        if guess is None:
            continue
        tokens = list(guess.tokens[0])
        recall, precision = bag_scores(tokens, truth, victim)
        if recall + precision > found["recall"] + found["precision"] or guess.confidence == "verified":
            placed = sum(a == b for a, b in zip(tokens, truth)) / len(truth) if guess.ordered else 0.0
            found |= {"attack": name, "confidence": guess.confidence, "recall": recall, "precision": precision}
            found |= {"in_place": placed, "exact": guess.ordered and tokens == truth}
        if guess.confidence == "verified":
            break
    blind = bag_scores(common_words(victim, others, len(set(truth))), truth, victim)
    return {**where, **found, "blind_recall": blind[0], "wall_seconds": time.perf_counter() - start}


def main() -> None:
    """Fill the map and print it."""
    parser = options(__doc__, "runs/lora_map.jsonl")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--ranks", default="16")
    parser.add_argument("--tokens", default="16,32,64")
    parser.add_argument("--rounds", default="1,2")
    parser.add_argument("--kinds", default="gradient,adamw")
    parser.add_argument("--targets", default="attention")
    told = parser.parse_args()
    victim = victim_of(told.model, told.models, told.device)
    lines = Lines(told.out)
    rounds = [int(r) for r in told.rounds.split(",")]
    others = rows_of(victim, told.data, 32, 8 * max(rounds), told.seed + 1)
    lengths = [tokens for tokens in map(int, told.tokens.split(",")) if tokens <= victim.max_length]
    rows = {tokens: rows_of(victim, told.data, tokens, told.draws, told.seed) for tokens in lengths}
    places = [(int(rank), number, draw) for rank in told.ranks.split(",") for number in rounds for draw in range(told.draws)]
    for rank, number, draw in places:
        model = None  # one for all cells of these rounds
        for tokens, kind in itertools.product(lengths, told.kinds.split(",")):
            where = {"model": told.model, "targets": told.targets, "rank": rank, "tokens": tokens}
            where |= {"round": number, "kind": kind, "draw": draw}
            if lines.has(**where):
                continue
            if model is None:
                model = in_round(victim, Adapter(rank, told.targets), number, others, earlier_round(rank), draw).to(
                    told.device
                )
            lines.add(cell(model, victim, rows[tokens][draw], others, where))
            print({k: v for k, v in lines.rows[-1].items() if k not in ("model", "targets")}, flush=True)
    show(lines, told.out)


def show(lines: Lines, path: Path) -> None:
    """The map as a table: means over draws with intervals."""
    print(f"\n{path}\n\n| model | rank | tokens | round | sent | n | exact | words found | of those named | guessing |")
    print("|---" * 10 + "|")
    names = ("model", "targets", "rank", "tokens", "round", "kind")
    for key in dict.fromkeys(tuple(row[n] for n in names) for row in lines.rows):
        some = [row for row in lines.rows if tuple(row[n] for n in names) == key]
        shares = [figure([float(row[n]) for row in some]) for n in ("exact", "recall", "precision", "blind_recall")]
        print(f"| {key[0]} | {key[2]} | {key[3]} | {key[4]} | {key[5]} | {len(some)} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
