"""Reading an update that somebody captured elsewhere: one safetensors file, any subset of the parameters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rasura.core.interfaces import Budget, InputError, NotApplicable
from rasura.core.mechanisms import Dropout, FrozenEmbeddings
from rasura.core.rng import generator
from rasura.core.threat import adversary_copy
from rasura.core.values import UNKNOWN, Grant, Message, Observation
from rasura.data.text import load_examples
from rasura.registry import attack as make_attack
from rasura.registry import parse_update
from rasura.runs.update_files import load_hidden, load_update
from rasura.victims.loading import Victim, load


def read_update(
    path: str | Path,
    victim: Victim,
    *,
    attack: str = "best",
    batch_size: int | None = None,
    labels: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    dropout: float = 0.0,
    frozen_embeddings: bool = False,
    hidden: str | Path | None = None,
    reference: str | Path | None = None,
    language_model: str | None = None,
    update: str = "fedsgd",
    budget: Budget | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Read the text behind an update: ``texts``, ``confidence``, ``attack``, ``tokens``, ``seconds``, ``details``.

    Whatever is not given is estimated by the attacks. ``frozen_embeddings`` leaves the embeddings' gradients unread;
    ``hidden`` names a file that says which entries the adversary does not see (``load_hidden``), ``reference`` a file of
    texts of the same kind, ``language_model`` a causal model's folder or hub id. ``update`` says how the file came about, as
    in ``rasura audit --update``: with ``fedavg-sgd:4:0.01`` it holds the weights after minus the weights before. Raises
    ``InputError`` for bad input, ``AttackFailed`` or ``NotApplicable`` when nothing can be read.
    """
    from rasura.victims.models import parts

    entries = load_update(path, victim)
    local, wire = parse_update(update)
    if local.lora:
        raise InputError("update lora: pass the adapter's folder as --model instead; its gradient is fedsgd")
    if local.kind != "fedsgd":
        entries = {n: t / -local.learning_rate for n, t in entries.items()}
    if not 0 <= dropout < 1:
        raise InputError(f"dropout is {dropout}; expected at least 0 and less than 1")
    if frozen_embeddings:
        entries = {n: t for n, t in entries.items() if n not in parts(victim.model).embedding_names}
    visible = {} if hidden is None else load_hidden(hidden, victim)
    visible = {n: mask for n, mask in visible.items() if n in entries and not bool(mask.all())}
    if all(n in visible and not bool(visible[n].any()) for n in entries):
        raise NotApplicable("every entry of the update is hidden, so that there is nothing to read")
    entries |= {n: entries[n] * mask for n, mask in visible.items()}
    size = batch_size or (len(lengths) if lengths else len(labels) if labels else None)
    for name, given in (("labels", labels), ("lengths", lengths)):
        if given and size is not None and len(given) != size:
            raise InputError(f"{len(given)} {name} for a batch of {size}; give one for each text")
    mechanism = [local.mechanism, *(part.mechanism for part in wire)] if update != "fedsgd" else []
    if frozen_embeddings:
        mechanism.append(FrozenEmbeddings())
    if dropout:
        mechanism.append(Dropout(dropout))
    granted: dict[Grant, Any] = {
        Grant.MODEL: adversary_copy(victim.model),
        Grant.BASE_MODEL: victim.vocabulary,
        Grant.MECHANISM: tuple(mechanism),
    }
    if size is not None:
        granted[Grant.BATCH_SIZE] = size
    if labels:
        granted[Grant.LABELS] = torch.tensor(list(labels))
    if lengths:
        granted[Grant.LENGTHS] = tuple(lengths)
    if reference is not None:
        granted[Grant.REFERENCE_TEXT] = tuple(e.text for e in load_examples(reference))
    if language_model is not None:
        prior = load(language_model, "causal", attacked=False)
        granted[Grant.LANGUAGE_MODEL] = (prior.model, prior.vocabulary)
    start = time.perf_counter()
    method = make_attack(attack)
    guess = method(
        Observation(Message(entries, visible, kind=local.kind), victim.task, granted),
        rng=generator(seed, "read"),
        budget=budget or Budget(),
    )
    return {
        "texts": [victim.vocabulary.text(t) for t in guess.tokens],
        "confidence": guess.confidence,
        "attack": str(guess.details.get("attack", method.name)),
        "tokens": [[None if t == UNKNOWN else t for t in text] for text in guess.tokens],
        "ordered": guess.ordered,
        "labels": list(guess.labels) if guess.labels is not None else None,
        "seconds": round(time.perf_counter() - start, 3),
        "details": dict(guess.details),
    }
