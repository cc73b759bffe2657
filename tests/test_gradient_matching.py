"""What gradient matching recovers: the engine, its orders, its masks and its priors."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from matching_setting import observed_of
from span_setting import seen_by_server
from torch import Tensor, nn

from rasura.attacks.shared.dummies import nearest_tokens
from rasura.attacks.updates.gradient_matching.engine import GradientMatching
from rasura.attacks.updates.gradient_matching.likely import RIDGE, left, likely
from rasura.attacks.updates.gradient_matching.masks import Dropouts, Masked, shapes
from rasura.attacks.updates.gradient_matching.objective import Distance, soft_cross_entropy
from rasura.attacks.updates.gradient_matching.presets import dlg, grab, guided_grab, lamp_cos, tag, tuned
from rasura.attacks.updates.gradient_matching.reorder import orders, reordered
from rasura.attacks.updates.gradient_matching.settings import Work
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.rng import generator
from rasura.core.threat import THREATS, observe
from rasura.core.values import Grant, Message, Observation
from rasura.registry import ATTACKS, DEFENSES, adversaries, for_task, parse_defense
from rasura.testing.tiny import CAUSAL_VOCABULARY, CLS, SEP, VOCABULARY, batch_of, tiny
from rasura.victims.step import step


@pytest.mark.slow
def test_tag_recovers_the_words_of_a_short_text() -> None:
    text = [CLS, 40, 41, 42, SEP]
    seen = seen_by_server(tiny("bert", "classification"), batch_of([text], "classification", [1]), "classification")
    guess = tag()(seen, rng=generator(0), budget=Budget())
    assert len(set(guess.tokens[0]) & {40, 41, 42}) >= 2


@pytest.mark.slow
def test_dlg_is_deterministic_and_more_steps_fit_better() -> None:
    text = [CLS, 40, 41, 42, SEP]
    seen = seen_by_server(tiny("bert", "classification"), batch_of([text], "classification", [1]), "classification")
    short, again = (dlg()(seen, rng=generator(0), budget=Budget("quick")) for _ in range(2))
    assert short.tokens == again.tokens and short.residual == again.residual
    long = dlg()(seen, rng=generator(0), budget=Budget())
    assert long.residual is not None and short.residual is not None and long.residual < short.residual


def test_refuses_what_it_cannot_do() -> None:
    seen = seen_by_server(tiny("bert", "classification"), batch_of([[CLS, 40, SEP]], "classification"), "classification")
    broken = {n: torch.full_like(g, float("nan")) for n, g in seen.gradients.items()}
    with pytest.raises(AttackFailed, match="not finite"):
        dlg()(Observation(Message(broken), seen.task, seen.granted), rng=generator(0), budget=Budget("quick"))
    causal = seen_by_server(tiny("gpt2", "causal"), batch_of([[CLS, 40, 41]], "causal"), "causal")
    for name in set(for_task(ATTACKS, "classification")) - {*for_task(ATTACKS, "causal")}:
        with pytest.raises(NotApplicable, match="classif"):
            ATTACKS[name].make()(causal, rng=generator(0), budget=Budget("quick"))


def test_what_is_expected_to_know_a_protection_of_decoders_reads_decoders() -> None:
    """A report advised to add lamp-weighted, which reads classifiers only: no run could have ended 'not measured'."""
    wanted = {a for d in DEFENSES.values() for a in adversaries(d.example, task="causal").attacks}
    matching = {n for n, spec in ATTACKS.items() if isinstance(spec.make(), GradientMatching)}
    assert len(matching) > 8 and not wanted & matching and not matching & {*for_task(ATTACKS, "causal")}


def test_orders_move_only_free_positions_of_one_text() -> None:
    free = torch.tensor([[0, 1, 1, 1, 1, 0], [0, 1, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0]]).bool()
    found = orders(free, 200, generator(0))
    same = torch.arange(6)
    assert torch.equal(found.sort(-1).values, same.expand(200, 3, 6))
    assert torch.equal(found[:, ~free], same.repeat(3, 1)[~free].expand(200, -1))
    moved = (found != same).any(-1)
    assert moved.sum(1).max() == 1 and moved[:, 0].any() and moved[:, 2].any() and not moved[:, 1].any()
    assert len({tuple(o[0].tolist()) for o in found}) > 10


def test_reordered_moves_vectors_and_orders_of_one_token_are_all_the_same() -> None:
    x = torch.arange(8.0).view(1, 4, 2)
    assert reordered(x, torch.tensor([[0, 2, 1, 3]]))[0, :, 0].tolist() == [0, 4, 2, 6]
    assert torch.equal(orders(torch.tensor([[False, True, False]]), 3, generator(0)), torch.arange(3).expand(3, 1, 3))


@pytest.mark.parametrize("prior", ["none", "reference text", "language model"])
def test_lamp_reads_a_text_with_every_prior(prior: str) -> None:
    text = [CLS, 40, 3, 41, 9, 50, 51, 4, 52, SEP]
    seen = seen_by_server(tiny("bert", "classification"), batch_of([text], "classification"), "classification")
    granted: dict[Grant, object] = {**seen.granted}
    if prior == "reference text":
        granted[Grant.REFERENCE_TEXT] = ("w40 the w41 . w50", "w51 of w52")
    elif prior == "language model":
        undecided = tiny("gpt2", "causal")  # to it all orders are alike; one of random weights would mislead
        for p in undecided.parameters():
            nn.init.zeros_(p)
        granted[Grant.LANGUAGE_MODEL] = (undecided, CAUSAL_VOCABULARY)
    seen = replace(seen, granted=granted)
    attack = replace(lamp_cos(), levels={"quick": Work(16, 2, 80, 10, 10)})
    guess = attack(seen, rng=generator(0), budget=Budget("quick"))
    assert guess.tokens == (tuple(text),) and guess.confidence == "verified"


@pytest.mark.slow
def test_rounds_of_beam_search_find_the_order_that_an_optimisation_misses() -> None:
    text = [CLS, 40, 3, 41, 9, 50, 51, 4, 52, SEP]
    seen = seen_by_server(tiny("bert", "classification"), batch_of([text], "classification"), "classification")
    plain = replace(dlg(), levels={"quick": Work(8, 1, 15)})
    beamed = replace(plain, levels={"quick": Work(8, 1, 15, orders=20, rounds=3, beam=2, sweeps=3)})
    without, found = (a(seen, rng=generator(1), budget=Budget("quick")) for a in (plain, beamed))
    assert without.confidence == "matched" and without.residual is not None and found.residual is not None
    assert found.residual < without.residual
    assert beamed(seen, rng=generator(1), budget=Budget("quick")).tokens == found.tokens


def test_dropout_masks_as_variables_do_what_dropout_did() -> None:
    """Masks recorded in train mode, attention's too, give the same logits in eval mode."""
    model = tiny("bert", "classification", hidden=16)
    inputs = {"input_ids": torch.tensor([[CLS, 40, 41, SEP], [CLS, 42, SEP, 0]])}
    inputs["attention_mask"] = inputs["input_ids"].ne(0).long()
    kept: list[Tensor] = []

    class Recorded(Dropouts):
        def answer(self, call: int, x: Tensor) -> Tensor:
            mask = (torch.rand(x.shape, generator=rng) > 0.1).float()
            kept.append(mask)
            return x * mask / 0.9

    rng = generator(3)
    with Recorded(), torch.no_grad():
        expected = model.train()(**inputs).logits
    assert [tuple(m.shape) for m in kept] == shapes(model.eval(), 2, 4) and len(kept) >= 6
    with Masked([m[None] for m in kept], 0.1), torch.no_grad():
        assert torch.allclose(model(**inputs).logits, expected, atol=1e-6)
    with Masked([torch.full_like(m[None], 0.9) for m in kept], 0.1), torch.no_grad():
        masked = model(**inputs).logits
    assert torch.allclose(masked, model(**inputs).logits.detach(), atol=1e-6)


