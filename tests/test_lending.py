"""A method that changes what it is given changes nothing for the others: it crashed, and what it changed is put back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_setting import TEXTS, model_folder, plan_for
from own_setting import described

import rasura
from rasura.core.interfaces import InputError, Transform
from rasura.core.unchanged import CHANGED, Assembled, Lent, mark, tensors_of
from rasura.core.values import Grant, Reconstruction, Stage
from rasura.registry import methods_with
from rasura.registry.objects import attack_spec
from rasura.runs.audit import Audit
from rasura.testing.tiny import tiny

__all__ = ["model_folder"]


class Own:
    """An attack that does something to what it sees, and names one text."""

    name = "own"
    needs = frozenset({Grant.BASE_MODEL, Grant.MODEL})
    uses = frozenset({Grant.MECHANISM})

    def __init__(self, does: Callable[[Any], object]) -> None:
        self.does = does

    def __call__(self, seen: Any, *, rng: Any, budget: Any) -> Reconstruction:
        self.does(seen)
        return Reconstruction(((1, 5, 2),))


def tuned(seen: Any) -> None:
    for p in seen.model.parameters():
        p.requires_grad_(True)
    by = torch.optim.SGD(seen.model.parameters(), lr=0.5)
    seen.model(input_ids=torch.tensor([[1, 5, 2]]), labels=torch.tensor([0])).loss.backward()
    by.step()


def behind_autograd(seen: Any) -> None:
    for g in seen.gradients.values():
        g.data.zero_()


def in_numpy(seen: Any) -> None:
    next(iter(seen.gradients.values())).numpy()[:] = 0


def first(seen: Any) -> Any:
    return next(iter(seen.model.parameters()))


WRITES: dict[str, Callable[[Any], object]] = {
    "an entry": lambda seen: [g.sign_() for g in seen.gradients.values()],
    "behind autograd": behind_autograd,
    "in numpy": in_numpy,
    "an entry left out": lambda seen: seen.gradients.clear(),
    "a weight": tuned,
    "one number of a weight": lambda seen: first(seen).data.view(-1)[3:4].add_(1),
    "another tensor in place of a weight": lambda seen: setattr(first(seen), "data", torch.zeros_like(first(seen))),
    "the type": lambda seen: seen.model.double(),
}

QUIET: dict[str, Callable[[Any], object]] = {
    "a layer": lambda seen: setattr(seen.model, "classifier", torch.nn.Identity()),
    "training mode": lambda seen: seen.model.train(),
    "a hook": lambda seen: seen.model.register_forward_pre_hook(lambda *_: 1 / 0),
    "gradients": lambda seen: [p.requires_grad_(True) for p in seen.model.parameters()],
    "the configuration": lambda seen: setattr(seen.model.config, "num_labels", 7),
    "the mechanism": lambda seen: [m.parameters.clear() for m in seen.mechanism if isinstance(m.parameters, dict)],
}


def told(records: Any) -> dict[tuple[str, str, int], Any]:
    return {
        (r.attack, r.defense, r.batch): (r.status, r.reason, r.confidence, r.scores, r.blind, r.sent_bytes)
        for r in records if r.attack != "own"
    }  # fmt: skip


@pytest.fixture(scope="module")
def alone(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, int], Any]:
    return told(run(model_folder, tmp_path_factory.mktemp("alone")))


def run(model: Path, out: Path, *own: Any, **more: Any) -> list[Any]:
    given: dict[str, Any] = {"attacks": [*own, "span"], "defenses": ["none", "bf16"], "metrics": ["token_recall"]} | more
    return list(rasura.audit(model=model, data=TEXTS[:2], out=out, budget="quick", **given))


@pytest.mark.parametrize("what", WRITES)
def test_an_attack_that_writes_into_what_it_is_given_crashed_and_the_others_read_as_without_it(
    what: str, model_folder: Path, alone: Any, tmp_path: Path
) -> None:
    found = run(model_folder, tmp_path, Own(WRITES[what]))
    assert {(r.status, r.reason) for r in found if r.attack == "own"} == {("crashed", CHANGED)}
    assert told(found) == alone and {v[0] for v in alone.values()} == {"ok"}


@pytest.mark.parametrize("what", QUIET)
def test_what_an_attack_did_to_its_own_copy_beside_numbers_is_put_back(
    what: str, model_folder: Path, alone: Any, tmp_path: Path
) -> None:
    found = run(model_folder, tmp_path, Own(QUIET[what]))
    assert {r.status for r in found if r.attack == "own"} == {"ok"}
    assert told(found) == alone


def test_weights_of_which_no_clean_copy_was_kept_end_the_run(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rasura.core.unchanged.KEPT", 100)
    assert len(run(model_folder, tmp_path / "entries", Own(WRITES["an entry"]))) == 8
    with pytest.raises(InputError, match="changed the weights of the model"):
        run(model_folder, tmp_path / "weights", Own(tuned))


@pytest.mark.slow
def test_the_packages_own_attacks_change_nothing(model_folder: Path) -> None:
    prepared = Audit(plan_for(model_folder, attacks=("blind", "embedding-rows", "span", "best"), limit=1))
    assert not prepared.own and not prepared.models._clean[next(iter(prepared.models._clean))].whole
    assert "crashed" not in {r.status for c in prepared.cells for r in prepared.records([c])}


def part(stage: Stage, apply: Any, init: Any = lambda x: None) -> Transform[Any, Any, Any]:
    return Transform(stage, described(f"own-{stage.value}", stage), init, lambda x, state, rng: (apply(x), None))


def rewritten(batch: Any) -> Any:
    batch.input_ids[:, 1:-1] = 7
    return batch


def frozen(model: Any) -> Any:
    for p in model.parameters():
        p.requires_grad_(p.dim() > 1)
        p.data.mul_(0.5)
    return model


def zeroed(about: Any) -> None:
    for p in (about[0] if isinstance(about, tuple) else about).parameters():
        p.data.zero_()


def written(about: Any) -> None:
    about[1]["input_ids"].zero_()


LASTING = {
    "texts": (part(Stage.DATA, rewritten), "ok"),
    "a model without undo": (part(Stage.MODEL, frozen), "ok"),
    "weights, at the data": (part(Stage.DATA, lambda batch: batch, zeroed), "crashed"),
    "weights, at the message": (part(Stage.WIRE, lambda message: message, zeroed), "crashed"),
    "inputs": (part(Stage.WIRE, lambda message: message, written), "ok"),
    "the sum": (part(Stage.AGGREGATE, lambda examples: {n: g.zero_() for n, g in examples.mean().items()}), "ok"),
    "weights, at the sum": (part(Stage.AGGREGATE, lambda examples: examples.mean(), zeroed), "crashed"),
}


def test_a_protection_that_exits_ends_its_own_step_alone(model_folder: Path, alone: Any, tmp_path: Path) -> None:
    found = run(model_folder, tmp_path, defenses=[part(Stage.WIRE, lambda message: sys.exit(0)), "none", "bf16"])
    assert {k: v for k, v in told(found).items() if k[1] in ("none", "bf16")} == alone
    ended = [r for r in found if r.defense == "own-wire"]
    assert ended and all(r.status == "crashed" and "SystemExit" in r.reason for r in ended)


@pytest.mark.parametrize("what", LASTING)
def test_a_protection_that_writes_into_what_it_is_given_leaves_the_other_columns_alone(
    what: str, model_folder: Path, alone: Any, tmp_path: Path
) -> None:
    own, status = LASTING[what]
    found = run(model_folder, tmp_path, defenses=[own, "none", "bf16"])
    here = {k: v for k, v in told(found).items() if k[1] in ("none", "bf16")}
    assert here == alone
    ended = [r.status for r in found if r.defense == f"own-{own.stage.value}" and "changed the model" in r.reason]
    assert ended == (["crashed"] * 2 if status == "crashed" else [])


class OwnMetric:
    name, unit, higher_is, bounds = "own-metric", "share", "worse", (0.0, 1.0)

    def __init__(self, does: Callable[[Any, Any], Any]) -> None:
        self.does = does

    def __call__(self, guess: Any, truth: Any) -> Any:
        return self.does(guess, truth)


def zero_and_say(truth: Any, tensors: Any) -> list[float]:
    for t in tensors:
        t.data.zero_()
    return [1.0] * len(truth.batch)


METRICS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "raises": (lambda guess, truth: 1 / 0, "ZeroDivisionError"),
    "exits": (lambda guess, truth: sys.exit(0), "SystemExit"),
    "too many": (lambda guess, truth: [1.0] * 9, "9 values for 1 examples"),
    "no number": (lambda guess, truth: ["much"], "ValueError"),
    "writes texts": (lambda guess, truth: zero_and_say(truth, [truth.batch.input_ids]), ""),
    "writes weights": (lambda guess, truth: zero_and_say(truth, truth.model.parameters()), CHANGED),
    "writes the update": (lambda guess, truth: zero_and_say(truth, truth.message.gradients.values()), CHANGED),
}


@pytest.mark.parametrize("what", METRICS)
def test_a_metric_that_fails_has_no_value_and_says_why(what: str, model_folder: Path, alone: Any, tmp_path: Path) -> None:
    does, why = METRICS[what]
    found = run(model_folder, tmp_path, metrics=[OwnMetric(does), "token_recall"])
    for r in found:
        scores = r.scores["own-metric"]
        assert r.status == "ok" and why in scores.get("reason", "")
        assert scores["per_record"] == [1.0] if not why else scores["per_record"][0] != scores["per_record"][0]
    here = told(replace(r, scores=_without(r.scores), blind=_without(r.blind)) for r in found)
    assert here == alone


def _without(scores: Any) -> dict[str, Any]:
    return {name: score for name, score in scores.items() if name != "own-metric"}


GUESSES: dict[str, tuple[Callable[[], Any], str]] = {
    "no guess": (lambda: None, "NoneType"),
    "labels": (lambda: Reconstruction(((1, 5, 2),), labels=7), "labels is int"),  # type: ignore[arg-type]
    "tokens": (lambda: Reconstruction(((1, "met", 2),)), "not a whole number"),  # type: ignore[arg-type]
    "texts": (lambda: Reconstruction(((1, 5, 2), (1, 6, 2))), "2 texts for a batch of 1"),
    "many labels": (lambda: Reconstruction((), labels=(0, 1)), "2 labels for a batch of 1"),
    "details": (lambda: Reconstruction((), details={"x": torch.ones(1)}), "details: x"),  # type: ignore[dict-item]
    "images": (lambda: Reconstruction((), images=torch.zeros(2, 1, 4, 4)), "images"),
}


@pytest.mark.parametrize("what", GUESSES)
def test_a_guess_without_the_form_of_one_ends_its_attempt_and_not_the_run(what: str, model_folder: Path) -> None:
    made, why = GUESSES[what]
    plan = plan_for(model_folder, attacks=("own", "span"), defenses=("none",), limit=1)

    class Odd(Own):
        def __call__(self, seen: Any, *, rng: Any, budget: Any) -> Any:
            return made()

    prepared = Audit(plan, methods=methods_with({"own": attack_spec(Odd(lambda seen: None))}, {}, {}))
    odd, span = prepared.records(prepared.cells)
    assert (odd.status, span.status) == ("crashed", "ok") and why in odd.reason


def test_a_mark_is_of_every_bit_of_a_tensor() -> None:
    for shape, kind in (((0,), torch.float32), ((7, 3), torch.float32), ((40, 130), torch.bfloat16), ((4097,), torch.bool)):
        tensor = torch.randint(0, 2, shape).to(kind)
        before = mark(tensor)
        assert mark(tensor.clone()) == before != mark(tensor.to(torch.float64))
        for place in range(0, tensor.numel(), 41):
            other = tensor.clone()
            flat = other.view(-1)
            flat[place] = 1 - flat[place].to(torch.float32)
            assert mark(other) != before
    assert mark(torch.zeros(2, 3)) != mark(torch.zeros(3, 2)) and mark(torch.arange(9.0)[1:]) == mark(torch.arange(1.0, 9.0))
    assert mark(torch.arange(12.0).view(3, 4).T) == mark(torch.arange(12.0).view(3, 4).T.contiguous())


def test_a_model_is_put_together_again_as_it_was() -> None:
    model: Any = tiny("bert", "classification")
    parts, lent = Assembled(model), Lent(lambda: tensors_of(model))
    names = [n for n, _ in model.named_modules()]
    model.bert.encoder.layer = model.bert.encoder.layer[:1]
    model.bert.pooler.forward = lambda x: x
    model.train()
    next(model.parameters()).requires_grad_(False)
    model.register_buffer("more", torch.zeros(1))
    assert lent.changed
    parts.put_back()
    assert [n for n, _ in model.named_modules()] == names and not lent.changed and "forward" not in vars(model.bert.pooler)
    assert all(p.requires_grad for p in model.parameters()) and not any(m.training for m in model.modules())
