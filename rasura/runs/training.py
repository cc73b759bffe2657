"""`rasura train`: fine-tune under any protection, and measure the model's utility on original text."""

from __future__ import annotations

import copy
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import nn

from rasura.accounting import Ledger, assumes_poisson, carries, sampling_for
from rasura.core.batches import Batch
from rasura.core.files import appended, name_for
from rasura.core.given import of_kind
from rasura.core.interfaces import Defense, InputError
from rasura.core.local import Adapter
from rasura.core.provenance import sitting
from rasura.core.rng import Randomness, generator, seeded
from rasura.data.overlap import texts_hash
from rasura.data.text import Example, columns_of, data_hash, encode, load_examples
from rasura.metrics.learned import majority
from rasura.metrics.utility import HIGHER_IS_BETTER, causal, classification, stored
from rasura.registry.services import check_same, files_of
from rasura.runs.canary_result import measured
from rasura.runs.described import codes_of
from rasura.runs.drawing import numbered
from rasura.runs.gradient_canaries import GradientCanaries
from rasura.runs.held_out import left_out, parted, untrained
from rasura.runs.membership_rows import began
from rasura.runs.noise_target import check_target
from rasura.runs.scoring import versions
from rasura.runs.train_plan import TrainPlan, by_chance
from rasura.runs.trained import SERVED, claim, finished, folder_of, name_classes
from rasura.runs.uncovered import uncovered
from rasura.service_protections.service import Service
from rasura.victims.adapters import with_fresh_adapter
from rasura.victims.batching import renamed, split
from rasura.victims.fingerprint import fingerprint
from rasura.victims.loading import Victim, load, with_one_label
from rasura.victims.outputs import check_predicted, nats, predictions
from rasura.victims.protected_rows import protected
from rasura.victims.step import defended
from rasura.victims.train import FineTuning
from rasura.victims.trainable import enough
from rasura.victims.weights import classes_for


