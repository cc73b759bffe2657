"""A training that its own figures end early has the guarantee of its whole plan: its length depends on the texts."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from early_setting import fails, ledger, trainer_of_five_steps

from rasura.accounting import Draw, Ledger, Run, epsilon
from rasura.accounting.ledger import counted, releases_in
from rasura.core.errors import InputError
from rasura.core.rounding import above

pytest.importorskip("dp_accounting")

NOT_MADE, LATER = "of these were not made", "of these are not in the weights"


def draws(made: Ledger, sampling: str, count: int) -> None:
    for k in range(count):
        if sampling == "poisson":
            draw = Draw("poisson", 0.4)
        elif sampling == "fixed":
            draw = made.turn()
        else:
            draw = Draw("disjoint", number=k // 3 + 1)
            made._passes = k // 3 + 1
        made.made(draw, [7, 3], secret=True)


@pytest.mark.parametrize(
    ("defense", "sampling"), [("dp-sgd:2.0", "poisson"), ("dp-ftrl:2.0/band=2", "fixed"), ("directional:3", "shuffled")]
)
@pytest.mark.parametrize("steps", [0, 4, 6])
def test_a_ledger_that_ended_early_states_its_plan(defense: str, sampling: str, steps: int, tmp_path: Path) -> None:
    made, kept = ledger(defense, sampling), tmp_path / "ledger.json"
    draws(made, sampling, steps)
    so_far = made.spent().epsilon if steps else 0
    made.end()
    found = made.spent()
    assert found.epsilon == made.planned.epsilon and so_far < found.epsilon and made.releases == steps
    assert any(NOT_MADE in said for said in found.warnings)
    kept.write_text(json.dumps(made.state_dict()))
    assert (counted(kept).epsilon, counted(kept).warnings) == (found.epsilon, found.warnings)


def test_a_ledger_whose_plan_was_made_says_nothing_of_an_end() -> None:
    made = ledger("dp-sgd:2.0", "poisson")
    draws(made, "poisson", 12)
    made.end()
    assert made.spent().warnings == () and made.spent().epsilon == epsilon(2.0, 0.4, 12, 1e-3)
    assert "unmade" not in made.state_dict()


def test_what_was_not_made_counts_no_more_when_the_training_goes_on() -> None:
    made = ledger("dp-sgd:2.0", "poisson")
    draws(made, "poisson", 4)
    made.end()
    draws(made, "poisson", 8)
    assert made.releases == 12 and made.spent().epsilon == made.planned.epsilon


@pytest.mark.parametrize("sampling", ["poisson", "shuffled"])
def test_a_state_that_ended_early_says_so_until_the_training_goes_on(sampling: Any) -> None:
    defense = "dp-sgd:2.0" if sampling == "poisson" else "directional:3"
    made, later = ledger(defense, sampling), ledger(defense, sampling)
    draws(made, sampling, 3)
    made.end()
    later.load_state_dict(made.state_dict())
    assert later.releases == 3 and later.spent() == made.spent() and later.state_dict() == made.state_dict()
    assert later.planned.epsilon == made.planned.epsilon
    for k in range(9):
        number = 0 if sampling == "poisson" else later.begin() if k % 3 == 0 else later._passes
        later.made(Draw("poisson", 0.4) if sampling == "poisson" else Draw("disjoint", number=number), [7, 3], secret=True)
    assert later.releases == 12 and later.spent().warnings == () and later.spent().epsilon == made.planned.epsilon


@pytest.mark.parametrize(("epochs", "counted_releases"), [(2, 12), (8, 24)])
def test_what_an_earlier_plan_did_not_make_counts_where_nothing_takes_its_place(epochs: int, counted_releases: int) -> None:
    made = ledger("dp-sgd:2.0", "poisson")
    draws(made, "poisson", 4)
    made.end()
    later = Ledger(made.defense, Run(10, 4, epochs, 1e-3), sizes=[7, 3])
    later.load_state_dict(made.state_dict())
    whole = epsilon(2.0, 0.4, counted_releases, 1e-3)
    assert later.planned.epsilon == whole and later.releases == 4
    draws(later, "poisson", 3 * epochs - 4)
    assert later.releases == 3 * epochs and later.spent().epsilon == whole
    assert any(said.startswith("6 of these were not made") for said in later.spent().warnings) == (epochs == 2)
    with pytest.raises(
        InputError, match=rf"all {3 * epochs} planned releases \({epochs} epochs\) were made \({3 * epochs}\)"
    ):
        draws(later, "poisson", 1)


def test_other_noise_takes_no_place() -> None:
    made = ledger("dp-sgd:2.0", "poisson")
    draws(made, "poisson", 4)
    made.end()
    later = ledger("dp-sgd:4.0", "poisson")
    later.load_state_dict(made.state_dict())
    draws(later, "poisson", 8)
    assert later.releases == 12 and later.spent().steps == 20
    assert any(said.startswith("8 of these were not made") for said in later.spent().warnings)


def states_its_plan(trainer: Any, made: int = 2) -> bool:
    found = trainer.guarantee
    said = any(NOT_MADE in one for one in found.warnings)
    return trainer.ledger.releases == made and said and found.epsilon == epsilon(1.0, 6 / 24, 5, 1e-3)


def test_a_trainer_that_a_callback_ends_states_its_plan(tmp_path: Path) -> None:
    """Hugging Face's EarlyStoppingCallback looks at the loss of a model that learned from the texts."""
    trainer = trainer_of_five_steps(tmp_path, lambda control: setattr(control, "should_training_stop", True))
    trainer.train()
    assert states_its_plan(trainer)
    # What stays of the run says so as well: the last log, and the ledger beside the weights.
    first, *_, last = [log["epsilon"] for log in trainer.state.log_history]
    assert first < epsilon(1.0, 6 / 24, 2, 1e-3) and last == float(above(trainer.guarantee.epsilon))
    assert counted(tmp_path / "checkpoint-2" / "rasura_ledger.json") == trainer.guarantee
    trainer.save_model(str(tmp_path / "saved"))
    assert counted(tmp_path / "saved" / "rasura_ledger.json") == trainer.guarantee


