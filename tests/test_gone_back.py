"""A training that goes on from an earlier checkpoint: what was released after it was released, and counts for good."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from early_setting import OTHERS, fails, ledger, trainer_of_five_steps
from private_setting import DATA, collate
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from rasura import PrivateTrainer
from rasura.accounting import Draw, Ledger, Run, epsilon
from rasura.accounting.ledger import counted, parsed, releases_in
from rasura.core.errors import InputError
from rasura.registry import parse_defense
from rasura.testing.tiny import tiny

pytest.importorskip("dp_accounting")

LATER = "of these are not in the weights: they were made after these weights"
FILE = "rasura_ledger.json"


class Past:
    """What all processes of a training released, and the one checkpoint that stays of it."""

    def __init__(self, defense: str, kept: Path) -> None:
        self.defense, self.kept, self.made, self.passes = parse_defense(defense), kept, 0, 0

    def process(self, before: int, after: int, ends: bool) -> Ledger:
        """Go on from the checkpoint, if there is one: release ``before`` batches, save, release ``after`` more, and write
        into the checkpoint what counts by then, as ``PrivateTrainer`` does."""
        chance = self.defense[0].mechanism.name == "dp-sgd"
        run = Run(4, 2, 3, 1e-3, "poisson" if chance else "shuffled")
        found = Ledger([p.mechanism for p in self.defense], run, sizes=[7, 3])
        if self.kept.exists():
            found.load(self.kept)
        seen, number = 0, 0
        for place in range(before + after):
            if place == before:
                found.save(self.kept)
            if found.releases == run.steps or (not chance and place % 2 == 0 and found.passes == run.epochs):
                break
            if not chance and place % 2 == 0:
                number, seen = found.begin(), seen + 1
            found.made(Draw("poisson", run.rate) if chance else Draw("disjoint", number=number), [7, 3], secret=True)
            self.made += 1
        if not self.kept.exists() or (before and not after):
            found.save(self.kept)
        self.passes += seen
        if ends:
            found.end()
        found.save(self.kept, made=releases_in(self.kept))
        return found


def stated(state: Any) -> tuple[int, int]:
    """The releases and the passes that a ledger's state counts."""
    numbers = {one["release"]["number"] for one in state["runs"]}
    return sum(one["count"] for one in state["runs"]), len(numbers)


def histories() -> Iterator[tuple[tuple[int, int, bool], ...]]:
    """Up to three processes: releases before the checkpoint and after it, and whether the process ended."""
    one = list(itertools.product((1, 3), (0, 1, 2), (False, True)))
    yield from itertools.product(one, one)
    yield from itertools.product([(0, 2, True), (1, 2, False)], one[1::4], one[::4])


@pytest.mark.parametrize("defense", ["dp-sgd:2.0", "directional:3"])
def test_no_release_of_any_process_is_lost(defense: str, tmp_path: Path) -> None:
    """Each new release took the place of one that another process had made after the checkpoint."""
    for number, history in enumerate(itertools.islice(histories(), 0, None, 1 if defense == "dp-sgd:2.0" else 5)):
        past = Past(defense, tmp_path / f"{number}.json")
        for process in history:
            last = past.process(*process)
            for state in (last.state_dict(), parsed(past.kept)[0]):
                releases, passes = stated(state)
                assert passes >= past.passes if defense[:3] == "dir" else releases >= past.made, history
            if defense[:3] != "dir" and last.releases == 6:
                assert stated(last.state_dict())[0] == past.made, f"{history}: the plan was made, and nothing else counts"


def test_later_releases_stay_when_the_training_goes_on(tmp_path: Path) -> None:
    made, kept = ledger("dp-sgd:2.0", "poisson"), tmp_path / "ledger.json"
    for count in (4, 5):
        for _ in range(count):
            made.made(Draw("poisson", 0.4), [7, 3], secret=True)
        if count == 4:
            made.save(kept)
    made.end()
    made.save(kept, made=releases_in(kept))
    again = ledger("dp-sgd:2.0", "poisson")
    again.load(kept)
    assert (again.releases, again.spent().steps, again.planned.epsilon) == (4, 12, epsilon(2.0, 0.4, 17, 1e-3))
    assert [said.split(" ")[0] for said in counted(kept).warnings] == ["3", "5"] and LATER in counted(kept).warnings[1]
    for _ in range(8):
        again.made(Draw("poisson", 0.4), [7, 3], secret=True)
    assert again.spent().epsilon == again.planned.epsilon and again.spent().steps == 17
    assert next(said for said in again.spent().warnings if LATER in said).startswith("5 ")


def test_a_ledger_of_an_earlier_version_counts_the_safe_way(tmp_path: Path) -> None:
    """It has one number for releases that were not made and for those that were, after these weights."""
    made, kept = ledger("dp-sgd:2.0", "poisson"), tmp_path / "ledger.json"
    for _ in range(4):
        made.made(Draw("poisson", 0.4), [7, 3], secret=True)
    made.end()
    state = made.state_dict()
    del state["later"]
    kept.write_text(json.dumps(state))
    again = ledger("dp-sgd:2.0", "poisson")
    again.load(kept)
    assert again.releases == 4 == releases_in(kept) and again.planned.epsilon == epsilon(2.0, 0.4, 20, 1e-3)
    for found in (again.spent(), counted(kept)):
        assert found.steps == 12 and "an earlier version of Rasura wrote this ledger" in found.warnings[-1]
    again.save(kept)
    assert counted(kept) == again.spent()


