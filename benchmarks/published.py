"""What the published gradient-matching attacks read back from real sentences on MiniLM, in GRAB's settings.

python benchmarks/published.py DATA.parquet --attack lamp-cos --draws 16 [--reference TRAIN.parquet]
"""

from __future__ import annotations

import argparse
import time
from statistics import mean, median

from rasura.data.text import Example, encode, load_examples
from rasura.interfaces import AttackFailed, Budget
from rasura.metrics.text import rouge
from rasura.recipes import attack, parse_defense
from rasura.rng import derive, generator
from rasura.threat import WITH_LABELS_AND_LENGTHS, adversary_copy, observe
from rasura.values import Reconstruction
from rasura.victims.loading import load
from rasura.victims.step import step


def main() -> None:
    """Print one line a draw and the means."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--attack", default="lamp-cos")
    parser.add_argument("--defense", default="frozen-embeddings")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--draws", type=int, default=16)
    parser.add_argument("--budget", default="default")
    parser.add_argument("--reference", help="a file of reference texts, granted to the adversary")
    options = parser.parse_args()
    victim = load("minilm", "classification")
    adversary = adversary_copy(victim.model)
    texts = tuple(e.text for e in load_examples(options.reference)) if options.reference else None
    every = [e for e in load_examples(options.data) if 8 <= len(victim.tokenizer(e.text).input_ids) <= 20]
    every.sort(key=lambda e: derive(0, e.text))
    names = ("rouge1", "rouge2", "rougeL")
    scores: dict[str, list[float]] = {n: [] for n in names}
    seconds = []
    for draw in range(options.draws):
        chosen = every[draw * options.batch_size : (draw + 1) * options.batch_size]
        labelled = [Example(e.text, None, k % 2) for k, e in enumerate(chosen)]
        batch = encode(labelled, victim.tokenizer, "classification", max_length=512, num_labels=2)
        truth = step(
            victim.model,
            batch,
            parse_defense(options.defense),
            task="classification",
            vocabulary=victim.vocabulary,
            rng=generator(draw, "step"),
        )
        seen = observe(truth, WITH_LABELS_AND_LENGTHS, adversary_model=adversary, reference_text=texts)
        start = time.process_time()
        try:
            guess = attack(options.attack)(seen, rng=generator(draw, "attack"), budget=Budget(options.budget))
        except AttackFailed as error:
            print(draw, error)
            guess = Reconstruction(())
        seconds.append(time.process_time() - start)
        for name in names:
            scores[name] += rouge(name)(guess, truth)
        read = victim.vocabulary.text(guess.tokens[0]) if guess.tokens else ""
        last = [scores[n][-options.batch_size :] for n in names]
        print(draw, guess.confidence, *(f"{100 * mean(x):.0f}" for x in last), f"cpu {seconds[-1]:.0f} s", read, flush=True)
    print("mean ROUGE-1, -2, -L:", *(f"{100 * mean(scores[n]):.1f}" for n in names), f"median cpu {median(seconds):.0f} s")


if __name__ == "__main__":
    main()
