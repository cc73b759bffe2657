"""A real round: 64 texts, 1 epoch, batch 8, AdamW, LoRA 16. What is read, and which texts were in it?

python benchmarks/real_round.py TEXTS.parquet --models MODELS --model smollm2 --out runs/real_round.jsonl

Half of the texts are in the round and half are not. ``fall`` and ``agreement`` are the scores of ``rasura read
--candidates``; ``before`` is the loss under the model as it was before the round, which knows nothing of it: the baseline.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from lora_setting import (
    Lines,
    bag_scores,
    common_words,
    figure,
    in_round,
    options,
    rows_of,
    seen_of,
    sent_by,
    tried,
    victim_of,
)  # fmt: skip

from rasura.attacks.updates.candidates import agreement, fall, last_weights
from rasura.core.local import Local
from rasura.metrics.membership import Rate, auc, needed, tpr_at
from rasura.registry import parse_update


def rate(one: Rate) -> str:
    """A figure with its interval."""
    return f"{one.mean:.2f} ({one.low:.2f} to {one.high:.2f})"


def draws(told: Any, lines: Lines, local: Local) -> None:
    """Do what the file of lines lacks: one round a draw."""
    victim = victim_of(told.model, told.models, told.device)
    count = 2 * told.examples
    for draw in range(told.draws):
        where = {"model": told.model, "update": told.update, "round": told.round, "examples": told.examples}
        where |= {"tokens": told.tokens, "draw": draw}
        if lines.has(**where):
            continue
        start = time.perf_counter()
        every = rows_of(victim, told.data, told.tokens, count + 8 * told.round, told.seed + draw)
        inside, outside, others = every[: told.examples], every[told.examples : count], every[count:]
        model = in_round(victim, local.adapter, told.round, others, local, draw).to(told.device)
        sent = sent_by(model, victim, inside, local, draw)
        seen = seen_of(model, victim, sent, local, told.examples)
        model = seen.model  # the adversary's copy, on the CPU
        model = model.to(told.device)
        after = last_weights(model, sent, local)
        row: dict[str, Any] = {**where, "fall": [], "agreement": [], "before": []}
        for text in (*inside, *outside):
            text = text.to(told.device)
            row["fall"].append(fall(model, text.inputs(), after))
            row["agreement"].append(agreement(model, text.inputs(), sent))
            row["before"].append(-float(model(**text.inputs()).loss.detach()))
        model.to("cpu")
        truth = [t for text in inside for t in text.ids(0)]
        guess, how, seconds = tried("joint-pursuit", seen, draw)
        row |= {"read": how, "cpu_seconds": seconds, "different": len(set(truth))}
        row["recall"], row["precision"] = (0.0, 0.0) if guess is None else bag_scores(guess.tokens[0], truth, victim)
        size = 1 if guess is None else len(guess.tokens[0])
        row["blind_recall"], row["blind_precision"] = bag_scores(common_words(victim, outside, size), truth, victim)
        lines.add({**row, "wall_seconds": time.perf_counter() - start})
        print({k: v for k, v in row.items() if not isinstance(v, list)}, flush=True)


def pooled(rows: Sequence[dict[str, Any]], name: str, examples: int) -> tuple[list[float], list[bool]]:
    """Scores of all draws, each draw's less its mean, and who was in."""
    values: list[float] = []
    for row in rows:
        mean = sum(row[name]) / len(row[name])
        values += [v - mean for v in row[name]]
    return values, ([True] * examples + [False] * examples) * len(rows)


def main() -> None:
    """Run the draws and print what they say together."""
    parser = options(__doc__, "runs/real_round.jsonl")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--round", type=int, default=2)
    parser.add_argument("--update", default="local:epochs=1/batch=8/optimizer=adamw/lr=2e-4/lora=16")
    told = parser.parse_args()
    lines = Lines(told.out)
    draws(told, lines, parse_update(told.update)[0])
    keys = ("model", "update", "round", "examples", "tokens")
    print("\n| model | update | round | texts x tokens | n | score | AUC | true positives at 1 % |\n" + "|---" * 8 + "|")
    for key in dict.fromkeys(tuple(row[k] for k in keys) for row in lines.rows):
        some = [row for row in lines.rows if tuple(row[k] for k in keys) == key]
        for name in ("fall", "agreement", "before"):
            values, members = pooled(some, name, key[3])
            at = rate(tpr_at(values, members, 0.01)) if sum(members) >= needed(0.01) else "too few"
            print(f"| {key[0]} | `{key[1]}` | {key[2]} | {key[3]} x {key[4]} | {len(some)} | {name} | "
                  f"{rate(auc(values, members))} | {at} |")  # fmt: skip
        read = [figure([row[n] for row in some]) for n in ("recall", "precision", "blind_recall", "blind_precision")]
        print(f"\nwords found {read[0]}, of those named {read[1]}; guessing {read[2]}, {read[3]}")


if __name__ == "__main__":
    main()
