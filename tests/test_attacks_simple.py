"""Blind, embedding rows and label recovery on tiny random models of the families, seen through the honest server's eyes."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rasura.attacks.updates.blind import Blind, best_guess
from rasura.attacks.updates.embedding_rows import EmbeddingRows
from rasura.attacks.updates.idlg import IDLG
from rasura.attacks.updates.label_recovery import LabelRecovery, counts
from rasura.core.batches import Batch
from rasura.core.interfaces import AttackFailed, Budget, Defense, InputError, NotApplicable
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import UNKNOWN, Grant, Message, Observation, Reconstruction, Task
from rasura.defenses.compose import chain, none
from rasura.defenses.dropout import dropout
from rasura.defenses.frozen import frozen_embeddings
from rasura.defenses.noise import gaussian_noise, laplace_noise
from rasura.defenses.pruning import magnitude_pruning, random_pruning
from rasura.priors.causal import CausalPrior
from rasura.priors.ngram import Unigram
from rasura.priors.trigram import Trigram
from rasura.testing.tiny import CAUSAL_VOCABULARY, CLS, FAMILIES, SEP, VOCABULARY, batch_for, batch_of, tiny
from rasura.victims.loading import load
from rasura.victims.step import step

BUDGET = Budget("quick")
WITH_POSITIONS = ("bert", "roberta", "distilbert", "gpt2")
SENTENCE = [CLS, 40, 3, 41, 9, 3, 42, 3, SEP]


def seen_by_server(model: nn.Module, batch: Batch, task: Task, defense: Defense = (), seed: int = 0) -> Observation:
    vocabulary = CAUSAL_VOCABULARY if task == "causal" else VOCABULARY
    return observe(step(model, batch, defense, task=task, vocabulary=vocabulary, rng=generator(seed, "step")), HONEST_SERVER)


def read(
    family: str, rows: list[list[int]], task: Task = "classification", defense: Defense = (), **config: Any
) -> Reconstruction:
    seen = seen_by_server(tiny(family, task, **config), batch_of(rows, task), task, defense)
    return EmbeddingRows()(seen, rng=generator(0), budget=BUDGET)


# --- the unigram prior and the blind attack


def test_unigram_probabilities_sum_to_one_and_spare_special_tokens() -> None:
    prior = Unigram.of(VOCABULARY, ["the w40 the w41", "w42 of the"])
    assert float(prior.probabilities.sum()) == pytest.approx(1)
    assert prior.log_probability([CLS]) == -math.inf and prior.log_probability([]) == 0
    assert prior.top(1) == VOCABULARY.encode("the")
    # 3 of 7 tokens are "the"; 4 of 7 occur once and leave their share to what was not seen.
    the = 3 / 7 * 3 / 7 + 4 / 7 / (VOCABULARY.size - 3)
    assert prior.log_probability(VOCABULARY.encode("the the")) == pytest.approx(2 * math.log(the))


def test_english_prior_knows_the_order_of_common_words() -> None:
    prior = Unigram.english(VOCABULARY)
    assert prior.top(4) == VOCABULARY.encode("the , . of")
    with pytest.raises(InputError, match="no token"):
        Unigram.of(VOCABULARY, ["nothing known"])


def test_a_frequent_word_is_guessed_as_often_as_it_pays() -> None:
    prior = Unigram.of(VOCABULARY, ["the the the the w40 w41 of of"] * 20)
    guess = Counter(best_guess(prior, 16))
    assert guess[VOCABULARY.encode("the")[0]] >= 6 and guess[VOCABULARY.encode("of")[0]] >= 3
    assert sum(guess.values()) <= 16


def test_trigram_sums_to_one_and_prefers_the_order_of_its_texts() -> None:
    prior = Trigram(VOCABULARY, ["w40 the w41 .", "w40 the w42 .", "w50 the w41 ."])
    assert sum(prior.weights) == pytest.approx(1) and min(prior.weights) >= 0
    one = [i for i in range(VOCABULARY.size) if i not in VOCABULARY.special_ids]
    ids = VOCABULARY.encode("w40 the w41")
    for before in ([], ids[:1], ids[:2], [77], [77, *ids[1:2]], [*ids, 9]):
        known = prior.log_probability(before)
        assert sum(math.exp(prior.log_probability([*before, i]) - known) for i in one) == pytest.approx(1)
    assert prior.log_probability(ids) > prior.log_probability(ids[::-1])
    with pytest.raises(InputError, match="no token"):
        Trigram(VOCABULARY, ["", "?"])


def test_blind_uses_what_is_granted_and_reads_no_gradient() -> None:
    bare = Observation(seen_by_server(tiny("bert", "classification"), batch_for("classification"), "classification").message,
                       "classification", {Grant.BASE_MODEL: VOCABULARY})  # fmt: skip
    one = Blind()(bare, rng=generator(0), budget=BUDGET)
    assert len(one.tokens) == 1 and one.tokens[0][0] == CLS and one.tokens[0][-1] == SEP and one.confidence == "none"
    told = Observation(bare.message, bare.task, {**bare.granted, Grant.LENGTHS: (4, 20), Grant.BATCH_SIZE: 2})
    two = Blind()(told, rng=generator(0), budget=BUDGET)
    assert len(two.tokens) == 2 and len(two.tokens[0]) < len(two.tokens[1]) <= 20
    texts = Observation(bare.message, bare.task, {**bare.granted, Grant.REFERENCE_TEXT: ("w77 w77", "w77 w78")})
    assert VOCABULARY.encode("w77")[0] in Blind()(texts, rng=generator(0), budget=BUDGET).tokens[0]


# --- embedding rows


@pytest.mark.parametrize("defense", [none(), dropout(0.2), gaussian_noise(0.0, clip=1e-3)], ids=["none", "drop", "clip"])
@pytest.mark.parametrize("family", WITH_POSITIONS)
def test_one_text_comes_back_in_order_with_repeats(family: str, defense: Defense) -> None:
    got = read(family, [SENTENCE], defense=chain(defense))
    assert got.tokens == (tuple(SENTENCE),) and got.ordered and got.confidence == "verified"


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(3, 30), min_size=1, max_size=40))
def test_any_text_comes_back(ids: list[int]) -> None:
    rows = [CLS, *ids, SEP]
    assert read("roberta", [rows]).tokens == (tuple(rows),)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_gives_the_bag_of_its_words(family: str) -> None:
    rows = [SENTENCE, [CLS, 50, 51, 4, 52, SEP]]
    got = read(family, rows)
    assert not got.ordered and got.confidence == "span" and len(got.tokens) == 2
    assert set(got.tokens[0]) == {i for row in rows for i in row}
    if family != "llama":
        assert got.details["longest"] == len(SENTENCE)


def test_without_positions_one_text_is_a_bag() -> None:
    got = read("llama", [SENTENCE])
    assert got.tokens == (tuple(sorted(set(SENTENCE))),) and not got.ordered


def test_an_unknown_number_of_texts_is_one_only_when_solved_exactly() -> None:
    def unknown(rows: list[list[int]]) -> Reconstruction:
        seen = seen_by_server(tiny("bert", "classification"), batch_of(rows, "classification"), "classification")
        granted = {g: v for g, v in seen.granted.items() if g in EmbeddingRows.needs}
        return EmbeddingRows()(Observation(seen.message, seen.task, granted), rng=generator(0), budget=BUDGET)

    assert unknown([SENTENCE]).tokens == (tuple(SENTENCE),)
    assert not unknown([SENTENCE, [CLS, 50, 51, 4, 52, SEP]]).ordered


@pytest.mark.parametrize("tied", [True, False])
def test_causal_gpt2_in_order_but_for_the_last_token(tied: bool) -> None:
    got = read("gpt2", [SENTENCE], "causal", tied=tied)
    assert got.tokens == ((*SENTENCE[:-1], UNKNOWN),)
    assert got.details["tied"] is tied and got.confidence == "span"


@pytest.mark.parametrize("rows", [[SENTENCE], [SENTENCE, [CLS, 50, 51, 4, 52, 53], [CLS, 60, 61, 3]]])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_tied_rows_are_separated_from_the_output_part(family: str, rows: list[list[int]]) -> None:
    got = read(family, rows, "causal", tied=True)
    assert set(got.tokens[0]) - {UNKNOWN} == {i for row in rows for i in row[:-1]}


def test_tied_rows_of_a_trained_llama(shared: Path) -> None:
    victim = load(shared / "models" / "stories260K-hf", "causal")
    ids = [*victim.vocabulary.prefix, *victim.vocabulary.encode("Once upon a time there was a little dog named Tim.")]
    batch = batch_of([ids], "causal")
    truth = step(victim.model, batch, task="causal", vocabulary=victim.vocabulary, rng=generator(0))
    got = EmbeddingRows()(observe(truth, HONEST_SERVER), rng=generator(0), budget=BUDGET)
    # Every word but the last, which has no gradient; that one may stand out all the same, as a target of the loss.
    assert set(ids[:-1]) <= set(got.tokens[0]) <= set(ids)


@pytest.mark.parametrize(
    ("family", "tied", "defense"),
    [("llama", True, ()), ("gpt2", True, ()), ("llama", False, chain(frozen_embeddings()))],
)
def test_an_output_layer_names_words_of_as_many_tokens_as_dimensions(family: str, tied: bool, defense: Defense) -> None:
    rows = [[CLS, *range(10 + 30 * k, 38 + 30 * k)] for k in range(4)]
    got = read(family, rows, "causal", defense, tied=tied)
    named = set(got.tokens[0])
    assert (got.confidence, got.ordered, got.details["tied"]) == ("matched", False, tied)
    assert len(named) >= 10 and len(named & {t for row in rows for t in row}) >= 0.9 * len(named)


def test_the_output_part_under_noise_or_hidden_in_part_says_so() -> None:
    with pytest.raises(AttackFailed, match="tied output layer"):
        read("gpt2", [SENTENCE], "causal", chain(gaussian_noise(1e-3)), tied=True)
    with pytest.raises(NotApplicable, match="tied to the output layer and part"):
        read("gpt2", [SENTENCE], "causal", chain(random_pruning(0.5)), tied=True)


def test_frozen_embeddings_are_not_applicable() -> None:
    with pytest.raises(NotApplicable, match="frozen, sealed or not sent"):
        read("bert", [SENTENCE], defense=chain(frozen_embeddings()))


@pytest.mark.parametrize("prune", [random_pruning(0.5), magnitude_pruning(0.7)])
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_pruning_leaves_the_words_in_place(family: str, prune: object) -> None:
    # Wide enough that a repeated word's places have columns in common with it, whatever the mask drawn.
    got = read(family, [SENTENCE], defense=chain(prune), hidden=256)  # type: ignore[arg-type]
    assert got.tokens == (tuple(SENTENCE),)


def test_heavy_pruning_names_no_wrong_token() -> None:
    got = read("bert", [SENTENCE], defense=chain(random_pruning(0.97)))
    assert {i for t in got.tokens for i in t} <= {*SENTENCE, UNKNOWN}


@pytest.mark.parametrize("make", [gaussian_noise, laplace_noise])
def test_weak_noise_leaves_words_that_stand_out_and_strong_noise_none(make: object) -> None:
    got = read("bert", [SENTENCE], defense=chain(make(1e-5)))  # type: ignore[operator]
    assert got.confidence == "matched" and got.details["noisy"] and got.tokens == (tuple(SENTENCE),)
    # The words still stand out where their order no longer does.
    more = read("bert", [SENTENCE], defense=chain(make(5e-5)))  # type: ignore[operator]
    assert {*SENTENCE} == {i for i in more.tokens[0] if i != UNKNOWN}
    with pytest.raises(AttackFailed, match="noise covers every row"):
        read("bert", [SENTENCE], defense=chain(make(1.0)))  # type: ignore[operator]


def test_a_text_as_long_as_the_model_allows_is_not_taken_for_noise() -> None:
    rows = [CLS, *range(100, 162), SEP]
    got = read("bert", [rows], hidden=128)
    assert got.tokens == (tuple(rows),) and got.confidence == "verified"


# --- labels


def recovered(family: str, labels: list[int], num_labels: int, defense: Defense = (), seed: int = 0) -> Reconstruction:
    rows = [[CLS, *range(20 + 9 * i, 25 + 9 * i), SEP] for i in range(len(labels))]
    model = tiny(family, "classification", num_labels=num_labels, seed=seed)
    seen = seen_by_server(model, batch_of(rows, "classification", labels), "classification", defense, seed)
    return LabelRecovery()(seen, rng=generator(0), budget=BUDGET)


@pytest.mark.parametrize("defense", [none(), dropout(0.2), frozen_embeddings()], ids=["none", "drop", "frozen"])
@pytest.mark.parametrize("num_labels", [2, 5])
@pytest.mark.parametrize("family", WITH_POSITIONS)
def test_the_label_of_one_text_is_exact(family: str, num_labels: int, defense: Defense) -> None:
    for label in (0, num_labels - 1):
        got = recovered(family, [label], num_labels, chain(defense))
        assert got.labels == (label,) and got.tokens == () and got.details["exact"]


@pytest.mark.parametrize("family", WITH_POSITIONS)
def test_label_counts_of_a_batch(family: str) -> None:
    for labels in ([0, 1, 1, 1], [2, 2, 2, 2], [0, 2, 2, 1]):
        assert recovered(family, labels, 3).labels == tuple(sorted(labels))


def test_a_head_without_bias_needs_a_typical_input() -> None:
    """Where every text ends alike, Llama's last state has a common direction; where not, the attack says so, not a guess."""
    model = tiny("llama", "classification", num_labels=2)
    for label in (0, 1):
        seen = seen_by_server(model, batch_of([SENTENCE], "classification", [label]), "classification")
        assert LabelRecovery()(seen, rng=generator(0), budget=BUDGET).labels == (label,)
    with torch.no_grad():  # blocks that add nothing: the last state is the last word's own
        for name, p in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                p.zero_()
    truth = step(model, batch_of([[CLS, 40, 90]], "classification", [1]), task="classification",
                 vocabulary=CAUSAL_VOCABULARY, rng=generator(0))  # fmt: skip
    with pytest.raises(AttackFailed, match="not identify a label"):
        LabelRecovery()(observe(truth, HONEST_SERVER), rng=generator(0), budget=BUDGET)


