"""A decoder's text from AdamW's differences of adapters: how many texts are verified, and how much of the others is read.

python benchmarks/prefix_matching.py TEXTS.parquet --models MODELS --draws 5

The client trained adapters on queries and values with AdamW: four steps on one text, from the second round on. Each row of
its difference is little more than the signs of a sum over the inputs of its layer. The server knows the model, how the
client trains, and that it has one text; not how long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lora_setting import earlier_round, in_round, options, rows_of, seen_of, sent_as, sent_by, tried, victim_of

from rasura.core.local import Adapter
from rasura.metrics.text import rouge

KINDS: tuple[Literal["rouge1", "rouge2", "rougeL"], ...] = ("rouge1", "rouge2", "rougeL")


def main() -> None:
    """Print each text, what was found, and how well."""
    parser = options(__doc__, "runs/prefix_matching.jsonl")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--round", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="texts that are left out at the beginning")
    told = parser.parse_args()
    victim = victim_of(told.model, told.models, told.device)
    others = rows_of(victim, told.data, 32, 8 * told.round, told.seed + 1)
    earlier, local = earlier_round(told.rank), sent_as("adamw", told.rank)
    pairs: list[tuple[str, str]] = []
    for draw, row in enumerate(rows_of(victim, told.data, told.tokens, told.draws, told.seed)):
        if draw < told.first:
            continue
        model = in_round(victim, Adapter(told.rank, "attention"), told.round, others, earlier, draw)
        seen = seen_of(model, victim, sent_by(model, victim, [row], local, draw), local, 1)
        guess, says, seconds = tried("prefix-matching", seen, draw)
        pairs.append((row.texts[0], "" if guess is None else victim.vocabulary.text(guess.tokens[0])))
        print(
            f"{pairs[-1][0]!r}\n{pairs[-1][1]!r}\n{says}, R-1, R-2, R-L {scored(pairs[-1:])} in {seconds:.0f} CPU s",
            flush=True,
        )
    print(f"mean of {len(pairs)} texts: {scored(pairs)}")
    beside = [(text, found) for text, own in pairs for _, found in pairs if found != own]
    if beside:
        print(f"what was found in the updates of the other texts: {scored(beside)}")


def scored(pairs: Sequence[tuple[str, str]]) -> str:
    """Mean ROUGE-1, -2 and -L of pairs of a text and a guess, in percent."""
    return ", ".join(f"{sum(100 * rouge(kind).score(*one) for one in pairs) / len(pairs):.0f}" for kind in KINDS)


if __name__ == "__main__":
    main()