def test_a_trainer_that_an_error_ends_states_its_plan(tmp_path: Path) -> None:
    """A search prunes a trial by an exception, whose callback looked at a figure; and a text may cause an error itself."""

    def pruned(control: Any) -> None:
        raise ArithmeticError("pruned")

    trainer = trainer_of_five_steps(tmp_path, pruned)
    with pytest.raises(ArithmeticError, match="pruned"):
        trainer.train()
    assert states_its_plan(trainer)


@pytest.mark.parametrize("steps", [5, 8])
def test_a_trainer_that_ended_early_goes_on_to_its_plan_or_a_larger_one(steps: int, tmp_path: Path) -> None:
    trainer_of_five_steps(tmp_path, lambda control: setattr(control, "should_training_stop", True)).train()
    trainer = trainer_of_five_steps(tmp_path, lambda control: None, steps)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.ledger.releases == steps == trainer.state.global_step
    assert not any(NOT_MADE in said for said in trainer.guarantee.warnings)
    assert trainer.guarantee.epsilon == epsilon(1.0, 6 / 24, steps, 1e-3)


@pytest.mark.parametrize("options", [{}, {"max_steps": -1, "num_train_epochs": 1.25}])
def test_a_trainer_whose_callback_writes_its_counts_states_its_plan(options: dict[str, Any], tmp_path: Path) -> None:
    """A callback that lowers the number of steps ends the training as well: what was made looked complete."""
    trainer = trainer_of_five_steps(tmp_path, lambda control: setattr(control.seen, "max_steps", 3), **options)
    trainer.train()
    assert trainer.state.global_step == 3 == trainer.state.max_steps and states_its_plan(trainer, made=3)


