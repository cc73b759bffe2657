"""Protections of a model service as they are written: ``obfuslm:k=10/epsilon=0.1`` (``rasura.registry``)."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from rasura.core.interfaces import InputError
from rasura.core.options import options
from rasura.core.rng import generator
from rasura.core.values import Vocabulary
from rasura.registry import SERVICE_PROTECTIONS, named
from rasura.service_protections.obfuslm.settings import ObfuscationSettings
from rasura.service_protections.obfuslm.tokenizer import fixed_ids
from rasura.service_protections.service import Service
from rasura.victims.loading import Victim


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of the protection ``text``. Raises ``InputError`` for those that do not exist."""
    name, _, rest = text.partition(":")
    named(name, SERVICE_PROTECTIONS, "protection of a service")
    usual: dict[str, Any] = asdict(ObfuscationSettings())
    if name != "obfuslm":
        given = _parameters(name)
        usual = {n: p.default for n, p in given.items() if isinstance(p.default, bool | int | float | str)}
    wanted = options(name, rest, usual)
    if name == "obfuslm":
        ObfuscationSettings(**wanted)
    return name, wanted


def learned(text: str) -> bool:
    """Whether the protection is trained together with the task: there is no service before that."""
    return "texts" in _parameters(parsed(text)[0])


def protected(text: str, victim: Victim, seed: int, texts: Sequence[Sequence[int]] = ()) -> Service:
    """The service of ``victim`` behind the protection ``text``; its key is drawn from ``seed``, since this is an experiment.

    ``texts``: the client's training texts in its own ids, which a protection that is ``learned`` needs.
    """
    fixed = fixed_ids(victim.tokenizer, victim.vocabulary.size) if parsed(text)[0] == "obfuslm" else frozenset()
    return service(text, victim.model, victim.vocabulary, seed, texts, fixed)


def service(
    text: str,
    model: nn.Module,
    vocabulary: Vocabulary,
    seed: int,
    texts: Sequence[Sequence[int]] = (),
    fixed: Collection[int] = (),
) -> Service:
    """The same for a model without a tokenizer. ``fixed``: tokens that keep their ids, where the protection asks."""
    name, wanted = parsed(text)
    given = _parameters(name)
    if name == "obfuslm":
        wanted = {"settings": ObfuscationSettings(**wanted), "fixed": frozenset(fixed)}
    if "rng" in given:
        wanted["rng"] = generator(seed, "key", text)
    if "texts" in given:
        if not texts:
            raise InputError(f"{name} is trained with its task; expected training texts")
        wanted["texts"] = texts
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # which CAPE's adversary begins with
        made: Service = SERVICE_PROTECTIONS[name].make(model, vocabulary, **wanted)
    return made


def _parameters(name: str) -> Any:
    return inspect.signature(SERVICE_PROTECTIONS[name].make).parameters
