"""`rasura membership`: can someone who queries a trained model infer which texts it was trained on?"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rasura.core.answers import Answers, Membership, ShadowModel
from rasura.core.batches import Batch
from rasura.core.errors import InputError, NotApplicable
from rasura.core.files import make_private
from rasura.core.given import of_kind
from rasura.core.records import Record, cell_key
from rasura.core.rng import generator
from rasura.core.run_store import RunStore
from rasura.core.threat import MODEL_USER, adversary_copy, observe_model
from rasura.core.unchanged import Lent, tensors_of
from rasura.core.values import Grant
from rasura.data.text import data_hash
from rasura.metrics.membership import COIN, auc, largest_leakage, leakage, needed, roc, split_check, tpr_at
from rasura.registry import DEFENSES, MEMBERSHIP, membership_adversaries, membership_attack, parts
from rasura.runs.attempt import MACHINE, Outcome, attempt, lacking, meddled, peak_mb
from rasura.runs.described import of_model, own_code
from rasura.runs.membership_models import QueriedModels
from rasura.runs.membership_plan import MembershipPlan
from rasura.runs.membership_texts import MembershipTexts
from rasura.runs.scoring import versions
from rasura.victims.outputs import answers
from rasura.victims.protected_rows import protected
from rasura.victims.train import FineTuning
from rasura.victims.weights import classes_for

FPRS = (0.01, 0.001)
"""The default false positive rates, as far as there are enough texts."""

NO_THRESHOLD = "the attack has no threshold of its own"

SAME = "gave every text the same score, so nothing was measured"

SOME = 8
"""Texts that show whether the audited model answers otherwise than the one on which its training began."""

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
        read = MembershipTexts(plan)
        self._measurable(*map(len, read.sides))
        labels = [e.label or 0 for some in (read.trained, read.others, read.reference) for e in some]
        count = plan.num_labels or classes_for(plan.model, 1 + max(labels))
        self.models = QueriedModels(plan, count, device)
        self.victim = self.models.victim
        inside, outside, beside, repeated = read.distinct(self.victim)
        self._measurable(len(inside), len(outside))
        everything = [*inside, *outside]
        # Members stand first in the files: shuffled, a candidate's place says nothing.
        order = torch.randperm(len(everything), generator=generator(plan.learning.seed, "candidates")).tolist()
        self.examples, self.rows = [everything[k][0] for k in order], tuple(everything[k][1] for k in order)
        self.members = torch.tensor([k < len(inside) for k in order])
        self.reference = tuple(row for _, row in beside)
        self.models.kept = (self.rows, self.reference)
        self.data = data_hash(self.examples)
        self.identity = {
            **json.loads(json.dumps(asdict(plan))), "kind": "membership", "data_hash": self.data,
            "n_members": len(inside), "n_others": len(outside), "n_reference": len(beside),
        }  # fmt: skip
        self.identity |= {"label_names": list(read.label_names)} if read.label_names else {}
        self.identity |= {"reference_hash": data_hash([e for e, _ in beside])} if beside else {}
        self.identity |= {"n_repeated": repeated} if repeated else {}
        self.identity |= {"others_chose": True} if plan.chose else {}
        self.identity |= {"untrained": True} if self.models.untrained(self.rows[:SOME]) else {}
        self._shadow_models: tuple[ShadowModel, ...] | None = None

    def _measurable(self, members: int, others: int) -> None:
        """Refuse, before any model is trained, what so few texts cannot measure."""
        if min(members, others) < 2:
            raise InputError(f"{members} members and {others} others; expected at least 2 of each")
        self.fprs = self.plan.fprs or tuple(f for f in FPRS if min(members, others) >= needed(f))
        for fpr in self.fprs:
            tpr_at([0.0] * (members + others), [True] * members + [False] * others, fpr)

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
                order = torch.randperm(len(pool), generator=generator(self.plan.learning.seed, "own", number // 2))
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
            seed = self.plan.learning.seed + 1 + number
            victim, defense = self.models.fresh(seed), self.plan.parts
            behind = protected(rows, defense, victim.model, victim.vocabulary, place / "protected", seed)
            # No text is held out: a shadow model ends where its recipe ends, or where nothing more is learned.
            model = self.models.learning(victim, seed)
            run = FineTuning(
                model, behind, defense, replace(self.plan.learning, seed=seed), place, task=victim.task,
                vocabulary=victim.vocabulary, evaluate=lambda model: {}, watched="train_loss", higher=False,
            )  # fmt: skip
            run.run()
            said = answers(model, pool, self.models.pad)
            kept = {k: getattr(said, k).contiguous() for k in ("losses", "margins", "logits")}
            make_private(path, partial(save_file, kept))
            run.finish({"epochs": run.history.epoch, "train_loss": run.history.best})
        return Answers(**load_file(str(path)))

    def run(self, store: RunStore, progress: Callable[[str, int, int], None] | None = None) -> Iterator[Record]:
        """Run the attacks that ``store`` lacks; store and yield each Record. Raises ``InputError`` if ``store`` holds
        results of other weights."""
        defenses = [DEFENSES[name] for name, _ in parts(self.plan.defense)]
        own = own_code([*(MEMBERSHIP[name] for name in self.plan.attacks or ()), *defenses])
        fixed = {**of_model(self.victim), **self.models.of_base(), **own}
        store.describe({**fixed, "cells": len(self.plan.attacks or ())}, fixed=tuple(fixed))
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
        """The baselines beside every figure: the blind attack, and how well the model's tokens alone separate members from
        others. Of a classifier, whose attacks see labels, also labels alone and both together. Of a causal model, also the
        loss of the model on which the training began."""
        told = self._attempt("blind", None).guess
        texts = [row.ids(0) for row in self.rows]
        check = partial(split_check, members=self.members.tolist(), seed=self.plan.learning.seed)
        found = {"words": check(texts)}
        if self.victim.task == "classification":
            labels = [e.label or 0 for e in self.examples]
            found |= {"labels": check(list(map(str, labels))), "words_and_labels": check(texts, labels=labels)}
        elif not bool((before := self.models.before(self.rows)).isnan().any()):
            found |= {"base": auc((-before).tolist(), self.members.tolist())}
        by_length = {} if told is None else {k: v for k, v in told.scores.items() if k == "auc" or k.startswith("tpr@")}
        return {name: asdict(rate) for name, rate in found.items()} | by_length

    def _one(
        self, name: str, key: str, beside: Mapping[str, Any], progress: Callable[[str, int, int], None] | None
    ) -> Record:
        plan = self.plan
        wall, cpu = time.perf_counter(), time.process_time()
        outcome = self._attempt(name, progress)
        told = outcome.guess
        return Record(
            key=key, attack=name, defense=plan.defense, threat=MODEL_USER.name, model=Path(plan.model).name, data=self.data,
            batch_size=len(self.rows), seed=plan.learning.seed, batch=0, status=outcome.status, update="model",
            reason=outcome.reason, known_by=asdict(membership_adversaries(plan.defense)),
            scores={} if told is None else told.scores, blind=beside, details={} if told is None else told.details,
            n_tokens=sum(row.lengths[0] for row in self.rows), threat_plain=MODEL_USER.plain,
            wall_seconds=time.perf_counter() - wall, cpu_seconds=time.process_time() - cpu,
            peak_mb=peak_mb(), device=self.device, versions=versions(),
        )  # fmt: skip

    def _attempt(self, name: str, progress: Callable[[str, int, int], None] | None) -> Outcome[Told]:
        attack, v = membership_attack(name), self.victim
        weights = Grant.BASE_MODEL in attack.needs | attack.uses
        # Each attack has its own copies: of the weights here, of what models answer wherever they are asked.
        base = copy.deepcopy(adversary_copy(self.models.base.model)) if weights else None
        seen = observe_model(
            MODEL_USER, v.task, ask=self.models.ask, ask_reference=self.models.ask_reference, candidates=self.rows,
            reference=self.reference, base=None if base is None else (base, v.vocabulary),
            shadow_models=lambda: copy.deepcopy(self.shadow_models(progress)),
            mechanism=tuple(copy.deepcopy(p.mechanism) for p in self.plan.parts),
        )  # fmt: skip
        if (missing := lacking(attack, seen, MODEL_USER.name)) is not None:
            return missing
        if Grant.TRAINING in attack.needs:  # what is wrong with their training is the run's fault, not the attack's
            self.shadow_models(progress)

        def told() -> Told:
            guess = attack(seen, rng=generator(self.plan.learning.seed, "membership", name))
            found = Told(self.scores(guess), {**guess.details, "roc": self._curve(guess)})
            if name != "blind" and len(set(guess.scores.tolist())) == 1:  # an AUC of .5 by construction is no measurement
                raise NotApplicable(SAME)
            return found

        rows = [*self.rows, *self.reference]
        given = [(k, name, t) for k, row in enumerate(rows) for name, t in row.inputs().items()]
        were = [t.clone() for _, _, t in given]
        lent = Lent(lambda: {f"{k} {name}": t for k, name, t in given} | ({} if base is None else tensors_of(base)))
        outcome = attempt(told, raises=MACHINE)
        if not lent.changed:
            return outcome
        for (_, _, tensor), was in zip(given, were, strict=True):
            tensor.data.copy_(was)
        return meddled(outcome)

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
            "largest_leakage": {"mean": most, "chance": chance, "level": COIN, "n": len(values), **about},
        }

    def _curve(self, guess: Membership) -> list[tuple[float, float]]:
        false, true = roc(guess.scores.tolist(), self.members.tolist())
        last = np.flatnonzero(np.append(np.diff(false) > 0, True))  # the highest point over each false positive rate
        some = np.unique(np.geomspace(1, len(last), POINTS).round().astype(int)) - 1
        return [(round(float(false[k]), 6), round(float(true[k]), 6)) for k in last[some]]


def infer_membership(plan: MembershipPlan, *, out: str | Path, device: str = "cpu") -> list[Record]:
    """Attack a trained model by ``plan``, into the folder ``out``; returns the Records, in the order of their ids.

    ``infer_membership(MembershipPlan("my-adapter", "train.jsonl", "other.jsonl"), out="runs/membership")``. Attacks that
    ``out`` holds are not run again. ``rasura.write_report(out)`` writes the report.
    """
    instead = 'a model and its files are MembershipPlan("my-adapter", "train.jsonl", "other.jsonl")'
    prepared = MembershipAudit(of_kind(plan, MembershipPlan, "plan", instead), out, device=device)
    store = RunStore(out, prepared.identity)
    try:
        list(prepared.run(store))
        return [Record.from_dict(found) for found in store]
    finally:
        store.close()
