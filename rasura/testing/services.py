"""The laws that protections of a model service, and attacks by its operator, keep."""

from __future__ import annotations

import torch

from rasura.core.answers import ServiceTranscript, TokenReading
from rasura.core.interfaces import Budget
from rasura.core.rng import generator
from rasura.core.specs import ServiceAttackSpec, ServiceProtectionSpec
from rasura.core.threat import observe_service, service_transcript
from rasura.registry.services import parse_service_protection
from rasura.testing.tiny import CLS, SEP, VOCABULARY, tiny

TEXTS = tuple(" ".join(f"w{20 + (7 * n + 3 * k) % 60}" if k % 3 else "the" for k in range(4 + n % 4)) for n in range(30))
IDS = tuple((CLS, *VOCABULARY.encode(t), SEP) for t in TEXTS[:6])
"""What clients send; the other texts are what the operator knows of the language."""


def check_service_attack(spec: ServiceAttackSpec) -> None:
    """Where it is at home it guesses, and repeats with its seed. Raises ``AssertionError``."""
    seen = observe_service(sent(*spec.home), reference_text=TEXTS[6:])
    first, again = (spec.make()(seen, rng=generator(0, spec.name), budget=Budget("quick")) for _ in range(2))
    assert isinstance(first, TokenReading) and len(first.ranked) == len(IDS)
    for text, one, other in zip(IDS, first.ranked, again.ranked, strict=True):
        assert len(one) and torch.equal(one, other) and len(one) <= len(text)


def check_service_protection(spec: ServiceProtectionSpec) -> None:
    """What the service sees is neither the clients' ids nor, where states are sent, rows of the public table."""
    plain, behind = observe_service(sent("none")), observe_service(sent(spec.example))
    assert plain.ids == IDS and not plain.vectors
    table = tiny("bert", "classification", blocks=4).get_parameter("bert.embeddings.word_embeddings.weight").detach()
    if behind.vectors:
        assert not any(torch.allclose(v[1], table[i[1]]) for v, i in zip(behind.vectors, IDS))
    else:
        assert behind.ids != IDS


def sent(protection: str, family: str = "bert") -> ServiceTranscript:
    """What clients send to a tiny model's service behind ``protection``: the whole truth."""
    model = tiny(family, "causal" if family == "llama" else "classification", blocks=4)
    made = parse_service_protection(protection).service(model, VOCABULARY, 5, IDS, VOCABULARY.special_ids)
    return service_transcript(made, IDS, generator(2))
