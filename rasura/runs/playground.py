"""The playground: one text, a protection and an adversary; each answer as soon as an attack has it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from threading import Lock
from typing import Any

from rasura.core.errors import InputError
from rasura.core.options import known
from rasura.core.records import CUT, Record
from rasura.core.rounding import percent
from rasura.core.so_far import SoFar
from rasura.core.values import Task
from rasura.data.fictional import fictional_notes
from rasura.runs.audit import Audit
from rasura.runs.cells import Cell
from rasura.runs.listened import listened
from rasura.runs.plans import Plan
from rasura.runs.scoring import recovered_so_far
from rasura.victims.embedded import TASKS
from rasura.victims.loading import load, with_one_label
from rasura.victims.weights import task_of

"""Models that are known by name, each with its task here."""

PROTECTIONS = ("none", "noise", "dropout", "frozen-embeddings", "pruning", "half precision", "signs")
ADVERSARIES = ("span", "embedding-rows", "pursuit", "tag", "lamp-cos", "best")
SCORED = ("token_recall",)
LONGEST, MOST = 2000, 8
"""Limits of a question: characters, and texts in an update."""

FIRST = "Mr Albright was given 40 units of insulin on 12 March ."


@dataclass(frozen=True)
class Question:
    """What a person asks. ``noise``: standard deviation of Gaussian noise, where the protection is noise. ``rank``: of LoRA
    adapters, 0 to train all weights. ``batch``: texts in the update; those beside ``text`` are fictional."""

    model: str = "minilm"
    text: str = FIRST
    protection: str = "none"
    attack: str = "span"
    noise: float = 0.001
    rank: int = 0
    batch: int = 1

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Question:
        """From plain values. Raises ``InputError`` for unknown names, wrong types and values out of range."""
        kinds = {f.name: type(f.default) for f in fields(cls)}
        for name, value in told.items():
            if name not in kinds:
                raise InputError(f"unknown field {name!r} of a question; expected {', '.join(kinds)}")
            right = isinstance(value, int | float) if kinds[name] is float else isinstance(value, kinds[name])
            if not right or isinstance(value, bool):
                raise InputError(f"{name} is {value!r}; expected {kinds[name].__name__}")
        asked = cls(**told)
        known("protection", asked.protection, PROTECTIONS)
        known("adversary", asked.attack, ADVERSARIES)
        if not asked.text.strip() or len(asked.text) > LONGEST:
            raise InputError(f"the text has {len(asked.text)} characters; expected 1 to {LONGEST}")
        if not (1 <= asked.batch <= MOST and 0 <= asked.rank <= 64 and 1e-6 <= asked.noise <= 10):
            raise InputError("a slider is out of range")
        return asked

    @property
    def defense(self) -> str:
        """The protection as ``rasura audit`` takes it."""
        made = {"noise": f"gaussian:{self.noise:g}", "dropout": "dropout:0.1", "pruning": "pruning:0.9"}
        return {**made, "half precision": "fp16", "signs": "sign"}.get(self.protection, self.protection)

    def plan(self, task: str) -> Plan:
        """The audit that answers the question."""
        attacks = tuple(dict.fromkeys(("blind", "embedding-rows", self.attack)))
        others = tuple(e.text for e in fictional_notes(self.batch - 1))
        update = f"lora:{self.rank}" if self.rank else "fedsgd"
        return Plan(
            self.model, task, texts=(self.text, *others), attacks=attacks, defenses=(self.defense,), updates=(update,),
            batch_sizes=(self.batch,), limit=self.batch, metrics=SCORED, budget="quick", show_text=True, truncate=True,
        )  # fmt: skip

    def command(self, task: str) -> str:
        """The command line that does the same, and keeps a report."""
        plan = self.plan(task)
        words = ["rasura", "audit", *(w for text in plan.texts for w in ("--text", text))]
        words += ["--model", self.model, "--task", task, "--attack", ",".join(plan.attacks), "--defense", self.defense]
        words += ["--update", plan.updates[0]] if self.rank else []
        words += ["--batch-size", str(self.batch)] if self.batch > 1 else []
        return shlex.join([*words, "--budget", "quick", "--truncate", "--show-text", "--out", "runs/playground"])


class Playground:
    """Models that are loaded once, and the answers to questions, one at a time.

    ``models``: names of ``TASKS``, or folders. ``task``: that of the folders; None for what each states.
    """

    def __init__(self, models: tuple[str, ...], task: Task | None = None) -> None:
        self.tasks = {name: TASKS.get(name) or task or task_of(name) for name in models}
        if images := [name for name, made in self.tasks.items() if made == "vision"]:
            raise InputError(f"{images[0]} reads images; the playground takes language models")
        self.victims = {name: with_one_label(load(name, made)) for name, made in self.tasks.items()}
        self._one = Lock()
        for _ in self.answers({"model": models[0], "text": "A first text ."}):  # reads what the metrics need
            pass

    @property
    def names(self) -> dict[str, str]:
        """What each model is called on the page."""
        return {name: name if name in TASKS else Path(name).name for name in self.tasks}

    def answers(self, told: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The answers to a question as plain values: first the command; then of each attack that it began, what it has read
        so far, and how it ended. The size of the update comes before the end of the first, with ``cut``: how many of the
        text's tokens were sent, and of how many; None where all were.

        Raises ``InputError`` for a wrong question.
        """
        asked = Question.of(told)
        if asked.model not in self.victims:
            raise InputError(f"the model {asked.model!r} is not loaded; expected {', '.join(self.victims)}")
        task = self.tasks[asked.model]
        yield {"kind": "command", "command": asked.command(task)}
        with self._one:
            audit = Audit(asked.plan(task), victim=self.victims[asked.model], baseline=False)
            yield from _told(audit)


def _told(audit: Audit) -> Iterator[dict[str, Any]]:
    """What the attacks of ``audit``, which has one batch, tell and find."""
    (batch,) = (b for some in audit.batches.values() for b in some)
    attack, sized = "", False
    last: dict[str, Any] = {}
    for heard in listened(audit):
        if isinstance(heard, Cell):
            attack, last = heard.attack, {}
            yield {"kind": "began", "attack": attack}
        elif isinstance(heard, SoFar):
            row = recovered_so_far(heard, batch, audit.victim.vocabulary, audit.plan.show_text)
            now = {"kind": "reading", "attack": attack, "ordered": heard.ordered, **row}
            if row["read"] and now != last:
                last = now
                yield now
        else:
            if not sized:
                sized = True
                (kept, whole), *_ = heard.details[CUT] or [(0, 0)]
                cut = [kept, whole] if kept < whole else None
                yield {"kind": "update", "bytes": heard.sent_bytes, "seconds": heard.defense_seconds, "cut": cut}
            yield _answer(heard)


def _answer(record: Record) -> dict[str, Any]:
    """What one attack read of the asked text, which is the first of the batch, and how it ended."""
    row = next(iter(record.recovered), None)
    (level, *_) = record.scores.get("token_recall", {}).get("per_record") or [None]
    level = level if level == level else None
    return {
        "kind": "attack", "attack": record.attack, "status": record.status, "reason": record.reason,
        "confidence": record.confidence, "seconds": record.wall_seconds, "words": [] if row is None else row["words"],
        "read": "" if row is None else row["read"], "recall": level, "percent": None if level is None else percent(level),
        "tokens": record.n_tokens,
    }  # fmt: skip
