"""The audit: attack x update x defense x threat x batch size x seed over real batches, as a stream of Records.

Its stages are modules: the plan is checked (``chosen_methods``), data and models are loaded (``audit_data``,
``audit_models``), the data is encoded (``audit_data``), the cells are enumerated (``cells``), and are run here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torch import OutOfMemoryError, nn

from rasura.core.errors import FAULTS, Malformed, broken
from rasura.core.given import given_texts, of_kind
from rasura.core.interfaces import ActiveAttack, Attack, InputError, NotApplicable, NotSent, Unavailable, attacking_device
from rasura.core.records import CUT, Record
from rasura.core.rng import generator
from rasura.core.run_store import RunStore
from rasura.core.threat import THREATS, ThreatModel
from rasura.core.unchanged import CHANGED
from rasura.core.values import Grant, Reconstruction, Task, Transcript
from rasura.registry import (
    REGISTERED,
    AttackLike,
    DefenseLike,
    Methods,
    MetricLike,
    adversaries,
    declared,
    methods_with,
    named_attacks,
    named_defenses,
    named_metrics,
    trusted,
)
from rasura.registry import attack as make_attack
from rasura.runs.attempt import Outcome, attempt, lacking, peak_mb
from rasura.runs.audit_data import AuditData, encoded_data, load_data
from rasura.runs.audit_models import AuditModels, load_language_model, load_victim, on_cpu
from rasura.runs.cells import Cell, by_step, enumerated
from rasura.runs.chosen_methods import chosen_methods
from rasura.runs.described import code_of, describe_run, of_model, own_methods, unproven
from rasura.runs.estimate import FIRST, all_seconds, image_seconds, load_of, measured_step
from rasura.runs.guesses import well_formed
from rasura.runs.lending import Lending
from rasura.runs.plans import Plan
from rasura.runs.processes import Workers
from rasura.runs.scoring import label_scores, naming, no_value, recovered, scored, sent_bytes, versions
from rasura.victims.loading import Victim, in_memory
from rasura.victims.models import parts
from rasura.victims.step import step
from rasura.victims.weights import task_in_memory


class Audit:
    """A prepared audit: inputs checked, model loaded, cells known. Iterate ``run`` to run the remaining cells.

    ``baseline``: also run every attack without protection, even if the plan does not list ``none``. Only an attack that
    works there can show anything about a protection; without the baseline, every verdict is 'not measured'. ``methods``: the
    methods behind the names in the plan. ``data``: some of the plan's data, already loaded.
    """

    def __init__(
        self, plan: Plan, *, device: str = "cpu", victim: Victim | None = None, baseline: bool = True,
        methods: Methods = REGISTERED, data: AuditData | None = None,
    ) -> None:  # fmt: skip
        plan = plan.checked(methods)
        chosen = chosen_methods(plan, methods, baseline)
        data = data or load_data(plan)
        self.plan = plan if data.label_names is None else replace(plan, label_names=data.label_names)
        self.methods, self.device, self.data = methods, device, data
        self.work = replace(self.plan.work, device=attacking_device(device))
        self.attacks, self.updates, self.metrics = chosen.attacks, chosen.updates, chosen.metrics
        self.defenses = chosen.defenses
        self.victim = victim or load_victim(plan, data.num_labels, device)
        task = self.victim.task
        own_output = task == "causal" and not parts(self.victim.model).tied
        among = partial(adversaries, task=task, own_output=own_output)
        self.known_by = {t: among(t, defenses=methods.defenses, attacks=methods.attacks) for t in self.defenses}
        self.own = own_methods(methods, self.attacks, self.defenses, self.metrics)
        adapters = (local.adapter for local, _ in self.updates.values())
        self.models = AuditModels(self.victim, adapters, plan.seed, bool(self.own))
        self.lending = Lending(self.models, partial(load_language_model, plan))
        encoded = encoded_data(data, plan, self.victim, self.defenses)
        self.batches, self.examples_in, self.cut_in = encoded.batches, encoded.examples, encoded.cut
        self.cells = list(enumerated(plan, data, self.defenses, encoded.names))
        self.data_name, self.unavailable = data.name, dict[str, str]()

    def estimate(self, store: RunStore | None = None, *, first: float = FIRST) -> dict[str, float]:
        """Rough CPU seconds of each cell, by its key, without those that ``store`` holds. Three steps are taken for it.
        ``first``: what the first cell takes beyond the others."""
        left = [c for c in self.cells if store is None or c.key not in store]
        attacks, level = self.methods.attacks, self.plan.budget
        if self.data.images or not left:
            return {c.key: image_seconds(c, level, attacks) for c in left}
        batch = {c.key: self.batches[c.defense, c.batch_size][c.batch] for c in left}
        v, rng = self.victim, generator(self.plan.seed, "estimate")
        take = partial(step, on_cpu(v.model), task=v.task, vocabulary=v.vocabulary, rng=rng)  # where attacks run
        loads = {key: load_of(b, v.model) for key, b in batch.items()}
        own = measured_step(take, list(batch.values()))
        found = all_seconds(left, loads, level, own, self.methods, self.known_by, causal=v.task == "causal")
        return {**found, left[0].key: found[left[0].key] + first}

    def run(
        self, store: RunStore, progress: Callable[[Cell], None] | None = None, workers: Workers | None = None
    ) -> Iterator[Record]:
        """Run the cells that ``store`` lacks, on ``workers`` if given; store and yield each Record. Records are the same
        whatever was done before."""
        self.describe(store)
        left = self.left(store)
        here = chain.from_iterable(self.records(cells, progress) for cells in left)
        for record in here if workers is None else workers.run(left, progress):
            store.add(record)
            yield record

    @property
    def fixed(self) -> dict[str, str | Mapping[str, str]]:
        """Fingerprints of all that the results depend on, by name: the model, the texts, public ones too, and methods."""
        texts = self.data.fixed(self.plan.skip)
        return {**of_model(self.victim), **texts, **self.lending.fixed, "code of own methods": code_of(self.own)}

    def describe(self, store: RunStore) -> None:
        """Store what the run is of. Raises ``InputError`` if ``store`` holds results of other weights, texts or methods."""
        describe_run(store, len(self.cells), self.defenses, self.methods.defenses, self.attacks, self.methods.attacks,
                     self.fixed, unproven(self.defenses))  # fmt: skip

    def left(self, store: RunStore) -> list[list[Cell]]:
        """The cells that ``store`` lacks, grouped by the step that they share."""
        return by_step(self.cells, store)

    def records(self, cells: Sequence[Cell], progress: Callable[[Cell], None] | None = None) -> Iterator[Record]:
        """The Records of ``cells`` that share a step. The step is computed once, and again after a method changed it."""
        truth: Transcript | tuple[str, str] | None = None
        for cell in cells:
            if progress is not None:
                progress(cell)
            truth = self._step(cell) if truth is None or self.lending.stale else truth
            yield self._cell(cell, truth)

    def _step(self, cell: Cell) -> Transcript | tuple[str, str]:
        """The step that the cell attacks. If there is none, the status and the reason for its cells."""
        # Seeded by the cell's place, not by what ran before, so that a resumed run takes the same step.
        rng = generator(cell.seed, "step", *cell.protected_update, cell.batch_size, cell.batch)
        batch, v = self.batches[cell.defense, cell.batch_size][cell.batch], self.victim
        local, wire = self.updates[cell.update]
        defense, public = (*self.defenses[cell.defense], *wire), self.models.public(local.adapter)
        self.lending.begin(local.adapter)
        found: Transcript | tuple[str, str]
        try:
            model = self.models.trained(local.adapter, self.attacks[cell.attack], cell)
            found = step(model, batch, defense, task=v.task, vocabulary=v.vocabulary, rng=rng, local=local, public=public)
        except (NotSent, NotApplicable) as reason:
            found = "not_applicable", str(reason)
        except Malformed as error:
            found = "crashed", f"the training step failed: {error}"
        except (InputError, OutOfMemoryError):
            raise
        except FAULTS as error:
            found = "crashed", f"the training step failed: {broken(error)}"
        if self.lending.put_back():
            found = "crashed", "the training step failed: a method of the step changed the model"
        self.lending.begin(local.adapter, None if isinstance(found, tuple) else found)
        return found

    def _cell(self, cell: Cell, truth: Transcript | tuple[str, str]) -> Record:
        threat, attack = THREATS[cell.threat], self.attacks[cell.attack]
        if isinstance(truth, tuple):
            return self._record(cell, threat, *truth)
        if isinstance(attack, ActiveAttack) and not threat.active:
            reason = f"it needs crafted weights, but the server of {cell.threat} sends the model unchanged"
            return self._record(cell, threat, "not_applicable", f"{reason}; pass --threat malicious-server")
        size = sent_bytes(truth.message)
        blind = self._attempt(make_attack("blind"), replace(cell, attack="blind"), truth, threat)
        outcome = self.lending.checked(self._attempt(attack, cell, truth, threat))
        guess = outcome.guess or Reconstruction((), details=outcome.details)
        scored = bool(guess.tokens) or guess.images is not None
        told = Grant.LABELS in threat.grants and Grant.LABELS in attack.needs | attack.uses
        read = label_scores(None if told else guess.labels, truth)  # labels that the threat model grants are not read
        likely = [self.data.commonest_label] * len(truth.batch) if read else None
        return self._record(
            cell,
            threat,
            outcome.status,
            outcome.reason,
            confidence=guess.confidence,
            scores={**(self.scores(guess, truth) if scored else {}), **read},
            blind={**(self.scores(blind.guess, truth) if blind.guess is not None else {}), **label_scores(likely, truth)},
            recovered=recovered(guess, truth, self.plan.show_text) if scored else [],
            details=dict(guess.details) | (naming(guess, blind.guess, truth) if scored else {}),
            n_tokens=0 if self.data.images else sum(truth.text_batch.lengths),
            sent_bytes=size,
            defense_seconds=truth.seconds,
            crafted=truth.model is not self.models.public(self.updates[cell.update][0].adapter),
            wall_seconds=outcome.wall_seconds,
            cpu_seconds=outcome.cpu_seconds,
        )

    def _record(self, cell: Cell, threat: ThreatModel, status: str, reason: str, **found: Any) -> Record:
        found["details"] = {**found.get("details", {}), CUT: self.cut_in[cell.defense, cell.batch_size][cell.batch]}
        return Record(
            key=cell.key, attack=cell.attack, update=cell.update, defense=cell.defense, threat=cell.threat,
            model=Path(self.plan.model).name, data=self.data_name, batch_size=cell.batch_size, seed=cell.seed,
            batch=cell.batch, examples=self.examples_in[cell.defense, cell.batch_size][cell.batch], status=status,
            reason=reason, known_by=asdict(self.known_by[cell.defense]), threat_plain=threat.plain, peak_mb=peak_mb(),
            device=self.device, versions=versions(), **found,
        )  # fmt: skip

    def _attempt(
        self, attack: Attack[Reconstruction], cell: Cell, truth: Transcript, threat: ThreatModel
    ) -> Outcome[Reconstruction]:
        seen = self.lending.observed(truth, threat, self.data.reference)
        if (missing := lacking(attack, seen, cell.threat)) is not None:
            return missing
        rng = generator(cell.seed, "attack", cell.attack, *cell.protected_update, cell.threat, cell.batch_size, cell.batch)

        told = declared(attack, seen)

        def guess() -> Reconstruction:
            made = trusted(well_formed(attack(told, rng=rng, budget=self.work), truth.batch), seen, attack)
            return replace(made, texts=tuple(truth.vocabulary.text(t) for t in made.tokens))

        return attempt(guess, raises=(OutOfMemoryError,))  # a GPU's: a fault of the machine

    def scores(self, guess: Reconstruction, truth: Transcript) -> dict[str, Any]:
        """All metrics of one guess. A metric that this machine cannot compute is recorded with the remedy instead of a
        value, and one that fails, or changes what it was given, with the reason."""
        out, own = {}, {spec.name for spec in self.own}
        for name, metric in self.metrics.items():
            try:
                out[name] = scored(metric, guess, truth)
            except Unavailable as error:
                self.unavailable[name] = str(error)
            if name in own and self.lending.put_back():
                out[name] = no_value(metric, CHANGED, len(truth.batch))
        return out


def audit(
    plan: Plan | None = None,
    *,
    out: str | Path = "runs/audit",
    model: str | Path | nn.Module | None = None,
    tokenizer: Any = None,
    data: str | Path | Sequence[str] | None = None,
    task: Task | None = None,
    attacks: Sequence[AttackLike] | None = None,
    defenses: Sequence[DefenseLike] | None = None,
    metrics: Sequence[MetricLike] | None = None,
    limit: int | None = None,
    budget: str | None = None,
    seed: int | None = None,
    device: str = "cpu",
) -> Iterator[Record]:
    """Run an audit into the folder ``out`` and yield each Record when it is finished. Cells that ``out`` holds are not run
    again.

    ``plan``: the whole plan; the other arguments replace its fields. ``model``: a folder, a hub id, or a Hugging Face model
    in memory with its ``tokenizer``. ``data``: a file, or the private texts themselves. ``attacks``, ``defenses``,
    ``metrics``: names, specs, or objects with the protocols ``Attack``, ``Transform`` and ``Metric``. No attack is assumed
    to know a protection that is given as a ``Transform``, so no verdict says that it stops anything; pass a ``DefenseSpec``
    with ``known_by`` to change this. The baseline without protection always runs. Raises ``InputError`` for bad input,
    before anything runs.
    """
    wanted: dict[str, Any] = {"task": task, "limit": limit, "budget": budget, "seed": seed}
    if data is not None and not isinstance(data, str | Path):
        wanted["texts"] = given_texts(data)
    elif data is not None:
        wanted["data"] = str(data)
    chosen = of_kind(plan or Plan(), Plan, "plan", 'a file or texts are data="notes.jsonl", a model is model="minilm"')
    wanted["attacks"], own_attacks = named_attacks(chosen.attacks if attacks is None else attacks)
    wanted["defenses"], own_defenses = named_defenses(chosen.defenses if defenses is None else defenses)
    wanted["metrics"], own_metrics = named_metrics(chosen.metrics if metrics is None else metrics)
    victim = None
    if isinstance(model, nn.Module):
        if tokenizer is None:
            raise InputError("the model is in memory, but no tokenizer was given; pass its tokenizer as well")
        wanted["task"] = task or chosen.task or task_in_memory(model)
        victim = in_memory(model, tokenizer, wanted["task"], device=device)
        wanted["model"] = victim.name
    elif tokenizer is not None:
        raise InputError("a tokenizer was given for a folder or hub id, which has its own; leave it out")
    elif model is not None:
        wanted["model"] = str(model)
    chosen = chosen.with_given({name: value for name, value in wanted.items() if value is not None})
    methods = methods_with(own_attacks, own_defenses, own_metrics)
    return _recorded(Audit(chosen, device=device, victim=victim, methods=methods), out)


def _recorded(prepared: Audit, out: str | Path) -> Iterator[Record]:
    store = RunStore(out, prepared.plan.canonical())
    try:
        yield from prepared.run(store)
    finally:
        store.close()
