"""Decepticons: crafted weights, what an ordinary step on them gives away, and the threat model that allows them."""

from __future__ import annotations

import copy
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from audit_setting import model_folder, plan_for
from torch import Tensor, nn

from rasura.attacks.updates.decepticons import Decepticons
from rasura.attacks.updates.decepticons.reading import _seen_wider
from rasura.core.batches import Batch
from rasura.core.interfaces import ActiveAttack, AttackFailed, Budget, NotApplicable
from rasura.core.rng import generator
from rasura.core.run_store import RunStore
from rasura.core.threat import HONEST_SERVER, MALICIOUS_SERVER, adversary_copy, observe
from rasura.core.values import UNKNOWN, Grant, Observation, Reconstruction, Task
from rasura.registry import attack, parse_defense
from rasura.report.page import ACTIVE, not_tested
from rasura.runs.audit import Audit
from rasura.testing.attacks import token_f1 as f1
from rasura.testing.defenses import snapshot
from rasura.testing.tiny import (
    ALL,
    CAUSAL_VOCABULARY,
    CLS,
    ENCODERS,
    SEP,
    UNSUPPORTED,
    VOCABULARY,
    WORDS,
    batch_for,
    batch_of,
    tiny,
)
from rasura.victims.step import step

__all__ = ["model_folder"]


CRAFTED = (*ENCODERS, "gpt2", "opt", "mpnet")
"""Families that the weights can be crafted for."""


@cache
def sent(family: str, task: Task, hidden: int = 64) -> nn.Module:
    """What the server sends."""
    return Decepticons().craft(tiny(family, task, hidden=hidden), task, rng=generator(0, "craft"))  # type: ignore[arg-type]


def observed(family: str, task: Task, batch: Batch, defense: str = "none", hidden: int = 64) -> Observation:
    vocabulary = CAUSAL_VOCABULARY if task == "causal" else VOCABULARY
    model = sent(family, task, hidden)
    truth = step(model, batch, parse_defense(defense), task=task, vocabulary=vocabulary, rng=generator(0, "step"))
    return observe(truth, MALICIOUS_SERVER)


def read(seen: Observation) -> Reconstruction:
    return attack("decepticons")(seen, rng=generator(1), budget=Budget("quick"))


def texts(batch: Batch) -> Counter[tuple[int, ...]]:
    return Counter(batch.ids(row) for row in range(len(batch)))


def many(rows: int, length: int) -> Batch:
    """Texts of random words that all begin and end alike."""
    drawn = torch.randint(3, WORDS, (rows, length - 2), generator=generator(0, "texts")).tolist()
    return batch_of([[CLS, *row, SEP] for row in drawn], "classification", [k % 3 for k in range(rows)])


@pytest.mark.parametrize("defense", ["none", "frozen-embeddings"])
@pytest.mark.parametrize("family", CRAFTED)
def test_the_texts_of_a_batch_come_back(family: str, defense: str) -> None:
    """Texts of MPNet begin with another token: it counts no place for one with number 1."""
    batch = batch_for("classification", 4)
    if family == "mpnet":
        batch = batch_of([[SEP, *ids[1:]] for ids in texts(batch)], "classification", [0, 1, 2, 0])
    guess = read(observed(family, "classification", batch, defense))
    assert Counter(guess.tokens) == texts(batch) and guess.confidence == "matched"


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_causal_model_gives_all_but_the_last_token_and_prefixes_may_be_shared(family: str) -> None:
    rows = [[CLS, 40, 3, 41, 9, 42], [CLS, 40, 3, 50, 51], [CLS, 60, 3, 60, 61, 62, 9]]
    guess = read(observed(family, "causal", batch_of(rows, "causal")))
    assert Counter(guess.tokens) == Counter((*row[:-1], UNKNOWN) for row in rows)


def test_several_hundred_tokens_come_back_without_knowing_how_many_texts_there_are() -> None:
    """Nearly as many tokens as the model is wide, many of them in one step with another."""
    batch = many(12, 20)
    seen = observed("bert", "classification", batch, hidden=256)
    assert sum(batch.lengths) == 240
    unknown = Observation(seen.message, seen.task, {g: v for g, v in seen.granted.items() if g is not Grant.BATCH_SIZE})
    for one in (seen, unknown):
        found = sum((Counter(read(one).tokens) & texts(batch)).values())
        assert found >= 11


