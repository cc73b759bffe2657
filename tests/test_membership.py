"""Membership inference: attacks against the obvious formulas, metrics against counting."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from audit_setting import model_folder
from hypothesis import given, settings
from hypothesis import strategies as some
from scipy.stats import norm
from transformers import BertConfig, BertForMaskedLM

from rasura import registry
from rasura.core.answers import Answers, Membership, ModelObservation, ShadowModel
from rasura.core.batches import Batch
from rasura.core.interfaces import InputError, MembershipAttack
from rasura.core.rng import generator
from rasura.core.threat import MODEL_USER, observe_model
from rasura.core.values import Grant, NotGranted
from rasura.metrics.intervals import pairs_interval, proportion_interval
from rasura.metrics.membership import (
    auc,
    auc_bound,
    coin_level,
    largest_leakage,
    leakage,
    needed,
    roc,
    split_check,
    tpr_at,
)
from rasura.report.membership import membership_findings
from rasura.testing.tiny import CLS, PAD, SEP, VOCABULARY, WORDS, batch_of, tiny
from rasura.victims.outputs import answers

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
        models.append(ShadowModel(answers_of(rows, inside, rng), inside, said))

    def ask(asked: Any) -> Answers:
        if asked is rows:
            return target
        return (
            outside if asked is others else answers_of(tuple(asked), torch.zeros(len(asked)), generator(seed, "neighbours"))
        )

    seen = observe_model(
        MODEL_USER, "classification", ask=ask, candidates=rows, reference=others, shadow_models=lambda: tuple(models),
        base=(tiny("bert", "classification", num_labels=2), VOCABULARY),
    )  # fmt: skip
    return seen, members


def guess(name: str, seen: ModelObservation, seed: int = 0) -> Membership:
    return registry.membership_attack(name)(seen, rng=generator(seed, "attack"))


# --- the attacks


def probability(margin: torch.Tensor) -> float:
    return 1 / (1 + math.exp(-float(margin)))


def test_lira_is_the_ratio_of_two_gaussians() -> None:
    seen, _ = imagined()
    margins = torch.stack([m.answers.margins for m in seen.shadow_models]).numpy()
    inside = torch.stack([m.inside for m in seen.shadow_models]).numpy()
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
        return [probability(target.margins[k]) / float(np.mean([probability(a.margins[k]) for a in own])) for k in every]

    mine = ratios(seen.candidates, [m.answers for m in seen.shadow_models])
    others = mine
    if reference:
        others = ratios(seen.reference, [m.reference for m in seen.shadow_models if m.reference is not None])
    expected = [sum(x / z >= 1 - 1e-12 for z in others) / len(others) for x in mine]
    assert guess("rmia", seen).scores.tolist() == pytest.approx(expected)


def test_mia_r_is_the_interpolated_rank_among_models_without_the_text() -> None:
    seen, _ = imagined()
    scores = guess("mia-r", seen).scores
    target = seen.ask(seen.candidates).losses
    for k in range(N):
        without = sorted(float(m.answers.losses[k]) for m in seen.shadow_models if not m.inside[k])
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


@pytest.mark.parametrize("name", registry.for_task(registry.MEMBERSHIP, "classification"))
def test_an_attack_repeats_and_reads_only_what_it_declares(name: str) -> None:
    seen, _ = imagined(reference=20)
    attack: MembershipAttack = registry.membership_attack(name)
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
    from rasura.core.interfaces import NotApplicable

    seen, _ = imagined()
    models = tuple(ShadowModel(m.answers, torch.ones(N, dtype=torch.bool)) for m in seen.shadow_models)
    with pytest.raises(NotApplicable, match="train more"):
        guess(name, ModelObservation(seen.task, {**seen.granted, Grant.TRAINING: lambda: models}))


def test_a_rank_among_one_model_is_not_applicable() -> None:
    """Every text had the score one half, whatever the model answered."""
    from rasura.core.interfaces import NotApplicable

    with pytest.raises(NotApplicable, match="train at least 4 shadow models"):
        guess("mia-r", imagined(own=2)[0])
    assert len(set(guess("mia-r", imagined(own=4)[0]).scores.tolist())) > 1


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


@pytest.mark.slow
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
    assert largest_leakage(scores, members)[0] == pytest.approx(max(0.0, *gaps))
    for fpr in (0.3, 0.5):
        if min(len(inside), len(outside)) < needed(fpr):
            continue
        allowed = [t for t in [*scores, 9.0] if sum(s >= t for s in outside) <= fpr * len(outside) + 1e-9]
        assert tpr_at(scores, members, fpr).mean == pytest.approx(
            max(sum(s >= t for s in inside) for t in allowed) / len(inside)
        )


def test_an_area_has_an_interval_at_every_number_of_texts() -> None:
    """Ten and ten texts told apart without a fault had the interval [1, 1]."""
    found = auc([*range(20)], [False] * 10 + [True] * 10)
    assert (found.mean, found.high, found.n) == (1.0, 1.0, 20) and found.low == pytest.approx(0.025**0.1)
    one = auc([1.0, 0.0], [True, False])
    assert (one.low, one.high) == (pytest.approx(0.025), 1.0)
    many = auc([*range(5), 2.5], [True] * 5 + [False])
    assert many.mean == pytest.approx(0.4) and (many.low, many.high) == pairs_interval(many.mean, 5, 1)


def placed(n: int, fpr: float) -> tuple[int, int]:
    """The last rank among ``n`` others that surely takes at most ``fpr``, the first that surely takes more; by sums."""
    more = [sum(math.comb(n, j) * fpr**j * (1 - fpr) ** (n - j) for j in range(k, n + 1)) for k in range(1, n + 1)]
    return max((k for k, p in enumerate(more, 1) if p >= 0.9875), default=0), min(
        (k for k, p in enumerate(more, 1) if p <= 0.0125), default=0
    )


def test_members_found_at_few_false_alarms_have_the_thresholds_doubt_in_their_interval() -> None:
    n, fpr = 40, 0.2
    high_enough, low_enough = placed(n, fpr)
    assert (high_enough, low_enough) == (3, 15)
    members = [39.5, 38.5, 33.5, 30.5, 25.5, 24.5, 20.5, 9.5, 2.5, 0.5] * 3
    found = tpr_at([*range(n), *members], [False] * n + [True] * 30, fpr)
    # Others fall from 39: the third is 37, the ninth 31, the fifteenth 25.
    assert found.mean == 9 / 30 and found.n == 30
    assert found.low == proportion_interval(6, 30, 0.975)[0] and found.high == proportion_interval(15, 30, 0.975)[1]
    few = tpr_at([*range(10), *[20.0] * 10], [False] * 10 + [True] * 10, 0.1)
    assert (few.mean, few.low) == (1.0, 0.0), "from ten others nobody knows what a tenth of all others exceeds"
    assert few.high == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("n", "fpr"), [(20, 0.1), (100, 0.01), (100, 0.1), (1000, 0.01)])
def test_coverage_of_members_found(n: int, fpr: float) -> None:
    rng, hits, draws = np.random.default_rng(0), 0, 1000
    truth = norm.sf(norm.isf(fpr) - 1)
    for _ in range(draws):
        found = tpr_at([*rng.normal(1, 1, n), *rng.normal(0, 1, n)], [True] * n + [False] * n, fpr)
        hits += found.low <= truth <= found.high
    assert hits >= 0.94 * draws


def test_leakage_is_at_the_attacks_own_threshold_and_may_be_negative() -> None:
    scores, members = [0.9, 0.8, 0.3, 0.2, 0.5, 0.4], [True, True, True, True, False, False]
    found = leakage(scores, members, 0.45)
    assert found.mean == pytest.approx(0.5 - 0.5) and found.n == 6
    assert leakage(scores, members, 0.4).mean == pytest.approx(0.5 - 0.5), "only what is above the threshold is taken"
    assert leakage(scores, members, 0.6).mean == pytest.approx(0.5)
    assert leakage([-s for s in scores], members, -0.45).mean == pytest.approx(0.5 - 0.5)
    worse = leakage(scores, [not m for m in members], 0.6)
    assert worse.mean == pytest.approx(-0.5) and -1 <= worse.low < worse.mean < worse.high <= 1
    rates = proportion_interval(2, 4, 0.975), proportion_interval(0, 2, 0.975)
    of_rates = (rates[0][0] - rates[1][1], rates[0][1] - rates[1][0])
    ours = leakage(scores, members, 0.6)
    assert (ours.low, ours.high) == pytest.approx(of_rates)
    with pytest.raises(InputError, match="threshold is not a number"):
        leakage(scores, members, math.nan)


@settings(max_examples=30, deadline=None)
@given(some.integers(1, 5), some.integers(1, 5), some.sampled_from([0.5, 0.8, 0.95]))
def test_the_level_of_a_coin_is_that_of_all_orders(members: int, others: int, level: float) -> None:
    n = members + others
    reached = []
    for inside in combinations(range(n), members):
        scores, who = [float(-k) for k in range(n)], [k in inside for k in range(n)]
        reached.append(largest_leakage(scores, who)[0])
    reached.sort()
    at = coin_level(members, others, level)
    assert sum(r <= at + 1e-9 for r in reached) >= level * len(reached) - 1e-9
    assert at == pytest.approx(reached[math.ceil(level * len(reached) - 1e-9) - 1]), "and no lower level will do"


def test_the_level_of_a_coin_at_the_sizes_of_audits() -> None:
    assert [coin_level(n, n, 0.95) for n in (2, 3, 10, 50)] == pytest.approx([1.0, 2 / 3, 0.5, 0.24])
    assert [coin_level(n, n) for n in (3, 10, 50)] == pytest.approx([1.0, 0.6, 0.26])
    assert coin_level(100, 80, 0.95) == coin_level(80, 100, 0.95) == pytest.approx(0.1775)
    for n in (1000, 3000):  # counted, and the limit that stands for more texts than can be counted
        assert coin_level(n, n) == pytest.approx(math.sqrt(math.log(40) / n), rel=0.02)
    assert coin_level(4000, 1001) == pytest.approx(math.sqrt(math.log(40) / 2 * (1 / 4000 + 1 / 1001)), rel=1e-12)
    assert largest_leakage([2.0, 1.0, 0.0], [True, False, False]) == (1.0, coin_level(1, 2))


@pytest.mark.parametrize("n", range(6, 41))
def test_leakage_at_the_level_of_guessing_is_not_above_it(n: int) -> None:
    """8 of 24 members above 0 others, 13 above 5 and so on differ by the same: as fractions, some seemed to be more."""
    gap = round(coin_level(n, n) * n)
    for others in range(n - gap + 1):
        first, last = [True] * (gap + others), [True] * (n - gap - others)
        order = [*[False] * others, *first, *[False] * (n - others), *last]  # the greatest difference is ``gap`` texts
        assert largest_leakage([float(-k) for k in range(2 * n)], order) == (coin_level(n, n), coin_level(n, n))
    with pytest.raises(InputError, match="at least one of each"):
        coin_level(0, 4)
    rng, above = np.random.default_rng(0), 0
    for _ in range(1000):
        most, level = largest_leakage(rng.random(40).tolist(), [True] * 15 + [False] * 25)
        above += most > level
    assert 5 <= above <= 35, "a coin is above it at most once in 40"


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
        ([1.0], [True, False], "one score for each"),
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


def test_a_split_is_told_by_what_a_model_sees() -> None:
    """Case, and the space before a full stop, hid from the check what every attack on the model saw."""
    rng = generator(0)
    said = [" ".join(f"W{int(i)}" for i in torch.randint(0, 200, (12,), generator=rng)) + "." for _ in range(200)]
    members = [k % 2 == 0 for k in range(200)]
    assert split_check(said, members).low < 0.5
    for other in (str.lower, lambda text: text.replace(".", " .")):
        assert split_check([t if m else other(t) for t, m in zip(said, members)], members).low > 0.8
    ids = [[int(i) + (1000 if m else 0) for i in torch.randint(0, 50, (12,), generator=rng)] for m in members]
    assert split_check(ids, members).low > 0.8 and split_check([[i % 1000 for i in one] for one in ids], members).low < 0.5


def test_words_are_told_apart_in_a_script_without_spaces() -> None:
    """A clause was one word there, and no clause occurs twice."""
    rng = generator(0)
    sides = [
        ["病人", "医生", "手术", "药物", "住院", "发烧", "护士", "血压"],
        ["球员", "教练", "进球", "比赛", "联赛", "射门", "球迷", "冠军"],
    ]
    members = [k % 2 == 0 for k in range(200)]
    said = ["".join(sides[k % 2][int(i)] for i in torch.randperm(8, generator=rng)[:4]) for k in range(200)]
    assert split_check(said, members).low > 0.9
    same = split_check(said, [k % 4 < 2 for k in range(200)])
    assert same.low < 0.5 < same.high


def test_a_split_that_only_labels_with_words_tell_is_seen() -> None:
    """Of two annotators who disagree, neither has other words than the other, nor other labels."""
    rng = generator(0)
    words = [" ".join(f"w{int(i)}" for i in torch.randint(0, 200, (12,), generator=rng)) for _ in range(200)]
    members, good = [k % 2 == 0 for k in range(200)], [k % 4 < 2 for k in range(200)]
    said = [w + (" good" if g else " bad") for w, g in zip(words, good)]
    labels = [int(g == m) for g, m in zip(good, members)]
    for plain in (split_check(said, members), split_check(list(map(str, labels)), members)):
        assert plain.low < 0.5 < plain.high
    assert split_check(said, members, labels=labels).low > 0.7
    random = split_check(said, members, labels=[int(n) for n in torch.randint(0, 2, (200,), generator=rng)])
    assert random.low < 0.5 < random.high


def of_leakage(most: float, chance: float, own: float | None = None) -> dict[str, Any]:
    ends = {"low": None if own is None else own - 0.1, "high": None if own is None else own + 0.1}
    return {"leakage": {"mean": own, **ends}, "largest_leakage": {"mean": most, "chance": chance}}


def page_of(*scored: dict[str, Any], **plan: Any) -> tuple[str, list[tuple[str, ...]]]:
    """Sentences and rows of attacks a, b, ... with these scores."""
    middle = {"mean": 0.5, "low": 0.45, "high": 0.55, "n": 400}
    names = "abc"[: len(scored)]
    records = [
        {"attack": n, "status": "ok", "reason": "", "scores": s, "blind": {"auc": middle, "words": middle}}
        for n, s in zip(names, scored)
    ]
    found = membership_findings(records, {"attacks": [*names], "n_members": 200, "n_others": 200, **plan})
    return " ".join((*found.sentences, *found.checks)), [*found.rows]


def area(low: float, high: float) -> dict[str, Any]:
    return {"auc": {"mean": (low + high) / 2, "low": low, "high": high, "n": 400}, **of_leakage(0.1, 0.1)}


def test_the_verdict_is_beyond_an_interval_or_not_told() -> None:
    said, _ = page_of(area(0.45, 0.62))
    assert "Not told from guessing: with 400 texts, an AUC of up to 0.620 is not ruled out" in said
    assert "Above guessing: b separates members from others" in page_of(area(0.45, 0.62), area(0.51, 0.6))[0]
    assert "Above guessing: a separates members from others" in page_of(area(0.38, 0.49))[0], (
        "turned around, it tells as much"
    )
    assert "up to 0.650" in page_of(area(0.35, 0.52))[0]

    def rate(low: float) -> dict[str, Any]:
        return {"tpr@0.01": {"mean": 0.2, "low": low, "high": 0.5, "n": 200}}

    assert "reveals which texts it was trained on" in page_of({**area(0.45, 0.62), **rate(0.02)})[0]
    assert "Not told from guessing" in page_of({**area(0.45, 0.62), **rate(0.01)})[0]
    assert "too few texts to measure how many members" in page_of({**area(0.51, 0.62), **rate(0.01)})[0]


def test_leakage_is_shown_twice_with_the_level_of_a_coin() -> None:
    said, rows = page_of(
        {**area(0.45, 0.55), **of_leakage(0.3, 0.1)}, {**area(0.45, 0.55), **of_leakage(0.1, 0.1, own=-0.02)}
    )
    assert rows[0][-2:] == ("does not set a threshold", "0.300 (above chance, 0.100)")
    assert rows[1][-2:] == ("-0.020 (-0.120 to 0.080)", "0.100 (not above chance, 0.100)")
    assert "random guessing stays at or below 0.100 in 95 % of draws" in said


def found_with(low: float, high: float, attack: str = "rmia", **plan: Any) -> str:
    """What the page checks when an attack's AUC lies between ``low`` and ``high``."""
    middle = {"mean": 0.5, "low": 0.45, "high": 0.55, "n": 400}
    scores = {"auc": {"mean": (low + high) / 2, "low": low, "high": high, "n": 400}, **of_leakage(0.1, 0.1)}
    record = {"attack": attack, "status": "ok", "scores": scores, "blind": {"auc": middle, "words": middle}}
    known = {"attacks": [attack], "n_members": 200, "n_others": 200, **plan}
    return " ".join(membership_findings([record], known).checks)


def test_an_attack_beyond_what_epsilon_permits_is_named_and_one_within_is_not() -> None:
    within = "permits an AUC of at most 0.732; no attack is shown to exceed it, and an AUC of up to 0.900 is not ruled out"
    assert within in found_with(0.70, 0.90, epsilon=1.0)
    alone = found_with(0.45, 0.55, epsilon=1.0, attack="blind")
    assert "permits an AUC of at most 0.732; this run does not tell whether attacks stay below it" in alone
    assert "and rmia is above it" in found_with(0.75, 0.90, epsilon=1.0)
    assert "and rmia is above it" in found_with(0.10, 0.25, epsilon=1.0)  # turned around, it tells as much
    assert "permits" not in found_with(0.75, 0.90)


@pytest.mark.parametrize("name", registry.for_task(registry.MEMBERSHIP, "classification"))
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
