"""One note, and what a client sends of it by each kind of update."""

from __future__ import annotations

from collections.abc import Sequence

from rasura import registry
from rasura.core.rng import generator
from rasura.core.threat import THREATS, observe
from rasura.core.values import Observation
from rasura.data.text import Example, encode
from rasura.registry import parse_update
from rasura.victims.adapters import with_fresh_adapter
from rasura.victims.loading import Victim
from rasura.victims.step import step

NOTE = "the patient owes 4250 euros to dr brandt"


def sent_by(victim: Victim, update: str, defense: str = "frozen-embeddings", texts: Sequence[str] = (NOTE,)) -> Observation:
    local, wire = parse_update(update)
    examples = [Example(t, None, k % 2) for k, t in enumerate(texts)]
    batch = encode(examples, victim.tokenizer, "classification", max_length=64, num_labels=2)
    whole = (*registry.parse_defense(defense), *wire)
    model = with_fresh_adapter(victim.model, victim.task, local.lora, 0)
    truth = step(model, batch, whole, task="classification", vocabulary=victim.vocabulary, rng=generator(0), local=local)
    return observe(truth, THREATS["honest-server"])
