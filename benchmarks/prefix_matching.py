"""A decoder's text from AdamW's differences of adapters: how many texts are verified, and how much of the others is read.

python benchmarks/prefix_matching.py TEXTS.parquet --models MODELS --draws 5

The client trained adapters on queries and values with AdamW: four steps on one text, from the second round on. Each row of
its difference is little more than the signs of a sum over the inputs of its layer. The server knows the model, how the
client trains, and that it has one text; not how long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lora_setting import options_of_one_text, texts_behind_adamw, tried

from rasura.metrics.text import rouge

KINDS: tuple[Literal["rouge1", "rouge2", "rougeL"], ...] = ("rouge1", "rouge2", "rougeL")


def main() -> None:
    """Print each text, what was found, and how well."""
    parser = options_of_one_text(__doc__, "runs/prefix_matching.jsonl")
    parser.add_argument("--first", type=int, default=0, help="texts that are left out at the beginning")
    told = parser.parse_args()
    pairs: list[tuple[str, str]] = []
    for draw, (victim, row, seen) in enumerate(texts_behind_adamw(told, told.first), told.first):
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
