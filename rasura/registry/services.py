"""Protections of a model service as they are written: ``obfuslm:k=10/epsilon=0.1`` (``rasura.registry``)."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from rasura.core.errors import InputError
from rasura.core.files import file_digest
from rasura.core.options import options
from rasura.core.rng import generator, seeded
from rasura.core.specs import ServiceProtectionSpec
from rasura.core.values import Vocabulary
from rasura.registry.adversaries import Adversaries, is_known, readers
from rasura.registry.collect import named
from rasura.registry.tables import SERVICE_ATTACKS, SERVICE_PROTECTIONS
from rasura.service_protections.obfuslm.settings import ObfuscationSettings
from rasura.service_protections.obfuslm.tokenizer import fixed_ids
from rasura.service_protections.service import Service
from rasura.victims.loading import Victim


@dataclass(frozen=True)
class ServiceProtection:
    """A protection as it was written, parsed: its method, and the ``options`` that ``text`` gives."""

    text: str
    spec: ServiceProtectionSpec
    options: Mapping[str, Any]

    @property
    def learned(self) -> bool:
        """Whether the protection is trained together with the task: there is no service before that."""
        return "texts" in _parameters(self.spec)

    @property
    def adversaries(self) -> Adversaries:
        """The attacks that know this protection with these options."""
        known_by = self.spec.known_by
        for option, others in self.spec.known_by_with.items():
            known_by = others if self.options.get(option) else known_by
        known = is_known(self.spec.name, known_by, SERVICE_PROTECTIONS.own(self.spec), SERVICE_ATTACKS)
        wanted = known_by or ()
        return Adversaries(wanted, () if known else (self.spec.name,), readers(wanted, SERVICE_ATTACKS, SERVICE_ATTACKS))

    @property
    def files(self) -> dict[str, str]:
        """The content of the files that it reads, as it is now: a fingerprint of each, by the option that names it. Raises
        ``InputError`` for a file that cannot be read."""
        usual = {name: _parameters(self.spec)[name].default for name in self.spec.files}
        named = {name: self.options.get(name, default) for name, default in usual.items()}
        return {n: file_digest(str(p), f"file of {self.spec.name}") for n, p in named.items() if p != usual[n]}

    def of(self, victim: Victim, seed: int, texts: Sequence[Sequence[int]] = ()) -> Service:
        """The service of ``victim`` behind this protection; its key is drawn from ``seed`` alone: an experiment.

        ``texts``: the client's training texts in its own ids, which a protection that is ``learned`` needs.
        """
        obfuslm = self.spec.name == "obfuslm"
        fixed = fixed_ids(victim.tokenizer, victim.vocabulary.size) if obfuslm else frozenset[int]()
        return self.service(victim.model, victim.vocabulary, seed, texts, fixed)

    def service(
        self,
        model: nn.Module,
        vocabulary: Vocabulary,
        seed: int,
        texts: Sequence[Sequence[int]] = (),
        fixed: Collection[int] = (),
    ) -> Service:
        """As ``of``, for a model without a tokenizer. ``fixed``: tokens that keep their ids, where the protection asks.

        Raises ``InputError`` where a ``learned`` protection is given no ``texts``.
        """
        given, wanted = _parameters(self.spec), dict(self.options)
        if self.spec.name == "obfuslm":
            wanted = {"settings": ObfuscationSettings(**wanted), "fixed": frozenset(fixed)}
        if "rng" in given:
            # Of the seed alone: one setting has one key however it is written, and settings are compared behind one key.
            wanted["rng"] = generator(seed, "key")
        if "texts" in given:
            if not texts:
                raise InputError(f"{self.spec.name} is trained with its task; expected training texts")
            wanted["texts"] = texts
        with seeded(seed):  # which CAPE's adversary begins with
            made: Service = self.spec.make(model, vocabulary, **wanted)
        return made


def parse_service_protection(text: str) -> ServiceProtection:
    """``obfuslm:k=10/epsilon=0.1`` as a value. Raises ``InputError`` for methods and options that do not exist."""
    name, _, rest = text.partition(":")
    spec = named(name, SERVICE_PROTECTIONS, "protection of a service")
    usual: dict[str, Any] = asdict(ObfuscationSettings())
    if name != "obfuslm":
        given = _parameters(spec)
        usual = {n: p.default for n, p in given.items() if isinstance(p.default, bool | int | float | str)}
    wanted = options(name, rest, usual)
    if name == "obfuslm":
        ObfuscationSettings(**wanted)
    return ServiceProtection(text, spec, wanted)


def files_of(protections: Mapping[str, ServiceProtection]) -> dict[str, str]:
    """One fingerprint of the files of each of ``protections`` that reads any, by its text."""
    found = {text: one.files for text, one in protections.items()}
    return {text: ", ".join(files.values()) for text, files in found.items() if files}


def check_same(text: str, one: ServiceProtection, files: Mapping[str, str]) -> None:
    """Raises ``InputError`` where the files of ``text`` are no longer those that ``files_of`` found."""
    if files_of({text: one}).get(text) != files.get(text):
        raise InputError(f"a file of {text} has changed since the run began; start it again with another --out")


def _parameters(spec: ServiceProtectionSpec) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(spec.make).parameters
