"""The federated app: labels that mean the same for all clients, and figures that somebody measured."""

from __future__ import annotations

import importlib
import json
import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from federated_setting import app_modules, configured, folder, simulated
from flower_setting import LocalGrid, app_of, flower
from rounds_setting import FIRST, model

from rasura.core.interfaces import InputError
from rasura.data.text import load_labelled
from rasura.integrations.flower.agreement import agree

__all__ = ["app_modules", "flower", "folder"]

pytestmark = pytest.mark.usefixtures("flower")


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The lines of Flower's log, which does not propagate."""
    logging.getLogger("flwr").addHandler(caplog.handler)
    yield caplog
    logging.getLogger("flwr").removeHandler(caplog.handler)


def labels_of(place: Path, folder: Path, file: Path, **given: Any) -> list[list[int]]:
    """The labels to train on and to evaluate with, of a client with its own ``file``."""
    from flwr.app import Context, RecordDict

    task = importlib.import_module("federated.task")
    context = Context(1, 0, {"data": str(file)}, RecordDict(), configured(place, folder, **given))
    return [[int(r.labels[0]) for r in rows] for rows in task.texts(context)]


def named(folder: Path, *names: str, first: int = 20) -> Path:
    """A file with one text for each label."""
    place = folder / f"{'-'.join(names)}-{first}.csv"
    place.write_text("text,label\n" + "".join(f"w{first + k} w{60 + k},{n}\n" for k, n in enumerate(names)))
    return place


def test_names_of_labels_are_the_same_classes_for_every_client(app_modules: Path, folder: Path) -> None:
    one, other = named(folder, *["positive", "negative"] * 3), named(folder, *["negative", "positive"] * 3)
    for file in (one, other):
        with pytest.raises(InputError, match=r"does not name its classes; .*classes = \"negative,positive\""):
            labels_of(app_modules, folder, file)
    agreed = {"classes": "negative, positive"}
    assert labels_of(app_modules, folder, one, **agreed) == [[1, 0, 1, 0, 0], [1]]
    fresh = named(folder, *["positive", "negative"] * 3, first=30)
    assert labels_of(app_modules, folder, other, **agreed, test=str(fresh)) == [[0, 1, 0, 1, 0, 1], [1, 0, 1, 0, 1, 0]]
    with pytest.raises(InputError, match="not one of the model's classes"):
        labels_of(app_modules, folder, named(folder, "neutral", "positive"), **agreed)
    with pytest.raises(InputError, match="has the classes negative, positive; "):
        labels_of(app_modules, folder, other, **agreed, test=str(named(folder, "no", "yes")))
    assert labels_of(app_modules, folder, named(folder, "1", "0", "1"), **agreed)[0] == [1, 0, 1]


