"""The audit: attack x update x defense x threat x batch size x seed over real batches, as a stream of Records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any, cast

from torch import nn

from rasura.core.accumulation import gathered, least_tokens, tokens_in
from rasura.core.errors import broken
from rasura.core.interfaces import (
    ActiveAttack,
    Attack,
    InputError,
    NotApplicable,
    NotSent,
    Unavailable,
)
from rasura.core.records import Record, RunStore, cell_key
from rasura.core.rng import generator
from rasura.core.threat import THREATS, ThreatModel, adversary_copy, observe
from rasura.core.values import Message, Reconstruction, Task, Transcript
from rasura.core.wire import to_bytes
from rasura.data.images import ImageExample, demo_images, encode_images, images_hash, load_images
from rasura.data.text import E, Example, columns_of, data_hash, demo_examples, encode, groups, load_examples, load_reference
from rasura.registry import (
    REGISTERED,
    Adversaries,
    AttackLike,
    DefenseLike,
    Methods,
    MetricLike,
    adversaries,
    methods_with,
    named_attacks,
    named_defenses,
    named_metrics,
    parse_defense,
    parse_update,
)
from rasura.registry import attack as make_attack
from rasura.registry import metric as make_metric
from rasura.runs.attempt import Outcome, attempt, lacking, peak_mb
from rasura.runs.plans import Plan
from rasura.runs.scoring import recovered, score, versions
from rasura.victims.batching import joined
from rasura.victims.loading import Victim, in_memory, load, with_fresh_adapter
from rasura.victims.step import step

WORK = {"quick": 0.25, "default": 1.0, "paper": 30.0}
"""What a budget makes of an attack's usual cost."""


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix."""

    attack: str
    update: str
    defense: str
    threat: str
    batch_size: int
    seed: int
    batch: int
    key: str


class Audit:
    """A prepared audit: inputs checked, model loaded, cells known. Iterate ``run`` to do what is not done yet.

    ``baseline``: without protection every attack is run as well, whether the plan has ``none`` or not. Only an attack that
    is seen to read there can say anything of a protection; without the baseline every verdict is 'not measured'.
    ``methods``: what the names of the plan stand for.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        device: str = "cpu",
        victim: Victim | None = None,
        baseline: bool = True,
        methods: Methods = REGISTERED,
    ) -> None:
        self.plan, self.methods = plan.checked(methods), methods
        plan = self.plan
        added = () if "none" in plan.defenses or not baseline else ("none",)
        self.columns = (*added, *plan.defenses)
        self.images = self._images() if plan.task == "vision" else []
        self.examples = [] if self.images else self._examples()
        self.defenses = {text: parse_defense(text, methods=methods.defenses) for text in self.columns}
        self.updates = {text: parse_update(text) for text in plan.updates}
        self.metrics = {name.partition(":")[0]: make_metric(name, methods.metrics) for name in plan.metrics}
        self.attacks = {name: methods.attacks[name].make() for name in plan.attacks}
        private: Sequence[Any] = self.images or self.examples
        labels = plan.num_labels or max(2, 1 + max((e.label or 0) for e in private))
        task: Any = plan.task
        self.victim = victim or load(plan.model, task, num_labels=labels, seed=plan.seed, device=device)
        self.device = device
        self.data = images_hash(self.images) if self.images else data_hash(self.examples)
        self.reference = self._reference()
        prior = None if plan.language_model is None else load(plan.language_model, "causal", attacked=False)
        self.language_model = None if prior is None else (prior.model, prior.vocabulary)
        # By adapter rank, 0 for none: the model that is trained, and the adversary's copy of it.
        ranks = {local.lora for local, _ in self.updates.values()}
        self.models = {rank: with_fresh_adapter(self.victim, rank, plan.seed) for rank in sorted(ranks)}
        self.adversaries = {rank: adversary_copy(model) for rank, model in self.models.items()}
        self.crafted: dict[tuple[str, int, int], nn.Module] = {}
        self.unavailable: dict[str, str] = {}
        # Everything is tokenized once before the first cell, so that a bad text is refused now.
        batches = {size: [self._encode(g) for g in groups(private, size)] for size in plan.batch_sizes}
        numbers = {size: list(groups(_numbered(private), size)) for size in plan.batch_sizes}
        self.batches: dict[tuple[str, int], list[Any]] = {}
        self.examples_in: dict[tuple[str, int], list[list[int]]] = {}
        for text, size in product(self.columns, batches):
            places = self._gathered(text, batches[size])
            self.batches[text, size] = [self._joined([batches[size][k] for k in some]) for some in places]
            self.examples_in[text, size] = [[n for k in some for n in numbers[size][k]] for some in places]
        self.cells = list(self._cells())

    def _images(self) -> list[ImageExample]:
        plan = self.plan
        found = demo_images() if plan.data is None else load_images(plan.data, limit=plan.skip + plan.limit)
        return self._wanted(found)

    def _examples(self) -> list[Example]:
        plan = self.plan
        found: list[Example]
        if plan.texts:
            if any(not t.strip() for t in plan.texts):
                raise InputError("--text is empty; expected a text")
            found = [Example(t, None, k % 2, source="--text", row=k + 1) for k, t in enumerate(plan.texts)]
        elif plan.data is None:
            found = demo_examples()
        else:
            read = load_examples(plan.data, limit=plan.skip + plan.limit, columns=columns_of(plan), model=plan.model)
            self.plan = replace(plan, label_names=read.label_names or ())
            found = read
        return self._wanted(found)

    def _wanted(self, found: list[E]) -> list[E]:
        plan = self.plan
        if plan.skip and len(found) <= plan.skip:
            raise InputError(f"skip is {plan.skip}, and there are {len(found)} texts or images; expected less")
        return found[plan.skip : plan.skip + plan.limit]

    def _reference(self) -> tuple[str, ...] | None:
        if self.plan.reference is None:
            return None
        found = load_reference(self.plan.reference, columns_of(self.plan))
        private = {e.text.strip() for e in self.examples}
        both = sum(e.text.strip() in private for e in found)
        if both:
            raise InputError(f"{self.plan.reference} holds {both} of the audited texts; expected other texts of their kind")
        return tuple(e.text for e in found)

    def _encode(self, group: Sequence[Any]) -> Any:
        v = self.victim
        if v.task == "vision":
            return encode_images(group, size=v.max_length, num_labels=v.num_labels, truncate=self.plan.truncate)
        return encode(
            group, v.tokenizer, v.task, max_length=v.max_length, num_labels=v.num_labels, truncate=self.plan.truncate
        )

    def _gathered(self, defense: str, batches: list[Any]) -> list[list[int]]:
        """The places of the batches that a client sends as one: behind ``accumulate`` several, so that it is sent at all.

        What is left over is not sent, and not audited; where nothing is, one batch of all that there is says so.
        """
        least = least_tokens((p.mechanism for p in self.defenses[defense]), self.victim.model)
        if not least:
            return [[k] for k in range(len(batches))]
        whole, rest = gathered([tokens_in(b.inputs()) for b in batches], least)
        return whole or [rest]

    def _joined(self, batches: list[Any]) -> Any:
        return batches[0] if len(batches) == 1 else joined(batches, self.victim.vocabulary.pad_id or 0)

    def _cells(self) -> Iterator[Cell]:
        plan = self.plan
        known = {} if self.reference is None else {"reference": data_hash([Example(t) for t in self.reference])}
        known |= {name: str(value) for name in ("language_model", "entries") if (value := getattr(plan, name)) is not None}
        for size in plan.batch_sizes:
            for seed in range(plan.seed, plan.seed + plan.seeds):
                for batch in range(max(len(self.batches[defense, size]) for defense in self.columns)):
                    for update, defense, threat, attack in product(plan.updates, self.columns, plan.threats, plan.attacks):
                        if batch >= len(self.batches[defense, size]):
                            continue
                        where = {"attack": attack, "defense": defense, "threat": threat, "batch_size": size}
                        where |= {"seed": seed, "batch": batch, "budget": plan.budget}
                        where |= {"update": update} if update != "fedsgd" else {}
                        key = cell_key(model=plan.model, task=plan.task, data=self.data, **known, **where)
                        yield Cell(attack, update, defense, threat, size, seed, batch, key)

    def estimate(self) -> float:
        """Rough CPU seconds of the whole audit on a small model, for the user to decide before it starts."""
        return WORK[self.plan.budget] * sum(self.methods.attacks[c.attack].seconds * c.batch_size for c in self.cells)

    def run(self, store: RunStore, progress: Callable[[Cell], None] | None = None) -> Iterator[Record]:
        """Do the cells that ``store`` lacks, storing and yielding each. The same Records whatever was done before."""
        for cells in self.left(store):
            for record in self.records(cells, progress):
                store.add(record)
                yield record

    def left(self, store: RunStore) -> list[list[Cell]]:
        """The cells that ``store`` lacks, those that share a step together."""
        return [left for _, cells in groupby(self.cells, key=_shared) if (left := [c for c in cells if c.key not in store])]

    def records(self, cells: Sequence[Cell], progress: Callable[[Cell], None] | None = None) -> Iterator[Record]:
        """The Records of ``cells`` that share a step, which is taken once."""
        truth: Transcript | tuple[str, str] | None = None
        for cell in cells:
            if progress is not None:
                progress(cell)
            truth = truth or self._step(cell)
            yield self._cell(cell, truth)

    def _step(self, cell: Cell) -> Transcript | tuple[str, str]:
        """The step that the cell attacks; or why there is none to attack, as the status and the reason of its cells."""
        # Seeded by the cell's place, not by what ran before, so that a resumed run takes the same step.
        rng = generator(cell.seed, "step", *_named(cell), cell.batch_size, cell.batch)
        batch = self.batches[cell.defense, cell.batch_size][cell.batch]
        v = self.victim
        local, wire = self.updates[cell.update]
        defense = (*self.defenses[cell.defense], *wire)
        public = self._public(cell)
        try:
            model = self._crafted(cell, public)
            return step(model, batch, defense, task=v.task, vocabulary=v.vocabulary, rng=rng, local=local, public=public)
        except (NotSent, NotApplicable) as reason:
            return "not_applicable", str(reason)
        except InputError:
            raise
        except Exception as error:
            return "crashed", f"the training step broke: {broken(error)}"

    def _crafted(self, cell: Cell, public: nn.Module) -> nn.Module:
        """The model that is trained on: ``public``, or what the server sends instead under an active threat model."""
        attack, task = self.attacks[cell.attack], self.victim.task
        if not (THREATS[cell.threat].active and isinstance(attack, ActiveAttack)):
            return public
        key = cell.attack, self.updates[cell.update][0].lora, cell.seed
        if key not in self.crafted:
            # One at a time: each is as large as the model.
            self.crafted = {key: attack.craft(public, task, rng=generator(cell.seed, "craft", cell.attack))}
        return self.crafted[key]

    def _cell(self, cell: Cell, truth: Transcript | tuple[str, str]) -> Record:
        threat = THREATS[cell.threat]
        if isinstance(truth, tuple):
            return self._record(cell, threat, *truth)
        if isinstance(self.attacks[cell.attack], ActiveAttack) and not threat.active:
            reason = f"it crafts the weights that are trained on, and {cell.threat} sends the model as it is"
            return self._record(cell, threat, "not_applicable", f"{reason}; pass --threat malicious-server")
        outcome = self._attempt(self.attacks[cell.attack], cell, truth, threat)
        blind = self._attempt(make_attack("blind"), replace(cell, attack="blind"), truth, threat)
        guess = Reconstruction((), details=outcome.details) if outcome.status == "failed" else outcome.guess
        scored = guess is not None and (bool(guess.tokens) or guess.images is not None)
        return self._record(
            cell,
            threat,
            outcome.status,
            outcome.reason,
            confidence=guess.confidence if guess is not None else "none",
            scores=self.scores(guess, truth) if guess is not None and scored else {},
            blind=self.scores(blind.guess, truth) if blind.guess is not None else {},
            recovered=recovered(guess, truth, self.plan.show_text) if guess is not None and scored else [],
            details=dict(guess.details) if guess is not None else {},
            n_tokens=0 if self.images else sum(truth.text_batch.lengths),
            sent_bytes=_sent_bytes(truth.message),
            defense_seconds=truth.seconds,
            crafted=truth.model is not self._public(cell),
            wall_seconds=outcome.wall_seconds,
            cpu_seconds=outcome.cpu_seconds,
        )

    def _record(self, cell: Cell, threat: ThreatModel, status: str, reason: str, **found: Any) -> Record:
        return Record(
            key=cell.key,
            attack=cell.attack,
            update=cell.update,
            defense=cell.defense,
            threat=cell.threat,
            model=self.plan.model if self.plan.model == "minilm" else Path(self.plan.model).name,
            data=self.data,
            batch_size=cell.batch_size,
            seed=cell.seed,
            batch=cell.batch,
            examples=self.examples_in[cell.defense, cell.batch_size][cell.batch],
            status=status,
            reason=reason,
            known_by=asdict(self._adversaries(cell.defense)),
            threat_plain=threat.plain,
            peak_mb=peak_mb(),
            device=self.device,
            versions=versions(),
            **found,
        )

    def _adversaries(self, defense: str) -> Adversaries:
        known = self.methods
        return adversaries(defense, images=bool(self.images), defenses=known.defenses, attacks=known.attacks)

    def _public(self, cell: Cell) -> nn.Module:
        """The model that an honest server sends."""
        return self.models[self.updates[cell.update][0].lora]

    def _attempt(
        self, attack: Attack[Reconstruction], cell: Cell, truth: Transcript, threat: ThreatModel
    ) -> Outcome[Reconstruction]:
        sent, public = truth.model, self._public(cell)
        adversary = self.adversaries[self.updates[cell.update][0].lora] if sent is public else adversary_copy(sent)
        seen = observe(
            truth, threat, adversary_model=adversary, reference_text=self.reference, language_model=self.language_model
        )
        if (missing := lacking(attack, seen, cell.threat)) is not None:
            return missing
        rng = generator(cell.seed, "attack", cell.attack, *_named(cell), cell.threat, cell.batch_size, cell.batch)

        def guess() -> Reconstruction:
            made = attack(seen, rng=rng, budget=self.plan.work)
            return replace(made, texts=tuple(truth.vocabulary.text(t) for t in made.tokens))

        return attempt(guess)

    def scores(self, guess: Reconstruction, truth: Transcript) -> dict[str, Any]:
        """All metrics of one guess; a metric that this machine cannot compute is noted with its remedy, not faked."""
        out = {}
        for name, metric in self.metrics.items():
            try:
                out[name] = score(metric, guess, truth)
            except Unavailable as error:
                self.unavailable[name] = str(error)
        return out