class Training:
    """A prepared training: files are read and tokenized here, so that errors show early. Iterate ``run``."""

    def __init__(self, plan: TrainPlan, folder: str | Path, *, device: str = "cpu") -> None:
        self.plan = plan = plan.checked()
        self.folder, self.device, self.sitting = Path(folder), device, sitting()
        columns = columns_of(plan)
        everything = load_examples(plan.data, columns=replace(columns, unit=plan.unit), model=plan.model)
        self.label_names = everything.label_names
        tested = None
        if plan.test is not None:
            tested = load_examples(plan.test, columns=columns, label_names=self.label_names, model=plan.model)
        labels = [e.label or 0 for e in [*everything, *(tested or [])]]
        self.labels = plan.num_labels or classes_for(plan.model, 1 + max(labels))
        victim = self.victim(plan.recipe.seed)
        self.pad = victim.vocabulary.pad_id or 0
        places = parted(plan, everything)
        self.parted: dict[str, Any] = {"trained": places[0], "held_out": places[1], "texts": texts_hash(everything)}
        kept, held = ([everything[k] for k in some] for some in places)
        self.owners = None if plan.unit is None else numbered([e.unit or "" for e in kept], len(kept))
        start = time.process_time()
        self.rows = self._encoded(victim, kept)
        self.encoding = time.process_time() - start
        self.held = left_out(self._encoded(victim, held), self.rows, plan)
        self.test = self.held
        if tested is not None:
            others = self._encoded(victim, tested)
            self.test = untrained(others, self.rows, str(plan.test), "pass others as --test")
        self.left_out = len(held if tested is None else tested) - len(self.test)
        if plan.task == "causal":
            check_predicted(self.held, f"{plan.data}, texts held out")
            check_predicted(self.test, str(plan.test))
        for parts in plan.parts.values():
            enough(parts, victim.model, self.rows)
        told = {k: v for k, v in asdict(plan).items() if k not in ("defenses", "seeds")}  # to which others may be added
        asked, self.plan = plan, plan.with_noise_for(len(self.rows) if self.owners is None else len(set(self.owners)))
        plan = self.plan
        self.about: dict[str, Any] = {"data": data_hash(everything), "weights": fingerprint(victim.model)}
        self.about |= {"test": data_hash(held if tested is None else tested), "plan": json.loads(json.dumps(told))}
        self.about |= {"label_names": list(self.label_names)} if self.label_names else {}
        for text, parts in plan.parts.items():
            planned = self._ledger(parts, ()).planned
            if text not in asked.defenses and asked.target_epsilon is not None:
                check_target(planned, asked.target_epsilon)
        self.files = files_of(plan.protections)
        cut = {"truncate": plan.truncate, "max_length": plan.max_length}
        start_of = began(victim, plan.model, plan.recipe, cut)
        codes = codes_of(plan.defenses, plan.service)
        claim(self.folder, self.about, {**self.parted, **start_of}, self.files, codes)

    def _ledger(self, parts: Defense, sizes: Sequence[int]) -> Ledger:
        """A ledger for a training under ``parts``, planned for the maximum number of epochs."""
        known, owners = [p.counted for p in parts], self._owners(parts)
        count = len(self.rows) if owners is None else len(set(owners))
        run = self.plan.run(count, sampling_for(known))
        return Ledger(known, run, sizes=sizes, secure=self.plan.recipe.noise == "secure")

    def _owners(self, parts: Defense) -> list[int] | None:
        """The number of the person of each training text, where ``parts`` protect persons."""
        return self.owners if by_chance(parts) else None

    def victim(self, seed: int) -> Victim:
        """The model before training, with a head drawn from ``seed``. That of a service is on the CPU, where its client
        computes and where it is audited; only what is trained of it goes to ``device``."""
        task: Any = self.plan.task
        attacked = self.plan.service or self.plan.lora > 0  # both look for the model's parts
        device = "cpu" if self.plan.service else self.device
        made = load(self.plan.model, task, num_labels=self.labels, seed=seed, device=device, attacked=attacked)
        return with_one_label(made)

    def _encoded(self, victim: Victim, examples: Sequence[Example]) -> list[Batch]:
        return encoded(victim, examples, max_length=self.plan.max_length, truncate=self.plan.truncate)

    def protected_rows(
        self, defense: str, victim: Victim, progress: Callable[[int, int], None] | None = None
    ) -> list[Batch]:
        """The training texts under the DATA part of ``defense``. They are kept, so that they are the same for every seed."""
        place = self.folder / "protected" / name_for(defense)
        return protected(
            self.rows, self.plan.parts[defense], victim.model, victim.vocabulary, place, self.plan.recipe.seed, progress
        )

    def run(self, progress: Callable[[str, int, int, Mapping[str, float]], None] | None = None) -> Iterator[dict[str, Any]]:
        """Train under every defense from every seed and yield each result. Finished trainings are read, not repeated.

        Raises ``InputError`` while another process trains in the folder.
        """
        first = self.plan.recipe.seed
        with appended(self.folder / "lock"):
            for defense, seed in product(self.plan.defenses, range(first, first + self.plan.seeds)):
                done = finished(self.folder, defense, seed, self.about["test"])
                yield done or self._one(defense, seed, self.folder / folder_of(defense, seed), progress)

    def _one(
        self, defense: str, seed: int, place: Path, progress: Callable[[str, int, int, Mapping[str, float]], None] | None
    ) -> dict[str, Any]:
        wall, cpu = time.perf_counter(), time.process_time()
        plan, victim = self.plan, self.victim(seed)
        weights = fingerprint(victim.model)
        parts = plan.parts[defense]
        vocabulary = victim.vocabulary
        service = self.service(defense, victim, seed) if plan.service else None
        held, test = self.held, self.test
        if service is not None:
            rng, model = generator(seed, "sent"), service.served.to(self.device)
            rows, held, test = (sent(service, some, rng) for some in (self.rows, held, test))
        else:
            rows = self.protected_rows(
                defense, victim,
                None if progress is None else lambda done, total: progress(f"{defense}: protecting", done, total, {}),
            )  # fmt: skip
            model = with_fresh_adapter(
                victim.model, victim.task, Adapter(plan.lora, plan.targets, plan.adapter_dropout), seed
            )
        protecting = time.process_time() - cpu
        watched = "accuracy" if plan.task == "classification" else "loss"
        before = stored(self._figures(model, test))
        with defended(model, parts):
            ledger = self._ledger(parts, [p.numel() for p in model.parameters() if p.requires_grad])
        mechanisms = [p.mechanism for p in parts] if service is None else [service.mechanism]
        canaries = self._canaries(parts)
        run = FineTuning(
            model, rows, parts, replace(plan.recipe, seed=seed), place, task=victim.task, vocabulary=vocabulary,
            evaluate=lambda m: self._figures(m, held), watched=watched, higher=HIGHER_IS_BETTER[watched],
            poisson=assumes_poisson(ledger.defense), secret=plan.recipe.noise == "secure" and carries(mechanisms),
            ledger=ledger, owners=self._owners(parts), canaries=canaries, asked=held,
        )  # fmt: skip
        history = run.run(
            None if progress is None else lambda done, total, told: progress(f"{defense}: batch", done, total, told)
        )
        if service is not None:
            save_model(model, str(place / SERVED))
        elif (saved := getattr(model, "save_pretrained", None)) is not None:
            if plan.task == "classification" and self.label_names:
                name_classes(model.config, self.label_names, self.labels, place / "model" if plan.lora else None)
            saved(place / "model", safe_serialization=True)
            victim.tokenizer.save_pretrained(place / "model")
        result = {
            "defense": defense, "seed": seed, "task": plan.task, "model": Path(plan.model).name, "data": self.about["data"],
            "n_train": len(rows), "n_holdout": len(held), "n_test": len(test), "n_left_out": self.left_out,
            "tested_on": "test" if plan.test else "holdout", "before": before, "after": stored(self._figures(model, test)),
            "epochs": history.epoch, "best_epoch": history.best_epoch, "history": history.epochs,
            "mechanism": [{"name": m.name, "stage": m.stage.value, "parameters": dict(m.parameters)} for m in mechanisms],
            "lora": plan.lora,
            "planned": ledger.planned.to_dict(), "ledger": ledger.state_dict(),
            "noise": "secure" if run.secret and service is None else "seeded",  # what was drawn, not what was asked for
            "wall_seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu,
            "encode_seconds": self.encoding, "protect_seconds": protecting,
            "device": self.device, "versions": versions(), "sitting": self.sitting, "weights": weights,
        }  # fmt: skip
        result |= self._about(parts, test) | measured(canaries, ledger, self._uncovered(parts))
        run.finish(result)
        return result

    def _uncovered(self, parts: Defense) -> list[str]:
        return uncovered(self.plan, self.rows, self.parted["held_out"], self._owners(parts) is not None)

    def _canaries(self, parts: Defense) -> GradientCanaries | None:
        """New canaries for a training under ``parts``, where they are asked for and can join it."""
        count = self.plan.gradient_canaries
        return GradientCanaries(count) if count and by_chance(parts) else None

    def _about(self, parts: Defense, test: Sequence[Batch]) -> dict[str, Any]:
        """Of a result: what judges it, the classes, and who the persons are that ``parts`` protect."""
        told: dict[str, Any] = {"test": self.about["test"]}
        told["epochs_compared"] = 1 if self.plan.test else self.plan.recipe.compared
        if self.label_names:
            told["label_names"] = list(self.label_names)
        if self.plan.task == "classification":
            told["majority"] = majority([int(row.labels[0]) for row in test])
        if (owners := self._owners(parts)) is not None:
            persons = Counter(owners)
            told["unit"] = {"column": self.plan.unit, "persons": len(persons), "most_texts": max(persons.values())}
        return told

    def _figures(self, model: nn.Module, rows: Sequence[Batch]) -> dict[str, float]:
        with seeded(self.plan.recipe.seed):  # where a service draws noise, the same for every epoch
            if self.plan.task == "classification":
                return classification(predictions(model, rows, self.pad), [int(r.labels[0]) for r in rows])
            return causal(*nats(model, rows, self.pad))

    def service(self, protection: str, victim: Victim, seed: int) -> Service:
        """The service of ``victim`` under ``protection`` before training. It shares no weights with the public model."""
        made = self.plan.protections[protection].of(victim, seed, [row.ids(0) for row in self.rows])
        check_same(protection, self.plan.protections[protection], self.files)
        return replace(made, served=copy.deepcopy(made.served)) if made.served is made.public else made

    def trained_service(self, made: Service, protection: str, seed: int) -> Service:
        """A copy of ``made``, the service under ``protection``, after the training by ``run``. Raises ``InputError`` if it
        is not finished."""
        if finished(self.folder, protection, seed, self.about["test"]) is None:
            raise InputError(f"{self.folder} holds no finished training under {protection} from seed {seed}")
        served = copy.deepcopy(made.served).eval()
        load_model(served, str(self.folder / folder_of(protection, seed) / SERVED))
        return replace(made, served=served, uploaded=made.served)


