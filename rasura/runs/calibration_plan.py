"""The plan of a calibration, checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from rasura.core.given import of_kind
from rasura.core.interfaces import InputError
from rasura.core.options import known
from rasura.registry import METRICS, family, for_task, usual_metrics
from rasura.report.sentence import HEADLINE
from rasura.runs.plans import Plan
from rasura.victims.recipe import Recipe

TOLD = (
    "epochs", "patience", "keep", "batch_size", "learning_rate", "schedule", "warmup", "optimizer", "precision", "seed",
    "physical_batch_size",
)  # fmt: skip
"""Fields of a recipe that options of ``rasura train`` set."""


@dataclass(frozen=True)
class CalibrationPlan:
    """What to find: for each of ``plan.defenses``, which have one open number each (``gaussian``,
    ``frozen-embeddings+pruning``), the weakest setting that keeps ``risk`` at or below ``at_most`` under the attacks of
    ``plan``. ``risk``: a metric of texts, or ``ssim`` for images. ``steps``: settings tried between the last that fails and
    the first that holds. ``utility``: a figure of ``rasura train``, measured under the setting found, on ``train`` (None:
    the data of ``plan``) and ``test``, with at most ``train_limit`` texts; a formal guarantee is also computed for
    ``recipe``, which differs from the usual one in no other fields than ``TOLD`` and ``noise``.
    """

    plan: Plan
    risk: str = "rougeL"
    at_most: float = 0.1
    steps: int = 3
    utility: str | None = None
    train: str | None = None
    test: str | None = None
    train_limit: int | None = None
    recipe: Recipe = field(default_factory=lambda: Recipe(epochs=3))

    def checked(self) -> CalibrationPlan:
        """This plan with the metrics it needs. Raises ``InputError`` if it is wrong."""
        of_kind(self.plan, Plan, "plan", 'a file is Plan(data="notes.jsonl")')
        if not self.plan.task:
            return replace(self, plan=self.plan.with_task()).checked()
        images = self.plan.task == "vision"
        bare = known("risk", self.risk, ("ssim",) if images else for_task(METRICS, "classification"))
        if getattr(METRICS[bare].make, "higher_is", "worse") != "worse":
            raise InputError(f"risk is {self.risk}, of which less means that more was read; choose a share that was read")
        if not 0 < self.at_most < 1:
            raise InputError(f"at-most is {self.at_most}; expected a fraction above 0 and below 1")
        if self.steps < 0:
            raise InputError(f"steps is {self.steps}; expected 0 or more")
        for name, found in (
            ("threat", self.plan.threats), ("batch size", self.plan.batch_sizes), ("update", self.plan.updates)
        ):  # fmt: skip
            if len(found) != 1:
                raise InputError(
                    f"calibrate takes one {name}, found {len(found)}; run it once for each, with different --out folders"
                )
        # Seeded noise is for the measured cost; the guarantee, and the command, are for secure noise.
        told, usual = (*TOLD, "noise"), vars(Recipe())
        if odd := [name for name, value in vars(self.recipe).items() if name not in told and value != usual[name]]:
            raise InputError(
                f"the recipe sets {', '.join(odd)}, which no option of rasura train does, so no command would apply the "
                "setting found; leave it out"
            )
        if self.utility is not None:
            figures = {"classification": ("accuracy", "f1", "mcc", "loss"), "causal": ("loss", "perplexity")}
            if self.plan.task not in figures:
                raise InputError(f"--utility is for language models; the task is {self.plan.task}")
            known(f"utility for the task {self.plan.task}", self.utility, figures[self.plan.task])
            if (self.train or self.plan.data) is None:
                raise InputError("--utility needs texts to train on; pass FILE or --train")
        metrics = self.plan.metrics if images or bare in usual_metrics() else (*usual_metrics(), bare)
        metrics = metrics if images else tuple(dict.fromkeys((*metrics, HEADLINE)))  # no setting holds whose words are read
        for text in self.plan.defenses:
            family(text)
        if len(set(self.plan.defenses)) < len(self.plan.defenses) or not self.plan.defenses:
            raise InputError("no protection was given, or one was given twice; pass each protection once")
        attacks = tuple(a for a in self.plan.attacks if a != "blind")
        if not attacks:
            raise InputError(
                "only the attack blind was given, which always runs; pass at least one attack that reads the update"
            )
        plan = replace(self.plan, metrics=metrics, attacks=attacks)
        unprotected = replace(plan, defenses=("none",)).checked()
        return replace(self, plan=replace(unprotected, defenses=plan.defenses))

    def identity(self) -> dict[str, Any]:
        """The folder's identity: the model and the texts. Targets, protections, attacks and seeds may change within a
        folder."""
        found = self.plan.canonical()
        for name in ("attacks", "defenses", "seeds", "seed", "show_text"):
            del found[name]
        return {**found, "kind": "calibration", "attacks": [], "defenses": []}
