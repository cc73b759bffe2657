"""What the benchmarks of adapters and rounds share: models, texts, earlier rounds, attacks, and lines that are kept."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.batches import Batch
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.local import FEDSGD, Adapter, Local
from rasura.core.rng import generator, permutation
from rasura.core.threat import observe_update
from rasura.core.updates import changed
from rasura.core.values import Message, Observation, Reconstruction
from rasura.data.text import Example, encode, load_examples
from rasura.metrics.intervals import mean_interval
from rasura.registry import attack as make_attack
from rasura.registry import parse_update
from rasura.victims.adapters import with_fresh_adapter
from rasura.victims.batching import joined
from rasura.victims.loading import Victim, load

CLASSIFIERS = ("minilm", "distilbert", "mpnet")
"""Models that are classifiers; every other one is a causal model. All but the first, which needs no folder, are in
``--models``."""


class Lines:
    """A file of JSON lines, one a cell: what it holds is not done again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines() if line.strip()]

    def has(self, **cell: Any) -> bool:
        """Whether a line with these values is there."""
        return any(all(row.get(name) == value for name, value in cell.items()) for row in self.rows)

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep one cell."""
        self.rows.append(dict(row))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def options(about: str | None, out: str) -> argparse.ArgumentParser:
    """The options that all of these benchmarks have."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="texts")
    parser.add_argument("--models", type=Path, default=Path("models"), help="folder of model folders")
    parser.add_argument("--device", default="cpu", help="device of the training; attacks use the CPU")
    parser.add_argument("--out", type=Path, default=Path(out), help="file of JSON lines; what it holds is not done again")
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def options_of_one_text(about: str | None, out: str) -> argparse.ArgumentParser:
    """The options of benchmarks that ``texts_behind_adamw`` serves."""
    parser = options(about, out)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--round", type=int, default=2)
    return parser


def texts_behind_adamw(told: argparse.Namespace, first: int = 0) -> Iterator[tuple[Victim, Batch, Observation]]:
    """For each draw from ``first`` on: one text, and what a server sees of a client that trained adapters on queries and
    values with AdamW on it."""
    victim = victim_of(told.model, told.models, told.device)
    others = rows_of(victim, told.data, 32, 8 * told.round, told.seed + 1)
    earlier, local = earlier_round(told.rank), sent_as("adamw", told.rank)
    rows = rows_of(victim, told.data, told.tokens, told.draws, told.seed)
    for draw, row in list(enumerate(rows))[first:]:
        model = in_round(victim, Adapter(told.rank, "attention"), told.round, others, earlier, draw)
        yield victim, row, seen_of(model, victim, sent_by(model, victim, [row], local, draw), local, 1)


def victim_of(name: str, models: Path, device: str) -> Victim:
    """The model ``name``."""
    task: Any = "classification" if name in CLASSIFIERS else "causal"
    return load(name if name == CLASSIFIERS[0] else models / name, task, device=device)


def rows_of(victim: Victim, data: str, tokens: int, count: int, seed: int) -> list[Batch]:
    """``count`` texts of exactly ``tokens`` tokens each, made of the file's texts in random order, one a batch."""
    every = load_examples(data)
    frame = len(victim.vocabulary.prefix) + len(victim.vocabulary.suffix)
    out: list[Batch] = []
    held: list[int] = []
    for k in permutation(len(every), generator(seed, "texts")).tolist():
        held += victim.vocabulary.encode(every[k].text)
        while len(held) >= tokens - frame and len(out) < count:
            ids = [*victim.vocabulary.prefix, *held[: tokens - frame], *victim.vocabulary.suffix]
            held = held[tokens - frame :]
            out.append(batch_of(victim, ids, len(out) % 2))
        if len(out) == count:
            return out
    raise SystemExit(f"{data} has too few texts for {count} of {tokens} tokens")


