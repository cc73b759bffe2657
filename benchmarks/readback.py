"""What an attack reads back from real sentences on MiniLM.

python benchmarks/readback.py DATA.parquet --attack span --defense frozen-embeddings+dropout:0.1 --batch-size 2 --draws 16
python benchmarks/readback.py DATA.parquet --attack span-matching --defense frozen-blocks:5 --draws 16
python benchmarks/readback.py DATA.parquet --attack span --defense frozen-embeddings --hide-top 0.3 --draws 16
python benchmarks/readback.py DATA.parquet --attack lamp-cos --threat with-labels-and-lengths --reference TRAIN.parquet
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean, median

import torch

from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.rng import derive, generator
from rasura.core.threat import THREATS, adversary_copy, observe
from rasura.core.values import Message, Observation, Reconstruction
from rasura.data.text import Example, encode, load_examples
from rasura.metrics.text import rouge
from rasura.registry import attack, parse_defense, parse_update
from rasura.victims.adapters import with_fresh_adapter
from rasura.victims.loading import load
from rasura.victims.step import step


def without_largest(seen: Observation, share: float) -> Observation:
    """``seen`` with the largest ``share`` of all entries hidden."""
    if not share:
        return seen
    sizes = torch.cat([g.abs().flatten() for g in seen.gradients.values()])
    cut = sizes.kthvalue(round((1 - share) * sizes.numel())).values
    visible = {n: g.abs() <= cut for n, g in seen.gradients.items()}
    return replace(seen, message=Message({n: g * visible[n] for n, g in seen.gradients.items()}, visible))


def percent(scores: Mapping[str, Sequence[float]]) -> str:
    """The means of ``scores`` in percent."""
    return " / ".join(f"{100 * mean(values):.1f}" for values in scores.values())


def main() -> None:
    """Print one line a draw and the means."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--attack", default="span")
    parser.add_argument("--defense", default="none")
    parser.add_argument("--update", default="fedsgd")
    parser.add_argument("--hide-top", type=float, default=0.0, help="share of all entries, the largest, that is hidden")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--draws", type=int, default=16)
    parser.add_argument("--threat", default="honest-server", choices=THREATS)
    parser.add_argument("--reference", help="a file of texts that the adversary is granted")
    parser.add_argument("--budget", default="default")
    parser.add_argument("--words", type=int, nargs=2, help="texts of that many words, least and most; else 8 to 20 tokens")
    options = parser.parse_args()
    victim = load("minilm", "classification")
    local, wire = parse_update(options.update)
    model = with_fresh_adapter(victim.model, victim.task, local.lora, 0)
    adversary = adversary_copy(model)
    every = list(load_examples(options.data))
    if options.words:
        every = [e for e in every if options.words[0] <= len(e.text.split()) <= options.words[1]]
    else:
        every = [e for e in every if 8 <= len(victim.tokenizer(e.text).input_ids) <= 20]
    every.sort(key=lambda e: derive(0, e.text))
    defense = (*parse_defense(options.defense), *wire)
    reference = tuple(e.text for e in load_examples(options.reference)) if options.reference else None
    metrics = {"rouge1": rouge("rouge1"), "rouge2": rouge("rouge2"), "rougeL": rouge("rougeL")}
    scores: dict[str, list[float]] = {name: [] for name in metrics}
    seconds: list[tuple[float, float]] = []
    exact = 0
    for draw in range(options.draws):
        chosen = every[draw * options.batch_size : (draw + 1) * options.batch_size]
        labelled = [Example(e.text, None, k % 2) for k, e in enumerate(chosen)]
        batch = encode(labelled, victim.tokenizer, "classification", max_length=512, num_labels=2)
        rng = generator(draw, "step")
        truth = step(model, batch, defense, task="classification", vocabulary=victim.vocabulary, rng=rng, local=local)
        start, cpu = time.perf_counter(), time.process_time()
        try:
            seen = observe(truth, THREATS[options.threat], adversary_model=adversary, reference_text=reference)
            seen = without_largest(seen, options.hide_top)
            guess = attack(options.attack)(seen, rng=generator(draw, "attack"), budget=Budget(options.budget))
        except (AttackFailed, NotApplicable) as error:
            print(draw, error)
            guess = Reconstruction(())
        cpu, wall = time.process_time() - cpu, time.perf_counter() - start
        values = {name: metric(guess, truth) for name, metric in metrics.items()}
        read = [victim.vocabulary.text(t) for t in guess.tokens]
        hits = sum(victim.vocabulary.text(batch.ids(k)) in read for k in range(len(batch)))
        for name, all_values in scores.items():
            all_values += values[name]
        seconds.append((wall, cpu))
        exact += hits
        line = f"{draw} {guess.confidence} ROUGE-1, -2, -L {percent(values)} exact {hits}/{len(batch)}"
        print(f"{line} wall {wall:.1f} s cpu {cpu:.1f} s", flush=True)
    print(f"mean ROUGE-1, -2, -L {percent(scores)}, exact {exact} of {len(scores['rouge1'])}")
    print(f"median wall {median(s[0] for s in seconds):.1f} s")
    print(f"median cpu {median(s[1] for s in seconds):.1f} s")


if __name__ == "__main__":
    main()
