"""Membership inference: attacks against the obvious formulas, metrics against counting."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from scipy.stats import norm
from test_auditing import model_folder
from tiny import CLS, PAD, SEP, VOCABULARY, WORDS, batch_of, tiny
from transformers import BertConfig, BertForMaskedLM

from rasura import recipes
from rasura.answers import Answers, Membership, ModelObservation, OwnModel
from rasura.interfaces import InputError, MembershipAttack
from rasura.metrics.membership import auc, auc_bound, clopper_pearson, leakage, needed, roc, split_check, tpr_at
from rasura.report.membership import membership_findings
from rasura.rng import generator
from rasura.threat import MODEL_USER, observe_model
from rasura.values import Batch, Grant, NotGranted
from rasura.victims.train import answers

__all__ = ["model_folder"]

N, OWN = 40, 6


def texts(count: int = N, seed: int = 0, task: str = "classification") -> tuple[Batch, ...]:
    """Texts of three to six words, each with a label."""
    rng = generator(seed, "texts")
    out = []
    for _ in range(count):
        middle = torch.randint(11, WORDS, (int(torch.randint(3, 7, (1,), generator=rng)),), generator=rng).tolist()
        out.append(batch_of([[CLS, *middle, SEP]], task, [int(torch.randint(0, 2, (1,), generator=rng))]))
    return tuple(out)


def answers_of(rows: tuple[Batch, ...], inside: torch.Tensor, rng: torch.Generator) -> Answers:
    """What an imagined two-class model says that is surer of what it was trained on."""
    own = torch.tensor([float(sum(row.ids(0)) % 7) - 3 for row in rows], dtype=torch.float64)  # some texts are easier
    margins = own + 2.0 * inside.double() + 0.5 * torch.randn(len(rows), generator=rng, dtype=torch.float64)
    labels = torch.tensor([int(row.labels[0]) for row in rows], dtype=torch.int64)
    logits = torch.zeros(len(rows), 2, dtype=torch.float64)
    logits[torch.arange(len(rows)), labels] = margins
    return Answers(torch.nn.functional.softplus(-margins), margins, logits)


def imagined(own: int = OWN, seed: int = 0, reference: int = 0) -> tuple[ModelObservation, torch.Tensor]:
    """An observation of an imagined model, and who its members are."""
    rng = generator(seed, "imagined")
    rows, others = texts(seed=seed), texts(reference, seed + 100)
    members = torch.zeros(N, dtype=torch.bool)
    members[torch.randperm(N, generator=rng)[: N // 2]] = True
    target, outside = answers_of(rows, members, rng), answers_of(others, torch.zeros(reference), rng)
    models = []
    for number in range(own):
        if number % 2 == 0:
            half = torch.randperm(N, generator=rng)[: N // 2]
        inside = torch.zeros(N, dtype=torch.bool)
        inside[half] = True
        inside = inside if number % 2 == 0 else ~inside
        said = answers_of(others, torch.zeros(reference), rng) if reference else None
        models.append(OwnModel(answers_of(rows, inside, rng), inside, said))

    def ask(asked: Any) -> Answers:
        if asked is rows:
            return target
        return (
            outside if asked is others else answers_of(tuple(asked), torch.zeros(len(asked)), generator(seed, "neighbours"))
        )

    seen = observe_model(
        MODEL_USER, "classification", ask=ask, candidates=rows, reference=others, own=lambda: tuple(models),
        base=(tiny("bert", "classification", num_labels=2), VOCABULARY),
    )  # fmt: skip
    return seen, members


def guess(name: str, seen: ModelObservation, seed: int = 0) -> Membership:
    return recipes.membership_attack(name)(seen, rng=generator(seed, "attack"))


# --- the attacks


def probability(margin: torch.Tensor) -> float:
    return 1 / (1 + math.exp(-float(margin)))


def test_lira_is_the_ratio_of_two_gaussians() -> None:
    seen, _ = imagined()
    margins = torch.stack([m.answers.margins for m in seen.own]).numpy()
    inside = torch.stack([m.inside for m in seen.own]).numpy()
    spread = {}
    for side in (True, False):
        parts = [margins[inside[:, k] == side, k] for k in range(N)]
        spread[side] = math.sqrt(sum(float(((p - p.mean()) ** 2).sum()) for p in parts) / sum(len(p) - 1 for p in parts))
    target = seen.ask(seen.candidates).margins.numpy()
    expected = []
    for k in range(N):
        with_, without = (norm(margins[inside[:, k] == side, k].mean(), spread[side]) for side in (True, False))
        expected.append(with_.logpdf(target[k]) - without.logpdf(target[k]))
    assert guess("lira", seen).scores.tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("reference", [0, 25])
def test_rmia_counts_the_texts_whose_likelihood_ratio_is_no_larger(reference: int) -> None:
    seen, _ = imagined(reference=reference)

    def ratios(rows: tuple[Batch, ...], own: list[Answers]) -> list[float]:
        target = seen.ask(rows)
        every = range(len(rows))
        return [probability(target.margins[k]) / np.mean([probability(a.margins[k]) for a in own]) for k in every]

    mine = ratios(seen.candidates, [m.answers for m in seen.own])
    others = mine
    if reference:
        others = ratios(seen.reference, [m.reference for m in seen.own if m.reference is not None])
    expected = [sum(x / z >= 1 - 1e-12 for z in others) / len(others) for x in mine]
    assert guess("rmia", seen).scores.tolist() == pytest.approx(expected)


def test_mia_r_is_the_interpolated_rank_among_models_without_the_text() -> None:
    seen, _ = imagined()
    scores = guess("mia-r", seen).scores
    target = seen.ask(seen.candidates).losses
    for k in range(N):
        without = sorted(float(m.answers.losses[k]) for m in seen.own if not m.inside[k])
        lower = sum(loss <= target[k] for loss in without)
        rank = 1 - float(scores[k])
        last = len(without) + 1
        assert max(1, lower) / last - 1e-12 <= rank <= min(last - 1, lower + 1) / last + 1e-12


def test_mia_n_compares_with_neighbours_that_differ_in_one_ordinary_token() -> None:
    seen, _ = imagined()
    asked: list[Batch] = []

    def ask(rows: Any) -> Answers:
        if rows is not seen.candidates:
            asked.extend(rows)
        losses = torch.tensor([float(sum(row.ids(0))) for row in rows], dtype=torch.float64)
        return Answers(losses, losses, torch.empty(len(rows), 0))

    spied = ModelObservation("classification", {**seen.granted, Grant.MODEL: ask})
    scores = guess("mia-n", spied).scores
    for k, row in enumerate(seen.candidates):
        mine = asked[10 * k : 10 * k + 10]
        for one in mine:
            changed = [(a, b) for a, b in zip(row.ids(0), one.ids(0)) if a != b]
            assert len(changed) == 1 and not {*changed[0]} & VOCABULARY.special_ids
            assert int(one.labels[0]) == int(row.labels[0])
        expected = np.mean([sum(one.ids(0)) for one in mine]) - sum(row.ids(0))
        assert float(scores[k]) == pytest.approx(expected)


def test_mia_n_takes_a_masked_language_models_swaps() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, pad_token_id=PAD
    )
    masked = BertForMaskedLM(config).eval()
    with torch.no_grad():  # it finds one word far likelier than the rest, everywhere
        masked.cls.predictions.bias[77] = 50.0
    seen, _ = imagined()
    asked: list[Batch] = []

    def ask(rows: Any) -> Answers:
        asked.extend(rows if rows is not seen.candidates else ())
        return Answers(torch.zeros(len(rows)).double(), torch.zeros(len(rows)).double(), torch.empty(len(rows), 0))

    spied = ModelObservation("classification", {**seen.granted, Grant.MODEL: ask, Grant.BASE_MODEL: (masked, VOCABULARY)})
    assert guess("mia-n", spied).details["swaps_by"] == "masked language model"
    first = seen.candidates[0].ids(0)
    swaps = [{*one.ids(0)} - {*first} for one in asked[:10]]
    assert sum(swap == {77} for swap in swaps) >= len(first) - 2 - (77 in first)


@pytest.mark.parametrize("name", recipes.MEMBERSHIP)
def test_an_attack_repeats_and_reads_only_what_it_declares(name: str) -> None:
    seen, _ = imagined(reference=20)
    attack: MembershipAttack = recipes.membership_attack(name)
    assert isinstance(attack, MembershipAttack) and attack.name == name
    for grants in (attack.needs, attack.needs | attack.uses):
        only = ModelObservation(seen.task, {g: seen.granted[g] for g in grants})
        first, again = guess(name, only), guess(name, only)
        assert first.scores.shape == (N,) and torch.equal(first.scores, again.scores) and first.details == again.details
    for grant in attack.needs:
        with pytest.raises(NotGranted):
            guess(name, ModelObservation(seen.task, {g: v for g, v in seen.granted.items() if g is not grant}))


@pytest.mark.parametrize("name", ["loss", "mia", "mia-r", "lira", "rmia"])
def test_attacks_beat_the_blind_level_on_a_model_that_remembers(name: str) -> None:
    found, floor = [], []
    for seed in range(5):
        seen, members = imagined(seed=seed)
        found.append(auc(guess(name, seen).scores.tolist(), members.tolist()).mean)
        floor.append(auc(guess("blind", seen).scores.tolist(), members.tolist()).mean)
    assert np.mean(found) > 0.6 and abs(np.mean(floor) - 0.5) < 0.1
    if name in ("lira", "rmia", "mia-r"):
        assert np.mean(found) > 0.85  # they know how hard each text is


@pytest.mark.parametrize("name", ["mia-r", "lira"])
def test_a_text_that_every_own_model_holds_is_not_applicable(name: str) -> None:
    from rasura.interfaces import NotApplicable

    seen, _ = imagined()
    models = tuple(OwnModel(m.answers, torch.ones(N, dtype=torch.bool)) for m in seen.own)
    with pytest.raises(NotApplicable, match="train more"):
        guess(name, ModelObservation(seen.task, {**seen.granted, Grant.TRAINING: lambda: models}))


@pytest.mark.parametrize("task", ["classification", "causal"])
def test_answers_are_the_models_own_losses_whatever_stands_beside_them(task: str) -> None:
    model = tiny("gpt2", task, num_labels=2).double()
    rows = texts(12, task=task)
    said = answers(model, rows, PAD)
    for k, row in enumerate(rows):
        with torch.no_grad():
            loss = float(model(**row.inputs()).loss)
        assert float(said.losses[k]) == pytest.approx(loss, rel=1e-6)  # the library's loss is in float32
        p = math.exp(-loss)
        assert float(said.margins[k]) == pytest.approx(math.log(p / (1 - p)), rel=1e-5, abs=1e-6)
    assert said.logits.shape == (12, 2 if task == "classification" else 0)


# --- the metrics


scores_and_members = some.lists(some.tuples(some.integers(0, 6), some.booleans()), min_size=4, max_size=60).filter(
    lambda rows: 0 < sum(m for _, m in rows) < len(rows)
)


@settings(max_examples=60, deadline=None)
@given(scores_and_members)
def test_metrics_equal_counting(rows: list[tuple[int, bool]]) -> None:
    scores, members = [float(s) for s, _ in rows], [m for _, m in rows]
    inside, outside = ([s for s, m in rows if m is side] for side in (True, False))
    pairs = [(a > b) + 0.5 * (a == b) for a in inside for b in outside]
    found = auc(scores, members)
    assert found.mean == pytest.approx(sum(pairs) / len(pairs)) and 0 <= found.low <= found.mean <= found.high <= 1
    assert auc([-s for s in scores], members).mean == pytest.approx(1 - found.mean)
    false, true = roc(scores, members)
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
    assert np.trapezoid(true, false) == pytest.approx(found.mean)
    gaps = [sum(s >= t for s in inside) / len(inside) - sum(s >= t for s in outside) / len(outside) for t in {*scores}]
    assert leakage(scores, members)[0] == pytest.approx(max(0.0, *gaps))
    for fpr in (0.3, 0.5):
        if min(len(inside), len(outside)) < needed(fpr):
            continue
        allowed = [t for t in [*scores, 9.0] if sum(s >= t for s in outside) <= fpr * len(outside) + 1e-9]
        assert tpr_at(scores, members, fpr).mean == pytest.approx(
            max(sum(s >= t for s in inside) for t in allowed) / len(inside)
        )


def test_intervals_hold_what_they_promise() -> None:
    assert clopper_pearson(0, 100) == pytest.approx((0.0, 1 - 0.025 ** (1 / 100)))
    assert clopper_pearson(7, 7)[1] == 1.0
    for hits, n in ((3, 50), (40, 41)):
        low, high = clopper_pearson(hits, n)
        tails = [sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in ks) for p, ks in
                 ((low, range(hits, n + 1)), (high, range(hits + 1)))]  # fmt: skip
        assert tails == pytest.approx([0.025, 0.025])
    rng = np.random.default_rng(0)
    truth = norm.cdf(1 / math.sqrt(2))
    covered = 0
    for _ in range(300):
        rows = [*rng.normal(1, 1, 60), *rng.normal(0, 1, 80)]
        found = auc(rows, [True] * 60 + [False] * 80)
        covered += found.low <= truth <= found.high
    assert 270 <= covered <= 298


def test_too_few_texts_for_a_false_positive_rate_are_refused_with_the_number_needed() -> None:
    members = [True] * 50 + [False] * 500
    with pytest.raises(InputError, match="it needs 100 of each"):
        tpr_at(list(range(550)), members, 0.01)
    with pytest.raises(InputError, match="it needs 1000 of each"):
        tpr_at([0.0] * 1100, [True] * 550 + [False] * 550, 0.001)
    assert [needed(f) for f in (0.01, 0.001, 0.1, 0.03)] == [100, 1000, 10, 34]
    for wrong in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(InputError, match="false positive rate"):
            needed(wrong)


def test_bad_scores_are_refused() -> None:
    for scores, members, says in (
        ([1.0], [True, False], "one score a candidate"),
        ([math.nan, 0.0], [True, False], "not a number"),
        ([1.0, 0.0], [True, True], "expected members and others"),
    ):
        with pytest.raises(InputError, match=says):
            auc(scores, members)


@settings(max_examples=40, deadline=None)
@given(some.floats(0, 20), some.floats(0, 0.5))
def test_the_bound_is_the_area_under_the_permitted_curve(epsilon: float, delta: float) -> None:
    assert auc_bound(epsilon) == pytest.approx(1 / (1 + math.exp(-epsilon)))
    false = np.linspace(0, 1, 200_001)
    with np.errstate(over="ignore"):
        true = np.minimum(1.0, np.minimum(math.exp(epsilon) * false + delta, 1 - math.exp(-epsilon) * (1 - delta - false)))
    assert auc_bound(epsilon, delta) == pytest.approx(np.trapezoid(true, false), abs=2e-4)


def test_a_split_that_words_tell_is_seen_and_a_random_one_is_not() -> None:
    rng = generator(0)
    words = [" ".join(f"w{int(i)}" for i in torch.randint(0, 200, (12,), generator=rng)) for _ in range(200)]
    members = [k % 2 == 0 for k in range(200)]
    plain = split_check(words, members)
    assert plain.low < 0.5 < plain.high
    assert split_check([w + " page one" if m else w for w, m in zip(words, members)], members).mean > 0.95


def found_with(low: float, high: float, **plan: Any) -> str:
    """What the page checks when an attack's AUC lies between ``low`` and ``high``."""
    middle = {"mean": 0.5, "low": 0.45, "high": 0.55, "n": 400}
    scores = {"auc": {"mean": (low + high) / 2, "low": low, "high": high, "n": 400}, "leakage": {"mean": 0.3, "chance": 0.1}}
    record = {"attack": "rmia", "status": "ok", "scores": scores, "blind": {"auc": middle, "words": middle}}
    known = {"attacks": ["rmia"], "n_members": 200, "n_others": 200, **plan}
    return " ".join(membership_findings([record], known).checks)


def test_an_attack_beyond_what_epsilon_permits_is_named_and_one_within_is_not() -> None:
    assert "permits an AUC of at most 0.731; no attack is above it" in found_with(0.70, 0.90, epsilon=1.0)
    assert "and rmia is above it" in found_with(0.75, 0.90, epsilon=1.0)
    assert "and rmia is above it" in found_with(0.10, 0.25, epsilon=1.0)  # turned around, it tells as much
    assert "permits" not in found_with(0.75, 0.90)


@pytest.mark.parametrize("name", recipes.MEMBERSHIP)
def test_a_model_that_saw_nothing_stays_below_the_bound_of_epsilon_zero(name: str) -> None:
    """Its answers do not depend on who is a member: epsilon is 0, and the interval holds one half."""
    within = 0
    for seed in range(10):
        seen, _ = imagined(seed=seed)
        anybody = torch.zeros(N, dtype=torch.bool)
        anybody[torch.randperm(N, generator=generator(seed, "anybody"))[: N // 2]] = True
        found = auc(guess(name, seen).scores.tolist(), anybody.tolist())
        within += found.low <= auc_bound(0.0) <= found.high
    assert within >= 8
