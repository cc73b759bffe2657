"""What span reads back from pretrained models, with the CPU seconds and the memory that it takes.

python benchmarks/real_models.py TEXTS.parquet MODEL_FOLDER --task causal --sizes 1,4,8
python benchmarks/real_models.py TEXTS.parquet MODEL_FOLDER --task classification --defense frozen-embeddings+dropout:0.1

Every row runs in a process of its own, on one thread, so that its peak memory is its own. Texts have at least six words.
The attack knows the batch size. CPU seconds are those of the attack and its proof, without loading and without the
client's step. Peak memory is that of the whole process, the client's model and the adversary's copy of it included.
Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections import Counter

import torch

from rasura.attacks.updates.span import Span
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.rng import derive, generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import Reconstruction, Task
from rasura.data.text import encode, load_examples
from rasura.metrics.text import rouge
from rasura.registry import parse_defense
from rasura.victims.loading import load
from rasura.victims.step import step

MIN_WORDS = 6
HEAD = "| batch | protection | tokens | exact | ROUGE-1 | confidence | CPU s | peak GB |\n" + "|---" * 8 + "|"


def row(texts: str, model: str, task: Task, size: int, defense: str, draw: int) -> str:
    """One line of the table: one batch."""
    torch.set_num_threads(1)
    victim = load(model, task)
    examples = [e for e in load_examples(texts) if len(e.text.split()) >= MIN_WORDS]
    examples = sorted(examples, key=lambda e: derive(0, e.text))[draw * size : (draw + 1) * size]
    batch = encode(examples, victim.tokenizer, task, max_length=64, num_labels=2)
    sent = step(
        victim.model, batch, parse_defense(defense), task=task, vocabulary=victim.vocabulary, rng=generator(draw, "step")
    )  # fmt: skip
    seen = observe(sent, HONEST_SERVER)
    start = time.process_time()
    try:
        guess = Span()(seen, rng=generator(draw, "attack"), budget=Budget())
        said: str = guess.confidence if guess.ordered else f"{guess.confidence}, without order"
    except (AttackFailed, NotApplicable) as error:
        guess, said = Reconstruction(()), str(error)
    seconds = time.process_time() - start
    true = [tuple(batch.ids(k)) for k in range(len(batch))]
    exact = sum((Counter(true) & Counter(guess.tokens)).values())
    scores = rouge("rouge1")(guess, sent)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    figures = f"{sum(map(len, true))} | {exact}/{size} | {100 * sum(scores) / len(scores):.1f} | {said} | {seconds:.0f}"
    return f"| {size} | {defense} | {figures} | {peak:.1f} |"


def main() -> None:
    """Print the table, a row as it is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts")
    parser.add_argument("model")
    parser.add_argument("--task", default="causal")
    parser.add_argument("--sizes", default="1,4,8")
    parser.add_argument("--defense", default="frozen-embeddings")
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--row", type=int, default=None, help="print the row of this draw alone, of the first size")
    options = parser.parse_args()
    sizes = [int(n) for n in options.sizes.split(",")]
    if options.row is not None:
        print(row(options.texts, options.model, options.task, sizes[0], options.defense, options.row))
        return
    print(HEAD, flush=True)
    for size in sizes:
        for draw in range(options.draws):
            command = [sys.executable, __file__, options.texts, options.model, "--task", options.task]
            command += ["--sizes", str(size), "--defense", options.defense, "--row", str(draw)]
            done = subprocess.run(command, capture_output=True, text=True)
            lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
            print(lines[-1] if lines else f"| {size} | ended with {done.returncode} |", flush=True)


if __name__ == "__main__":
    main()
