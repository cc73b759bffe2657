"""What an attack reads back from real sentences on MiniLM.

python benchmarks/readback.py DATA.parquet --attack span --defense frozen-embeddings+dropout:0.1 --batch-size 2 --draws 16
python benchmarks/readback.py DATA.parquet --attack span-matching --defense frozen-blocks:5 --draws 32 --seeds 3 --threads 1
python benchmarks/readback.py DATA.parquet --attack span --defense frozen-embeddings --hide-top 0.3 --draws 16
python benchmarks/readback.py DATA.parquet --attack lamp-cos --threat with-labels-and-lengths --reference TRAIN.parquet
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

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


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--attack", default="span")
    parser.add_argument("--defense", default="none")
    parser.add_argument("--update", default="fedsgd")
    parser.add_argument("--hide-top", type=float, default=0.0, help="share of all entries, the largest, that is hidden")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--draws", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=1, help="attacks on each update, with other seeds")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--out", help="a file that results are added to; what it holds is not run again")
    parser.add_argument("--threat", default="honest-server", choices=THREATS)
    parser.add_argument("--reference", help="a file of texts that the adversary is granted")
    parser.add_argument("--budget", default="default")
    parser.add_argument("--words", type=int, nargs=2, help="texts of that many words, least and most; else 8 to 20 tokens")
    return parser.parse_args()


def stored(path: str | None, options: argparse.Namespace) -> dict[tuple[int, int], dict[str, Any]]:
    """What ``path`` holds, by draw and seed; refuses results of other options."""
    if path is None or not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    if any(row["setting"] != setting(options) for row in rows):
        raise SystemExit(f"{path} holds results of other options")
    return {(row["draw"], row["seed"]): row for row in rows}


def setting(options: argparse.Namespace) -> dict[str, Any]:
    """The options that decide what is measured."""
    return {k: v for k, v in vars(options).items() if k not in ("draws", "seeds", "out")}


def main() -> None:
    """Print one line an attack, the means, and quantiles of its time."""
    options = parsed()
    if options.threads:
        torch.set_num_threads(options.threads)
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
    rows = stored(options.out, options)
    for seed, draw in itertools.product(range(options.seeds), range(options.draws)):
        if (draw, seed) in rows:
            continue
        chosen = every[draw * options.batch_size : (draw + 1) * options.batch_size]
        labelled = [Example(e.text, None, k % 2) for k, e in enumerate(chosen)]
        batch = encode(labelled, victim.tokenizer, "classification", max_length=512, num_labels=2)
        rng = generator(draw, "step")
        truth = step(model, batch, defense, task="classification", vocabulary=victim.vocabulary, rng=rng, local=local)
        start, cpu = time.perf_counter(), time.process_time()
        try:
            seen = observe(truth, THREATS[options.threat], adversary_model=adversary, reference_text=reference)
            seen = without_largest(seen, options.hide_top)
            rng = generator(draw, "attack", seed) if seed else generator(draw, "attack")
            guess = attack(options.attack)(seen, rng=rng, budget=Budget(options.budget))
        except (AttackFailed, NotApplicable) as error:
            print(draw, error)
            guess = Reconstruction(())
        cpu, wall = time.process_time() - cpu, time.perf_counter() - start
        values = {name: metric(guess, truth) for name, metric in metrics.items()}
        read = [victim.vocabulary.text(t) for t in guess.tokens]
        hits = sum(victim.vocabulary.text(batch.ids(k)) in read for k in range(len(batch)))
        row = {"draw": draw, "seed": seed, "exact": hits, "texts": len(batch), "wall": wall, "cpu": cpu, **values}
        row |= {"confidence": guess.confidence, "tokens": int(batch.attention_mask.sum()), "setting": setting(options)}
        rows[draw, seed] = row
        if options.out:
            with open(options.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        line = f"{draw} {seed} {guess.confidence} ROUGE-1, -2, -L {percent(values)} exact {hits}/{len(batch)}"
        print(f"{line} wall {wall:.1f} s cpu {cpu:.1f} s", flush=True)
    scores = {name: [v for row in rows.values() for v in row[name]] for name in metrics}
    print(
        f"mean ROUGE-1, -2, -L {percent(scores)}, exact {sum(r['exact'] for r in rows.values())} of {len(scores['rouge1'])}"
    )
    for what in ("wall", "cpu"):
        times = torch.tensor([row[what] for row in rows.values()])
        p50, p90 = times.quantile(torch.tensor([0.5, 0.9])).tolist()
        print(f"{what}: p50 {p50:.1f} s, p90 {p90:.1f} s, most {float(times.max()):.1f} s, of {len(times)} attacks")


if __name__ == "__main__":
    main()
