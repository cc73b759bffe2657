"""What the operator of a model service reads: protections x attacks on the same texts, resumable."""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import torch

from rasura.core.answers import ServiceObservation, ServiceTranscript, TokenReading
from rasura.core.errors import AttackFailed, InputError
from rasura.core.files import write_whole
from rasura.core.interfaces import Budget
from rasura.core.options import known
from rasura.core.rng import generator
from rasura.core.threat import observe_service, service_transcript
from rasura.core.values import Task
from rasura.data.text import load_examples
from rasura.metrics.service import BagF1, RougeL, TopTokens
from rasura.metrics.text import rouge
from rasura.registry import SERVICE_ATTACKS, service_attack
from rasura.registry.services import learned, parsed, protected
from rasura.runs.attempt import MACHINE, attempt
from rasura.runs.fields import typed
from rasura.runs.training import Training
from rasura.service_protections.service import Service
from rasura.victims.loading import load

METRICS = (TopTokens(1), TopTokens(3), RougeL(), BagF1())

CLIENT = "client"
"""In place of an attack: what the client itself reads, of a model that generates."""


@dataclass(frozen=True)
class ServicePlan:
    """``limit`` texts of ``data`` of at least four words, sent behind each of ``protections`` (``obfuslm:k=10/epsilon=0.1``;
    see ``rasura list service-protections``) and read by each of ``attacks``. Their ``references`` texts come from
    ``reference``.

    ``weights``: what is read is the service as it was ``uploaded``, before any training, or as it was ``trained`` since.
    """

    data: str
    reference: str
    model: str = "minilm"
    task: str = "classification"
    protections: tuple[str, ...] = ("obfuslm",)
    attacks: tuple[str, ...] = tuple(SERVICE_ATTACKS)
    limit: int = 64
    references: int = 5000
    seed: int = 0
    budget: str = "quick"
    weights: tuple[str, ...] = ("uploaded",)

    def checked(self) -> ServicePlan:
        """This plan, or ``InputError`` for what is wrong with it."""
        known("task", self.task, [t for t in get_args(Task) if t != "vision"])
        known("budget", self.budget, ("quick", "default", "paper"))
        for text in self.protections:
            parsed(text)
        for name in self.weights:
            known("weights", name, ("uploaded", "trained"))
        for name in self.attacks:
            known("attack on a service", name, SERVICE_ATTACKS)
        for name in ("limit", "references"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; expected at least 1")
        return self


class ServiceAudit:
    """A prepared audit: files read, so that what is wrong is said now. Iterate ``run``.

    ``training``: of the same model behind the same protections, which was run; needed where trained weights are read. What a
    model that generates was sent is then the first half of every text, and how it goes on, which its client reads too.
    """

    def __init__(self, plan: ServicePlan, folder: str | Path, training: Training | None = None) -> None:
        self.plan, self.folder, self.training = plan.checked(), Path(folder), training
        for text in plan.protections:
            if training is None and (learned(text) or "trained" in plan.weights):
                raise InputError(f"{text}: reading it as it was trained needs a training, and this audit has none")
        texts = [t for e in load_examples(plan.data) if len((t := _text(e)).split()) > 3]
        if len(texts) < plan.limit:
            raise InputError(f"{plan.data} has {len(texts)} texts of four words or more; expected at least {plan.limit}")
        self.chosen = random.Random(plan.seed).sample(texts, plan.limit)
        told = set(self.chosen)
        self.reference = tuple(t for e in load_examples(plan.reference) if (t := _text(e)) not in told)[: plan.references]
        task: Any = plan.task
        self.victim = load(plan.model, task) if training is None else training.victim(plan.seed)
        words, longest = self.victim.vocabulary, self.victim.max_length
        if training is not None:
            longest = min(longest, training.plan.max_length or longest)
        room = longest - len(words.prefix) - len(words.suffix)
        self.ids = [(*words.prefix, *words.encode(t)[:room], *words.suffix) for t in self.chosen]
        self.prompts = [ids[: max(1, len(ids) // 2)] for ids in self.ids]
        known = hashlib.sha256(json.dumps([self.ids, self.reference]).encode()).hexdigest()[:16]
        said = {"model": plan.model, "task": plan.task, "seed": plan.seed, "budget": plan.budget}
        self.about = {**said, "texts": known} | ({"training": training.about} if training else {})

    def __len__(self) -> int:
        """How many rows ``run`` yields."""
        return sum(self._generates + len(self._weights(p)) * len(self.plan.attacks) for p in self.plan.protections)

    def run(self, progress: Callable[[str], None] | None = None) -> Iterator[dict[str, Any]]:
        """Do the cells that the folder lacks, keeping and yielding each."""
        for protection in self.plan.protections:
            yield from self._behind(protection, progress or (lambda what: None))

    def _behind(self, protection: str, tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
        uploaded = cache(partial(self._uploaded, protection))
        services = {"uploaded": uploaded, "trained": cache(partial(self._trained, protection, uploaded))}
        answers = None
        if self._generates:
            row = self._kept(protection, CLIENT, "trained", partial(self._continued, services["trained"]), tell)
            yield row
            answers = [tuple(ids) for ids in row["answers"]]
        for weights in self._weights(protection):
            both = cache(partial(self._sent, protection, services[weights], answers))
            for attack in self.plan.attacks:
                yield self._kept(protection, attack, weights, partial(self._cell, attack, both), tell)

    @property
    def _generates(self) -> bool:
        return self.training is not None and self.plan.task == "causal"

    def _weights(self, protection: str) -> tuple[str, ...]:
        return ("trained",) if learned(protection) else self.plan.weights

    def _kept(
        self, protection: str, attack: str, weights: str, make: Callable[[], dict[str, Any]], tell: Callable[[str], None]
    ) -> dict[str, Any]:
        """One row, made only where the folder lacks it."""
        key = json.dumps([self.about, protection, attack, weights], sort_keys=True)
        path = self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        if not path.exists():
            tell(f"{attack} / {protection}")
            row = {"protection": protection, "attack": attack, "weights": weights, **self.about, **make()}
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(row))
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def _uploaded(self, protection: str) -> Service:
        if self.training is None:
            return protected(protection, self.victim, self.plan.seed)
        return self.training.service(protection, self.victim, self.plan.seed)

    def _trained(self, protection: str, uploaded: Callable[[], Service]) -> Service:
        assert self.training is not None, "which __init__ asked for"
        return self.training.trained_service(uploaded(), protection, self.plan.seed)

    def _continued(self, trained: Callable[[], Service]) -> dict[str, Any]:
        """How the service goes on after the first half of every text, in the client's ids, and how near that is to the other
        half."""
        service, start = trained(), time.process_time()
        if not hasattr(service.served, "generate"):
            raise InputError(f"{service.mechanism.name}: a client that sends states cannot have text generated")
        back = service.tokens.argsort()
        sent = service.sent(self.prompts, generator(self.plan.seed, "prompts"))
        answers: list[list[int]] = []
        for text, given in zip(self.ids, sent):
            ids, more = torch.tensor([given]), len(text) - len(given)
            with torch.no_grad():
                said = service.served.generate(  # type: ignore[operator]  # a Hugging Face model
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=more, do_sample=False,
                    eos_token_id=self.victim.tokenizer.eos_token_id, pad_token_id=self.victim.vocabulary.pad_id or 0,
                )  # fmt: skip
            answers.append(back[said[0, len(given) :]].tolist())
        return {
            "status": "ok", "reason": "", "scores": self._likeness(answers), "answers": answers,
            "cpu_seconds": time.process_time() - start,
        }  # fmt: skip

    def _likeness(self, answers: Sequence[Sequence[int]]) -> dict[str, list[float]]:
        """ROUGE of ``answers`` with the second half of every text."""
        text, out = self.victim.vocabulary.text, {}
        true = [text(ids[len(p) :]) for ids, p in zip(self.ids, self.prompts)]
        for kind in ("rouge1", "rougeL"):
            score = rouge(kind).score
            out[f"continuation_{kind}"] = [score(a, text(b)) for a, b in zip(true, answers, strict=True)]
        return out

    def _sent(
        self, protection: str, service: Callable[[], Service], answers: Sequence[tuple[int, ...]] | None
    ) -> tuple[ServiceTranscript, ServiceObservation]:
        """The texts behind ``protection``, and what its operator sees of them: the same for every attack."""
        ids = self.ids if answers is None else [p + a for p, a in zip(self.prompts, answers)]
        truth = service_transcript(service(), ids, generator(self.plan.seed, "sent", protection))
        return truth, observe_service(truth, reference_text=self.reference)

    def _cell(self, attack: str, both: Callable[[], tuple[ServiceTranscript, ServiceObservation]]) -> dict[str, Any]:
        truth, seen = both()
        level: Any = self.plan.budget

        def scores() -> dict[str, list[float]]:
            guess = service_attack(attack)(seen, rng=generator(self.plan.seed, attack), budget=Budget(level))
            found = self._scores_of_halves(guess, truth) if self._generates else _scores(guess, truth)
            return _whole(found, len(truth.ids))

        outcome = attempt(scores, on_error="failed", raises=MACHINE)
        return {
            "status": outcome.status, "reason": outcome.reason, "scores": outcome.guess or {},
            "cpu_seconds": outcome.cpu_seconds,
        }  # fmt: skip

    def _scores_of_halves(self, guess: TokenReading, truth: ServiceTranscript) -> dict[str, list[float]]:
        """What was read of the prompts; of the answers; and how near these, as read, are to how the texts go on."""
        cuts = [len(p) for p in self.prompts]
        prompts, answers = (
            (
                TokenReading(tuple(r[part] for r, part in zip(guess.ranked, parts)), guess.ordered),
                replace(truth, ids=tuple(ids[part] for ids, part in zip(truth.ids, parts))),
            )
            for parts in ([slice(n) for n in cuts], [slice(n, None) for n in cuts])
        )
        out = _scores(*prompts) | {f"answer_{name}": values for name, values in _scores(*answers).items()}
        return out | self._likeness([r[:, 0].tolist() for r in answers[0].ranked])


def _scores(guess: TokenReading, truth: ServiceTranscript) -> dict[str, list[float]]:
    found = {m.name: m(guess, truth) for m in METRICS}
    return {name: list(values) for name, values in found.items() if values is not None}


def _whole(scores: dict[str, list[float]], texts: int) -> dict[str, list[float]]:
    """``scores``, or ``AttackFailed`` where a figure is no number or a text has none: then nothing can be averaged."""
    for name, values in scores.items():
        if len(values) != texts or not all(map(math.isfinite, values)):
            raise AttackFailed(f"{name} is not a number for every text")
    return scores


def _text(example: Any) -> str:
    return f"{example.text} {example.text_pair or ''}".strip()


def service_plan_of(found: Mapping[str, Any], source: str) -> ServicePlan:
    """A plan from plain values with the names of ``ServicePlan``'s fields."""
    values = typed(ServicePlan, found, source)
    for name in ("data", "reference"):
        if name not in values:
            raise InputError(f"{source}: no {name}; expected a data file")
    return ServicePlan(**values)