def test_clipping_is_undone_and_angles_do_not_mind_scale() -> None:
    factoriser, observed, e, mask = observed_of([CLS, 40, 41, SEP])
    onehot = nn.functional.one_hot(torch.tensor([[1]]), 3).double().expand(2, -1, -1)
    found = factoriser(e, mask, lambda z: soft_cross_entropy(z, onehot), graph=False)
    whole = float(torch.stack([g.square().sum() for g in observed.values()]).sum().sqrt())
    clipped = {n: 0.01 * g for n, g in observed.items()}
    for distance in (Distance(clipped, "norm", norm=0.01 * whole), Distance(clipped, "angle")):
        right, wrong = distance(found).tolist()
        assert right < 1e-2 * wrong
    assert float(Distance(clipped, "norm")(found)[0].detach()) > 0.5 * whole


def test_entries_of_a_part_stand_for_the_whole() -> None:
    factoriser, observed, e, mask = observed_of([CLS, 40, 41, SEP])
    onehot = nn.functional.one_hot(torch.tensor([[0]]), 3).double().expand(2, -1, -1)
    found = factoriser(e, mask, lambda z: soft_cross_entropy(z, onehot), graph=False)
    masks = {n: torch.ones_like(g, dtype=torch.bool) for n, g in observed.items()}
    for kind, visible in (("l2", {}), ("l2", masks)):
        whole = Distance(observed, kind, alpha=0.1, visible=visible)(found)  # type: ignore[arg-type]
        parts = [Distance(observed, kind, alpha=0.1, visible=visible, entries=0.25, rng=generator(k))(found)  # type: ignore[arg-type]
                 for k in range(40)]  # fmt: skip
        assert torch.allclose(torch.stack(parts).mean(0), whole, rtol=0.1)


