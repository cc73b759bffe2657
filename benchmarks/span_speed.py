"""How near ``span`` is to its floor, and how much faster than at another commit, in CPU seconds on one thread.

python benchmarks/span_speed.py scan TEXTS.parquet minilm MODEL_FOLDER ...
python benchmarks/span_speed.py whole TEXTS.parquet minilm MODEL_FOLDER ... --before CHECKOUT --sizes 1,4,8

``scan``: the test of the whole vocabulary at all places of a text, beside two floors timed in the same run: the bare product
of the word embedding and the row space's basis, once, and once for each place. ``whole``: the attack with its proof, of the
package at hand and of ``CHECKOUT``, a folder with another commit, in turns. MiniLM classifies; model folders are causal.
Prints tables in Markdown: medians, and what came back exactly.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from rasura.attacks.updates.span import Span
from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.rows import block_spaces, visible_blocks
from rasura.core.batches import Batch
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.rng import derive, generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import Observation, Reconstruction
from rasura.data.text import Example, encode, load_examples
from rasura.registry import parse_defense
from rasura.victims.loading import Victim, load
from rasura.victims.step import step

REPEATS = 9

LOSS = 0.9
"""Below this ratio of the times before and now, a row says that it is slower."""


def cpu(work: Callable[[], object]) -> float:
    """CPU seconds of ``work``, once."""
    start = time.process_time()
    work()
    return time.process_time() - start


def observed(victim: Victim, texts: str, size: int, draw: int, defense: str) -> tuple[Batch, Observation]:
    """Batch number ``draw`` of texts of 8 to 20 tokens, and what the server sees of it."""
    examples = [e for e in load_examples(texts) if 8 <= len(victim.tokenizer(e.text).input_ids) <= 20]
    examples = sorted(examples, key=lambda e: derive(0, e.text))[draw * size : (draw + 1) * size]
    labelled = [Example(e.text, None, k % 2) for k, e in enumerate(examples)]
    batch = encode(labelled, victim.tokenizer, victim.task, max_length=64, num_labels=2)
    sent = step(
        victim.model, batch, parse_defense(defense), task=victim.task, vocabulary=victim.vocabulary,
        rng=generator(draw, "step"),
    )  # fmt: skip
    return batch, observe(sent, HONEST_SERVER)


def loaded(name: str) -> Victim:
    """The model ``name`` on one thread."""
    torch.set_num_threads(1)
    return load(name, "classification" if name == "minilm" else "causal")


def scan(texts: str, name: str, size: int) -> str:
    """One line: the scan of one batch beside its floors."""
    from rasura.attacks.updates.span.scan import Scan
    from rasura.attacks.updates.span.tokens import candidates

    victim = loaded(name)
    batch, seen = observed(victim, texts, size, 0, "frozen-embeddings")
    space = block_spaces(seen, visible_blocks(seen)[:1])[0]
    inputs, ids = Inputs(seen.model), candidates(seen.vocabulary)
    table = seen.model.get_parameter(inputs.parts.word_embedding).detach()
    basis = space.basis.to(table)
    places = Scan(space, inputs, ids, int(batch.attention_mask.sum(1).max())).places

    def scanned() -> None:
        found = Scan(space, inputs, ids, places)
        for place in range(places):
            found.missing(place)

    times = [(cpu(scanned), cpu(lambda: table @ basis)) for _ in range(REPEATS)]
    own, bare = (median(column) for column in zip(*times))
    figures = f"{own:.3f} | {bare:.3f} | {own / bare:.1f} | {places * bare:.3f} | {own / (places * bare):.2f}"
    shape = f"{len(table):,} x {table.shape[1]} x {space.rank}"
    return f"| {Path(name).name} | {size} | {shape} | {places} | {figures} |"


def attacked(texts: str, name: str, size: int, defense: str) -> None:
    """For each number of a draw on standard input, print seconds, texts read exactly and the confidence as JSON."""
    victim = loaded(name)
    for line in sys.stdin:
        draw = int(line)
        batch, seen = observed(victim, texts, size, draw, defense)
        start = time.process_time()
        try:
            guess = Span()(seen, rng=generator(draw, "attack"), budget=Budget())
        except (AttackFailed, NotApplicable):
            guess = Reconstruction(())
        seconds = time.process_time() - start
        exact = sum(tuple(batch.ids(k)) in guess.tokens for k in range(len(batch)))
        print(json.dumps([seconds, exact, guess.confidence]), flush=True)


class Tree:
    """The attack of the package in a folder, in a process of its own, by the folder's own copy of this file, if any."""

    def __init__(self, folder: str, texts: str, name: str, size: int, defense: str) -> None:
        own = Path(folder, "benchmarks", Path(__file__).name)
        script = str(own if own.exists() else __file__)
        self.folder = folder
        command = [sys.executable, script, "draws", texts, name, "--sizes", str(size), "--defense", defense]
        self.process = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": folder}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self.found: list[tuple[float, int, str]] = []

    def __call__(self, draw: int) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{draw}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the attack of {self.folder} ended without a result")
        self.found.append(json.loads(line))

    def ended(self) -> list[tuple[float, int, str]]:
        """What was found, when the process is done."""
        self.process.communicate()
        return self.found


def whole(texts: str, name: str, size: int, defense: str, draws: int, before: str) -> str:
    """One line: the attack of the checkout ``before`` and of this one, a draw of each in turn: both meet the same load."""
    folders = (str(Path(before).resolve()), str(Path(__file__).resolve().parents[1]))
    trees = [Tree(folder, texts, name, size, defense) for folder in folders]
    for draw in range(draws):
        for tree in trees:
            tree(draw)
    old, new = (tree.ended() for tree in trees)
    ratio = median(a[0] / b[0] for a, b in zip(old, new))
    seconds = " | ".join(f"{median(s for s, _, _ in found):.2f}" for found in (old, new))
    exact = ", ".join(str(sum(n for _, n, _ in found)) for found in (old, new))
    proved = ", ".join(str(sum(said == "verified" for _, _, said in found)) for found in (old, new))
    dropout = defense.partition("dropout:")[2] or "off"
    what = f"| {Path(name).name} | {dropout} | {size} | {seconds} | {ratio:.1f}{' **slower**' * (ratio < LOSS)}"
    return f"{what} | {exact} of {draws * size} | {proved} of {draws} |"


def main() -> None:
    """Print a table, a row as it is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("scan", "whole", "draws"))
    parser.add_argument("texts")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--sizes", default="1,4,8")
    parser.add_argument("--before", help="the folder of another commit")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--defense", default="frozen-embeddings")
    options = parser.parse_args()
    sizes = [int(n) for n in options.sizes.split(",")]
    if options.what == "draws":
        attacked(options.texts, options.models[0], sizes[0], options.defense)
        return
    if options.what == "whole" and options.before is None:
        parser.error("whole needs --before")
    scans = "| model | batch | product | places | scan, s | bare product, s | times | one a place, s | times |"
    wholes = "| model | dropout | batch | before, s | now, s | times faster | exact before, now | verified before, now |"
    head = scans if options.what == "scan" else wholes
    print(head + "\n" + "|---" * (head.count("|") - 1) + "|", flush=True)
    for name in options.models:
        for size in sizes:
            if options.what == "scan":
                print(scan(options.texts, name, size), flush=True)
            else:
                print(whole(options.texts, name, size, options.defense, options.draws, options.before), flush=True)


if __name__ == "__main__":
    main()
