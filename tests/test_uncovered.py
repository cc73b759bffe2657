"""What a training says beside its guarantee: of texts in several rows, texts held out, and an earlier training."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_setting import model_folder
from private_setting import DATA, collate
from torch.utils.data import DataLoader
from training_setting import notes, text

import rasura
from rasura.accounting.ledger import counted
from rasura.accounting.states import read
from rasura.core.errors import InputError
from rasura.runs.train_plan import TrainPlan
from rasura.runs.training import Training
from rasura.testing.tiny import tiny
from rasura.victims.recipe import Recipe

pytest.importorskip("dp_accounting")

__all__ = ["model_folder"]

RECIPE = Recipe(epochs=1, batch_size=4, learning_rate=1e-3, keep="last", patience=1)


def warnings(folder: Path, data: Path, model: Path, defense: str = "dp-sgd:1.0", **options: Any) -> list[str]:
    plan = TrainPlan(
        str(data), str(notes(folder, "test.jsonl", 4, start=40)), str(model),
        **{"defenses": (defense,), "recipe": RECIPE, "delta": 1e-3, **options},
    )  # fmt: skip
    (found,) = Training(plan, folder / "run").run()
    (kept,) = (folder / "run").glob("*/result.json")
    assert json.loads(kept.read_text())["privacy"] == found["privacy"]
    said = list(found["privacy"].get("warnings", ()))
    if "epsilon" in found["privacy"]:
        assert list(counted(kept).warnings) == said
        other = counted(kept, 0.5)  # whose own warning is not that of the training's delta
        assert "delta 0.5 is not below" in other.warnings[0] and list(other.warnings[1:]) == said
    return said


def with_copies(folder: Path, of: int, copies: int) -> Path:
    path = notes(folder)
    more = "".join(json.dumps({"text": text(k), "label": k % 2, "who": "a"}) + "\n" for k in range(of)) * copies
    path.write_text("".join(json.dumps({"text": text(k), "label": k % 2, "who": f"p{k}"}) + "\n" for k in range(12)) + more)
    return path


def test_a_training_on_texts_that_stand_there_once_has_nothing_to_add(tmp_path: Path, model_folder: Path) -> None:
    assert warnings(tmp_path, notes(tmp_path), model_folder) == []


def test_texts_in_several_rows_are_named(tmp_path: Path, model_folder: Path) -> None:
    """Epsilon was said to be "for each text", also of a text that was drawn, clipped and added six times over."""
    (said,) = warnings(tmp_path, with_copies(tmp_path, 6, 5), model_folder, holdout=0.3)
    rows = r"the guarantee is for one row, and [2-6] different training texts stand in several, one in [4-6]\."
    assert re.match(rows, said)


def test_persons_are_covered_with_their_copies(tmp_path: Path, model_folder: Path) -> None:
    data = with_copies(tmp_path, 6, 5)
    assert warnings(tmp_path, data, model_folder, unit="who", holdout=0.3) == []


@pytest.mark.parametrize("changed", [{"keep": "best", "epochs": 2, "patience": 2}, {"epochs": 2}])
def test_held_out_texts_that_decide_something_are_named(changed: Any, tmp_path: Path, model_folder: Path) -> None:
    recipe = Recipe(**{**vars(RECIPE), **changed})
    said = warnings(tmp_path, notes(tmp_path), model_folder, recipe=recipe)
    assert any(one.startswith("nothing is guaranteed for the 1 texts held out of notes.jsonl") for one in said)


def test_a_model_that_was_trained_before_is_named(tmp_path: Path, model_folder: Path) -> None:
    """A training without protection on the same texts began it: the page said (epsilon, delta) for each text."""
    plan = TrainPlan(str(notes(tmp_path)), model=str(model_folder), recipe=RECIPE)
    list(Training(plan, tmp_path / "first").run())
    (said,) = warnings(tmp_path, notes(tmp_path), tmp_path / "first" / "none-0" / "model")
    assert "was itself trained by rasura train, under none" in said and "counts beside this guarantee" in said


def test_a_checkpoint_of_a_trainer_is_named(tmp_path: Path, model_folder: Path) -> None:
    """A new Trainer on the weights of an earlier one stated its own releases, as if the texts were new to the model."""
    from transformers import AutoModelForSequenceClassification, TrainingArguments

    def trained(model: Path, out: str, resume: bool = False) -> Any:
        args = TrainingArguments(str(tmp_path / out), max_steps=2 + 2 * resume, save_steps=2, report_to=[], use_cpu=True)
        loaded = AutoModelForSequenceClassification.from_pretrained(str(model), attn_implementation="eager")
        trainer = rasura.PrivateTrainer(loaded, args, collate, DATA[:9], defense="dp-sgd:1.0", delta=1e-3)
        trainer.train(resume_from_checkpoint=resume or None)
        return trainer.guarantee

    kept = tmp_path / "first" / "checkpoint-2"
    assert trained(model_folder, "first").warnings == ()
    (said,) = trained(kept, "second").warnings
    assert said.startswith(f"{kept} was itself trained by PrivateTrainer, under dp-sgd (2 releases): for a text")
    assert counted(tmp_path / "second" / "checkpoint-2" / "rasura_ledger.json").warnings == (said,)
    for file in model_folder.glob("*token*"):
        shutil.copy(file, kept)
    assert warnings(tmp_path, notes(tmp_path), kept) == [said]
    resumed = trained(kept, "first", resume=True)  # its ledger counts what was released before
    assert (resumed.steps, resumed.warnings) == (4, ())
    (kept / "rasura_ledger.json").write_text("{}")
    (said,) = trained(kept, "third").warnings
    assert "its ledger cannot be read" in said


def test_an_adapter_that_may_have_been_trained_is_named(tmp_path: Path, model_folder: Path) -> None:
    """Beside the adapter lay the ledger of its training, and the next one on the same texts did not mention it."""
    peft: Any = pytest.importorskip("peft")
    from transformers import AutoModelForSequenceClassification

    def base(folder: Path) -> Any:
        return AutoModelForSequenceClassification.from_pretrained(str(folder), attn_implementation="eager")

    def protected(model: Any) -> Any:
        loader: Any = DataLoader(DATA[:9], 9, collate_fn=collate)
        return rasura.protect_training(model, None, loader, "dp-sgd:1.0", epochs=2)

    lora = peft.LoraConfig(r=2, target_modules=["query", "value", "word_embeddings"], task_type="SEQ_CLS")
    private = protected(peft.get_peft_model(base(model_folder), lora))
    private.model(**next(iter(private.loader))).loss.backward()
    torch.optim.SGD(private.model.parameters(), 0.1).step()
    assert private.ledger.spent().warnings == ()
    private.model.save_pretrained(tmp_path / "one")
    private.ledger.save(tmp_path / "one" / "rasura_ledger.json")
    words = "the model's adapter may have been trained before, since its weights are not those of a new LoRA adapter"
    plain = base(tmp_path / "one")  # transformers loads the adapter onto its base
    plain.requires_grad_(True)
    beside = peft.get_peft_model(base(model_folder), lora)
    beside.load_adapter(str(tmp_path / "one"), "other")
    for model in (
        peft.PeftModel.from_pretrained(base(model_folder), str(tmp_path / "one"), is_trainable=True), plain, beside,
        peft.get_peft_model(base(model_folder), peft.IA3Config(task_type="SEQ_CLS")),
    ):  # fmt: skip
        done = protected(model)
        (said,) = done.ledger.spent().warnings
        assert said.startswith(words) and said.endswith("what it spent or gave away counts beside this guarantee")
        assert done.ledger.state_dict()["earlier"] == said
    done.ledger.load_state_dict(private.ledger.state_dict())  # which counts what was released before
    assert done.ledger.spent().warnings == ()


def test_a_training_without_a_guarantee_has_nothing_to_limit(tmp_path: Path, model_folder: Path) -> None:
    assert warnings(tmp_path, with_copies(tmp_path, 6, 5), model_folder, "gaussian:0.1", holdout=0.3) == []


@pytest.mark.parametrize("defense", ["dp-sgd:1.0", "dp-ftrl:1.0/band=1", "directional:100"])
def test_a_loop_names_the_texts_that_it_met_in_several_rows(defense: str) -> None:
    """A data set that holds its texts three times had a smaller epsilon "for each text" than one that holds them once."""
    rows = [{"input_ids": [1, 40 + k, 3, 2], "attention_mask": [1] * 4, "labels": k % 2} for k in range(8)]
    longer = {"input_ids": [1, 7, 7, 7, 7, 2], "attention_mask": [1] * 6, "labels": 0}
    once, thrice = (_looped(defense, [*rows, longer] * times) for times in (1, 3))
    assert once.spent().warnings == ()
    (said,) = thrice.spent().warnings
    assert re.match(
        r"the guarantee is for one row, and at least [2-9] different .* in several, one in at least [23]\.", said
    )
    state = json.loads(json.dumps(thrice.state_dict()))
    assert state["copies"] == list(thrice.copies) and state["copies"][0] > 1
    if not defense.startswith("dp-ftrl"):
        resumed = _looped(defense, rows * 3, begin=False, extra=3)
        resumed.load_state_dict(state)
        assert resumed.spent().warnings == (said,)
    for broken in ([1], 3, [1, -1], None):
        with pytest.raises(InputError, match="copies"):
            read({**state, "copies": broken})
    with pytest.raises(InputError, match="invalid numbers"):
        read({**state, "earlier": 3})


def _looped(defense: str, rows: list[Any], *, begin: bool = True, extra: int = 0) -> Any:
    def collate(some: list[Any]) -> dict[str, Any]:
        longest = max(len(one["input_ids"]) for one in some)
        made = {n: torch.zeros(len(some), longest, dtype=torch.long) for n in ("input_ids", "attention_mask")}
        for place, one in enumerate(some):
            for name, whole in made.items():
                whole[place, : len(one[name])] = torch.tensor(one[name])
        return {**made, "labels": torch.tensor([one["labels"] for one in some])}

    data: Any = [*rows, *rows[:extra]]
    loader: Any = DataLoader(data, 20, collate_fn=collate)
    model: Any = tiny("bert", "classification", num_labels=2)
    model, _, loader, ledger = rasura.protect_training(model, None, loader, defense, epochs=2)
    for batch in loader if begin else ():
        model(**batch).loss.backward()
        model.zero_grad()
    return ledger
