"""`rasura membership`: can someone who queries a trained model infer which texts it was trained on?"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rasura.core.answers import Answers, Membership, ShadowModel
from rasura.core.batches import Batch
from rasura.core.errors import InputError
from rasura.core.records import Record, cell_key
from rasura.core.rng import generator
from rasura.core.run_store import RunStore
from rasura.core.threat import MODEL_USER, adversary_copy, observe_model
from rasura.core.values import Grant
from rasura.data.overlap import wording_of
from rasura.data.text import Example, columns_of, data_hash, load_examples, place_of
from rasura.metrics.membership import auc, largest_leakage, leakage, needed, roc, split_check, tpr_at
from rasura.registry import membership_adversaries, membership_attack
from rasura.runs.attempt import MACHINE, Outcome, attempt, lacking, peak_mb
from rasura.runs.membership_models import QueriedModels
from rasura.runs.membership_plan import MembershipPlan
from rasura.runs.scoring import versions
from rasura.runs.training import encoded
from rasura.victims.fingerprint import fingerprint
from rasura.victims.outputs import answers
from rasura.victims.protected_rows import protected
from rasura.victims.train import FineTuning
from rasura.victims.weights import classes_for

FPRS = (0.01, 0.001)
"""The default false positive rates, as far as there are enough texts."""

NO_THRESHOLD = "the attack has no threshold of its own"

POINTS = 120
"""Points of a ROC curve kept for the plot."""


@dataclass(frozen=True)
class Told:
    """The result of one attack: its figures, and what is stored with them."""

    scores: dict[str, Any]
    details: dict[str, Any]


class MembershipAudit:
    """A prepared attack on a trained model. Files are read and tokenized here, so that errors show early. Iterate
    ``run``."""

    def __init__(self, plan: MembershipPlan, folder: str | Path, *, device: str = "cpu") -> None:
        self.plan = plan = plan.checked()
        self.folder, self.device = Path(folder), device
        self.label_names: tuple[str, ...] | None = None
        sides = self._sides()
        other = self._read(plan.reference) if plan.reference else []
        self._apart(sides, other)
        if min(map(len, sides)) < 2:
            raise InputError(f"{len(sides[0])} members and {len(sides[1])} others; expected at least 2 of each")
        self.fprs = plan.fprs or tuple(f for f in FPRS if min(map(len, sides)) >= needed(f))
        for fpr in self.fprs:  # refused now, not when the models are trained
            tpr_at([0.0] * sum(map(len, sides)), [True] * len(sides[0]) + [False] * len(sides[1]), fpr)
        everything = [*sides[0], *sides[1]]
        # Members stand first in the files: shuffled, a candidate's place says nothing.
        order = torch.randperm(len(everything), generator=generator(plan.recipe.seed, "candidates")).tolist()
        self.examples = [everything[k] for k in order]
        self.members = torch.tensor([k < len(sides[0]) for k in order])
        labels = [e.label or 0 for e in [*everything, *other]]
        count = plan.num_labels or classes_for(plan.model, 1 + max(labels))
        self.models = QueriedModels(plan, count, device)
        self.victim = self.models.victim
        limits: Any = {"max_length": plan.max_length, "truncate": plan.truncate}
        self.rows = tuple(encoded(self.victim, self.examples, **limits))
        self.reference = tuple(encoded(self.victim, other, **limits))
        if self.victim.task == "causal":
            _predicted([*self.rows, *self.reference], [*self.examples, *other])
        self.models.kept = (self.rows, self.reference)
        self.data = data_hash(self.examples)
        self.identity = {
            **json.loads(json.dumps(asdict(plan))), "kind": "membership", "data_hash": self.data,
            "n_members": len(sides[0]), "n_others": len(sides[1]), "n_reference": len(other),
        }  # fmt: skip
        self.identity |= {"label_names": list(self.label_names)} if self.label_names else {}
        self._shadow_models: tuple[ShadowModel, ...] | None = None

    def _sides(self) -> list[list[Example]]:
        """Members and others."""
        plan = self.plan
        inside = self._read(plan.members, plan.limit if plan.rows is None else None)
        others = None if plan.non_members is None else self._read(plan.non_members, plan.limit)
        if plan.rows is None:
            return [inside, others or []]
        everything = inside
        try:
            told = json.loads(Path(plan.rows).read_text(encoding="utf-8"))
            numbers = [k for name in ("trained", "held_out") for k in told[name]]
            if not all(type(k) is int and 0 <= k < len(everything) for k in numbers) or len(set(numbers)) < len(numbers):
                raise ValueError
            trained, held = ([everything[k] for k in told[name]] for name in ("trained", "held_out"))
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            raise InputError(
                f"{plan.rows} does not list rows of {plan.members}; expected the rows.json of its training run"
            ) from None
        if others is None:  # a text that occurs twice may stand on both sides: it was trained on
            seen = set(map(wording_of, trained))
            others = [e for e in held if wording_of(e) not in seen]
        return [trained[: plan.limit], others[: plan.limit]]

    def _read(self, source: str, limit: int | None = None) -> list[Example]:
        """A file's texts. Labels are numbered by the names in the first file read (the members), or otherwise by those of
        the model."""
        read = load_examples(
            source, limit=limit, columns=columns_of(self.plan), label_names=self.label_names, model=self.plan.model
        )
        self.label_names = read.label_names if self.label_names is None else self.label_names
        return read

    def _apart(self, sides: Sequence[Sequence[Example]], other: Sequence[Example]) -> None:
        plan = self.plan
        inside, outside, beside = (set(map(wording_of, some)) for some in (*sides, other))
        for name, what, both in (
            (plan.non_members, "members", outside & inside),
            (plan.reference, "candidates", beside & (inside | outside)),
        ):
            if both:
                raise InputError(f"{name} contains texts that are also {what} ({len(both)}); remove them")

    def shadow_models(self, progress: Callable[[str, int, int], None] | None = None) -> tuple[ShadowModel, ...]:
        """The adversary's shadow models: trained in pairs, one on a random half of all texts, one on the other half.

        The answers of each are kept in the run's folder for resumption; the weights are not kept.
        """
        if self._shadow_models is None:
            found = []
            pool = [*self.rows, *self.reference]
            for number in range(self.plan.shadow_models):
                if progress is not None:
                    progress("shadow models", number, self.plan.shadow_models)
                order = torch.randperm(len(pool), generator=generator(self.plan.recipe.seed, "own", number // 2))
                half = order[: len(pool) // 2] if number % 2 == 0 else order[len(pool) // 2 :]
                inside = torch.zeros(len(pool), dtype=torch.bool)
                inside[half] = True
                said = self._answers_of(number, [pool[k] for k in half.sort().values.tolist()], pool)
                n = len(self.rows)
                here, there = (Answers(said.losses[p], said.margins[p], said.logits[p]) for p in (slice(n), slice(n, None)))
                found.append(ShadowModel(here, inside[:n], there if self.reference else None))
            self._shadow_models = tuple(found)
        return self._shadow_models

    def _answers_of(self, number: int, rows: Sequence[Batch], pool: Sequence[Batch]) -> Answers:
        from safetensors.torch import load_file, save_file

        place = self.folder / "shadow_models" / f"{number:03d}"
        path = place / "answers.safetensors"
        if not path.exists():
            seed = self.plan.recipe.seed + 1 + number
            victim, defense = self.models.fresh(seed), self.plan.parts
            behind = protected(rows, defense, victim.model, victim.vocabulary, place / "protected", seed)
            # No text is held out: an shadow model ends where its recipe ends, or where nothing more is learned.
            run = FineTuning(
                victim.model, behind, defense, replace(self.plan.recipe, seed=seed), place, task=victim.task,
                vocabulary=victim.vocabulary, evaluate=lambda model: {}, watched="train_loss", higher=False,
            )  # fmt: skip
            run.run()
            said = answers(victim.model, pool, self.models.pad)
            part = path.with_suffix(".part")
            save_file({k: getattr(said, k).contiguous() for k in ("losses", "margins", "logits")}, str(part))
            part.replace(path)
            run.finish({"epochs": run.history.epoch, "train_loss": run.history.best})
        return Answers(**load_file(str(path)))

    def run(self, store: RunStore, progress: Callable[[str, int, int], None] | None = None) -> Iterator[Record]:
        """Run the attacks that ``store`` lacks; store and yield each Record. Raises ``InputError`` if ``store`` holds
        results of other weights."""
        about = {"model": fingerprint(self.victim.model), "cells": len(self.plan.attacks or ())}
        store.describe(about, fixed=("model",))
        beside: dict[str, Any] = {}
        for number, name in enumerate(self.plan.attacks or ()):
            key = cell_key(kind="membership", attack=name, plan=self.identity)
            if progress is not None:
                progress(name, number, len(self.plan.attacks or ()))
            if key in store:
                continue
            beside = beside or self._beside()
            record = self._one(name, key, beside, progress)
            store.add(record)
            yield record

    def _beside(self) -> dict[str, Any]:
        """The baselines beside every figure: the blind attack, and how well words alone separate members from others."""
        told = self._attempt("blind", None).guess
        texts = [f"{e.text} {e.text_pair or ''}" for e in self.examples]
        words = split_check(texts, self.members.tolist(), self.plan.recipe.seed)
        return {"words": asdict(words)} | ({} if told is None else {"auc": told.scores["auc"]})

    def _one(
        self, name: str, key: str, beside: Mapping[str, Any], progress: Callable[[str, int, int], None] | None
    ) -> Record:
        plan = self.plan
        wall, cpu = time.perf_counter(), time.process_time()
        outcome = self._attempt(name, progress)
        told = outcome.guess
        return Record(
            key=key, attack=name, defense=plan.defense, threat=MODEL_USER.name, model=Path(plan.model).name, data=self.data,
            batch_size=len(self.rows), seed=plan.recipe.seed, batch=0, status=outcome.status, update="model",
            reason=outcome.reason, known_by=asdict(membership_adversaries(plan.defense)),
            scores={} if told is None else told.scores, blind=beside, details={} if told is None else told.details,
            n_tokens=sum(row.lengths[0] for row in self.rows), threat_plain=MODEL_USER.plain,
            wall_seconds=time.perf_counter() - wall, cpu_seconds=time.process_time() - cpu,
            peak_mb=peak_mb(), device=self.device, versions=versions(),
        )  # fmt: skip

    def _attempt(self, name: str, progress: Callable[[str, int, int], None] | None) -> Outcome[Told]:
        attack, v = membership_attack(name), self.victim
        weights = Grant.BASE_MODEL in attack.needs | attack.uses
        seen = observe_model(
            MODEL_USER, v.task, ask=self.models.ask, ask_reference=self.models.ask_reference, candidates=self.rows,
            reference=self.reference, base=(adversary_copy(self.models.base.model), v.vocabulary) if weights else None,
            shadow_models=lambda: self.shadow_models(progress), mechanism=tuple(p.mechanism for p in self.plan.parts),
        )  # fmt: skip
        if (missing := lacking(attack, seen, MODEL_USER.name)) is not None:
            return missing
        if Grant.TRAINING in attack.needs:  # what is wrong with their training is the run's fault, not the attack's
            self.shadow_models(progress)

        def told() -> Told:
            guess = attack(seen, rng=generator(self.plan.recipe.seed, "membership", name))
            return Told(self.scores(guess), {**guess.details, "roc": self._curve(guess)})

        return attempt(told, raises=MACHINE)

    def scores(self, guess: Membership) -> dict[str, Any]:
        """AUC, true positive rate at each requested false positive rate, and privacy leakage, with their intervals.

        ``leakage`` is measured at the attack's own threshold; it is None, with a reason, without such a threshold.
        ``largest_leakage`` is the maximum over thresholds, with the level that random guessing reaches.
        """
        values, members = guess.scores.tolist(), self.members.tolist()
        found = {"auc": auc(values, members)} | {f"tpr@{fpr:g}": tpr_at(values, members, fpr) for fpr in self.fprs}
        most, chance = largest_leakage(values, members)
        about = {"unit": "share", "higher_is": "worse"}
        own: dict[str, Any] = {"mean": None, "low": None, "high": None, "n": len(values), "reason": NO_THRESHOLD}
        if guess.threshold is not None:
            own = {**asdict(leakage(values, members, guess.threshold)), "threshold": guess.threshold}
        return {
            **{name: {**asdict(rate), **about} for name, rate in found.items()},
            "leakage": {**own, **about},
            "largest_leakage": {"mean": most, "chance": chance, "n": len(values), **about},
        }

    def _curve(self, guess: Membership) -> list[tuple[float, float]]:
        false, true = roc(guess.scores.tolist(), self.members.tolist())
        last = np.flatnonzero(np.append(np.diff(false) > 0, True))  # the highest point over each false positive rate
        some = np.unique(np.geomspace(1, len(last), POINTS).round().astype(int)) - 1
        return [(round(float(false[k]), 6), round(float(true[k]), 6)) for k in last[some]]


def _predicted(rows: Sequence[Batch], examples: Sequence[Example]) -> None:
    """Raises ``InputError`` for a text of which a causal model predicts no token: it has no loss."""
    for number, (row, example) in enumerate(zip(rows, examples, strict=True), 1):
        if not bool((row.labels[:, 1:] != -100).any()):
            raise InputError(f"{place_of(example, number)}: a causal model predicts no token of this text; remove the row")


def infer_membership(plan: MembershipPlan, *, out: str | Path, device: str = "cpu") -> list[Record]:
    """Attack a trained model by ``plan``, into the folder ``out``; returns the Records, in the order of their ids.

    ``infer_membership(MembershipPlan("my-model", "train.jsonl", "other.jsonl"), out="runs/membership")``. Attacks that
    ``out`` holds are not run again. ``rasura.write_report(out)`` writes the report.
    """
    prepared = MembershipAudit(plan, out, device=device)
    store = RunStore(out, prepared.identity)
    try:
        list(prepared.run(store))
        return [Record.from_dict(found) for found in store]
    finally:
        store.close()