def early(folder: Path, scores: list[float], epochs: int = 4, **options: Any) -> Any:
    """A trainer of four releases an epoch, whose checkpoint of the best of ``scores`` stays alone."""
    left, callbacks = iter(scores), options.pop("callbacks", None)
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=6, num_train_epochs=epochs, save_strategy="epoch", eval_strategy="epoch",
        save_total_limit=1, load_best_model_at_end=True, metric_for_best_model="good", report_to=[], use_cpu=True,
    )  # fmt: skip
    return PrivateTrainer(
        tiny("bert", "classification", num_labels=2), args, collate, DATA, OTHERS, delta=1e-3, callbacks=callbacks,
        compute_metrics=lambda predicted: {"good": next(left)}, **({"defense": "dp-sgd:1.0"} | options),
    )  # fmt: skip


def test_a_trainer_that_goes_on_from_its_best_checkpoint_counts_what_came_after_it(tmp_path: Path) -> None:
    """Of 16 releases 8 are in the best weights. Eight more are 24, and 16 were stated."""
    early(tmp_path, [0.5, 0.9, 0.6, 0.6]).train()
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-8"]
    again = early(tmp_path, [0.91, 0.92])
    again.train(resume_from_checkpoint=True)
    assert again.ledger.releases == 16 and again.guarantee.epsilon == epsilon(1.0, 6 / 24, 24, 1e-3)
    assert counted(tmp_path / "checkpoint-16" / FILE) == again.guarantee
    assert again.guarantee.warnings[0].startswith(f"8 {LATER}")


def test_early_stopping_and_going_on_counts_both(tmp_path: Path) -> None:
    stopped = early(tmp_path, [0.9, 0.5], callbacks=[EarlyStoppingCallback(1)])
    stopped.train()
    assert stopped.state.global_step == 8 and stopped.guarantee.epsilon == epsilon(1.0, 6 / 24, 16, 1e-3)
    again = early(tmp_path, [0.91, 0.92, 0.93])
    again.train(resume_from_checkpoint=True)
    assert again.ledger.releases == 16 and again.guarantee.epsilon == epsilon(1.0, 6 / 24, 20, 1e-3)


def test_a_target_counts_what_came_after_the_best_checkpoint(tmp_path: Path) -> None:
    """The whole was within the target by its count, and beyond it."""
    options: Any = {"defense": "dp-sgd", "target_epsilon": 4.0}
    early(tmp_path, [0.9, 0.5], 2, **options).train()
    with pytest.raises(InputError, match=r"^epsilon 4 was not reached: the loaded releases count as well"):
        early(tmp_path, [0.91], 2, **options).train(resume_from_checkpoint=True)
    again = early(tmp_path, [0.91], 2, defense="dp-sgd:20", target_epsilon=None)
    again.train(resume_from_checkpoint=True)
    assert again.guarantee.steps == 12 and again.ledger.releases == 8


def test_each_attempt_that_an_error_ended_counts(tmp_path: Path) -> None:
    """The second attempt saved nothing, so its releases were in no file: the third counted without them."""

    def attempt(resumed: bool) -> Any:
        trainer = trainer_of_five_steps(tmp_path, fails, 8, "on_pre_optimizer_step")
        if resumed:
            trainer.add_callback(type("Third", (EarlyStoppingCallback,), {"on_train_begin": lambda *a, **k: None,
                "on_pre_optimizer_step": lambda self, args, state, control, **k: fails(control)})(1))  # fmt: skip
        with pytest.raises(ArithmeticError):
            trainer.train(resume_from_checkpoint=resumed)
        return trainer

    attempt(False)
    attempt(True)
    last = attempt(True)
    assert last.ledger.releases == 3 and sum(count for _, count in last.ledger.later) == 2
    again = trainer_of_five_steps(tmp_path, lambda control: None, 8)
    again.train(resume_from_checkpoint=True)
    assert again.ledger.releases == 8 and again.guarantee.epsilon == epsilon(1.0, 6 / 24, 11, 1e-3)


def test_a_pass_that_was_left_before_its_end_is_refused_where_the_rest_does_not_fit(tmp_path: Path) -> None:
    """A resumed training begins with a new pass; it was refused after the last step that the passes hold."""

    def passes(steps: int, last: int) -> Any:
        stop = type("Stop", (TrainerCallback,), {"on_step_end": lambda self, args, state, control, **more: setattr(
            control, "should_training_stop", state.global_step >= last)})  # fmt: skip
        args = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=6, max_steps=steps, save_steps=1, report_to=[], use_cpu=True
        )
        model = tiny("bert", "classification", num_labels=2)
        return PrivateTrainer(model, args, collate, DATA, defense="directional:50", delta=1e-3, callbacks=[stop()])

    passes(8, 6).train()
    says = r"checkpoint-6 has 6 steps in 2 of 2 planned passes, .* do not hold the 2 steps to go\. Pass max_steps=10, which"
    again = passes(8, 8)
    with pytest.raises(InputError, match=says):
        again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 0
    more = passes(10, 10)
    more.train(resume_from_checkpoint=True)
    assert (more.state.global_step, more.ledger.releases, more.ledger.passes) == (10, 10, 3)