def test_labels_do_not_apply_to_causal_models_or_missing_heads() -> None:
    seen = seen_by_server(tiny("gpt2", "causal"), batch_for("causal"), "causal")
    with pytest.raises(NotApplicable, match="its own tokens"):
        LabelRecovery()(seen, rng=generator(0), budget=BUDGET)
    full = seen_by_server(tiny("bert", "classification"), batch_for("classification"), "classification")
    cut = {n: g for n, g in full.gradients.items() if not n.startswith("classifier")}
    with pytest.raises(NotApplicable, match="neither the head's bias"):
        LabelRecovery()(Observation(type(full.message)(cut), full.task, full.granted), rng=generator(0), budget=BUDGET)


def test_without_the_batch_size_only_certain_labels_are_listed() -> None:
    model = tiny("bert", "classification", num_labels=4)
    batch = batch_of([[CLS, 20, 21, SEP], [CLS, 30, SEP], [CLS, 31, SEP]], "classification", [2, 0, 2])
    seen = seen_by_server(model, batch, "classification")
    bare = Observation(seen.message, seen.task, {Grant.MODEL: seen.model})
    assert LabelRecovery()(bare, rng=generator(0), budget=BUDGET).labels == (0, 2)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(0, 99))
def test_counts_are_exact_when_the_mean_prediction_is_known(labels: list[int], seed: int) -> None:
    expected = torch.rand(4, generator=generator(seed), dtype=torch.float64).softmax(0)
    present = torch.bincount(torch.tensor(labels), minlength=4).double()
    assert counts(expected - present / len(labels), expected, len(labels)) == present.long().tolist()