@pytest.mark.parametrize("options", [{}, {"max_steps": -1, "num_train_epochs": 1.25}])
def test_a_trainer_plans_the_steps_that_it_makes(options: dict[str, Any], tmp_path: Path) -> None:
    """Five steps are a pass and a quarter: the plan had two whole passes, up to which a callback could go on."""
    trainer = trainer_of_five_steps(tmp_path, lambda control: None, **options)
    trainer.train()
    assert trainer.ledger.releases == 5 and not any(NOT_MADE in said for said in trainer.guarantee.warnings)
    assert trainer.guarantee.epsilon == trainer.ledger.planned.epsilon == epsilon(1.0, 6 / 24, 5, 1e-3)
    more = trainer_of_five_steps(tmp_path, lambda control: setattr(control.seen, "max_steps", 6), **options)
    with pytest.raises(InputError, match="all 5 planned releases"):
        more.train()


@pytest.mark.parametrize(
    ("event", "at_two"),
    [
        ("on_save", lambda control: setattr(control, "should_training_stop", True)),
        ("on_pre_optimizer_step", fails),
        ("on_substep_end", lambda control: None),
    ],
)
def test_the_last_checkpoint_states_the_plan_whenever_the_training_ended(event: str, at_two: Any, tmp_path: Path) -> None:
    """Ended after the checkpoint was saved, by a callback or in the step after it: it stated what was made until then."""
    trainer = trainer_of_five_steps(tmp_path, at_two, event=event)
    with suppress(ArithmeticError):
        trainer.train()
    made, last = trainer.ledger.releases, max(tmp_path.glob("checkpoint-*"))
    assert (made, last.name) == {"on_save": (2, "checkpoint-2"), "on_substep_end": (5, "checkpoint-5")}.get(
        event, (3, "checkpoint-2")
    )
    found = counted(last / "rasura_ledger.json")
    assert found.epsilon == trainer.guarantee.epsilon == epsilon(1.0, 6 / 24, 5, 1e-3)
    assert any(NOT_MADE in said for said in found.warnings) == (made < 5)
    assert releases_in(last / "rasura_ledger.json") == int(last.name[-1])
    more = trainer_of_five_steps(tmp_path, lambda control: None, 8)
    more.train(resume_from_checkpoint=True)
    # The release of a step whose weights an error took counts for good.
    assert more.ledger.releases == 8 and more.guarantee.epsilon == epsilon(1.0, 6 / 24, 8 + made - int(last.name[-1]), 1e-3)
    assert not any(NOT_MADE in said for said in more.guarantee.warnings)


def test_the_best_checkpoint_states_all_releases_that_chose_it(tmp_path: Path) -> None:
    """That no later weights were better depends on all later releases; it stated those before it."""
    best, found = tmp_path / "checkpoint-1" / "rasura_ledger.json", []

    def trained(steps: int, resumed: bool) -> Any:
        trainer = trainer_of_five_steps(
            tmp_path, lambda control: found.append(counted(best).epsilon), steps, "on_step_begin", save_steps=1,
            eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, metric_for_best_model="early",
        )  # fmt: skip
        trainer.compute_metrics = lambda predicted: {"early": -trainer.state.global_step}
        trainer.train(resume_from_checkpoint=resumed)
        assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1") and releases_in(best) == 1
        assert not any(NOT_MADE in said for said in trainer.guarantee.warnings)
        assert counted(tmp_path / f"checkpoint-{steps}" / "rasura_ledger.json") == trainer.guarantee
        assert any(said.startswith(f"{steps - 1} {LATER}") for said in counted(best).warnings)
        assert counted(best).epsilon == trainer.guarantee.epsilon == epsilon(1.0, 6 / 24, steps, 1e-3)
        return trainer

    trained(5, False)
    assert found == [epsilon(1.0, 6 / 24, 2, 1e-3)], "a process that is killed leaves what was made until the last save"
    with pytest.raises(InputError, match=r"checkpoint-\d holds \d releases, and .*checkpoint-1, to go on from, 1: "):
        trainer_of_five_steps(tmp_path, fails).train(resume_from_checkpoint=str(best.parent))
    trained(8, True)
