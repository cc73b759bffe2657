"""A run is of one model, one data set and one version of each method: whatever changes is refused, and never mixed."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_setting import TEXTS, causal_folder, model_folder, plan_for
from own_setting import described
from training_setting import notes
from transformers import AutoTokenizer

import rasura
from rasura.core.interfaces import InputError, Transform
from rasura.core.run_store import RunStore
from rasura.core.values import Grant, Reconstruction, Stage
from rasura.registry import ATTACKS, MEMBERSHIP, SERVICE_ATTACKS, SERVICE_METRICS, SERVICE_PROTECTIONS
from rasura.report.compare import compared
from rasura.report.page import opened
from rasura.runs.audit import Audit
from rasura.runs.described import own_code
from rasura.runs.identity import identity_of
from rasura.runs.train_plan import TrainPlan
from rasura.runs.training import Training
from rasura.testing.tiny import tiny

__all__ = ["causal_folder", "model_folder"]


def scaled(by: float, name: str = "scaled") -> Transform[Any, Any, Any]:
    def apply(message: Any, *_: Any) -> Any:
        return replace(message, gradients={n: by * g for n, g in message.gradients.items()}), None

    return Transform(Stage.WIRE, described(name), lambda message: None, apply)


def audited(out: Path, model: Path, **more: Any) -> int:
    """How many new records there are."""
    given = {"data": TEXTS, "attacks": ["blind", "embedding-rows"], "metrics": ["token_recall"]} | more
    return len(list(rasura.audit(model=model, out=out, budget="quick", **given)))


def test_a_run_is_not_resumed_with_another_method_of_the_same_name(model_folder: Path, tmp_path: Path) -> None:
    assert audited(tmp_path, model_folder, defenses=[scaled(0.0)]) == 12
    assert audited(tmp_path, model_folder, defenses=[scaled(0.0)]) == 0, "the same one"
    with pytest.raises(InputError, match="another code of own methods"):
        audited(tmp_path, model_folder, defenses=[scaled(1.0)])


def test_a_run_stores_whose_word_a_guarantee_is(model_folder: Path, tmp_path: Path) -> None:
    audited(tmp_path, model_folder, defenses=[scaled(0.0), "dp-sgd:1.0", "accumulate:9+dp-sgd:1.0"])
    store = RunStore(tmp_path)
    told, why = store.about["protections"], store.about["compositions"]
    store.close()
    assert told["scaled"]["unchecked"] is True and "unchecked" not in told["dp-sgd"]
    assert (
        why["dp-sgd:1.0"] == ""
        and "a method of your own" in why["scaled"]
        and "the time of sending" in why["accumulate:9+dp-sgd:1.0"]
    )


class Names:
    """An attack that names one token."""

    name, needs, uses = "names", frozenset[Grant](), frozenset[Grant]()

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, seen: object, **how: object) -> Reconstruction:
        return Reconstruction(((self.token,),), "matched", ordered=False)


class Constant:
    """A metric that is the same for every guess."""

    name, unit, higher_is, bounds = "constant", "fraction", "worse", (0.0, 1.0)

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, guess: object, truth: Any) -> list[float]:
        return [self.value] * len(truth.batch.input_ids)


@pytest.mark.parametrize(("given", "make", "first", "other"), [("attacks", Names, 5, 6), ("metrics", Constant, 0.25, 0.75)])
def test_a_run_is_not_resumed_with_another_attack_or_metric_of_the_same_name(
    model_folder: Path, tmp_path: Path, given: str, make: Callable[[Any], Any], first: float, other: float
) -> None:
    wanted: dict[str, Any] = {"defenses": ["none"]}
    assert audited(tmp_path, model_folder, **wanted, **{given: [make(first)]}) > 0
    assert audited(tmp_path, model_folder, **wanted, **{given: [make(first)]}) == 0, "the same one"
    with pytest.raises(InputError, match="another code of own methods"):
        audited(tmp_path, model_folder, **wanted, **{given: [make(other)]})


def test_a_metric_outside_of_its_bounds_says_so(model_folder: Path, tmp_path: Path) -> None:
    """It was "ValueError in _scaled", a place in the code."""
    given: dict[str, Any] = {"data": TEXTS, "attacks": ["blind"], "defenses": ["none"], "metrics": [Constant(1.7)]}
    made = list(rasura.audit(model=model_folder, out=tmp_path, budget="quick", **given))
    told = [r.scores["constant"]["reason"] for r in made if r.attack == "blind"]
    assert told and set(told) == {"no value: InputError: a value lies outside [0, 1]: the values go from 1.7 to 1.7"}


def test_a_run_is_not_resumed_on_other_texts(model_folder: Path, tmp_path: Path) -> None:
    def run(texts: Sequence[str], reference: str = "Carol met the echo .") -> int:
        for name, some in (("data", texts), ("reference", [reference])):
            lines = [json.dumps({"text": t, "label": 0}) + "\n" for t in some]
            (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        plan = plan_for(
            model_folder, texts=(), data=str(tmp_path / "data.jsonl"), reference=str(tmp_path / "reference.jsonl"),
            attacks=("blind",), defenses=("none",),
        )  # fmt: skip
        return len(list(rasura.audit(plan, out=tmp_path / "run")))

    assert run(TEXTS) == 3 and run(TEXTS) == 0
    with pytest.raises(InputError, match="another data set"):
        run((TEXTS[0], TEXTS[2], TEXTS[1]))
    with pytest.raises(InputError, match="another reference text"):
        run(TEXTS, "Echo met the carol .")


def test_a_run_is_not_resumed_with_another_language_model(model_folder: Path, tmp_path: Path) -> None:
    def run(add: float) -> int:
        model = tiny("gpt2", "causal")
        with torch.no_grad():
            next(model.parameters()).add_(add)
        model.save_pretrained(tmp_path / "prior")
        AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path / "prior")
        plan = plan_for(model_folder, attacks=("blind",), defenses=("none",), language_model=str(tmp_path / "prior"))
        return len(list(rasura.audit(plan, out=tmp_path / "run")))

    assert run(0.0) == 3 and run(0.0) == 0
    with pytest.raises(InputError, match="another language model"):
        run(1.0)


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("tokenizer_config.json", '"do_lower_case": true', '"do_lower_case": false', "another tokenizer of the"),
        ("tokenizer_config.json", '"strip_accents": null', '"strip_accents": false', "another tokenizer of the"),
        (
            "tokenizer_config.json",
            '"tokenize_chinese_chars": true',
            '"tokenize_chinese_chars": false',
            "another tokenizer of the",
        ),
        ("tokenizer.json", '"alpha": 5,', '"gamma": 5,', "another tokenizer of the"),
        ("config.json", '"num_attention_heads": 4', '"num_attention_heads": 2', "(num_attention_heads: 4, now 2)"),
        ("config.json", '"hidden_act": "gelu"', '"hidden_act": "relu"', '(hidden_act: "gelu", now "relu")'),
        ("tokenizer_config.json", "{", '{"padding_side": "left",', "(tokenizer_padding_side: right, now left)"),
    ],
)
@pytest.mark.parametrize("role", ["model", "language model"])
def test_a_run_is_not_resumed_with_another_tokenizer_or_configuration(
    model_folder: Path, causal_folder: Path, tmp_path: Path, role: str, file: str, old: str, new: str, said: str
) -> None:
    """The weights are the same, and another tokenizer or number of heads makes another model of them."""
    if role != "model" and "another tokenizer" not in said:
        pytest.skip("a decoder has other names for these, and a language model pads nothing")
    folder = tmp_path / "model"
    shutil.copytree(model_folder if role == "model" else causal_folder, folder)
    named = {"folder": folder} if role == "model" else {"folder": model_folder, "language_model": str(folder)}
    plan = plan_for(**named, attacks=("blind",), defenses=("none",), limit=1)
    assert len(list(rasura.audit(plan, out=tmp_path / "run"))) == 1
    assert list(rasura.audit(plan, out=tmp_path / "run")) == []
    before = (folder / file).read_text()
    assert old in before
    (folder / file).write_text(before.replace(old, new, 1))
    with pytest.raises(InputError, match=re.escape(said)):
        list(rasura.audit(plan, out=tmp_path / "run"))
    assert len(list(rasura.audit(plan, out=tmp_path / "now"))) == 1
    runs = [opened(tmp_path / name) for name in ("run", "now")]
    (differs,) = (line for line in compared(*runs).settings if not line.startswith("language model:"))
    assert differs.startswith(("tokenizer of the " if "another tokenizer" in said else "configuration of the ") + role)


def test_texts_that_are_equal_for_the_model_are_one_example(model_folder: Path) -> None:
    texts = ("Alpha met Bravo .", "alpha met  bravo.", "Alpha paid Bravo .", "\u9b3c met Bravo .", "\u9b54 met Bravo .")
    plan = plan_for(model_folder, texts=texts, limit=5, attacks=("blind",), defenses=("none",), batch_sizes=(1, 2))
    found = Audit(plan).examples_in
    assert found["none", 1] == [[0], [0], [1], [2], [2]] and found["none", 2] == [[0, 0], [1, 2]]
    cut = replace(plan, max_length=4, truncate=True)
    assert Audit(cut).examples_in["none", 1] == [[0], [0], [1], [2], [2]]
    assert Audit(replace(cut, max_length=3)).examples_in["none", 1] == [[0], [0], [0], [1], [1]], "[CLS] alpha [SEP]"


def test_a_training_is_not_continued_from_other_weights(model_folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(model_folder, tmp_path / "model")
    plan = TrainPlan(str(notes(tmp_path)), model=str(model))
    Training(plan, tmp_path / "run")
    Training(replace(plan, defenses=("none", "sign")), tmp_path / "run")
    tiny("bert", "classification", num_labels=2, seed=5).save_pretrained(model)
    with pytest.raises(InputError, match="other settings, data or weights"):
        Training(replace(plan, defenses=("none", "sign")), tmp_path / "run")


LEVEL = 1


def helper(x: int) -> int:
    return x + LEVEL


@dataclass
class Method:
    """A method with a parameter."""

    rate: float
    table: Any = None

    def __call__(self, x: int) -> float:
        return self.rate * helper(x)


class Other(Method):
    def __call__(self, x: int) -> float:
        return self.rate - helper(x)


def closed(over: object) -> Callable[[], object]:
    return lambda: over


def test_what_a_method_does_is_its_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    same = [lambda: Method(0.5), lambda: closed(3), lambda: functools.partial(helper, 1), lambda: Method(1, torch.ones(2)),
            lambda: scaled(0.5), lambda: ATTACKS["span"].make()]  # fmt: skip
    for make in same:
        assert identity_of(make()) == identity_of(make())
    different = [Method(0.5), Method(0.25), Other(0.5), closed(3), closed(4), closed([3]), functools.partial(helper, 1),
                 functools.partial(helper, 2), Method(1, torch.ones(2)), Method(1, torch.zeros(2)),
                 Method(1, torch.ones(2).double()), scaled(0.5), scaled(1.0), {1, 2}, {1, 3}]  # fmt: skip
    assert len({identity_of(one) for one in different}) == len(different)
    before = identity_of(Method(0.5))
    monkeypatch.setattr(sys.modules[__name__], "LEVEL", 2)
    assert identity_of(Method(0.5)) != before, "a constant that it uses"
    with open(__file__) as file:
        assert identity_of(Method(0.5, file)) != identity_of(Method(0.5, file)), "nothing to compare"


@pytest.mark.slow
def test_the_identity_is_the_same_in_every_process() -> None:
    code = "import test_own_methods as t; print(t.identity_of(t.Method(0.5, {'b', 'a'})), t.identity_of(t.scaled(2.0)))"
    command, here = [sys.executable, "-c", code], Path(__file__).parent
    found = {subprocess.run(command, cwd=here, capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert len(found) == 1


def test_methods_of_services_and_trained_models_are_compared_too(tmp_path: Path) -> None:
    kinds: tuple[Any, ...] = (SERVICE_ATTACKS, SERVICE_PROTECTIONS, SERVICE_METRICS, MEMBERSHIP)
    shipped = [spec for kind in kinds for spec in kind.values()]
    assert len(shipped) > 20 and own_code(shipped) == {"code of own methods": {}}

    def own(token: int) -> dict[str, Any]:
        made: Any = functools.partial(Names, token)
        return dict(own_code([replace(SERVICE_ATTACKS["knn"], make=made), replace(MEMBERSHIP["loss"], make=made)]))

    store = RunStore(tmp_path, {})
    for _ in range(2):
        store.describe(own(1), fixed=("code of own methods",))
    with pytest.raises(InputError, match="another code of own methods"):
        store.describe(own(2), fixed=("code of own methods",))
    store.close()