def batch_of(victim: Victim, ids: Sequence[int], label: int) -> Batch:
    """One text of these ``ids``."""
    row = torch.tensor([list(ids)])
    labels = row.clone() if victim.task == "causal" else torch.tensor([label])
    text = victim.vocabulary.text(ids)
    types = None
    if victim.task != "causal":  # as the tokenizer would give them
        made = encode(
            [Example(text, None, label)], victim.tokenizer, victim.task, max_length=512, num_labels=2, truncate=True
        )
        types = None if made.token_type_ids is None else torch.zeros_like(row)
    return Batch(row, torch.ones_like(row), labels, (text,), (text,), types, victim.vocabulary.special_ids)


def earlier_round(rank: int) -> Local:
    """How a client trained in the rounds before."""
    return parse_update(f"local:epochs=2/batch=4/lr=1e-4/lora={rank}")[0]


def sent_as(kind: str, rank: int) -> Local:
    """How the text is trained on."""
    return FEDSGD if kind == "gradient" else parse_update(f"local:epochs=4/batch=0/lr=1e-4/lora={rank}")[0]


def trained(model: nn.Module) -> list[str]:
    """What is trained of ``model`` and sent."""
    return [n for n, p in model.named_parameters() if p.requires_grad]


def sent_by(model: nn.Module, victim: Victim, rows: Sequence[Batch], local: Local, seed: int) -> dict[str, Tensor]:
    """What a client with these texts sends, as gradients, in float32 on the CPU."""
    rng = generator(seed, "order")
    device = next(model.parameters()).device
    batch = joined(list(rows), victim.vocabulary.pad_id or 0).to(device)
    found, _ = changed(model, batch.inputs(), trained(model), local, lambda n: permutation(n, rng))
    return {n: g.float() for n, g in found.items()}


def in_round(victim: Victim, adapter: Adapter, number: int, rows: Sequence[Batch], local: Local, seed: int) -> nn.Module:
    """The model at the start of round ``number``: every round before trained on eight other texts of ``rows``."""
    model = with_fresh_adapter(victim.model, victim.task, adapter, seed)
    for k in range(number - 1):
        change = sent_by(model, victim, rows[8 * k : 8 * k + 8], local, seed + k)
        with torch.no_grad():
            for name, g in change.items():
                p = model.get_parameter(name)
                p.sub_(local.learning_rate * g.to(p.device))
    return model


def seen_of(
    model: nn.Module,
    victim: Victim,
    sent: Mapping[str, Tensor],
    local: Local,
    size: int,
) -> Observation:
    """What an honest server sees: the update, the model, how clients train and how many texts they have."""
    return observe_update(
        Message(dict(sent), kind=local.kind), victim.task, model=model, vocabulary=victim.vocabulary,
        mechanism=(local.mechanism,) if local.kind != "fedsgd" else (), batch_size=size,
    )  # fmt: skip


def tried(name: str, seen: Observation, seed: int) -> tuple[Reconstruction | None, str, float]:
    """The guess of an attack, or why there is none; and its CPU seconds."""
    start = time.process_time()
    try:
        guess = make_attack(name)(seen, rng=generator(seed, name), budget=Budget())
    except (AttackFailed, NotApplicable) as reason:
        return None, str(reason), time.process_time() - start
    return guess, guess.confidence, time.process_time() - start


def words(ids: Sequence[int], victim: Victim) -> set[int]:
    """The different words, without special tokens and holes."""
    return {t for t in ids if t >= 0 and t not in victim.vocabulary.special_ids}


def bag_scores(guess: Sequence[int], truth: Sequence[int], victim: Victim) -> tuple[float, float]:
    """Recall and precision of the different words; a guess without words has precision 0."""
    found, private = words(guess, victim), words(truth, victim)
    both = len(found & private)
    return both / max(1, len(private)), both / max(1, len(found))


def common_words(victim: Victim, rows: Sequence[Batch], count: int) -> list[int]:
    """The baseline, which looks at no update: the ``count`` most frequent words of other texts."""
    total = torch.zeros(victim.vocabulary.size)
    for row in rows:
        total[row.input_ids.unique()] += 1
    total[sorted(victim.vocabulary.special_ids)] = 0
    return [int(t) for t in total.topk(count).indices]


def figure(values: Sequence[float]) -> str:
    """A mean of shares with its interval that covers at every n."""
    _, low, high = mean_interval(values)
    return f"{sum(values) / len(values):.2f} ({low:.2f} to {high:.2f})"
