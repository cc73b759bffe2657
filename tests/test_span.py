"""The span attack: exact texts from real gradients of tiny models, dropout on and off, one text and several."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from span_setting import TEXTS, seen_by_server, seen_of_minilm
from torch import nn

from rasura.attacks.shared.comparing import relative_error
from rasura.attacks.shared.verify import VERIFIED, check
from rasura.attacks.updates.span import Span, prefixes
from rasura.attacks.updates.span.grouping import cluster, dealt, projections
from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.rates import own_rate, searched
from rasura.attacks.updates.span.rows import block_spaces, row_space, visible_blocks
from rasura.attacks.updates.span.scan import Scan
from rasura.attacks.updates.span.tokens import candidates, clearest
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import UNKNOWN, Grant, Mechanism, Message, Observation, Reconstruction, Stage, Vocabulary
from rasura.registry import parse_defense
from rasura.testing.tiny import CLS, SEP, VOCABULARY, WORDS, batch_of, tiny
from rasura.victims.loading import load
from rasura.victims.models import layer_inputs, parts
from rasura.victims.step import gradients, step

BARE = [[CLS, *t[1:-1]] for t in TEXTS]


def attack(seen: Observation) -> Reconstruction:
    return Span()(seen, rng=generator(0, "attack"), budget=Budget())


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
@pytest.mark.parametrize("rows", [1, 3])
def test_encoders_give_back_every_text_verified(family: str, rows: int) -> None:
    batch = batch_of(TEXTS[:rows], "classification", [1, 0, 2][:rows])
    guess = attack(seen_by_server(tiny(family, "classification"), batch, "classification"))
    assert sorted(guess.tokens) == sorted(map(tuple, TEXTS[:rows]))
    assert guess.confidence == "verified"
    assert guess.labels is not None and sorted(guess.labels) == sorted([1, 0, 2][:rows])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("task", ["classification", "causal"])
def test_decoders_give_back_every_text_verified(family: str, task: str) -> None:
    batch = batch_of(BARE, task, [1, 0, 2])
    guess = attack(seen_by_server(tiny(family, task), batch, task))
    assert sorted(guess.tokens) == sorted(map(tuple, BARE))
    assert guess.confidence == "verified"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_last_block_of_a_decoder_is_enough(family: str) -> None:
    model = tiny(family, "causal", blocks=3)
    name = parts(model).blocks[-1].module
    guess = attack(seen_by_server(model, batch_of(BARE[:1], "causal"), "causal", keep=name))
    assert guess.tokens == (tuple(BARE[0]),)
    assert guess.confidence == "verified"


def test_encoder_with_block_0_hidden_is_not_applicable() -> None:
    batch = batch_of(TEXTS[:1], "classification")
    seen = seen_by_server(tiny("bert", "classification"), batch, "classification", "layer.1.")
    with pytest.raises(NotApplicable, match="block 0 is hidden"):
        attack(seen)


def test_no_attention_gradient_is_not_applicable() -> None:
    batch = batch_of(TEXTS[:1], "classification")
    seen = seen_by_server(tiny("bert", "classification"), batch, "classification", "classifier")
    with pytest.raises(NotApplicable, match="no whole query, key or value gradient"):
        attack(seen)


def test_words_come_back_where_only_the_first_block_tells_inputs_apart() -> None:
    # 12 texts of 8 tokens have more different prefixes than the layer has inputs, of fewer different tokens.
    model = tiny("llama", "causal", hidden=32)
    draw = generator(4, "texts")
    rows = [[CLS, *(20 + torch.randint(18, (7,), generator=draw)).tolist()] for _ in range(12)]
    guess = attack(seen_by_server(model, batch_of(rows, "causal"), "causal"))
    assert not guess.ordered and guess.confidence == "span"
    named = {t for row in rows for t in row[:-1]}  # the last tokens have no gradient
    assert len(guess.tokens) == len(rows) and all(set(bag) == named for bag in guess.tokens)


def test_a_row_space_that_is_none_of_the_batch_is_not_read_by() -> None:
    model, batch = tiny("llama", "causal"), batch_of(BARE, "causal")
    seen, inputs = seen_by_server(model, batch, "causal"), Inputs(model)
    spaces = block_spaces(seen, visible_blocks(seen))
    scan = Scan(spaces[0], inputs, torch.arange(WORDS), 1)
    assert Span()._decoder(seen, seen, spaces, inputs, scan) is not None
    one = seen_by_server(model, batch_of(BARE[1:2], "causal"), "causal")
    part = block_spaces(one, visible_blocks(one))[1].basis  # the states of one text alone
    other = torch.randn(64, 8, generator=generator(1), dtype=torch.double)
    for directions in (part, torch.cat([part, other], 1)):
        basis = torch.linalg.qr(directions).Q
        wrong = replace(spaces[1], basis=basis, noise=torch.zeros(basis.shape[1], dtype=torch.double))
        assert Span()._decoder(seen, seen, {0: spaces[0], 1: wrong}, inputs, scan) is None


def test_row_spaces_that_accept_nearly_any_text_end_the_attack_as_a_failure() -> None:
    model = tiny("llama", "causal", hidden=16)
    seen, inputs = seen_by_server(model, batch_of(BARE, "causal"), "causal"), Inputs(model)
    blurred = {k: replace(s, noise=torch.ones_like(s.noise)) for k, s in block_spaces(seen, visible_blocks(seen)).items()}
    scan = Scan(blurred[0], inputs, torch.arange(WORDS), 1)
    with pytest.raises(AttackFailed, match="more prefixes than they can hold"):
        Span()._decoder(seen, seen, blurred, inputs, scan)


def test_a_search_that_grows_far_more_prefixes_than_a_batch_has_ends_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MOST_GROWN", 4)  # as it is, a few seconds more
    model = tiny("llama", "causal", hidden=32)
    seen, inputs = seen_by_server(model, batch_of(BARE, "causal"), "causal"), Inputs(model)
    spaces = block_spaces(seen, visible_blocks(seen)[1:])
    assert Span()._decoder(seen, seen, spaces, inputs, None) is not None
    blurred = {k: replace(s, noise=torch.full_like(s.noise, 0.1)) for k, s in spaces.items()}
    with pytest.raises(AttackFailed, match="more prefixes than they can hold"):
        Span()._decoder(seen, seen, blurred, inputs, None)


def test_noise_ends_the_attack_as_a_failure() -> None:
    seen = seen_by_server(tiny("bert", "classification"), batch_of(TEXTS[:1], "classification"), "classification")
    noisy = {n: g + 1e-2 * torch.randn(g.shape, generator=generator(1)) for n, g in seen.gradients.items()}
    with pytest.raises(AttackFailed):
        attack(Observation(Message(noisy), seen.task, seen.granted))


def test_more_tokens_than_inputs_end_the_attack_as_a_failure() -> None:
    model = tiny("bert", "classification", hidden=16)
    rows = [[CLS, *range(20 + 10 * k, 29 + 10 * k), SEP] for k in range(3)]
    with pytest.raises(AttackFailed):
        attack(seen_by_server(model, batch_of(rows, "classification"), "classification"))


# --- active dropout


def practical(texts: list[list[int]], rate: float, seed: int, size: int | None = None) -> Reconstruction:
    """Dropout active and embeddings frozen; the model is wide enough for the robust fit."""
    model = tiny("bert", "classification", hidden=128)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
    model.train()
    torch.manual_seed(seed)
    batch = batch_of(texts, "classification")
    found, _ = gradients(model, batch.inputs())
    model.eval()
    granted = {
        Grant.MODEL: model,
        Grant.BASE_MODEL: VOCABULARY,
        Grant.MECHANISM: (Mechanism("dropout", Stage.MODEL, {"p": rate}),),
        Grant.BATCH_SIZE: size or len(texts),
    }
    visible = {n: g for n, g in found.items() if "embeddings" not in n}
    return attack(Observation(Message(visible), "classification", granted))


@pytest.mark.parametrize("rate", [0.1, 0.2])
def test_dropout_does_not_stop_it(rate: float) -> None:
    guess = practical(TEXTS[:1], rate, 3)
    assert guess.tokens == (tuple(TEXTS[0]),)
    assert guess.confidence == "span", "nothing can be verified while the masks are unknown"


@pytest.mark.parametrize("hidden", [64, 256])
def test_gpt2_under_dropout_is_read_or_given_up(hidden: int) -> None:
    """Its dropout comes before the normalisation, and it takes no empty batch."""
    model, text = tiny("gpt2", "classification", hidden=hidden), [CLS, 40, 41, 42, 43, 44, 45, SEP]
    sent = step(
        model, batch_of([text], "classification", [1]), parse_defense("frozen-embeddings+dropout:0.1"),
        task="classification", vocabulary=VOCABULARY, rng=generator(1),
    )  # fmt: skip
    seen = observe(sent, HONEST_SERVER)
    if hidden == 256:
        assert attack(seen).tokens == (tuple(text),)
    else:
        with suppress(AttackFailed):
            guess = attack(seen)
            assert guess.confidence == "matched" and set(guess.tokens[0]) <= set(text)


@pytest.mark.parametrize(("own", "active"), [(0.1, 0.1), (0.0, 0.1), (0.4, 0.1)])
def test_dropout_that_nobody_announced_is_taken_for_the_models_own(own: float, active: float) -> None:
    """A training loop leaves it active. If that finds too little, no rate is taken for known."""
    model = tiny("bert", "classification", hidden=128)
    layers = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    for layer in layers:
        layer.p = active
    model.train()
    torch.manual_seed(3)
    found, _ = gradients(model, batch_of(TEXTS[:1], "classification").inputs())
    model.eval()
    for layer in layers:
        layer.p = own
    space = row_space([found[lin.weight] for lin in parts(model).blocks[0].qkv])
    assert space is not None and own_rate(model) == own
    scan = Scan(space, Inputs(model), candidates(VOCABULARY), len(TEXTS[0]))
    look = searched(
        scan, len(TEXTS[0]), 0.0, copies=1, opening=(), known_length=True, work=(96, 8), rng=generator(0)
    )  # fmt: skip
    assert look.complete and {(row.position, row.token) for row in look.rows} == set(enumerate(TEXTS[0]))
    assert look.rate in (own, 0.0) and (look.rate == own or own != active)


@pytest.mark.slow
def test_two_texts_of_a_usual_training_loop_are_told_apart(minilm_path: Path) -> None:
    """Nothing is announced: neither the dropout that the loop left active nor the number of texts. Only a bag of words came
    back, after eight minutes."""
    victim = load(minilm_path, "classification")
    texts = ["Lena Brandt owes 4,250 euros .", "The patient was discharged on Tuesday with a new prescription ."]
    coded = victim.tokenizer(texts, return_tensors="pt", padding=True)
    victim.model.train()
    torch.manual_seed(1)
    found, _ = gradients(victim.model, {**coded, "labels": torch.tensor([1, 0])})
    victim.model.eval()
    granted = {Grant.MODEL: victim.model, Grant.BASE_MODEL: victim.vocabulary, Grant.MECHANISM: ()}
    guess = attack(Observation(Message(found), "classification", granted))
    assert guess.ordered and guess.confidence == "span"
    assert sorted(map(victim.vocabulary.text, guess.tokens)) == sorted(map(victim.vocabulary.text, coded.input_ids.tolist()))


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_two_texts_of_a_trained_model_are_told_apart(minilm_path: Path, rate: float) -> None:
    victim = load(minilm_path, "classification")
    texts = ["mary is here now", "he lost it , again"]
    coded = victim.tokenizer(texts, return_tensors="pt", padding=True)
    ids = coded.input_ids.tolist()
    for module in victim.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
    victim.model.train(rate > 0)
    torch.manual_seed(2)
    found, _ = gradients(victim.model, {**coded, "labels": torch.tensor([0, 1])})
    victim.model.eval()
    granted = {Grant.MODEL: victim.model, Grant.BASE_MODEL: victim.vocabulary, Grant.BATCH_SIZE: 2}
    granted[Grant.MECHANISM] = (Mechanism("dropout", Stage.MODEL, {"p": rate}),) if rate else ()
    guess = attack(Observation(Message(found), "classification", granted))
    assert sorted(map(victim.vocabulary.text, guess.tokens)) == sorted(map(victim.vocabulary.text, ids))
    assert guess.confidence == ("span" if rate else "verified")


def test_dropout_that_nobody_announced_is_noticed() -> None:
    model = tiny("bert", "classification", hidden=128)
    model.train()
    torch.manual_seed(0)
    found, _ = gradients(model, batch_of(TEXTS[:1], "classification").inputs())
    model.eval()
    granted = {Grant.MODEL: model, Grant.BASE_MODEL: VOCABULARY, Grant.BATCH_SIZE: 1}
    guess = attack(Observation(Message(found), "classification", granted))
    assert guess.tokens == (tuple(TEXTS[0]),)
    assert guess.details["dropout_fit"] is True


def test_no_text_gets_two_tokens_of_a_place() -> None:
    rng = generator(3)
    truth, places = [0, 0, 0, 1, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2, 0, 1]
    alike = torch.tensor([[float(a == b) for b in truth] for a in truth]) + 0.2 * torch.rand(8, 8, generator=rng)
    alike = alike + alike.T
    wrong = [0, 0, 0, 1, 0, 1, 2, 2]
    assert dealt(alike, places, truth, 3) == truth
    assert dealt(alike, places, wrong, 3) == truth
    crowded = dealt(alike, [0] * 8, wrong, 3)
    assert crowded == wrong, "a place with more rows than texts is left as it is"


# --- pieces


def test_row_space_is_that_of_the_layer_inputs() -> None:
    model, batch = tiny("gpt2", "causal"), batch_of(BARE, "causal")
    found, _ = gradients(model, batch.inputs())
    lin = parts(model).blocks[1].qkv[0]
    space = row_space([found[lin.weight].T])
    assert space is not None
    states = layer_inputs(model, [lin.module], input_ids=batch.input_ids, attention_mask=batch.attention_mask)
    x = states[lin.module].detach()
    ends = batch.attention_mask.sum(1) - 1
    for row, end in enumerate(ends.tolist()):
        assert float(space.residual(x[row, :end].double()).max()) < 1e-5
        assert float(space.residual(x[row, end].double())) > 1e-2, "nothing is predicted from a last token: no gradient"


def test_row_space_of_noise_is_none() -> None:
    assert row_space([torch.randn(96, 64, generator=generator(3))]) is None
    assert row_space([torch.zeros(8, 8)]) is None


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "gpt2", "llama"])
def test_first_inputs_equal_the_whole_forward_pass(family: str) -> None:
    model = tiny(family, "classification")
    batch = batch_of([TEXTS[2]], "classification")
    module = parts(model).blocks[0].qkv[0].module
    with torch.no_grad():
        whole = layer_inputs(model, [module], input_ids=batch.input_ids, attention_mask=batch.attention_mask)[module][0]
    inputs = Inputs(model)
    for position, token in enumerate(TEXTS[2]):
        assert torch.allclose(inputs.first(torch.tensor([token]), position)[0], whole[position], atol=1e-5)


def test_rows_that_rounding_covers_are_counted_and_tolerated_by_their_noise() -> None:
    rng = generator(1)
    inputs = torch.randn(9, 96, generator=rng, dtype=torch.double)
    sizes = torch.logspace(0, -2, 9, dtype=torch.double)
    exact = (torch.randn(192, 9, generator=rng, dtype=torch.double) * sizes) @ inputs
    noisy = exact + 2e-4 * float(exact.norm()) / 10 * torch.randn(exact.shape, generator=rng, dtype=torch.double)
    space = row_space([noisy])
    assert space is not None and space.rank == 9
    residual, allowed = space.residual(inputs), space.tolerance(inputs)
    assert bool((residual < allowed).all()), "true inputs"
    assert float(allowed.max()) > 5 * float(allowed.min()), "weak inputs are given more room"
    other = torch.randn(50, 96, generator=rng, dtype=torch.double)
    assert bool((space.residual(other) > space.tolerance(other)).all())


@pytest.mark.parametrize("update", ["fedsgd+fp16", "fedsgd+bf16", pytest.param("fedavg-sgd:2", marks=pytest.mark.slow)])
def test_four_texts_come_back_through_rounding(minilm_path: Path, update: str) -> None:
    texts = ["mary is here now", "he lost it , again", "we saw her leave", "it is late"]
    seen, ids = seen_of_minilm(minilm_path, texts, [0, 1, 1, 0], update)
    assert sorted(attack(seen).tokens) == sorted(ids)


@pytest.mark.slow
def test_a_text_comes_back_whose_inputs_moved_more_than_the_noise_of_the_basis_says(minilm_path: Path) -> None:
    # The embeddings are trained as well, so that each of the four steps has other inputs.
    text = "he shook his head ; but there was a smile of indulgence"
    seen, ids = seen_of_minilm(minilm_path, [text], [0], "fedavg-sgd:4:0.02", "none")
    space, inputs = block_spaces(seen, visible_blocks(seen)[:1])[0], Inputs(seen.model)
    true = torch.cat([inputs.first(torch.tensor([token]), place) for place, token in enumerate(ids[0])]).double()
    assert bool((space.residual(true) > space.tolerance(true)).any())
    guess = attack(seen)
    assert guess.tokens == (ids[0],) and guess.confidence == "verified"


def test_tokens_before_a_clear_gap_are_named_and_without_one_none(minilm_path: Path) -> None:
    texts = ["mary is here now", "he lost it , again"]
    seen, ids = seen_of_minilm(minilm_path, texts, [0, 1], "fedavg-sgd:4:0.02", "none")
    space, inputs = block_spaces(seen, visible_blocks(seen)[:1])[0], Inputs(seen.model)
    scan = Scan(space, inputs, candidates(seen.vocabulary), 12)
    for place in range(1, 5):
        named = clearest(scan, place)
        residuals = [row.residual for row in named]
        assert {text[place] for text in ids} <= {row.token for row in named} and residuals == sorted(residuals)
        assert all(row.position == place and row.residual < 0.02 for row in named)
    assert clearest(scan, 11) == [], "behind the texts"


def test_copies_of_a_text_with_opposite_labels_come_back(minilm_path: Path) -> None:
    texts = ["mary is here now", "he lost it , again", "mary is here now"]
    seen, ids = seen_of_minilm(minilm_path, texts, [0, 1, 1], "fedsgd")
    guess = attack(seen)
    assert guess.confidence == "verified"
    assert sorted(guess.tokens) == sorted(ids)
    assert guess.labels is not None
    assert sorted(zip(guess.tokens, guess.labels)) == sorted(zip(ids, [0, 1, 1]))


@pytest.mark.slow
def test_copies_with_opposite_labels_come_back_from_a_batch_of_eight(minilm_path: Path) -> None:
    # The copies leave so little of their gradient that none of their tokens looks likely.
    texts = [
        "Sarah smiled a charming smile.",
        "Drew believes I think Rosie loves magazine ads.",
        "The only people being added to our group who were at Harvard were students.",
        "That we invaded Iraq really bites.",
        "The gardener grew that acorn into an oak tree.",
        "Chocolate eggs were hidden from no child by any adult.",
        "I forgot how good beer tastes.",
        "I forgot how good beer tastes.",
    ]
    seen, ids = seen_of_minilm(minilm_path, texts, [0, 1] * 4, "fedsgd")
    guess = Span()(seen, rng=generator(1, "attack"), budget=Budget())
    assert guess.confidence == "verified"
    assert sorted(guess.tokens) == sorted(ids)


@pytest.mark.parametrize("family", ["bert", "distilbert", "mpnet", "deberta-v2", "gpt2"])
def test_query_and_key_are_found_whatever_a_family_calls_them(family: str) -> None:
    model = tiny(family, "classification")
    seen = seen_by_server(model, batch_of(TEXTS[:1], "classification"), "classification")
    assert projections(seen, parts(model).blocks[0]) is not None


def test_cluster_finds_blocks_and_is_deterministic() -> None:
    likeness = torch.block_diag(torch.ones(4, 4), torch.ones(3, 3), torch.ones(5, 5)).double()
    labels = cluster(likeness, 3)
    assert labels == cluster(likeness, 3)
    assert [len({*labels[a:b]}) for a, b in ((0, 4), (4, 7), (7, 12))] == [1, 1, 1] and len({*labels}) == 3


@pytest.mark.parametrize("seed", range(6))
def test_groups_are_those_of_spectral_clustering(seed: int) -> None:
    from sklearn.cluster import SpectralClustering

    rng = generator(seed)
    true = torch.randint(0, 3, (20,), generator=rng)
    likeness = torch.rand((20, 20), generator=rng, dtype=torch.float64) * 0.2 + (true[:, None] == true).double()
    likeness = likeness + likeness.T
    slow = SpectralClustering(3, affinity="precomputed", assign_labels="cluster_qr", random_state=0)
    expected = torch.as_tensor(slow.fit_predict(likeness.clone().fill_diagonal_(0).numpy() + 1e-9))
    found = torch.tensor(cluster(likeness, 3))
    assert torch.equal(found[:, None] == found, expected[:, None] == expected)


# --- verification


def test_check_accepts_the_truth_and_nothing_near_it() -> None:
    model = tiny("bert", "classification")
    seen = seen_by_server(model, batch_of(TEXTS[:2], "classification", [2, 1]), "classification")
    error, labels = check(seen, [TEXTS[1], TEXTS[0]])
    assert error < VERIFIED / 10 and labels == (1, 2)
    wrong = [TEXTS[0], [*TEXTS[1][:-2], 53, SEP]]
    assert check(seen, wrong)[0] > 3 * VERIFIED
    assert check(seen, [TEXTS[0], [CLS, UNKNOWN, SEP]]) == (float("inf"), None)
    assert check(seen, []) == (float("inf"), None)


def test_relative_error_ignores_scale_and_hidden_entries() -> None:
    a = {"w": torch.tensor([1.0, 2.0, 3.0])}
    assert relative_error(a, {"w": 0.1 * a["w"]}) < 1e-6
    hidden = {"w": torch.tensor([2.0, 4.0, -9.0])}
    assert relative_error(a, hidden, {"w": torch.tensor([True, True, False])}) < 1e-6
    assert relative_error(a, hidden) > 0.5
    assert relative_error({}, a) == float("inf")


def test_unused_and_out_of_range_ids_are_never_guessed() -> None:
    unused = frozenset(range(200, WORDS))
    vocabulary = Vocabulary(
        WORDS, VOCABULARY.decode, VOCABULARY.encode, (CLS,), (SEP,), 0, VOCABULARY.special_ids, unused_ids=unused
    )
    model = tiny("bert", "classification")
    seen = seen_by_server(model, batch_of([[CLS, 40, 250, 41, SEP]], "classification"), "classification")
    granted = {**seen.granted, Grant.BASE_MODEL: vocabulary}
    guess = attack(Observation(seen.message, seen.task, granted))
    assert guess.tokens[0][:2] == (CLS, 40) and 250 not in guess.tokens[0]
