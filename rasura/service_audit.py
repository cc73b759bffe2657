"""What the operator of a model service reads: protections x attacks on the same texts, resumable."""

from __future__ import annotations

import hashlib
import inspect
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

from rasura import recipes
from rasura.answers import ServiceObservation, ServiceTranscript
from rasura.data.text import load_examples
from rasura.interfaces import AttackFailed, Budget, InputError, NotApplicable
from rasura.metrics.service import BagF1, RougeL, TopTokens
from rasura.obfuscation.services import Service
from rasura.obfuscation.settings import ObfuscationSettings
from rasura.obfuscation.tokenizer import fixed_ids
from rasura.options import options
from rasura.records import write_whole
from rasura.rng import generator
from rasura.threat import observe_service, service_transcript
from rasura.values import Task
from rasura.victims.loading import Victim, load

METRICS = (TopTokens(1), TopTokens(3), RougeL(), BagF1())


@dataclass(frozen=True)
class ServicePlan:
    """``limit`` texts of ``data`` of at least four words, sent behind each of ``protections`` (``obfuslm:k=10/epsilon=0.1``;
    see ``recipes.SERVICE_PROTECTIONS``) and read by each of ``attacks``, whose ``references`` texts come from ``reference``.

    What is read is the service as it was uploaded, before any training.
    """

    data: str
    reference: str
    model: str = "minilm"
    task: str = "classification"
    protections: tuple[str, ...] = ("obfuslm",)
    attacks: tuple[str, ...] = tuple(recipes.SERVICE_ATTACKS)
    limit: int = 64
    references: int = 5000
    seed: int = 0
    budget: str = "quick"

    def checked(self) -> ServicePlan:
        """This plan, or ``InputError`` for what is wrong with it."""
        recipes.known("task", self.task, [t for t in get_args(Task) if t != "vision"])
        recipes.known("budget", self.budget, ("quick", "default", "paper"))
        for text in self.protections:
            _parsed(text)
        for name in self.attacks:
            recipes.known("attack on a service", name, recipes.SERVICE_ATTACKS)
        for name in ("limit", "references"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; expected at least 1")
        return self


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a protection as it is written."""
    name, _, rest = text.partition(":")
    build = recipes.SERVICE_PROTECTIONS[recipes.known("protection of a service", name, recipes.SERVICE_PROTECTIONS)]
    usual: dict[str, Any]
    if name == "obfuslm":
        usual = asdict(ObfuscationSettings())
    else:
        parameters = inspect.signature(recipes.built(build)).parameters
        if "texts" in parameters:
            raise InputError(f"{name} is trained with its task, so an audit before training says nothing of it")
        usual = {n: p.default for n, p in parameters.items() if isinstance(p.default, bool | int | float | str)}
    return name, options(name, rest, usual)


def protected(text: str, victim: Victim, seed: int) -> Service:
    """The service behind the protection ``text``; its key is drawn from ``seed``, since this is an experiment."""
    name, wanted = _parsed(text)
    build, rng = recipes.SERVICE_PROTECTIONS[name], generator(seed, "key", text)
    if name == "obfuslm":
        fixed = fixed_ids(victim.tokenizer, victim.vocabulary.size)
        wanted = {"settings": ObfuscationSettings(**wanted), "fixed": fixed}
    if "rng" in inspect.signature(recipes.built(build)).parameters:
        wanted["rng"] = rng
    service: Service = build(victim.model, victim.vocabulary, **wanted)
    return service


class ServiceAudit:
    """A prepared audit: files read, so that what is wrong is said now. Iterate ``run``."""

    def __init__(self, plan: ServicePlan, folder: str | Path) -> None:
        self.plan, self.folder = plan.checked(), Path(folder)
        texts = [t for e in load_examples(plan.data) if len((t := _text(e)).split()) > 3]
        if len(texts) < plan.limit:
            raise InputError(f"{plan.data} has {len(texts)} texts of four words or more; expected at least {plan.limit}")
        self.chosen = random.Random(plan.seed).sample(texts, plan.limit)
        told = set(self.chosen)
        self.reference = tuple(t for e in load_examples(plan.reference) if (t := _text(e)) not in told)[: plan.references]
        task: Any = plan.task
        self.victim = load(plan.model, task)
        words = self.victim.vocabulary
        self.ids = [(*words.prefix, *words.encode(t), *words.suffix)[: self.victim.max_length] for t in self.chosen]
        known = hashlib.sha256(json.dumps([self.chosen, self.reference]).encode()).hexdigest()[:16]
        said = {"model": plan.model, "task": plan.task, "seed": plan.seed, "budget": plan.budget}
        self.about = {**said, "texts": known}

    def run(self, progress: Callable[[str], None] | None = None) -> Iterator[dict[str, Any]]:
        """Do the cells that the folder lacks, keeping and yielding each."""
        for protection in self.plan.protections:
            both: tuple[ServiceTranscript, ServiceObservation] | None = None
            for attack in self.plan.attacks:
                key = json.dumps([self.about, protection, attack], sort_keys=True)
                path = self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
                if path.exists():
                    yield json.loads(path.read_text(encoding="utf-8"))
                    continue
                if progress is not None:
                    progress(f"{attack} / {protection}")
                both = both or self._sent(protection)
                row = {"protection": protection, "attack": attack, **self.about, **self._cell(attack, *both)}
                self.folder.mkdir(parents=True, exist_ok=True)
                write_whole(path, json.dumps(row))
                yield row

    def _sent(self, protection: str) -> tuple[ServiceTranscript, ServiceObservation]:
        """The texts behind ``protection``, and what its operator sees of them: the same for every attack."""
        service = protected(protection, self.victim, self.plan.seed)
        truth = service_transcript(service, self.ids, generator(self.plan.seed, "sent", protection))
        return truth, observe_service(truth, reference_text=self.reference)

    def _cell(self, attack: str, truth: ServiceTranscript, seen: ServiceObservation) -> dict[str, Any]:
        level: Any = self.plan.budget
        start, scores, status, why = time.process_time(), {}, "ok", ""
        try:
            guess = recipes.SERVICE_ATTACKS[attack]()(seen, rng=generator(self.plan.seed, attack), budget=Budget(level))
            found = {m.name: m(guess, truth) for m in METRICS}
            scores = {n: list(v) for n, v in found.items() if v is not None}
        except NotApplicable as reason:
            status, why = "not_applicable", str(reason)
        except AttackFailed as reason:
            status, why = "failed", str(reason)
        return {"status": status, "reason": why, "scores": scores, "cpu_seconds": time.process_time() - start}


def _text(example: Any) -> str:
    return f"{example.text} {example.text_pair or ''}".strip()


def service_plan_of(found: Mapping[str, Any], source: str) -> ServicePlan:
    """A plan from plain values with the names of ``ServicePlan``'s fields."""
    names = [f.name for f in fields(ServicePlan)]
    for key in found:
        recipes.known(f"key in {source}", key, names)
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
    return ServicePlan(**values)