def test_numbers_of_labels_are_classes_of_the_model(
    app_modules: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that counts from 1 trained on other classes than the files of the others, and nothing was said."""
    for numbers, wrong in (((1, 2, 3), 3), ((0, -1, 1), -1)):
        file = named(folder, *map(str, numbers))
        row = 1 + numbers.index(wrong)
        with pytest.raises(
            InputError, match=rf"row {row}: label {wrong} is none of the classes 0 .. 2 of .*same in every client"
        ):
            labels_of(app_modules, folder, file, **{"num-labels": 3})
    told = (
        "{}: labels {} of the classes 0 .. 2 of .*, and no others; each number must mean the class of the model that has it"
    )
    for numbers, few in (((1, 2, 1), "1, 2"), ((0, 2, 2), "0, 2"), ((0, 1, 2), "")):
        caplog.clear()
        file = named(folder, *map(str, numbers))
        assert labels_of(app_modules, folder, file, **{"num-labels": 3})[0] == list(numbers)
        lines = [r.getMessage() for r in caplog.records if r.name == "rasura.data" and "classes" in r.getMessage()]
        assert len(lines) == bool(few) and all(re.fullmatch(told.format(file, few), line) for line in lines)


def test_a_model_that_names_its_classes_numbers_the_labels_of_all(app_modules: Path, folder: Path) -> None:
    config = json.loads((folder / "model" / "config.json").read_text())
    config |= {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    file = named(folder, "yes", "no", "yes")
    assert labels_of(app_modules, folder, file)[0] == labels_of(app_modules, folder, file, classes="no,yes")[0] == [1, 0, 1]
    with pytest.raises(InputError, match="the model has the classes no, yes"):
        labels_of(app_modules, folder, file, classes="yes,no")


@pytest.mark.parametrize("classes", ["negative", "a,b,c", "a,a", "a,", "0,1"])
def test_names_that_are_not_one_for_each_class_are_refused(classes: str, app_modules: Path, folder: Path) -> None:
    with pytest.raises(InputError, match="expected 2 different names"):
        labels_of(app_modules, folder, folder / "texts.jsonl", classes=classes)


def test_what_clients_save_names_the_classes(app_modules: Path, folder: Path) -> None:
    simulated(app_modules, folder, classes="a,b", save=str(folder / "kept" / "{client}-{round}"))
    config = json.loads((folder / "kept" / "0-1" / "config.json").read_text())
    assert config["id2label"] == {"0": "a", "1": "b"} and config["label2id"] == {"a": 0, "b": 1}


def test_a_label_beside_its_name_has_the_number_of_that_class(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    for number in (0, 1):
        file.write_text(json.dumps({"text": "w1", "label": number, "label_text": "positive"}))
        if number:
            assert load_labelled(file, ("negative", "positive"), "M", count=2)[0].label == 1
        else:
            with pytest.raises(InputError, match="other numbers than their names, and M has the classes negative, positive"):
                load_labelled(file, ("negative", "positive"), "M", count=2)


@pytest.mark.parametrize("defense", ["none", "sealing:all/by=secagg"])
def test_a_client_with_other_names_of_classes_is_left_out(defense: str) -> None:
    from rasura.integrations.flower import strategy

    same, other = (agree(defense, model(), classes=names) for names in (("a", "b", "c"), ("b", "a", "c")))
    apps = [app_of(same), app_of(same), app_of(same), app_of(other)]
    made = strategy(same, first_scale=FIRST)
    made.start(grid=LocalGrid(range(4), lambda node, message: apps[node](node, message)), num_rounds=1)
    assert made.figures[1]["counted"] == 3


# Figures


def evaluated(*told: dict[str, Any]) -> tuple[Any, dict[str, float]]:
    """What a run says of an evaluation in which each client reports one of ``told``, and the server's figures."""
    from flwr.app import MetricRecord

    from rasura.integrations.flower import strategy

    def changed(node: int, number: int, reply: Any) -> Any:
        if not reply.content.array_records and "rasura" not in reply.content:
            reply.content["metrics"] = MetricRecord(told[node])
        return reply

    made = strategy(agree("none", model()), first_scale=FIRST)
    grid = LocalGrid(range(len(told)), app_of(agree("none", model()), changed))
    return made.start(grid=grid, num_rounds=1).evaluate_metrics_clientapp.get(1), made.figures[1]


@pytest.mark.parametrize("loss", [math.nan, math.inf, [0.5, math.nan]])
def test_a_figure_that_is_no_number_voids_all_of_its_client(loss: Any, said: pytest.LogCaptureFixture) -> None:
    good, bad = {"num-examples": 2, "accuracy": 0.75, "loss": 0.25}, {"num-examples": 2, "accuracy": 0.5, "loss": loss}
    found, server = evaluated(good, bad, good)
    assert dict(found) == {"accuracy": 0.75, "loss": 0.25} and server["evaluated"] == 2
    assert "round 1, evaluation: 1 of 3 clients is left out" in said.text and "not finite" in said.text
    found, server = evaluated(bad, bad, bad)
    assert found is None and server["evaluated"] == 0
    assert "3 of 3 clients are left out" in said.text and "there is no figure, since no client measured any" in said.text


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        ({"num-examples": 2, "loss": 1e308}, {"num-examples": 2, "loss": 1e308}, "a mean is not finite"),
        ({"num-examples": 1e308, "loss": 1.0}, {"num-examples": 1e308, "loss": 1.0}, "a mean is not finite"),
        ({"num-examples": 2, "loss": 1.0}, {"num-examples": 2, "accuracy": 1.0}, "clients report none in common"),
    ],
)
def test_means_that_cannot_be_are_no_figures(
    one: dict[str, float], other: dict[str, float], why: str, said: pytest.LogCaptureFixture
) -> None:
    found, server = evaluated(one, one, other)
    assert found is None and server["evaluated"] == 0
    assert f"round 1, evaluation: there is no figure, since {why}" in said.text


def test_the_app_measures_texts_that_were_kept_back_or_says_that_there_are_none(
    app_modules: Path, folder: Path, said: pytest.LogCaptureFixture
) -> None:
    few = folder / "few.jsonl"
    few.write_text("".join((folder / "texts.jsonl").read_text().splitlines(keepends=True)[:4]))
    whole = {"data": str(folder / "texts.jsonl")}
    rounds = simulated(app_modules, folder, nodes=[whole, {"data": str(few)}])
    assert [r["server"]["evaluated"] for r in rounds.values()] == [1, 1]
    assert all(set(r["evaluate"]) == {"accuracy", "loss"} for r in rounds.values())
    assert "round 2, evaluation: 1 of 2 clients is left out of the reported figures (1 without a text" in said.text
    rounds = simulated(app_modules, folder, limit=1)
    assert [(r["evaluate"], r["server"]["evaluated"]) for r in rounds.values()] == [({}, 0)] * 2
    assert "2 of 2 clients are left out" in said.text


