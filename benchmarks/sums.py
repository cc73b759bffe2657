"""From how many clients on does reading a sum fall to guessing? And what does a series of rounds add?

python benchmarks/sums.py TEXTS.parquet --models MODELS --model smollm2 --clients 1,2,4,8,16,32,64 --out runs/sums.jsonl

``sum``: the mean of K clients' gradients, as a secure sum gives it, one text of ``--tokens`` tokens each. ``series``: one
client sends the gradient of the same text in R rounds; block 0's adapters read the same inputs in each, so that their
dimensions add up.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
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
    sent_by,
    tried,
    victim_of,
)  # fmt: skip
from torch import Tensor

from rasura.core.batches import Batch
from rasura.core.local import FEDSGD, Adapter
from rasura.victims.loading import Victim


def summed(victim: Victim, rows: list[Batch], others: list[Batch], where: dict[str, Any], device: str) -> dict[str, Any]:
    """The mean of several clients' gradients in the second round, and what is read of it."""
    adapter, draw = Adapter(where["rank"]), where["draw"]
    earlier = earlier_round(where["rank"]) if where["rank"] else FEDSGD
    model = in_round(victim, adapter, 2 if where["rank"] else 1, others, earlier, draw).to(device)
    total: dict[str, Tensor] = {}
    for row in rows:
        for name, g in sent_by(model, victim, [row], FEDSGD, draw).items():
            if "embed" not in name and "lm_head" not in name:  # embeddings stay as they are
                total[name] = total[name] + g / len(rows) if name in total else g / len(rows)
    return judged(victim, rows, others, where, seen_of(model, victim, total, FEDSGD, len(rows)))


def series(victim: Victim, rows: list[Batch], others: list[Batch], where: dict[str, Any], device: str) -> dict[str, Any]:
    """The same text in several rounds, whose adapters' gradients are put together as one of more rows."""
    draw = where["draw"]
    stacked: dict[str, Tensor] = {}
    earlier = earlier_round(where["rank"])
    for number in range(where["rounds"]):
        model = in_round(victim, Adapter(where["rank"]), 2 + number, others, earlier, draw).to(device)
        for name, g in sent_by(model, victim, rows, FEDSGD, draw).items():
            if "lora_A" in name:
                stacked[name] = torch.cat([stacked[name], g]) if name in stacked else g
    return judged(victim, rows, others, where, seen_of(model, victim, stacked, FEDSGD, 1), only="joint-pursuit")


def judged(
    victim: Victim, rows: list[Batch], others: list[Batch], where: dict[str, Any], seen: Any, only: str = ""
) -> dict[str, Any]:
    """What the attacks read: texts that are whole, and words."""
    truth = [list(row.ids(0)) for row in rows]
    every = [t for text in truth for t in text]
    best: dict[str, Any] = {"attack": "", "confidence": "none", "exact": 0.0, "recall": 0.0, "precision": 0.0}
    seconds = 0.0
    for name in [only] if only else ["joint-pursuit", *(["span"] if len(rows) <= 8 else [])]:
        guess, how, took = tried(name, seen, where["draw"])
        seconds, best[name] = seconds + took, how
        if guess is None:
            continue
        recall, precision = bag_scores([t for text in guess.tokens for t in text], every, victim)
        whole = sum(list(text) in truth for text in guess.tokens) / len(truth) if guess.ordered else 0.0
        if (whole, recall + precision) > (best["exact"], best["recall"] + best["precision"]):
            best |= {"attack": name, "confidence": guess.confidence, "exact": min(1.0, whole), "recall": recall}
            best |= {"precision": precision}
    blind = bag_scores(common_words(victim, others, max(1, len(set(every)))), every, victim)
    return {**where, **best, "different": len(set(every)), "blind_recall": blind[0], "cpu_seconds": seconds}


def main() -> None:
    """Fill both curves and print them."""
    parser = options(__doc__, "runs/sums.jsonl")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rank", type=int, default=16, help="0: all weights, embeddings frozen")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--clients", default="1,2,4,8")
    parser.add_argument("--rounds", default="", help="a series: 1,2,4")
    parser.add_argument("--series-tokens", type=int, default=128)
    told = parser.parse_args()
    victim, lines = victim_of(told.model, told.models, told.device), Lines(told.out)
    clients = [int(k) for k in told.clients.split(",") if k]
    rounds = [int(r) for r in told.rounds.split(",") if r]
    others = rows_of(victim, told.data, 32, 8 * (max([1, *rounds]) + 1), told.seed + 1)
    common = {"model": told.model, "rank": told.rank}
    for draw in range(told.draws):
        for count in clients:
            where = {**common, "what": "sum", "clients": count, "rounds": 1, "tokens": told.tokens, "draw": draw}
            if not lines.has(**where):
                rows = rows_of(victim, told.data, told.tokens, count, told.seed + 100 * (draw + 1))
                kept(lines, summed(victim, rows, others, where, told.device))
        for number in rounds:
            where = {**common, "what": "series", "clients": 1, "rounds": number, "tokens": told.series_tokens, "draw": draw}
            if not lines.has(**where):
                rows = rows_of(victim, told.data, told.series_tokens, 1, told.seed + 100 * (draw + 1))
                kept(lines, series(victim, rows, others, where, told.device))
    show(lines, told.out)


def kept(lines: Lines, row: dict[str, Any]) -> None:
    """Keep one cell and say it."""
    lines.add({**row, "at": time.time()})
    print(row, flush=True)


def show(lines: Lines, path: Path) -> None:
    """Both curves as a table."""
    print(f"\n{path}\n\n| model | rank | what | clients | rounds | tokens a text | different words | n ", end="")
    print("| whole texts | words found | of those named | guessing |\n" + "|---" * 12 + "|")
    names = ("model", "rank", "what", "clients", "rounds", "tokens")
    for key in dict.fromkeys(tuple(row[n] for n in names) for row in lines.rows):
        some = [row for row in lines.rows if tuple(row[n] for n in names) == key]
        shares = [figure([float(row[n]) for row in some]) for n in ("exact", "recall", "precision", "blind_recall")]
        different = sum(row["different"] for row in some) / len(some)
        print(f"| {' | '.join(map(str, key))} | {different:.0f} | {len(some)} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