def _numbered(private: Sequence[Any]) -> list[int]:
    """A number for each text or image, the same for the same one: what comes twice counts once."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(_content(one), len(numbers)) for one in private]


def _content(one: Any) -> Any:
    return one.pixels.numpy().tobytes() if isinstance(one, ImageExample) else (one.text, one.text_pair)


def _shared(cell: Cell) -> tuple[Any, ...]:
    """What the cells of one step share."""
    # An active adversary has the step taken on weights of its own.
    own = cell.attack if THREATS[cell.threat].active else ""
    return cell.update, cell.defense, cell.batch_size, cell.seed, cell.batch, own


def _sent_bytes(message: Message) -> int:
    if message.sealed:
        return len(to_bytes(message))
    return sum(g.numel() * g.element_size() for g in message.gradients.values())


def _named(cell: Cell) -> list[str]:
    """What names the sent message's kind: the same seeds as ever where it is one gradient."""
    return [cell.defense] if cell.update == "fedsgd" else [cell.update, cell.defense]


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
    """Run an audit into the folder ``out``, yielding each Record as it is done; what ``out`` holds is not redone.

    ``plan``: the whole plan, whose fields the other arguments replace. ``model``: a folder, a hub id, or a Hugging Face
    model in memory with its ``tokenizer``. ``data``: a file, or the private texts themselves. ``attacks``, ``defenses``,
    ``metrics``: names, specs, or objects that keep the protocols ``Attack``, ``Transform`` and ``Metric``. No attack is
    taken to know a protection that is given as a ``Transform``, so no verdict says that it stops anything: give a
    ``DefenseSpec`` with ``known_by`` for that. The baseline without protection is run where ``plan`` lacks it. Raises
    ``InputError`` for bad input, before anything runs.
    """
    wanted: dict[str, Any] = {"task": task, "limit": limit, "budget": budget, "seed": seed}
    if data is not None and not isinstance(data, str | Path):
        wanted |= {"texts": tuple(data), "limit": limit or len(data)}
    elif data is not None:
        wanted["data"] = str(data)
    chosen = plan or Plan()
    wanted["attacks"], own_attacks = named_attacks(chosen.attacks if attacks is None else attacks)
    wanted["defenses"], own_defenses = named_defenses(chosen.defenses if defenses is None else defenses)
    wanted["metrics"], own_metrics = named_metrics(chosen.metrics if metrics is None else metrics)
    victim, learned = None, cast(Task, task or chosen.task)
    if isinstance(model, nn.Module):
        if tokenizer is None:
            raise InputError("model is in memory; expected its tokenizer, too")
        victim = in_memory(model, tokenizer, learned, device=device)
        wanted["model"] = victim.name
    elif tokenizer is not None:
        raise InputError("tokenizer is for a model in memory; a folder or hub id brings its own")
    elif model is not None:
        wanted["model"] = str(model)
    chosen = replace(chosen, **{name: value for name, value in wanted.items() if value is not None})
    methods = methods_with(own_attacks, own_defenses, own_metrics)
    return _recorded(Audit(chosen, device=device, victim=victim, methods=methods), out)


def _recorded(prepared: Audit, out: str | Path) -> Iterator[Record]:
    store = RunStore(out, prepared.plan.canonical())
    try:
        yield from prepared.run(store)
    finally:
        store.close()
