"""Which words do the embedding rows of a training name? ``embedding-rows`` on what a round changed, all weights trained.

python benchmarks/trained_rows.py TEXTS.parquet --models MODELS --model smollm2 --examples 8 --draws 3

The blind attack names as many of the most frequent words of 64 other texts.
"""

from __future__ import annotations

from lora_setting import Lines, bag_scores, common_words, figure, options, rows_of, seen_of, sent_by, tried, victim_of

from rasura.registry import parse_update


def main() -> None:
    """Do what the file of lines lacks, a line a draw, and print the means."""
    parser = options(__doc__, "runs/trained_rows.jsonl")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--examples", default="8")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--update", default="local:epochs=1/batch=8/lr=1e-4")
    told = parser.parse_args()
    victim, lines = victim_of(told.model, told.models, told.device), Lines(told.out)
    local, _ = parse_update(told.update)
    for count in map(int, told.examples.split(",")):
        where = {"model": told.model, "update": told.update, "examples": count, "tokens": told.tokens}
        for draw in range(told.draws):
            if lines.has(**where, draw=draw):
                continue
            every = rows_of(victim, told.data, told.tokens, count + 64, told.seed + draw)
            rows, others = every[:count], every[count:]
            seen = seen_of(victim.model, victim, sent_by(victim.model, victim, rows, local, draw), local, count)
            guess, how, seconds = tried("embedding-rows", seen, draw)
            truth, bag = [t for row in rows for t in row.ids(0)], guess.tokens[0] if guess is not None else ()
            own, blind = bag_scores(bag, truth, victim), bag_scores(common_words(victim, others, len(bag)), truth, victim)
            lines.add({**where, "draw": draw, "said": how, "own": own, "blind": blind, "cpu_seconds": seconds})
            print(lines.rows[-1], flush=True)
        some = [row for row in lines.rows if where.items() <= row.items()]
        shares = [figure([row[who][k] for row in some]) for who in ("own", "blind") for k in (0, 1)]
        print(f"| {told.model} | {count} | {len(some)} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()
