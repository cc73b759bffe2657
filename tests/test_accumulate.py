"""Accumulation: nothing leaves with too few tokens, in the step, the audit and training; and the rank law behind it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_setting import model_folder, plan_for
from hypothesis import given, settings
from hypothesis import strategies as some
from training_setting import RECIPE, figures, rows

from rasura.attacks.shared.verify import in_span
from rasura.attacks.updates.span.leverage import or_by_leverage
from rasura.core.accumulation import Accumulator, gathered, needed_tokens, tokens_in, width
from rasura.core.batches import Batch
from rasura.core.interfaces import AttackFailed, Budget, InputError, NotApplicable, NotSent
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import Reconstruction, Transcript
from rasura.data.text import load_examples
from rasura.registry import attack, parse_defense
from rasura.runs.audit import Audit, audit
from rasura.runs.train_plan import TrainPlan
from rasura.runs.training import Training
from rasura.testing.tiny import CLS, SEP, VOCABULARY, batch_of, tiny
from rasura.victims.batching import batches, joined
from rasura.victims.loading import load
from rasura.victims.models import parts
from rasura.victims.step import step
from rasura.victims.train import FineTuning

__all__ = ["model_folder"]


def sent(model: torch.nn.Module, batch: Batch, defense: str) -> Transcript:
    return step(model, batch, parse_defense(defense), task="classification", vocabulary=VOCABULARY, rng=generator(0, "step"))


def texts(count: int, length: int = 8, seed: int = 0) -> list[Batch]:
    """Texts of ``length`` tokens whose words all differ."""
    words = (11 + torch.randperm(280, generator=generator(seed))).tolist()
    middle = length - 2
    return [batch_of([[CLS, *words[k * middle : (k + 1) * middle], SEP]], "classification", [k % 2]) for k in range(count)]


def test_an_update_with_too_few_tokens_is_not_sent_and_one_with_enough_is_the_plain_one() -> None:
    model = tiny("bert", "classification")
    batch = joined(texts(2, 6), 0)
    with pytest.raises(NotSent, match="hold 10 different tokens, but accumulate waits for 11"):
        sent(model, batch, "accumulate:11")
    plain, waited = sent(model, batch, "none"), sent(model, batch, "accumulate:10")
    assert all(torch.equal(g, waited.message.gradients[n]) for n, g in plain.message.gradients.items())


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "gpt2", "llama"])
def test_multiples_are_of_the_hidden_size(family: str) -> None:
    model = tiny(family, "classification", hidden=32)
    assert width(model) == 32
    for text, least in (
        ("accumulate:0.1d", 4),
        ("accumulate:1d", 32),
        ("accumulate:1.5d", 48),
        ("accumulate:7", 7),
        ("none", 0),
    ):
        assert needed_tokens((p.mechanism for p in parse_defense(text)), model) == least


@pytest.mark.parametrize("text", ["", "0", "-3", "1.5", "0d", "infd", "nand", "many", "d"])
def test_bad_amounts_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="accumulate"):
        parse_defense(f"accumulate:{text}")


def test_span_reads_below_the_width_and_nothing_from_it_on() -> None:
    """The law behind it: with as many tokens as the model is wide, the row space is everything."""
    model = tiny("bert", "classification", hidden=32)
    # The norm of a fresh model takes one direction away from every input.
    for count, rank, reads in ((1, 8, True), (10, 31, False)):
        rows_of = texts(count)
        truth = sent(model, joined(rows_of, 0), "accumulate:1d" if count > 1 else "none")
        query = next(g for n, g in truth.message.gradients.items() if n.endswith("layer.0.attention.self.query.weight"))
        assert int(torch.linalg.matrix_rank(query.double(), rtol=1e-7)) == rank
        seen = observe(truth, HONEST_SERVER)
        try:
            found: tuple[Any, ...] = attack("span")(seen, rng=generator(0), budget=Budget("quick")).tokens
        except (AttackFailed, NotApplicable):
            found = ()
        assert any(row.ids(0) in found for row in rows_of) is reads


def test_words_that_come_often_stand_out_of_a_full_row_space() -> None:
    """Every token lies in it, yet its directions are not equally strong."""
    model = tiny("llama", "causal", hidden=32)
    words = (11 + torch.randperm(280, generator=generator(0))).tolist()
    often, rare = words[:6], words[6:42]
    lines = [[CLS, *often, SEP]] * 12 + [[CLS, *rare[k : k + 6], SEP] for k in range(0, 36, 6)]
    defense = parse_defense("frozen-embeddings+accumulate:1.0d")
    truth = step(model, batch_of(lines, "causal"), defense, task="causal", vocabulary=VOCABULARY, rng=generator(0, "step"))
    seen = observe(truth, HONEST_SERVER)

    def fails() -> Reconstruction:
        raise AttackFailed("every token lies in the row space")

    guess = or_by_leverage(fails, seen)
    assert set(guess.tokens[0]) == set(often) and (guess.confidence, guess.ordered) == ("matched", False)
    for ordered, known, stays in ((True, 4, True), (True, 2, False), (False, 4, False)):
        read = in_span((tuple(often[:known]),), seen, believed=False, ordered=ordered)
        found = or_by_leverage([read].pop, seen)
        assert (found.tokens == read.tokens) is stays, "an order is not given up for a few words"
        assert found.details.get("other_words") == (2 if stays else None), "and those are told of"
    noise = {n: torch.randn(g.shape, generator=generator(1)) for n, g in seen.gradients.items()}
    with pytest.raises(AttackFailed, match="every token"):
        or_by_leverage(fails, replace(seen, message=replace(seen.message, gradients=noise)))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_token_that_nothing_is_predicted_from_does_not_count(family: str) -> None:
    """The law behind it: the first block's rank is that of the tokens that count, or with positions no less."""
    model = tiny(family, "causal")
    lines = [[CLS, 20, 21, 22], [CLS, 20, 23], [CLS, 24, 25, 26, 27]]
    batch = batch_of(lines, "causal")
    assert tokens_in(batch.inputs()) == {CLS, 20, 21, 24, 25, 26}
    value = parts(model).blocks[0].qkv[-1].weight
    truth = step(model, batch, (), task="causal", vocabulary=VOCABULARY, rng=generator(0))
    rank = int(torch.linalg.matrix_rank(truth.message.gradients[value].double(), rtol=1e-7))
    assert rank == 6 if family == "llama" else rank >= 6
    masked = replace(
        batch, labels=torch.where(torch.arange(5) < 2, batch.labels, -100)
    )  # only the second token is predicted
    assert tokens_in(masked.inputs()) == {CLS}
    assert tokens_in(batch_of(lines, "classification").inputs()) == {i for line in lines for i in line}