@pytest.mark.slow
def test_less_memory_gives_the_same_text() -> None:
    text = [CLS, 40, 41, 42, SEP]
    seen = seen_by_server(tiny("bert", "classification"), batch_of([text], "classification", [1]), "classification")
    guesses = [tag()(seen, rng=generator(0), budget=Budget("quick", memory_mb=m)) for m in (1, 4096)]
    assert guesses[0].tokens == guesses[1].tokens
    assert guesses[0].residual == pytest.approx(guesses[1].residual, rel=0.02)


@pytest.mark.slow
def test_a_random_share_of_the_visible_entries_is_enough_and_the_record_says_so() -> None:
    text = [CLS, 40, 3, 41, 9, 50, 51, 4, 52, SEP]
    seen = seen_by_server(tiny("bert", "classification"), batch_of([text], "classification"), "classification")
    visible = {n: torch.rand(g.shape, generator=generator(5)) < 0.7 for n, g in seen.gradients.items()}
    seen = replace(seen, message=Message({n: g * visible[n] for n, g in seen.gradients.items()}, visible))
    attack = replace(lamp_cos(), levels={"quick": Work(16, 3, 150, 20, 10)})
    guess = attack(seen, rng=generator(0), budget=Budget("quick", entries=0.2))
    assert guess.tokens == (tuple(text),) and guess.confidence == "verified"
    assert guess.details["entries"] == 0.2


def through_dropout(texts: list[list[int]]) -> Observation:
    sent = step(
        tiny("bert", "classification", num_labels=2), batch_of(texts, "classification", [1, 0][: len(texts)]),
        parse_defense("frozen-embeddings+dropout:0.1"), task="classification", vocabulary=VOCABULARY, rng=generator(0),
    )  # fmt: skip
    return observe(sent, THREATS["honest-server"])


def test_the_ablations_of_grab_leave_out_one_part() -> None:
    whole, fixed, smooth = grab(), grab(masks=False), grab(discrete=False)
    assert fixed.settings == replace(whole.settings, learn_masks=False) and fixed.levels == whole.levels
    assert smooth.settings == whole.settings and all(w.rounds == 1 and not w.beam for w in smooth.levels.values())
    assert [a.name for a in (whole, fixed, smooth)] == ["grab", "grab-without-masks", "grab-without-discrete"]


def test_the_steps_for_large_models_shrink_in_a_line_and_are_clipped() -> None:
    attack = tuned(grab())
    assert attack.settings == replace(grab().settings, linear=True, steepest=0.5) and attack.levels == grab().levels
    assert [attack.settings.rate(k, 4) for k in range(4)] == [1, 0.75, 0.5, 0.25]
    assert [grab().settings.rate(k, 4) for k in (0, 49, 50, 120)] == [1, 1, 0.89, 0.89**2]