def test_a_language_model_is_a_prior_in_nats_over_ids_of_another_vocabulary() -> None:
    model = tiny("gpt2", "causal")
    ids = [40, 3, 41]
    told = CAUSAL_VOCABULARY.encode(VOCABULARY.text(ids))
    start = list(CAUSAL_VOCABULARY.prefix)
    plain = 0.0
    for k, token in enumerate(told):
        with torch.no_grad():
            scores = model(input_ids=torch.tensor([[*start, *told[:k]]])).logits[0, -1]
        plain += float(torch.log_softmax(scores, -1)[token])
    prior = CausalPrior(model, CAUSAL_VOCABULARY, VOCABULARY)
    assert start and prior.log_probability(ids) == pytest.approx(plain, rel=1e-4)
    assert prior.log_probability(ids) == prior.log_probability(tuple(ids))
    assert prior.log_probability([]) == 0.0


def test_a_trained_language_model_prefers_a_sentence_to_its_words_shuffled(shared: Path) -> None:
    victim = load(shared / "models" / "stories260K-hf", "causal")
    prior = CausalPrior(victim.model, victim.vocabulary, victim.vocabulary)
    words = ["Once", "upon", "a", "time,", "there", "was", "a", "little", "girl"]
    right, wrong = (victim.vocabulary.encode(" ".join(order)) for order in (words, sorted(words)))
    assert prior.log_probability(right) > prior.log_probability(wrong) + 10