# --- gathering


@settings(max_examples=100, deadline=None)
@given(some.lists(some.lists(some.integers(0, 30), max_size=9), max_size=40), some.integers(1, 25))
def test_groups_are_consecutive_and_hold_just_enough(tokens: list[list[int]], least: int) -> None:
    whole, rest = gathered(tokens, least)
    assert [k for group in [*whole, rest] for k in group] == list(range(len(tokens)))

    def held(group: list[int]) -> int:
        return len({i for k in group for i in tokens[k]})

    assert all(held(group) >= least > held(group[:-1]) for group in whole) and held(rest) < least


def test_an_accumulator_gives_the_gradient_of_all_texts_together_and_keeps_quiet_before() -> None:
    model = tiny("bert", "classification").double()
    every = texts(6, 6)
    parts = [joined(every[a:b], 0) for a, b in ((0, 2), (2, 3), (3, 6))]
    held = Accumulator(26)  # 4 words of each text, and two tokens around them all
    for part in parts[:2]:
        update = sent(model, part, "none").message.gradients
        assert held.add(update, tokens_in(part.inputs()), weight=len(part)) is None
    assert len(held.tokens) == 14
    mean = held.add(sent(model, parts[2], "none").message.gradients, tokens_in(parts[2].inputs()), weight=3)
    whole = sent(model, joined(every, 0), "accumulate:26").message.gradients
    assert mean is not None and all(torch.allclose(mean[n], g, atol=1e-12) for n, g in whole.items())
    assert (held.tokens, held.weight, held.total) == (set(), 0.0, {})


def test_the_same_text_again_does_not_count() -> None:
    held = Accumulator(5)
    assert all(held.add({"a": torch.ones(1)}, [1, 2, 2, 3]) is None for _ in range(9))
    assert held.add({"a": torch.ones(1)}, [4, 5]) is not None