@pytest.mark.parametrize(("different", "held"), [(10, 2), (5, 1), (4, 0)])
def test_no_text_that_is_measured_on_is_trained_on(different: int, held: int, app_modules: Path, folder: Path) -> None:
    from flwr.app import Context, RecordDict

    task = importlib.import_module("federated.task")
    rows = [{"text": f"w{20 + k % different} w60", "label": k % 2} for k in range(4 * different)]
    file = folder / "copies.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))

    def texts(**given: Any) -> list[list[tuple[int, ...]]]:
        config = configured(app_modules, folder, **given)
        found = task.texts(Context(1, 0, {"data": str(file)}, RecordDict(), config))
        return [[tuple(r.input_ids[0].tolist()) for r in part] for part in found]

    train, kept = texts()
    assert len(kept) == len(set(kept)) == held and not set(kept) & set(train)
    assert len(train) == 4 * (different - held), "all copies of a text are on one side"
    other = folder / "test.jsonl"
    other.write_text("".join(json.dumps({"text": t, "label": 1}) + "\n" for t in ("w20 w60", "w99 w60", "w99 w60")))
    train, kept = texts(test=str(other))
    assert len(train) == 4 * different and len(kept) == 1 and not set(kept) & set(train)


def test_the_scale_is_for_the_texts_that_all_agree_on_and_a_client_with_more_says_so(
    app_modules: Path, folder: Path, said: pytest.LogCaptureFixture
) -> None:
    """The scale was for 64 texts whatever a client had, and nothing told that the rest of its training was cut off."""
    many = folder / "many.jsonl"
    rows = [{"text": f"w{20 + k % 200} w{30 + k // 200} w{100 + k % 90}", "label": 1} for k in range(400)]
    many.write_text("".join(json.dumps(r) + "\n" for r in rows))
    clients = [{"data": str(many)}, {"data": str(folder / "texts.jsonl")}]
    once = {"nodes": clients, "num-server-rounds": 1}
    cut = re.compile(r"round 1: \d+ of this client's \d+ hidden entries lie beyond the agreed scale, and are cut")
    rounds = simulated(app_modules, folder, **once)
    assert rounds["1"]["train"]["rasura-beyond"] > 0 and cut.search(said.text)
    assert "takes 40 steps on 320 texts, but the agreed scale is for 8, those of 64 texts" in said.text
    assert "steps on 8 texts" not in said.text
    for given in ({"scale-texts": 320}, {"defense": "none"}):
        said.clear()
        rounds = simulated(app_modules, folder, **once, **given)
        assert not rounds["1"]["train"].get("rasura-beyond") and "agreed scale" not in said.text

    task = importlib.import_module("federated.task")
    for told, texts in (({}, 64), ({"limit": 9}, 9), ({"update": "local:batch=8/examples=24", "limit": 9}, 24)):
        assert task.scale_texts(configured(app_modules, folder, **told)) == texts
    with pytest.raises(InputError, match="scale-texts is 0; expected the most texts that any client trains on"):
        task.scale_texts(configured(app_modules, folder, **{"scale-texts": 0}))


def test_the_app_has_no_accuracy_of_outputs_that_are_not_finite(app_modules: Path, folder: Path) -> None:
    task = importlib.import_module("federated.task")
    made = task.prepared(configured(app_modules, folder))
    rows = task._texts(str(folder / "texts.jsonl"), 0, 1, 0, task.wanted(configured(app_modules, folder)))
    assert all(0 <= v < 10 for v in task.accuracy(made, rows).values())
    with torch.no_grad():
        for parameter in made.net.parameters():
            parameter.mul_(1e30)
    assert [math.isnan(v) for v in task.accuracy(made, rows).values()] == [True, True]
    assert task.accuracy(made, []) == {}


def test_rounds_whose_training_has_no_figure_are_among_the_results(app_modules: Path, folder: Path) -> None:
    own = app_modules / "federated" / "task.py"
    own.write_text(own.read_text().replace("sum(losses) / len(losses)", "float('nan')"))
    rounds = simulated(app_modules, folder)
    assert [(r["train"], r["server"]["counted"]) for r in rounds.values()] == [({}, 2)] * 2