def sent(service: Service, rows: Sequence[Batch], rng: Randomness) -> list[Batch]:
    """Texts, one per batch, as a client sends them (or, if states are sent, the ids from which it computes the states)."""
    drawn = service.sent([row.ids(0) for row in rows], rng)
    return [renamed(row, torch.tensor([new])) for row, new in zip(rows, drawn, strict=True)]


def encoded(victim: Victim, examples: Sequence[Example], *, max_length: int | None, truncate: bool) -> list[Batch]:
    """``examples`` in the form that the model takes, one text each. Raises ``InputError`` as ``data.text.encode`` does."""
    longest = victim.longest(max_length)
    return [
        row
        for start in range(0, len(examples), 256)
        for row in split(
            encode(
                examples[start : start + 256], victim.tokenizer, victim.task, max_length=longest,
                num_labels=victim.num_labels, truncate=truncate,
            )
        )
    ]  # fmt: skip


def train(plan: TrainPlan, *, out: str | Path, device: str = "cpu") -> list[dict[str, Any]]:
    """Fine-tune by ``plan``, into the folder ``out``: ``train(TrainPlan("notes.jsonl"), out="runs/train")``.

    Every defense and seed has a folder with the model and ``result.json``: figures on the test texts before and after
    training, and on the held-out texts by epoch. After an interruption, the same call resumes.
    """
    plan = of_kind(plan, TrainPlan, "plan", 'a file is TrainPlan("notes.jsonl")')
    return list(Training(plan, out, device=device).run())