def test_an_accumulator_refuses_what_it_cannot_add() -> None:
    held = Accumulator(10)
    held.add({"a": torch.ones(2)}, [3])
    for update, weight, says in (
        ({"b": torch.ones(2)}, 1.0, "tensors differ"), ({"a": torch.ones(3)}, 1.0, "tensors differ"),
        ({"a": torch.ones(2)}, 0.0, "weight 0.0"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=says):
            held.add(update, [4], weight=weight)
    assert held.tokens == {3}
    with pytest.raises(InputError, match="at least 1"):
        Accumulator(0)


# --- the audit and training


@pytest.mark.slow
def test_the_audit_sees_the_accumulated_update_of_several_batches(tmp_path: Path, model_folder: Path) -> None:
    plan = plan_for(model_folder, attacks=("blind", "span"), defenses=("none", "accumulate:9", "accumulate:500"))
    prepared = Audit(plan)
    plain = prepared.batches["none", 1]
    lengths = [sum(b.lengths) for b in plain]
    seen = [tokens_in(b.inputs()) for b in plain]
    assert len(seen) == 3 and len(seen[0]) < 9 <= len(seen[0] | seen[1])
    records = list(audit(plan, out=tmp_path / "run"))
    by = {name: [r for r in records if r.defense == name] for name in plan.defenses}
    assert len(by["none"]) == 6
    waited = [r for r in by["accumulate:9"] if r.attack == "blind"]
    assert [r.n_tokens for r in waited] == [sum(lengths[:2])]  # what is left over is not sent
    assert waited[0].scores["rouge1"]["n"] == 2 and waited[0].batch_size == 1
    assert {(r.status, r.reason) for r in by["accumulate:500"]} == {
        (
            "not_applicable",
            f"nothing is sent: the texts hold {len(frozenset().union(*seen))} different tokens, but accumulate "
            "waits for 500",
        )
    }


def test_training_steps_hold_enough_tokens_and_every_text(tmp_path: Path) -> None:
    data = rows()
    model = tiny("bert", "classification", num_labels=2)
    run = FineTuning(
        model, data, parse_defense("accumulate:16"), RECIPE, tmp_path, task="classification", vocabulary=VOCABULARY,
        evaluate=lambda m: figures(m, data), watched="accuracy", higher=True,
    )  # fmt: skip
    run._epoch(0)
    plain = tiny("bert", "classification", num_labels=2)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=RECIPE.learning_rate, weight_decay=RECIPE.weight_decay)
    lengths = [r.lengths[0] for r in data]
    groups: list[list[int]] = [[]]
    for part in batches(lengths, RECIPE.batch_size, generator(RECIPE.seed, "order", 0)):
        if len({i for k in groups[-1] for i in data[k].ids(0)}) >= 16:
            groups.append([])
        groups[-1] += part
    if len({i for k in groups[-1] for i in data[k].ids(0)}) < 16:
        groups[-2:] = [groups[-2] + groups[-1]]
    assert len(groups) > 1 and sorted(k for g in groups for k in g) == list(range(len(data)))
    for group in groups:
        optimizer.zero_grad()
        plain(**joined([data[k] for k in group], 0).inputs()).loss.backward()
        optimizer.step()
    for one, other in zip(model.parameters(), plain.parameters()):
        assert torch.allclose(one, other, atol=1e-6)


def test_training_texts_that_never_suffice_are_refused_at_the_start(tmp_path: Path, model_folder: Path) -> None:
    path = tmp_path / "notes.csv"
    path.write_text("text,label\n" + "\n".join(f"alpha met echo in delta w{k},{k % 2}" for k in range(12)) + "\n")
    with pytest.raises(InputError, match=r"hold \d+ different tokens, but accumulate waits for 6400"):
        Training(TrainPlan(str(path), model=str(model_folder), defenses=("none", "accumulate:100d")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_images_have_no_tokens_to_count() -> None:
    with pytest.raises(InputError, match="no input_ids"):
        parse_defense("accumulate:5")[0].init((tiny("bert", "classification"), {"pixel_values": torch.zeros(1, 3, 8, 8)}))


@pytest.mark.parametrize("tied", [True, False])
def test_waiting_does_not_hide_the_words_of_a_trained_output_layer(shared: Path, tied: bool) -> None:
    """At 1.0 d counted tokens nothing is left to test in the row space; the output layer still names words."""
    victim = load(shared / "models" / "stories260K-hf", "causal")
    if not tied:
        victim.model.lm_head.weight = torch.nn.Parameter(victim.model.lm_head.weight.detach().clone())
    stories = load_examples(shared / "data" / "tinystories.validation.parquet", limit=20)
    told = [[*victim.vocabulary.prefix, *victim.vocabulary.encode(e.text)][:24] for e in stories]
    batch = batch_of(told, "causal")
    defense = parse_defense("accumulate:1.0d" if tied else "frozen-embeddings+accumulate:1.0d")
    truth = step(victim.model, batch, defense, task="causal", vocabulary=victim.vocabulary, rng=generator(0))
    guess = attack("embedding-rows")(observe(truth, HONEST_SERVER), rng=generator(0), budget=Budget())
    named = set(guess.tokens[0])
    assert guess.confidence == "matched" and len(named) >= 20
    assert len(named & {t for row in told for t in row}) >= 0.9 * len(named)