def test_the_model_is_left_as_it_was_and_the_crafted_one_has_its_shape() -> None:
    model = tiny("bert", "classification")
    before = snapshot(model)
    one = Decepticons().craft(model, "classification", rng=generator(0))
    other = Decepticons().craft(model, "classification", rng=generator(0))
    assert snapshot(model) == before and isinstance(Decepticons(), ActiveAttack)
    assert {n: p.shape for n, p in one.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert all(torch.equal(a, b) and bool(torch.isfinite(a).all()) for a, b in zip(one.parameters(), other.parameters()))


@pytest.mark.parametrize("defense", ["dp-sgd:1.0", "gaussian:1.0", "directional:1e2"])
def test_in_much_noise_it_fails_or_says_no_more_than_guessing(defense: str) -> None:
    batch = batch_for("classification", 2)
    seen = observed("bert", "classification", batch, defense)
    blind = attack("blind")(seen, rng=generator(0), budget=Budget())
    try:
        guess = read(seen)
    except AttackFailed:
        return
    rows = [list(batch.ids(k)) for k in range(2)]
    assert all(max(f1(t, r) for t in guess.tokens) <= max(f1(t, r) for t in blind.tokens) + 0.05 for r in rows)


def test_in_little_noise_words_are_read_that_no_single_step_shows() -> None:
    batch = batch_for("classification", 1)
    guess = read(observed("bert", "classification", batch, "gaussian:0.003", hidden=128))
    assert f1(guess.tokens[0], list(batch.ids(0))) >= 0.8


def test_rows_on_both_sides_of_a_step_are_averaged() -> None:
    steps = torch.randn((2, 9, 3), generator=generator(0), dtype=torch.float64)
    rows = steps.flip(1).cumsum(1).flip(1)

    def row(k: int, j: int) -> Tensor:
        return rows[k, max(0, j)] if j < 9 else torch.zeros(3, dtype=torch.float64)

    for scale in (1, 2, 4):
        wider = _seen_wider(steps, scale)
        for k in range(2):
            for j in range(9):
                mine = torch.stack([row(k, j - i) - row(k, j + 1 + i) for i in range(scale)]).sum(0) / scale
                assert torch.allclose(wider[k, j], mine, atol=1e-12)


def test_weights_of_an_honest_server_or_another_kind_are_declined_in_one_line() -> None:
    batch = batch_for("classification", 1)
    model = tiny("bert", "classification")
    truth = step(model, batch, (), task="classification", vocabulary=VOCABULARY, rng=generator(0))
    with pytest.raises(NotApplicable, match="not crafted for this attack"):
        read(observe(truth, HONEST_SERVER))
    with pytest.raises(NotApplicable, match="not in the update"):
        read(observed("bert", "classification", batch, "frozen-blocks:1"))
    with pytest.raises(NotApplicable, match="no blocks with two norms"):
        Decepticons().craft(tiny("llama", "causal"), "causal", rng=generator(0))
    with pytest.raises(NotApplicable, match="one block"):
        Decepticons().craft(tiny("bert", "classification", blocks=1), "classification", rng=generator(0))


@pytest.mark.parametrize("family", sorted({*ALL} - {*UNSUPPORTED, *CRAFTED}))
def test_other_families_are_declined_in_one_line(family: str) -> None:
    with pytest.raises(NotApplicable, match=r"no blocks|one block|another width"):
        Decepticons().craft(tiny(family, "classification"), "classification", rng=generator(0))


def test_an_adversary_sees_the_weights_that_were_sent_and_cannot_change_them() -> None:
    seen = observed("bert", "classification", batch_for("classification", 1))
    assert not any(p.requires_grad for p in seen.model.parameters())
    assert snapshot(adversary_copy(sent("bert", "classification")))[-1] == snapshot(copy.deepcopy(seen.model))[-1]


def test_an_audit_crafts_under_an_active_threat_alone(model_folder: Path, tmp_path: Path) -> None:
    plan = plan_for(
        model_folder, attacks=("blind", "embedding-rows", "decepticons"), defenses=("none",),
        threats=("honest-server", "malicious-server"), batch_sizes=(3,), metrics=("token_recall", "exact_match"),
    )  # fmt: skip
    prepared = Audit(plan)
    before = snapshot(prepared.victim.model)
    store = RunStore(tmp_path / "run", plan.canonical())
    by = {(r.threat, r.attack): r for r in prepared.run(store)}
    store.close()
    assert snapshot(prepared.victim.model) == before
    honest, active = by["honest-server", "decepticons"], by["malicious-server", "decepticons"]
    assert honest.status == "not_applicable" and "pass --threat malicious-server" in honest.reason
    assert active.status == "ok" and active.crafted and active.scores["exact_match"]["mean"] == 1
    # Whoever crafts nothing meets the same step under both.
    assert by["honest-server", "embedding-rows"].scores == by["malicious-server", "embedding-rows"].scores
    assert not any(r.crafted for key, r in by.items() if key != ("malicious-server", "decepticons"))
    assert ACTIVE not in not_tested([r.to_dict() for r in by.values()])
    assert ACTIVE in not_tested([honest.to_dict()])
