"""Risk against how many tokens an update holds, in units of the model's width: where do span attacks end?

python benchmarks/accumulate.py MODEL TEXTS.parquet --task causal --cut 8
python benchmarks/accumulate.py minilm TEXTS.parquet
python benchmarks/accumulate.py minilm TEXTS.parquet --leverage --counted --widths 1,1.5,2    # words by leverage alone
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator

import torch

from rasura.attacks.updates.span.leverage import words_by_leverage
from rasura.core.accumulation import counted, tokens_in, width
from rasura.core.batches import Batch
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, adversary_copy, observe
from rasura.core.values import Transcript
from rasura.data.text import Example, encode, load_examples
from rasura.metrics.intervals import mean_interval
from rasura.registry import attack as make_attack
from rasura.registry import metric, parse_defense
from rasura.victims.batching import joined, split
from rasura.victims.loading import Victim, load
from rasura.victims.step import step

METRICS = ("token_recall", "rougeL", "exact_match")


def texts(victim: Victim, data: str, cut: int | None, seed: int) -> Iterator[Batch]:
    """Texts of a file in random order, one a batch, cut to at most ``cut`` tokens."""
    every = load_examples(data)
    for k in torch.randperm(len(every), generator=generator(seed, "texts")).tolist():
        e = every[k]
        example = Example(e.text, None, e.label if e.label in (0, 1) else 0)
        yield from split(
            encode(
                [example], victim.tokenizer, victim.task, max_length=cut or victim.max_length,
                num_labels=victim.num_labels, truncate=True,
            )
        )  # fmt: skip


def mean_of(values: list[int]) -> float:
    """Their mean."""
    return sum(values) / len(values)


def by_leverage(steps: list[Transcript], asked: str, least: int) -> str:
    """A row on the words that stand out of the row space: how many, how many of them are right, and of how many."""
    bags = [set(words_by_leverage(observe(sent, HONEST_SERVER))) for sent in steps]
    held = [set(tokens_in(s.text_batch.inputs())) - s.vocabulary.special_ids for s in steps]
    named, right, every = (sum(map(len, some)) for some in (bags, [a & b for a, b in zip(bags, held)], held))
    return f"| {asked} | {least} | {len(steps)} | {named} | {right} | {every} |"


def main() -> None:
    """Fill updates to each multiple of the width, attack them, and print a row a multiple."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--task", default="classification")
    parser.add_argument("--attack", default="blind,embedding-rows,span")
    parser.add_argument("--defense", default="none", help="what else protects")
    parser.add_argument("--widths", default="0.1,0.25,0.5,0.75,0.9,1,1.25,1.5,2")
    parser.add_argument("--counted", action="store_true", help="widths are of the tokens that accumulate counts")
    parser.add_argument("--leverage", action="store_true", help="words by leverage alone, in place of attacks")
    parser.add_argument("--cut", type=int, default=None, help="tokens of a text at most")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    victim = load(options.model, options.task, seed=options.seed)
    source = texts(victim, options.data, options.cut, options.seed)
    adversary = adversary_copy(victim.model)
    metrics = {name: metric(name) for name in METRICS}
    defense, d = parse_defense(options.defense), width(victim.model)
    start = time.process_time()
    if options.leverage:
        print("| d | counted tokens at least | updates | words named | right | words in the updates |")
        print("|---" * 6 + "|")
    else:
        print(f"| at least | tokens / d | counted / d | texts | attack | {' | '.join(METRICS)} | silent | CPU s |")
        print("|---" * (7 + len(METRICS)) + "|")
    for asked in options.widths.split(","):
        least = math.ceil(float(asked) * d)
        steps: list[Transcript] = []
        for draw in range(options.draws):
            rows: list[Batch] = []
            while len(counted(rows)) < least if options.counted else sum(row.lengths[0] for row in rows) < least:
                rows.append(next(source))
            rng = generator(options.seed, "step", asked, draw)
            batch = joined(rows, victim.vocabulary.pad_id or 0)
            steps.append(step(victim.model, batch, defense, task=victim.task, vocabulary=victim.vocabulary, rng=rng))
        if options.leverage:
            print(by_leverage(steps, asked, least), flush=True)
            continue
        held = [sum(s.text_batch.lengths) for s in steps]
        different = [len(tokens_in(s.text_batch.inputs())) for s in steps]
        for name in options.attack.split(","):
            values: dict[str, list[float]] = {m: [] for m in METRICS}
            silent, used = 0, time.process_time()
            for draw, sent in enumerate(steps):
                seen = observe(sent, HONEST_SERVER, adversary_model=adversary)
                try:
                    guess = make_attack(name)(seen, rng=generator(options.seed, name, asked, draw), budget=Budget())
                except (AttackFailed, NotApplicable):
                    # A silent attack knows no more than anybody: its texts count at the guessing level.
                    silent += 1
                    guess = make_attack("blind")(seen, rng=generator(options.seed, "blind"), budget=Budget())
                for m, judge in metrics.items():
                    values[m] += judge(guess, sent)
            shown = (mean_interval(values[m]) for m in METRICS)
            cells = [f"{100 * mean:.1f} [{100 * low:.0f}, {100 * high:.0f}]" for mean, low, high in shown]
            seconds = (time.process_time() - used) / len(steps)
            first = [asked, f"{mean_of(held) / d:.2f}", f"{mean_of(different) / d:.2f}", len(values[METRICS[0]]), name]
            row = [*first, *cells, f"{silent} of {len(steps)}", f"{seconds:.1f}"]
            print(f"| {' | '.join(map(str, row))} |", flush=True)
    print(f"{time.process_time() - start:.0f} s CPU")


if __name__ == "__main__":
    main()
