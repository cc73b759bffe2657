"""The audit of a model service: protections x attacks on the same texts, as a stream of Records."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from rasura.core.answers import ServiceObservation, ServiceTranscript, TokenReading
from rasura.core.given import of_kind
from rasura.core.interfaces import Budget, InputError
from rasura.core.records import CLIENT, CUT, Record, cell_key
from rasura.core.rng import generator
from rasura.core.run_store import RunStore
from rasura.core.threat import SERVICE_OPERATOR, observe_service, own_copy, service_transcript
from rasura.core.unchanged import Lent, tensors_of
from rasura.data.overlap import holding, refuse_shared
from rasura.data.text import Example, columns_of, load_examples
from rasura.registry import SERVICE_ATTACKS, SERVICE_METRICS, SERVICE_PROTECTIONS, service_attack
from rasura.registry.services import check_same, files_of
from rasura.runs.attempt import MACHINE, Outcome, attempt, meddled, peak_mb
from rasura.runs.described import describe_run, of_model, own_code
from rasura.runs.scoring import likeness, recovered_texts, service_scores, versions
from rasura.runs.service_plan import ServicePlan
from rasura.runs.training import Training
from rasura.service_protections.service import Service
from rasura.victims.loading import load


@dataclass(frozen=True)
class ServiceCell:
    """One cell: an attack on the service under a protection, with the weights that were ``uploaded`` or ``trained``.
    ``drawn``: the number of the service's key."""

    protection: str
    attack: str
    weights: str
    drawn: int
    key: str


@dataclass(frozen=True)
class Sent:
    """The texts under a protection: the truth, what the operator sees of it, the scores of guessing, and its seconds."""

    truth: ServiceTranscript
    seen: ServiceObservation
    blind: Mapping[str, Any]
    seconds: float