# --- iDLG


@pytest.mark.parametrize("num_labels", [2, 5])
@pytest.mark.parametrize("family", (*WITH_POSITIONS, "llama"))
def test_idlg_names_the_label_of_one_text(family: str, num_labels: int) -> None:
    model = tiny(family, "classification", num_labels=num_labels)
    for label in (0, num_labels - 1):
        seen = seen_by_server(model, batch_of([SENTENCE], "classification", [label]), "classification")
        without = {n: g for n, g in seen.gradients.items() if not (n.endswith("bias") and g.shape == (num_labels,))}
        for gradients in (seen.gradients, without):
            one = Observation(Message(dict(gradients)), seen.task, seen.granted)
            if num_labels == 2 and (gradients is without or family in ("gpt2", "llama")):
                with pytest.raises(NotApplicable, match="three classes"):
                    IDLG()(one, rng=generator(0), budget=BUDGET)
            else:
                assert IDLG()(one, rng=generator(0), budget=BUDGET).labels == (label,)


def test_idlg_names_no_class_that_neither_of_two_texts_has() -> None:
    batch = batch_of([SENTENCE, SENTENCE], "classification", [0, 1])
    seen = seen_by_server(tiny("bert", "classification"), batch, "classification")
    without = Message({n: g for n, g in seen.gradients.items() if n != "classifier.bias"})
    with pytest.raises(AttackFailed, match="2 texts"):
        IDLG()(Observation(without, seen.task, seen.granted), rng=generator(0), budget=BUDGET)


def test_idlg_fails_on_two_labels_and_does_not_apply_to_causal_models() -> None:
    rows = [SENTENCE, [CLS, 50, 3, SEP], [CLS, 60, SEP]]
    seen = seen_by_server(tiny("bert", "classification"), batch_of(rows, "classification", [0, 1, 1]), "classification")
    with pytest.raises(AttackFailed, match="2 classes have the sign"):
        IDLG()(seen, rng=generator(0), budget=BUDGET)
    seen = seen_by_server(tiny("gpt2", "causal"), batch_for("causal"), "causal")
    with pytest.raises(NotApplicable, match="single-label"):
        IDLG()(seen, rng=generator(0), budget=BUDGET)
