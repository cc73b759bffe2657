"""A protection of somebody that returns something of another form is refused by its name, wherever it acts."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_setting import TEXTS, model_folder
from own_setting import described
from torch import Tensor

import rasura
from rasura.core.errors import InputError, Malformed
from rasura.core.interfaces import Transform
from rasura.core.values import Message, Stage
from rasura.testing.settings import send
from rasura.testing.tiny import VOCABULARY, batch_of
from rasura.victims.protected_rows import protected

__all__ = ["model_folder"]


def mine(change: Callable[[Any], Any], stage: Stage = Stage.WIRE, whole: bool = False) -> Transform[Any, Any, Any]:
    """One of ``stage`` that returns what ``change`` makes of its input; ``whole``: also in place of the pair."""
    return Transform(
        stage,
        described("mine-malformed", stage),
        lambda _: None,
        lambda x, state, rng: change(x) if whole else (change(x), None),
    )


def each(change: Callable[[Tensor], Any]) -> Callable[[Message], Message]:
    return lambda message: replace(message, gradients={n: change(g) for n, g in message.gradients.items()})


def masked(make: Callable[[Tensor], Tensor]) -> Callable[[Message], Message]:
    return lambda message: replace(message, visible={n: make(g) for n, g in message.gradients.items()})


MESSAGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "none": (lambda message: None, "returned None; expected a Message"),
    "mapping": (lambda message: dict(message.gradients), "returned a dict; expected a Message"),
    "flat": (each(torch.flatten), r"returned the shape \(\d+,\) for .*; expected \(\d+, \d+\)"),
    "renamed": (
        lambda message: replace(message, gradients={f"x.{n}": g for n, g in message.gradients.items()}),
        "returned 'x.*', which is not among",
    ),
    "empty": (lambda message: replace(message, gradients={}), "returned no entries"),
    "arrays": (each(lambda g: g.numpy()), "returned something else for .* than a dense tensor"),
    "whole-numbers": (each(lambda g: g.to(torch.int8)), "returned something else for .* than a dense tensor"),
    "sparse": (each(lambda g: g.to_sparse()), "returned something else for .* than a dense tensor"),
    "attached": (each(lambda g: g.clone().requires_grad_()), "returned a tensor for .* that still has its computation"),
    "another-kind": (lambda message: replace(message, kind="fedavg"), "changed the kind of the update"),
    "small-masks": (masked(lambda g: torch.ones(1, dtype=torch.bool)), "returned a mask for .* that is not of bool"),
    "weights-as-masks": (masked(torch.ones_like), "returned a mask for .* that is not of bool"),
    "sent-all-the-same": (
        masked(lambda g: torch.zeros_like(g, dtype=torch.bool)), "sends entries of .* that its mask calls hidden",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MESSAGES)
def test_a_message_of_another_form_is_refused(case: str) -> None:
    change, says = MESSAGES[case]
    with pytest.raises(Malformed, match=f"the protection mine-malformed {says}"):
        send("bert", "classification", (mine(change),))


@pytest.mark.parametrize(
    ("stage", "change", "says"),
    [
        (Stage.AGGREGATE, lambda examples: None, "returned None; expected tensors by the names"),
        (Stage.AGGREGATE, lambda examples: list(examples.mean().values()), "returned a list; expected tensors by"),
        (Stage.AGGREGATE, lambda examples: {n: g[None] for n, g in examples.mean().items()}, "returned the shape"),
        (Stage.AGGREGATE, lambda examples: {"mine": torch.ones(2)}, "returned 'mine', which is not among"),
        (Stage.DATA, lambda batch: None, "returned None; expected a Batch"),
        (Stage.DATA, lambda batch: batch.input_ids, "returned a Tensor; expected a Batch"),
        (Stage.MODEL, lambda model: None, "returned None; expected the model that it was given"),
        (Stage.MODEL, deepcopy, "returned a .*; expected the model that it was given, changed in place"),
    ],
)
def test_so_is_every_other_stage(stage: Stage, change: Callable[[Any], Any], says: str) -> None:
    with pytest.raises(Malformed, match=f"the protection mine-malformed {says}"):
        send("bert", "classification", (mine(change, stage),))
    with pytest.raises(Malformed, match="expected two values"):
        send("bert", "classification", (mine(lambda given: given, stage, whole=True),))


def test_no_text_of_a_training_is_lost_by_a_protection_that_returns_fewer(tmp_path: Path) -> None:
    rows = [batch_of([[2, 5 + k, 3]], "classification", [0]) for k in range(3)]
    first = mine(lambda batch: rows[0], Stage.DATA)
    with pytest.raises(Malformed, match="mine-malformed returned 1 examples of 3; expected as many"):
        protected(rows, (first,), torch.nn.Linear(1, 1), VOCABULARY, tmp_path, 0)


def test_an_audit_says_so_and_judges_the_others(model_folder: Path, tmp_path: Path) -> None:
    hides_nothing = mine(MESSAGES["sent-all-the-same"][0])
    records = list(
        rasura.audit(
            model=str(model_folder), data=TEXTS[:1], attacks=["blind", "embedding-rows"], budget="quick", out=tmp_path,
            defenses=[hides_nothing, "fp16"], metrics=["token_recall"],
        )
    )  # fmt: skip
    found = {(r.defense, r.attack): r for r in records}
    assert {r.status for (defense, _), r in found.items() if defense != "mine-malformed"} == {"ok"}
    for attack in ("blind", "embedding-rows"):
        one = found["mine-malformed", attack]
        assert one.status == "crashed" and not one.scores
        assert one.reason.startswith("the training step failed: the protection mine-malformed sends entries of ")
    page = rasura.write_report(tmp_path).read_text(encoding="utf-8")
    assert "sends entries of" in page
    assert issubclass(Malformed, InputError), "a training ends with this line"