class ServiceAudit:
    """A prepared audit: files are read here, so that errors show early. Iterate ``run`` to run the remaining cells.
    ``training``: a finished training of the same model under the same protections, needed for trained weights. A generating
    model then receives the first half of every text and continues it, and its client reads this, too. ``baseline``: also run
    every attack without protection, even if the plan does not list ``none``. Only an attack that works there can show
    anything about a protection; without the baseline, every verdict is 'not measured'.
    """

    def __init__(self, plan: ServicePlan, training: Training | None = None, *, baseline: bool = True) -> None:
        self.plan, self.training = (plan := plan.checked()), training
        added = () if "none" in plan.protections or not baseline else ("none",)
        self.columns = (*added, *plan.protections)
        if training is not None and (plan.key, plan.keys) != (0, 1):
            raise InputError("a training uses the key of its seed; with a training, key must be 0 and keys 1")
        for text in self.columns:
            if "trained" not in self._weights(text):
                continue
            if training is None:
                raise InputError(
                    f"{text}: attacking its trained weights needs a training, and this audit has none; pass one"
                )
            if text not in training.plan.defenses:
                raise InputError(
                    f"{text}: attacking its trained weights needs a training under this protection; train under it as well"
                )
        columns = columns_of(plan)
        texts = [e for e in load_examples(plan.data, columns=columns) if len(_text(e).split()) > 3]
        if len(texts) < plan.limit:
            raise InputError(f"{plan.data} has {len(texts)} texts of four words or more; expected at least {plan.limit}")
        picked = random.Random(plan.seed).sample(texts, plan.limit)
        self.chosen = [_text(e) for e in picked]
        self.reference = _reference(plan, picked)
        task: Any = plan.task
        self.victim = load(plan.model, task) if training is None else training.victim(plan.seed)
        words, longest = self.victim.vocabulary, self.victim.max_length
        if training is not None:
            longest = min(longest, training.plan.max_length or longest)
        room = longest - len(words.prefix) - len(words.suffix)
        whole = [words.encode(t) for t in self.chosen]
        self.ids = [(*words.prefix, *ids[:room], *words.suffix) for ids in whole]
        self.cut = [(min(len(ids), room) + longest - room, len(ids) + longest - room) for ids in whole]
        self.prompts = [ids[: max(1, len(ids) // 2)] for ids in self.ids]
        numbers: dict[tuple[int, ...], int] = {}
        self.examples = [numbers.setdefault(ids, len(numbers)) for ids in self.ids]
        self.data = hashlib.sha256(json.dumps([self.ids, self.reference]).encode()).hexdigest()[:16]
        self.identity = {**plan.canonical(), "texts": self.data} | ({"training": training.about} if training else {})
        self.files = files_of(plan.parsed)
        self.cells = list(self._cells())

    @property
    def _generates(self) -> bool:
        return self.training is not None and self.plan.task == "causal"

    def _weights(self, protection: str) -> tuple[str, ...]:
        return ("trained",) if self.plan.parsed[protection].learned else self.plan.weights

    def _cells(self) -> Iterator[ServiceCell]:
        for protection in self.columns:
            places = [(CLIENT, "trained")] if self._generates else []
            places += [(attack, weights) for weights in self._weights(protection) for attack in self.plan.attacks]
            first = self.plan.seed + self.plan.key
            for drawn in range(first, first + (1 if protection == "none" else self.plan.keys)):
                for attack, weights in places:
                    where = {"protection": protection, "attack": attack, "weights": weights, "drawn": drawn}
                    yield ServiceCell(protection, attack, weights, drawn, cell_key(plan=self.identity, **where))

    def run(self, store: RunStore, progress: Callable[[ServiceCell], None] | None = None) -> Iterator[Record]:
        """Run the cells that ``store`` lacks; store and yield each Record. Records are the same whatever was done before."""
        attacks = self.plan.attacks
        protections = (one.spec for one in self.plan.parsed.values())
        own = own_code([*(SERVICE_ATTACKS[name] for name in attacks), *protections, *SERVICE_METRICS.values()])
        fixed: dict[str, str | Mapping[str, str]] = {**of_model(self.victim), "data set": self.data, **own}
        fixed |= {"file of a protection": self.files} if self.files else {}
        describe_run(store, len(self.cells), self.columns, SERVICE_PROTECTIONS, attacks, SERVICE_ATTACKS, fixed)
        for (protection, drawn), cells in groupby(self.cells, key=lambda cell: (cell.protection, cell.drawn)):
            uploaded = cache(partial(self._uploaded, protection, drawn))
            services = {"uploaded": uploaded, "trained": cache(partial(self._trained, protection, uploaded))}
            answers = cache(partial(self._answers, services["trained"]))
            sent = cache(partial(self._sent, services, answers, drawn))
            for cell in cells:
                if cell.key in store:
                    continue
                if progress is not None:
                    progress(cell)
                client = cell.attack == CLIENT
                record = self._continued(cell, answers) if client else self._read(cell, sent(cell.weights))
                store.add(record)
                yield record

    def _uploaded(self, protection: str, drawn: int) -> Service:
        if self.training is not None:
            return self.training.service(protection, self.victim, self.plan.seed)
        one = self.plan.parsed[protection]
        made = one.of(self.victim, drawn)
        check_same(protection, one, self.files)
        return made

    def _trained(self, protection: str, uploaded: Callable[[], Service]) -> Service:
        assert self.training is not None, "which __init__ asked for"
        return self.training.trained_service(uploaded(), protection, self.plan.seed)

    def _answers(self, trained: Callable[[], Service]) -> list[list[int]]:
        """The service's continuations of the first half of every text, in the client's ids. Always the same, and not
        stored: they may hold private text."""
        service = trained()
        if not hasattr(service.served, "generate"):
            raise InputError(f"{service.mechanism.name}: text generation does not work for a client that sends states")
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
        return answers

    def _continued(self, cell: ServiceCell, answers: Callable[[], list[list[int]]]) -> Record:
        """How similar the ``answers`` are to the second half of every text."""
        wall, start = time.perf_counter(), time.process_time()
        near = likeness(answers(), self._endings(), self.victim.vocabulary, "better")
        return self._record(
            cell, "ok", "", scores=near, wall_seconds=time.perf_counter() - wall, cpu_seconds=time.process_time() - start
        )

    def _endings(self) -> list[tuple[int, ...]]:
        """The second half of every text."""
        return [ids[len(p) :] for ids, p in zip(self.ids, self.prompts)]

    def _sent(
        self, services: Mapping[str, Callable[[], Service]], answers: Callable[[], list[list[int]]], drawn: int, weights: str
    ) -> Outcome[Sent]:
        """The texts under a protection, the same for every attack; or the reason why there is no such service to attack."""
        said = answers() if self._generates else None

        def made() -> Sent:
            start = time.perf_counter()
            ids = self.ids if said is None else [(*p, *a) for p, a in zip(self.prompts, said)]
            service = services[weights]()
            truth = service_transcript(service, ids, generator(drawn, "sent"))
            seconds = time.perf_counter() - start
            seen = observe_service(truth, reference_text=self.reference)
            return Sent(truth, seen, self.scores(self._guess("blind", seen), truth), seconds)

        return attempt(made, raises=(*MACHINE, InputError))

    def _guess(self, attack: str, seen: ServiceObservation) -> TokenReading:
        level: Any = self.plan.budget
        return service_attack(attack)(seen, rng=generator(self.plan.seed, attack), budget=Budget(level))

    def _read(self, cell: ServiceCell, sent: Outcome[Sent]) -> Record:
        if sent.guess is None:
            return self._record(cell, sent.status, f"the protected service cannot be built: {sent.reason}")
        truth, seen = sent.guess.truth, sent.guess.seen

        mine = own_copy(seen)
        models = [m for m in (mine.public, mine.served, mine.uploaded) if m is not None]
        lent = Lent(lambda: tensors_of(*models) | {f"states {k}": v for k, v in enumerate(mine.vectors)})

        def read() -> tuple[TokenReading, dict[str, Any]]:
            guess = self._guess(cell.attack, mine)
            return guess, self.scores(guess, truth)

        outcome = attempt(read, raises=MACHINE)
        outcome = meddled(outcome) if lent.changed else outcome
        guess, scores = outcome.guess or (None, {})
        return self._record(
            cell, outcome.status, outcome.reason, scores=scores, blind=sent.guess.blind,
            recovered=[] if guess is None else recovered_texts(guess, truth, self.plan.show_text),
            details={**(outcome.details if guess is None else guess.details), CUT: self.cut},
            sent_bytes=_sent_bytes(seen), defense_seconds=sent.guess.seconds, wall_seconds=outcome.wall_seconds,
            cpu_seconds=outcome.cpu_seconds,
        )  # fmt: skip

    def _record(self, cell: ServiceCell, status: str, reason: str, **found: Any) -> Record:
        plan = self.plan
        return Record(
            key=cell.key, attack=cell.attack, defense=cell.protection, update=cell.weights, threat=SERVICE_OPERATOR.name,
            model=Path(plan.model).name, data=self.data,
            batch_size=len(self.ids), seed=cell.drawn, batch=0, status=status, examples=self.examples, reason=reason,
            known_by=asdict(plan.parsed[cell.protection].adversaries), threat_plain=SERVICE_OPERATOR.plain,
            n_tokens=sum(map(len, self.ids)), peak_mb=peak_mb(), versions=versions(), **found,
        )  # fmt: skip

    def scores(self, guess: TokenReading, truth: ServiceTranscript) -> dict[str, Any]:
        """All metrics of one guess. For a generating model: the recovered fraction of the prompts and of the answers, and
        the similarity of the recovered answers to the true continuations."""
        if not self._generates:
            return service_scores(guess, truth)
        cuts = [len(p) for p in self.prompts]
        prompts, answers = (
            (
                TokenReading(tuple(r[part] for r, part in zip(guess.ranked, parts)), guess.ordered),
                replace(truth, ids=tuple(ids[part] for ids, part in zip(truth.ids, parts))),
            )
            for parts in ([slice(n) for n in cuts], [slice(n, None) for n in cuts])
        )
        out = service_scores(*prompts) | {f"answer_{name}": found for name, found in service_scores(*answers).items()}
        return out | likeness([r[:, 0].tolist() for r in answers[0].ranked], self._endings(), self.victim.vocabulary)


def _sent_bytes(seen: ServiceObservation) -> int:
    """The bytes of the states sent, or of the ids as 64-bit numbers."""
    return sum(v.numel() * v.element_size() for v in seen.vectors) or 8 * sum(map(len, seen.ids))


def _reference(plan: ServicePlan, picked: Sequence[Example]) -> tuple[str, ...]:
    """The adversary's texts. Texts that contain one of the ``picked`` are refused, or left out if the plan says so."""
    other = load_examples(plan.reference, columns=columns_of(plan))
    left_out = set(holding(picked, other)) if plan.drop_shared else set()
    if not plan.drop_shared:
        refuse_shared(picked, other, plan.reference, ", or set drop_shared = true to leave them out")
    return tuple(_text(e) for k, e in enumerate(other) if k not in left_out)[: plan.references]


def _text(example: Example) -> str:
    return f"{example.text} {example.text_pair or ''}".strip()


def audit_service(plan: ServicePlan, *, out: str | Path, training: Training | None = None) -> Iterator[Record]:
    """Audit a model service into the folder ``out`` and yield each Record when it is finished. Cells that ``out`` holds are
    not run again.

    ``audit_service(ServicePlan("notes.jsonl", "public.jsonl"), out="runs/service")``. The baseline without protection always
    runs. ``training``: as in ``ServiceAudit``. ``rasura.write_report(out)`` writes the report. Raises ``InputError`` for bad
    input, before anything runs.
    """
    plan = of_kind(plan, ServicePlan, "plan", 'files are ServicePlan("notes.jsonl", "public.jsonl")')
    return _recorded(ServiceAudit(plan, training), out)


def _recorded(prepared: ServiceAudit, out: str | Path) -> Iterator[Record]:
    store = RunStore(out, prepared.identity)
    try:
        yield from prepared.run(store)
    finally:
        store.close()