def test_each_restart_is_clipped_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    text, taken = [CLS, 40, 3, 41, SEP], list[Tensor]()
    step_of = torch.optim.AdamW.step

    def listened(self: torch.optim.AdamW, *args: Any) -> Any:
        taken.append(self.param_groups[0]["params"][0].grad.flatten(1).norm(dim=1).clone())
        return step_of(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", listened)

    def steps(steepest: float) -> list[Tensor]:
        taken.clear()
        attack = replace(dlg(), settings=replace(dlg().settings, steepest=steepest), levels={"quick": Work(8, 3, 4)})
        attack(through_dropout([text]), rng=generator(0), budget=Budget("quick"))
        return list(taken)

    free = steps(math.inf)
    most = float(free[0].median())
    clipped = steps(most)
    assert len(free) == len(clipped) == 4 and bool((free[0] > most).any())
    torch.testing.assert_close(clipped[0], free[0].clamp(max=most))
    assert all(bool((norms <= most * (1 + 1e-6)).all()) for norms in clipped)


@pytest.mark.slow
def test_grab_reads_words_through_dropout() -> None:
    text = [CLS, 40, 3, 41, 9, 50, SEP]
    attack = replace(grab(), levels={"quick": Work(32, 1, 150, orders=16, rounds=2, beam=2, sweeps=1)})
    guess, again = (attack(through_dropout([text]), rng=generator(0), budget=Budget("quick")) for _ in range(2))
    assert guess.tokens == again.tokens and guess.confidence == "matched"
    assert len(guess.tokens[0]) == len(text) and len(set(guess.tokens[0]) & set(text)) >= len(text) - 1


def test_grab_goes_through_dropout_where_embeddings_are_trained_too() -> None:
    """No mask comes before the norm behind the embeddings, whose gradient is seen there."""
    text = [CLS, 40, 3, 41, SEP]
    truth = step(
        tiny("bert", "classification"), batch_of([text], "classification"), parse_defense("dropout:0.1"),
        task="classification", vocabulary=VOCABULARY, rng=generator(0),
    )  # fmt: skip
    seen = observe(truth, THREATS["with-labels-and-lengths"])
    guess = grab()(seen, rng=generator(0), budget=Budget("quick"))
    assert "bert.embeddings.LayerNorm.weight" in seen.gradients and set(guess.tokens[0]) & {40, 3, 41}


@pytest.mark.slow
def test_grab_moves_the_ends_of_texts_whose_lengths_are_unknown() -> None:
    seen = through_dropout([[CLS, 40, 3, 41, 9, 50, SEP], [CLS, 51, 4, SEP]])
    attack = replace(grab(), levels={"quick": Work(16, 1, 60, orders=8, rounds=2, beam=2, sweeps=2)})
    guess = attack(seen, rng=generator(0), budget=Budget("quick"))
    assert sorted(map(len, guess.tokens)) != [5, 6], "the even split of 11 tokens that it starts from"
    assert all(t[0] == CLS and t[-1] == SEP and 0 not in t for t in guess.tokens)


def test_what_no_deltas_make_up_for_is_a_least_squares_residual() -> None:
    draw = partial(torch.randn, generator=generator(6), dtype=torch.double)
    x = nn.functional.normalize(draw(3, 5, 24), dim=-1)
    gradient = draw(7, 24)
    wanted = []
    for one in x:  # the ridge as rows of its own
        ridged = torch.cat([one.T, RIDGE**0.5 * torch.eye(5, dtype=torch.double)])
        aim = torch.cat([gradient.T, torch.zeros(5, 7, dtype=torch.double)])
        delta = torch.linalg.lstsq(ridged, aim).solution
        wanted.append((aim - ridged @ delta).square().sum() / gradient.square().sum())
    assert torch.allclose(left(gradient, x), torch.stack(wanted), rtol=1e-9)


@pytest.mark.parametrize("text", [[CLS, 40, 3, 41, 9, 50, SEP], [CLS, 40, 40, 3, 3, 41, SEP]])
def test_likely_words_through_dropout_make_the_text(text: list[int]) -> None:
    seen = through_dropout([text])
    ordinary = torch.tensor([i for i in range(VOCABULARY.size) if i not in VOCABULARY.special_ids])
    found = likely(seen, ordinary, len(text))
    assert found is not None
    assert all(word in row for word, row in zip(text[1:-1], found.words.tolist()[1:-1]))
    ids, free = torch.tensor([CLS, 0, 0, 0, 0, 0, SEP]), torch.tensor([0, 1, 1, 1, 1, 1, 0]).bool()
    texts = found.texts(ids, free, generator(0))
    assert texts[0].tolist() == text
    others = torch.tensor([[[CLS, 40, 3, 41, 9, 51, SEP]], [[CLS, 3, 40, 41, 9, 50, SEP]]])
    assert float(found.distance(torch.tensor([[text]]))) < float(found.distance(others).min())


def test_without_a_row_space_or_with_several_texts_no_words_are_likely() -> None:
    seen = through_dropout([[CLS, 40, 3, SEP]])
    hidden = {n: g for n, g in seen.gradients.items() if ".layer.0." not in n}
    assert likely(replace(seen, message=Message(hidden)), torch.arange(5, 60), 4) is None


def test_guided_grab_reads_one_text_from_its_likely_words() -> None:
    text = [CLS, 40, 3, 41, SEP]
    guess = guided_grab()(through_dropout([text]), rng=generator(0), budget=Budget("quick"))
    assert guess.tokens == (tuple(text),) and guess.confidence == "matched" and guess.details["steps"] == 0


def test_nearest_tokens_have_the_largest_cosines_of_the_ordinary_ones() -> None:
    draw = partial(torch.randn, generator=generator(7), dtype=torch.double)
    table, e, ordinary = draw(50, 8) * draw(50, 1).exp(), draw(2, 3, 8), torch.arange(5, 50, 2)
    slow = torch.stack([nn.functional.cosine_similarity(e, table[i], dim=-1) for i in ordinary], -1)
    assert torch.equal(nearest_tokens(e, table, ordinary, 4), ordinary[slow.topk(4, dim=-1).indices])
