"""What a server sees of small batches."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from rasura.core.batches import Batch
from rasura.core.local import Adapter
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import Message, Observation, Task, Vocabulary
from rasura.data.text import Example, encode
from rasura.registry import parse_defense, parse_update
from rasura.testing.tiny import CAUSAL_VOCABULARY, CLS, PAD, SEP, VOCABULARY
from rasura.victims.adapters import with_fresh_adapter
from rasura.victims.loading import load
from rasura.victims.step import step

TEXTS = [[CLS, 40, 3, 41, 9, 3, 42, SEP], [CLS, 50, 51, 4, 52, SEP], [CLS, 3, 60, 61, 62, 4, 60, 9, SEP]]


BARE = Vocabulary(VOCABULARY.size, VOCABULARY.decode, VOCABULARY.encode, (), (), PAD, frozenset({PAD}))
"""A vocabulary without start and end tokens, as SmolLM2's and Qwen's."""


def in_later_round(model: nn.Module, task: Task, adapter: Adapter, b: float = 0.02) -> nn.Module:
    """``model`` with adapters in a later round: B was trained before, here drawn at random."""
    model = with_fresh_adapter(model, task, adapter, 0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(b * torch.randn(p.shape, generator=generator(1, name)))
    return model


def seen_by_server(model: nn.Module, batch: Batch, task: str, keep: str | None = None) -> Observation:
    """What the honest server sees of one step; ``keep``: only parameters with this in their names."""
    vocabulary = CAUSAL_VOCABULARY if task == "causal" else VOCABULARY
    truth = step(model, batch, task=task, vocabulary=vocabulary, rng=generator(0, "step"))  # type: ignore[arg-type]
    seen = observe(truth, HONEST_SERVER)
    if keep is None:
        return seen
    kept = {n: g for n, g in seen.gradients.items() if keep in n}
    return Observation(Message(kept), seen.task, seen.granted)


def seen_of(model: nn.Module, batch: Batch, task: str) -> Observation:
    """What the honest server sees of one step on ``batch`` with frozen embeddings, where the task is causal."""
    defense = parse_defense("frozen-embeddings") if task == "causal" else ()
    truth = step(model, batch, defense, task=task, vocabulary=BARE, rng=generator(0, "step"))  # type: ignore[arg-type]
    return observe(truth, HONEST_SERVER)


def seen_of_minilm(
    path: Path, texts: list[str], labels: list[int], update: str, protection: str = "frozen-embeddings"
) -> tuple[Observation, list[tuple[int, ...]]]:
    """What the server sees of an update of MiniLM, and the ids of its texts."""
    victim = load(path, "classification")
    local, wire = parse_update(update)
    examples = [Example(text, None, label) for text, label in zip(texts, labels)]
    batch = encode(examples, victim.tokenizer, "classification", max_length=64, num_labels=2)
    defense = (*parse_defense(protection), *wire)
    rng = generator(0, "step")
    truth = step(victim.model, batch, defense, task="classification", vocabulary=victim.vocabulary, rng=rng, local=local)
    return observe(truth, HONEST_SERVER), [tuple(batch.ids(k)) for k in range(len(texts))]
