"""The plan of an audit, from the command line or a TOML file, checked once before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from rasura.core.given import given_texts
from rasura.core.interfaces import Budget, InputError
from rasura.core.options import known
from rasura.core.specs import CLASSIFIERS, IMAGES, AttackSpec, DefenseSpec
from rasura.core.values import Task
from rasura.registry import ATTACKS, REGISTERED, Methods, for_task, metric, named, parse_update, parts, usual_metrics
from rasura.runs.fields import toml, typed
from rasura.victims.weights import task_for

COLUMNS = ("text_column", "pair_column", "label_column")
"""Fields that name the columns of data files."""

SUITES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "quick": (
        ("blind", "embedding-rows", "span"),
        ("none", "frozen-embeddings+dropout:0.1"),
    ),
    "full": (
        ("blind", "embedding-rows", "labels", "span", "span-matching", "tag", "best"),
        ("none", "frozen-embeddings+dropout:0.1", "frozen-blocks:1", "pruning:0.9", "gaussian:0.001"),
    ),
}
"""Suite -> (attacks, defenses)."""


@dataclass(frozen=True)
class Plan:
    """One audit: every attack x update x defense x threat x batch size x seed, over the texts of ``data``.

    ``task``: empty for the one that the model's folder states. ``data``: None for the demo notes. ``reference``: a file
    of public texts of the same kind, ``language_model``: folder or hub id of a causal model; both are granted to the
    adversary. ``references``: how many of the reference texts are used, from the first on; None for all. ``limit``:
    texts used, after the first ``skip``; all of ``texts``, or four of a file, unless it is given. ``max_length``: tokens
    of a text at most, those of the model's frame included; with ``truncate``, longer texts are cut. ``num_labels``:
    number of classes of a new head; None for the number that the labels need. ``max_memory``: memory of an attack in
    MiB, beside model and update. ``entries``: fraction of the entries on which matching attacks evaluate L1 and masks.
    ``text_column``, ``pair_column``, ``label_column``: unusual column names of ``data`` and ``reference``.
    ``label_names``: the names of labels that are text in ``data``; the audit fills it in.

    Examples:
        >>> plan = Plan(attacks=("blind", "span"), defenses=("none", "dropout:0.1"), limit=8).checked()
        >>> plan.defenses
        ('none', 'dropout:0.1')

    """

    model: str = "minilm"
    task: str = ""
    data: str | None = None
    texts: tuple[str, ...] = ()
    reference: str | None = None
    language_model: str | None = None
    attacks: tuple[str, ...] = ("blind", "embedding-rows", "span", "best")
    defenses: tuple[str, ...] = ("none", "frozen-embeddings+dropout:0.1", "frozen-blocks:1", "pruning:0.9", "gaussian:0.001")
    updates: tuple[str, ...] = ("fedsgd",)
    threats: tuple[str, ...] = ("honest-server",)
    batch_sizes: tuple[int, ...] = (1,)
    metrics: tuple[str, ...] = usual_metrics()
    limit: int = None  # type: ignore[assignment]  # set below
    seeds: int = 1
    seed: int = 0
    budget: str = "default"
    truncate: bool = False
    max_length: int | None = None
    num_labels: int | None = None
    show_text: bool = False
    max_memory: int = Budget.memory_mb
    entries: float | None = None
    skip: int = 0
    text_column: str | None = None
    pair_column: str | None = None
    label_column: str | None = None
    label_names: tuple[str, ...] = ()
    references: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.texts, tuple) or self.texts:
            object.__setattr__(self, "texts", given_texts(self.texts, "texts"))
        if self.limit is None:
            object.__setattr__(self, "limit", len(self.texts) or 4)

    def with_given(self, given: Mapping[str, Any]) -> Plan:
        """This plan with the fields ``given`` in place of its own. A file of texts stands in place of ``texts``, too, and
        these in place of a file. All texts are audited unless ``given`` has a ``limit``."""
        instead: dict[str, dict[str, Any]] = {"data": {"texts": ()}, "texts": {"data": None}}
        left_out = {k: v for name, fields in instead.items() if name in given for k, v in fields.items()}
        every = {"limit": None} if given.get("texts") else {}
        return replace(self, **{**left_out, **every, **given})

    def with_task(self) -> Plan:
        """This plan with the task that the model's folder states, unless it has one."""
        return self if self.task else replace(self, task=task_for(None, self.model, self.num_labels))

    def checked(self, methods: Methods = REGISTERED) -> Plan:
        """This plan with its task, and the defaults for images if that is ``vision``. Raises ``InputError`` if it is wrong.

        ``methods``: the methods behind its names.
        """
        from rasura.core.threat import THREATS

        if not self.task:
            return self.with_task().checked(methods)
        known("task", self.task, get_args(Task))
        if self.task == "vision" and (plan := self._of_images()) != self:
            return plan.checked(methods)
        for kind, names, choices in (
            ("attack", self.attacks, methods.attacks),
            ("metric", self.metrics, for_task(methods.metrics, self.task)),
            ("threat", self.threats, THREATS),
        ):
            if not names:
                raise InputError(f"no {kind} given; expected at least one of {', '.join(choices)}")
            for name in names:
                known(kind, name.partition(":")[0] if kind == "metric" else name, choices)
        for name in self.metrics:
            metric(name, methods.metrics)
        for update in self.updates:
            if parse_update(update)[0].lora and self.task == "vision":
                raise InputError("update lora is for language models; for images, train all weights")
        for defense in self.defenses:
            for name, _ in parts(defense):
                self._usable("defense", named(name, methods.defenses, "defense"), methods.defenses)
        known("budget", self.budget, ("quick", "default", "paper"))
        self._check_numbers()
        for name in self.attacks:
            self._usable("attack", methods.attacks[name], methods.attacks)
        if self.data is not None and self.texts:
            raise InputError("the plan has both a data file and texts; expected one of them: data, or texts")
        if self.task == "vision" and (self.texts or self.reference):
            raise InputError("the task vision takes images, not --text or --reference; pass a folder of images as FILE")
        return self

    def _check_numbers(self) -> None:
        sizes = [("limit", self.limit), ("seeds", self.seeds), ("max_memory", self.max_memory)]
        for name, value in (*sizes, *(("batch size", b) for b in self.batch_sizes)):
            if value < 1:
                raise InputError(f"{name} is {value}; expected at least 1")
        if self.references is not None and self.references < 1:
            raise InputError(f"references is {self.references}; expected at least 1, or none for all")
        if self.skip < 0:
            raise InputError(f"skip is {self.skip}; expected a number of texts, 0 for none")
        if self.max_length is not None and (self.task == "vision" or self.max_length < 1):
            raise InputError(f"max_length is {self.max_length}; expected at least 1, and texts")
        if self.entries is not None and not 0 < self.entries <= 1:
            raise InputError(f"entries is {self.entries}; expected a fraction above 0 and at most 1")

    def _usable(self, kind: str, spec: AttackSpec | DefenseSpec, methods: Mapping[str, Any]) -> None:
        if self.task in spec.tasks:
            return
        images = spec.tasks == IMAGES
        what = "images" if images else "classifiers of texts" if spec.tasks == CLASSIFIERS else "texts"
        others = f"on {'images' if self.task == 'vision' else self.task}: {', '.join(for_task(methods, self.task))}"
        raise InputError(f"{kind} {spec.name} is for {what}; {'pass --task vision' if images else others}")

    def _of_images(self) -> Plan:
        """This plan, with the defaults for images in place of the defaults for texts."""
        texts = Plan()
        images: dict[str, Any] = {
            "model": "lenet", "attacks": for_task(ATTACKS, "vision"), "metrics": usual_metrics("vision"),
            "defenses": ("none", "pruning:0.9", "gaussian:0.001"),
        }  # fmt: skip
        return replace(self, **{k: v for k, v in images.items() if getattr(self, k) == getattr(texts, k)})

    @property
    def work(self) -> Budget:
        """The attacks' budget."""
        return Budget(self.budget, self.max_memory, self.entries)  # type: ignore[arg-type]  # checked above

    def canonical(self) -> dict[str, Any]:
        """Everything that the results depend on, as plain JSON values: the identity of a run's folder."""
        found = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        del found["max_memory"]
        for name in ("updates", "language_model", "entries", "skip", "max_length", *COLUMNS, "label_names", "references"):
            if getattr(self, name) == getattr(Plan, name):
                del found[name]
        return found


def from_toml(path: Path, base: Plan | None = None) -> Plan:
    """A plan from a TOML file with the fields of ``Plan``; unknown keys and wrong types are refused by name."""
    found = toml(path, "a TOML file with the fields of a plan")
    if found.get("texts") == []:
        raise InputError(f"{path}: texts is empty; expected at least one text, or no entry texts")
    return plan_of(found, str(path), base)


def plan_of(found: Mapping[str, Any], source: str, base: Plan | None = None) -> Plan:
    """A plan from plain values with the names of ``Plan``'s fields; unknown names and wrong types are refused."""
    names = [f.name for f in fields(Plan) if f.name != "label_names"]
    return (base or Plan()).with_given(typed(Plan, found, source, names))
