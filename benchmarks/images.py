"""What is read back of real images from one update of a LeNet or CNN with fresh weights.

python benchmarks/images.py FOLDER --model lenet --attack inverting-gradients
python benchmarks/images.py FOLDER --model cnn --attack feature-matching --hide-top 0.3
python benchmarks/images.py FOLDER --model cnn --attack inverting-gradients --defense pruning:0.9
"""

from __future__ import annotations

import argparse
import time
from statistics import mean, median

import torch
from readback import without_largest

from rasura.core.interfaces import AttackFailed, Budget
from rasura.core.rng import generator
from rasura.core.threat import THREATS, adversary_copy, observe
from rasura.data.images import encode_images, load_images
from rasura.data.text import groups
from rasura.registry import attack, metric, parse_defense
from rasura.victims.loading import load
from rasura.victims.step import step

METRICS = ("mse", "psnr", "ssim")


def main() -> None:
    """Print one line per update and the means, with the baseline beside them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--attack", default="inverting-gradients")
    parser.add_argument("--defense", default="none")
    parser.add_argument("--hide-top", type=float, default=0.0, help="share of all entries, the largest, that is hidden")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--num-labels", type=int, default=100)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--threat", default="honest-server", choices=THREATS)
    parser.add_argument("--budget", default="default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    victim = load(options.model, "vision", num_labels=options.num_labels)
    adversary = adversary_copy(victim.model)
    defense = parse_defense(options.defense)
    images = load_images(options.data, limit=options.draws * options.batch_size)
    values: dict[str, list[float]] = {name: [] for name in METRICS}
    blind: dict[str, list[float]] = {name: [] for name in METRICS}
    seconds = []
    for draw, group in enumerate(groups(images, options.batch_size)):
        batch = encode_images(group, size=victim.max_length, num_labels=victim.num_labels)
        truth = step(victim.model, batch, defense, task="vision", vocabulary=victim.vocabulary, rng=generator(draw, "step"))
        seen = without_largest(observe(truth, THREATS[options.threat], adversary_model=adversary), options.hide_top)
        start = time.process_time()
        floor = attack("blind")(seen, rng=generator(draw, "blind"), budget=Budget())
        try:
            guess = attack(options.attack)(seen, rng=generator(draw, "attack"), budget=Budget(options.budget))
        except AttackFailed as error:
            print(draw, error)
            guess = floor
        seconds.append(time.process_time() - start)
        for name in METRICS:
            values[name] += metric(name)(guess, truth)
            blind[name] += metric(name)(floor, truth)
        line = ", ".join(f"{name} {mean(values[name][-len(batch) :]):.4f}" for name in METRICS)
        right = guess.labels is not None and sorted(guess.labels) == sorted(batch.labels.tolist())
        print(f"{draw} {line}, labels {'right' if right else 'wrong'}, cpu {seconds[-1]:.1f} s", flush=True)
    for name in METRICS:
        print(f"mean {name} {mean(values[name]):.4f}, blind {mean(blind[name]):.4f}, n {len(values[name])}")
    print(f"median cpu {median(seconds):.1f} s an update")


if __name__ == "__main__":
    main()
