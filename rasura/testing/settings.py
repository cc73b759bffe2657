"""The settings in which the laws try a method: tiny models, short texts, what an adversary is granted of them."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from rasura.core.batches import Batch, ImageBatch
from rasura.core.interfaces import ActiveAttack, Defense
from rasura.core.rng import generator
from rasura.core.specs import AttackSpec, DefenseSpec
from rasura.core.threat import ThreatModel, observe
from rasura.core.values import NO_TEXT, Grant, Message, Observation, Task, Transcript
from rasura.data.images import demo_images, encode_images
from rasura.registry import DEFENSES, parse_defense
from rasura.testing.tiny import CAUSAL_VOCABULARY, CLS, SEP, VOCABULARY, batch_for, batch_of, tiny
from rasura.victims.step import step
from rasura.victims.vision import lenet

TEXT = (CLS, 3, 40, 41, 4, 42, 9, SEP)
"""The private text of the attack laws."""

OTHER = (CLS, 50, 3, 51, SEP)
"""The second text of the batch, where there are two."""

IMAGE_SIZE = 16


def send(family: str, task: Task, defense: Defense, model: nn.Module | None = None, seed: int = 0) -> Transcript:
    """What a client sends of two short texts: the whole truth."""
    return step(
        tiny(family, task) if model is None else model,
        batch_for(task), defense, task=task, vocabulary=VOCABULARY, rng=generator(seed, "step"),
    )  # fmt: skip


def at_home(spec: AttackSpec, rows: int = 1) -> Transcript:
    """The step that the attack is made for, on one private text or image, or on two."""
    home = spec.home
    model: nn.Module
    batch: Batch | ImageBatch
    if home.task == "vision":
        model = lenet(4, image_size=IMAGE_SIZE)
        batch = encode_images(demo_images(IMAGE_SIZE)[:rows], size=IMAGE_SIZE, num_labels=4)
    else:
        model = tiny(home.family, home.task, num_labels=2)
        batch = batch_of([list(TEXT), list(OTHER)][:rows], home.task, [1, 0][:rows])
    attack = spec.make()
    if isinstance(attack, ActiveAttack):
        model = attack.craft(model, home.task, rng=generator(0, "craft"))
    vocabulary = {"vision": NO_TEXT, "causal": CAUSAL_VOCABULARY}.get(home.task, VOCABULARY)
    defense = parse_defense(home.defense)
    return step(model, batch, defense, task=home.task, vocabulary=vocabulary, rng=generator(0, "step"))


def seen(sent: Transcript, grants: frozenset[Grant], message: Message | None = None) -> Observation:
    """What an adversary with exactly ``grants`` sees; every other field raises ``NotGranted``."""
    text = sent.task != "vision"
    found = observe(
        sent,
        ThreatModel("law", grants, "an adversary with exactly these grants"),
        reference_text=("the w60 of w61 .", "the w62") if text else None,
        language_model=(tiny("gpt2", "causal"), CAUSAL_VOCABULARY) if text else None,
    )
    return found if message is None else replace(found, message=message)


def overlaid(spec: DefenseSpec) -> Defense:
    """The defense as its ``example`` writes it, ``spec`` standing in for its name."""
    return parse_defense(spec.example, methods={**DEFENSES, spec.name: spec})
