"""The weakest protection whose upper bound of the risk meets a target, found and verified by audits (calibration paper, sec.
III).

For each protection with one open number: audits from weak to strong, then between the weakest setting that holds and the
next weaker one. A setting holds if the 95 % interval of the risk ends at or below the target, for every attack and for
guessing, if its verdict (``report/verdicts.py``) supports this, and if all stronger settings that were tried hold too. The
setting found must pass a new audit with other seeds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rasura.core.given import of_kind
from rasura.core.interfaces import Defense, InputError
from rasura.core.run_store import RunStore
from rasura.metrics.learned import has_figures
from rasura.metrics.utility import HIGHER_IS_BETTER
from rasura.registry import Family, family, parse_defense
from rasura.report.calibration import recommendation
from rasura.report.commands import FILE
from rasura.report.cut import OF_WHAT_IS_LEFT, cut_off
from rasura.report.levels import point, yardstick
from rasura.report.pooled import texts_needed
from rasura.report.search import UNPROTECTED, holds, least, missed, not_confirmed, not_found, searchable, why_not
from rasura.report.training import JUDGED
from rasura.report.verdicts import READS, plain, unmeasured
from rasura.runs.audit import Audit
from rasura.runs.audit_data import AuditData, different, load_data, without
from rasura.runs.calibration_guarantee import TrainedOn, trained_on
from rasura.runs.calibration_plan import TOLD, CalibrationPlan
from rasura.runs.cells import Cell
from rasura.runs.estimate import FIRST
from rasura.runs.plans import COLUMNS, Plan
from rasura.runs.train_plan import TrainPlan
from rasura.runs.training import Training
from rasura.victims.recipe import Recipe
from rasura.victims.step import defended

Progress = Callable[[Cell], None]


class Calibration:
    """A prepared calibration: inputs checked, model loaded. ``run`` computes what the folder does not hold yet."""

    def __init__(self, wanted: CalibrationPlan, folder: str | Path, *, device: str = "cpu") -> None:
        self.wanted = wanted = wanted.checked()
        self.plan, self.folder, self.device = wanted.plan, Path(folder), device
        first = Audit(replace(self.plan, defenses=("none",)), device=device)
        self.label_names = first.plan.label_names
        self.victim, self.data, self.data_name = first.victim, first.data, first.data_name
        self.n_texts = len(self.data.private)
        self.adapter = next(iter(first.updates.values()))[0].adapter
        self.model = first.models.public(self.adapter)
        entries = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self.families = [family(text, entries) for text in self.plan.defenses]
        settings = [one.setting(position) for one in self.families for position in one.strength.positions()]
        self.defenses: dict[str, Defense] = {text: parse_defense(text) for text in settings}
        searched = different(first.data, first.plan, first.victim)
        self.n_different = len(searched)
        self.fresh, self.fresh_data, self.which = self._fresh(searched)
        self.training: Training | None = None
        if wanted.utility is not None:
            rests = tuple(dict.fromkeys(one.rest for one in self.families))
            self.training = self._training(rests)
        self.store = RunStore(folder, wanted.identity())

    def _fresh(self, searched: frozenset[Hashable]) -> tuple[Plan, AuditData | None, str]:
        """The plan of the verifying audit, its data, and which texts these are: others than were ``searched`` with, as the
        model sees them, if there are enough; None for the same."""
        plan, count = self.plan, len(searched)
        other = replace(plan, seed=plan.seed + plan.seeds)
        after = replace(other, skip=plan.skip + plan.limit, defenses=("none",))
        try:
            read = load_data(replace(after, limit=2 * plan.limit))
            kept = without(read, after, self.victim, searched, count)
            if len(kept.private) < count:
                return other, None, f"the same texts, other seeds: there are fewer than {count} other texts"
            Audit(after, victim=self.victim, data=kept)  # refuses what cannot be audited
        except InputError as reason:
            return other, None, f"the same texts, other seeds ({reason})"
        return replace(other, skip=after.skip), kept, "other texts, other seeds"

    def _training(self, defenses: tuple[str, ...]) -> Training:
        return Training(self._train_plan(defenses), self.folder / "utility", device=self.device)

    def _train_plan(self, defenses: tuple[str, ...] = ("none",)) -> TrainPlan:
        w, p = self.wanted, self.plan
        return TrainPlan(
            str(w.train or p.data or FILE), w.test, p.model, p.task, defenses, w.train_limit,
            num_labels=self.victim.num_labels if p.task == "classification" else None, lora=self.adapter.rank,
            truncate=p.truncate, max_length=p.max_length, recipe=w.recipe, targets=self.adapter.targets,
            adapter_dropout=self.adapter.dropout, **{name: getattr(p, name) for name in COLUMNS},
        )  # fmt: skip

    def estimate(self) -> float:
        """Rough CPU seconds from the beginning, without training: every setting that is tried first or between two of these,
        and the setting found with its baseline on fresh texts."""
        settings = dict.fromkeys(("none", *(one.rest for one in self.families), *self.defenses))
        audit = Audit(replace(self.plan, defenses=tuple(settings)), victim=self.victim)
        told = audit.estimate(first=0.0)
        seconds: dict[str, float] = defaultdict(float)
        for cell in audit.cells:
            seconds[cell.defense] += told[cell.key]
        middle = [one.setting(one.strength.positions()[one.strength.points // 2]) for one in self.families]
        found = FIRST + sum(seconds.values()) + seconds["none"]
        return found + (self.wanted.steps + 1) * sum(seconds[setting] for setting in middle)

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def run(self, progress: Progress | None = None) -> dict[str, Any]:
        """Find and verify a setting for every protection, and measure its cost. The result is also written to
        ``summary.json`` in the folder."""
        w, p = self.wanted, self.plan
        # Of another target or other attacks: if this run is cut off, it would stand beside this run's command.
        (self.folder / "summary.json").unlink(missing_ok=True)
        found = [self._family(one, progress) for one in self.families]
        if w.utility is not None:
            self._utility(found)
        first = next(iter(self.store), {})
        result: dict[str, Any] = {
            "risk": w.risk, "at_most": w.at_most, "attacks": list(p.attacks), "texts": self.n_different, "seeds": p.seeds,
            "seed": p.seed, "batch_size": p.batch_sizes[0], "update": p.updates[0], "task": p.task,
            "model": first.get("model", p.model), "data": self.data_name, "threat": p.threats[0],
            "threat_plain": first.get("threat_plain", ""), "budget": p.budget, "utility": w.utility,
            "versions": first.get("versions", {}), "families": found, "checks": self._checks(found),
            "training": self._told_training(),
        }  # fmt: skip
        result |= {"label_names": list(self.label_names)} if self.label_names else {}
        result["recommendation"] = recommendation(result)
        self.store.export(result)
        return result

    def _measure(self, settings: Sequence[str], plan: Plan, progress: Progress | None) -> list[dict[str, Any]]:
        data = self.fresh_data if plan is self.fresh else None
        audit = Audit(replace(plan, defenses=tuple(settings)), device=self.device, victim=self.victim, data=data)
        self.defenses |= audit.defenses
        for _ in audit.run(self.store, progress):
            pass
        keys = {c.key for c in audit.cells}
        rows = [r for r in self.store if r["key"] in keys]
        baseline = [r for r in rows if plain(r["defense"])]
        return [
            point(
                s, [r for r in rows if r["defense"] == s], baseline, plan.attacks, self.wanted.risk, self.wanted.at_most,
                images=plan.task == "vision",
            )
            for s in settings
        ]  # fmt: skip

    def _family(self, one: Family, progress: Progress | None) -> dict[str, Any]:
        w = self.wanted
        points: dict[float, dict[str, Any]] = {}

        def setting(position: float) -> str:
            return one.setting(position) if math.isfinite(position) else one.rest

        def measure(*positions: float) -> float | None:
            # Two positions may be one setting, as 2 and 2 of a whole number.
            for t, measured in zip(positions, self._measure([setting(t) for t in positions], self.plan, progress)):
                value = one.strength.value(t, one.entries) if math.isfinite(t) else None
                points[t] = {**measured, "position": t if math.isfinite(t) else None, "value": value}
            bound: float | None = points[positions[-1]]["bound"]
            return bound

        measure(UNPROTECTED, *one.strength.positions())
        chosen = least(measure, searchable(points), w.at_most, w.steps)
        tried = {points[t]["setting"]: points[t] for t in sorted(points)}
        found: dict[str, Any] = {
            "family": one.text, "knob": one.strength.name, "status": "unreached", "setting": None, "unjudged": [],
            "points": list(tried.values()), "yardsticks": [yardstick(a, tried.values()) for a in self.plan.attacks],
        }  # fmt: skip
        if chosen is None:
            found |= not_found([points[t] for t in sorted(points)], w.at_most)
        failures: list[dict[str, Any]] = []
        # What holds here and not afresh gives way to the next stronger one, which has to pass as well.
        for t in [] if chosen is None else [t for t in sorted(points) if t >= chosen and holds(points[t], w.at_most)]:
            if points[t]["setting"] in [f["setting"] for f in failures]:
                continue
            (again,) = self._measure([points[t]["setting"]], self.fresh, progress)
            worst = max(again["levels"], key=lambda level: level["mean"]) if again["risk"] else None
            judged = not again["verdict"]["missing"] and again["verdict"]["verdict"] != READS
            if judged and worst is not None and worst["mean"] <= w.at_most:
                found |= {"status": "found" if math.isfinite(t) else "no need", "setting": points[t]["setting"]}
                found |= {"chosen": points[t], "guarantee": self._guarantee(points[t]["setting"])}
                found["verification"] = {**again, "risk": worst, "on": self.which, "seed": self.fresh.seed}
                break
            failed = {"setting": points[t]["setting"], "risk": worst, "reasons": why_not(again)}
            failures.append({**failed, "missed": missed(again, worst, w.at_most)})
        found["not_verified"] = failures
        if failures and found["setting"] is None:
            found |= not_confirmed(failures)
        return found

    def _told_training(self) -> dict[str, Any]:
        """The options of ``rasura train`` that the guarantee and the cost are for."""
        plan, recipe, usual = self._train_plan(), self.wanted.recipe, Recipe()
        told: dict[str, Any] = {"data": self.wanted.train or self.plan.data, "test": plan.test, "limit": plan.limit}
        told |= {n.replace("_", "-"): v for n in TOLD if (v := getattr(recipe, n)) != getattr(usual, n)}
        told |= {"num_labels": plan.num_labels, "lora": plan.lora or None}
        if plan.lora:
            told |= {"targets": plan.targets, "adapter-dropout": plan.adapter_dropout or None}
        return {name: value for name, value in told.items() if value is not None}

    def _guarantee(self, setting: str) -> dict[str, Any]:
        """The setting's guarantee for the texts of a training with the plan's recipe and secure noise, as the command that
        ``applied`` names runs it."""
        parts, recipe = self.defenses[setting], self.wanted.recipe
        about = {"batch_size": recipe.batch_size, "epochs": recipe.epochs}
        with defended(self.model, parts):
            sizes = [p.numel() for p in self.model.parameters() if p.requires_grad]
        try:
            return {**self._trained_on.promised([p.counted for p in parts], sizes), **about}
        except InputError as reason:
            return {"statement": f"not computed: {reason}", **about}

    @cached_property
    def _trained_on(self) -> TrainedOn:
        read = (self.wanted.train or self.plan.data) is not None
        return trained_on(self._train_plan(), self.plan, self.victim, self.data, read=read)

    def _utility(self, found: Sequence[dict[str, Any]]) -> None:
        """Train under each setting found, and without its open part, and add the cost."""
        name = str(self.wanted.utility)
        rests = {one.text: one.rest for one in self.families}
        for part in found:
            if part["setting"] is None:
                continue
            try:
                training = self._training(tuple(dict.fromkeys((rests[part["family"]], part["setting"]))))
                results = {r["defense"]: r for r in training.run()}
            except InputError as reason:
                part["utility"] = {"metric": name, "reason": str(reason)}
                continue
            first, last = (results[d] for d in (rests[part["family"]], part["setting"]))
            if not (has_figures(first) and has_figures(last) and has_figures(last, "before")):
                part["utility"] = {"metric": name, "reason": "the output of at least one model is not a number"}
                continue
            without, behind = first["after"][name], last["after"][name]
            part["utility"] = {
                "metric": name, "without": without, "behind": behind, "reference": rests[part["family"]],
                "cost": without - behind if HIGHER_IS_BETTER[name] else behind - without, "n": last["n_test"],
                "n_train": last["n_train"], "epochs": last["epochs"], "tested_on": last["tested_on"],
                "epochs_compared": last["epochs_compared"],
                "untrained": last["before"][name],
                "trained": [{k: r[k] for k in JUDGED if k in r} for r in results.values()],
            }  # fmt: skip

    def too_few(self) -> list[str]:
        """The note for the case that there are too few texts to decide about the target."""
        need, at_most = texts_needed(self.wanted.at_most) * self.plan.batch_sizes[0], self.wanted.at_most
        if need <= self.n_different:
            return []
        why = f"even if nothing is recovered, the upper bound is above {100 * at_most:.3g} %"
        return [f"{self.n_different} texts are too few: {why}. At least {need} are needed."]

    def _checks(self, found: Sequence[Mapping[str, Any]]) -> list[str]:
        """Warnings that the figures must be read with."""
        out, names = self.too_few(), self.plan.attacks
        if cut := cut_off((r for r in self.store if r["data"] == self.data_name), images=self.plan.task == "vision"):
            out.append(f"{cut}. {OF_WHAT_IS_LEFT}")
        for f in found:
            # The strongest setting is the one that the rest of the search stands on.
            beyond: list[str] = next((p["verdict"]["missing"] for p in reversed(f["points"]) if p["risk"]), [])
            if beyond and f["status"] != "not measured":
                out.append(f"{f['family']}, at its strongest: {unmeasured(beyond)}.")
        for f in found:
            tried = {level["attack"] for level in f["chosen"]["levels"]} if f["setting"] else set(names)
            for name in (n for n in names if n not in tried):
                why = next((r for r in f["chosen"]["reasons"] if r.startswith(f"{name}: ")), name)
                out.append(f"{f['setting']}: an attack could not be run there; {why}.")
        if not any(y["well_behaved"] for f in found for y in f["yardsticks"]):
            out.append("No attack is a reliable measure of any of these protections; each protection says why.")
        return out


def calibrate(wanted: CalibrationPlan, *, out: str | Path, device: str = "cpu") -> dict[str, Any]:
    """Find the weakest setting that meets a target, for each protection of ``wanted.plan``, into the folder ``out``.

    ``calibrate(CalibrationPlan(Plan(data="notes.jsonl", defenses=("gaussian",)), at_most=0.2), out="runs/calibrate")``.
    After an interruption, the same call resumes; another target reuses the measurements. The result says for each protection
    whether a setting was ``found``, there is ``no need`` for one, the target was ``unreached``, the setting that held was
    ``not verified``, or it could not be judged (``not measured``).
    """
    instead = 'a file is CalibrationPlan(Plan(data="notes.jsonl", defenses=("gaussian",)))'
    prepared = Calibration(of_kind(wanted, CalibrationPlan, "wanted", instead), out, device=device)
    try:
        return prepared.run()
    finally:
        prepared.close()
