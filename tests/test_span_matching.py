"""Span matching on tiny models: whichever blocks are visible."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from span_setting import TEXTS, seen_by_server
from torch import nn

from rasura.attacks.updates.gradient_matching.presets import dlg
from rasura.attacks.updates.span.rows import block_spaces, visible_blocks
from rasura.attacks.updates.span.sentences import rearranged
from rasura.attacks.updates.span_matching import SpanMatching
from rasura.attacks.updates.span_matching.attack import LEVELS
from rasura.attacks.updates.span_matching.discrete import beam_search, fill_holes, neighbours
from rasura.attacks.updates.span_matching.guided import RUN, Guided, Lens, Sharp
from rasura.attacks.updates.span_matching.objective import Objective, readout
from rasura.attacks.updates.span_matching.states import TRUSTED, Equations, equations, solve
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.rng import generator
from rasura.core.values import Message, Observation
from rasura.testing.tiny import CLS, ENCODERS, FAMILIES, SEP, batch_of, tiny
from rasura.victims.models import layer_inputs, parts
from rasura.victims.positions import read_position

SHORT = [CLS, 40, 3, 41, 9, SEP]


@pytest.mark.parametrize("starts", [2, 0], ids=["likely words", "continuous"])
def test_last_block_alone_gives_the_text_verified(starts: int) -> None:
    model = tiny("bert", "classification", blocks=3)
    seen = seen_by_server(model, batch_of([SHORT], "classification"), "classification", keep="layer.2.")
    levels = {"default": replace(LEVELS["default"], starts=starts)}
    guess = SpanMatching(levels=levels)(seen, rng=generator(0), budget=Budget())
    assert guess.tokens == (tuple(SHORT),)
    assert guess.confidence == "verified"


def objective_of(seen: Observation) -> Objective:
    return Objective(seen.model, block_spaces(seen, visible_blocks(seen)), seen.vocabulary, readout(seen, seen.batch_size))


def test_the_objective_is_at_the_floor_for_private_texts_alone() -> None:
    model = tiny("bert", "classification", blocks=3)
    batch = batch_of(TEXTS[:2], "classification")
    objective = objective_of(seen_by_server(model, batch, "classification"))
    bodies = [tuple(text[1:-1]) for text in TEXTS[:2]]
    scores = objective.texts([*bodies, (77, *bodies[0][1:]), bodies[0][::-1]])
    assert scores[:2].max() < 1e-9 and scores[2:].min() > 1e-4
    table = objective.model.get_input_embeddings().weight  # type: ignore[operator]
    e = table[batch.input_ids][None]
    assert objective.embeddings(e, batch.attention_mask[None], 0.0)[0] < 1e-5


def test_beam_search_mends_a_swap_and_a_wrong_token() -> None:
    seen = seen_by_server(tiny("bert", "classification", blocks=3), batch_of([SHORT], "classification"), "classification",
                          keep="layer.2.")  # fmt: skip
    beam = beam_search(
        objective_of(seen), [(41, 3, 40, 77)], [3, 9, 40, 41], width=2, floor=1e-9, sweeps=8, rng=generator(0)
    )
    assert beam[0][1] == tuple(SHORT[1:-1]) and beam[0][0] < 1e-9


def test_beam_search_finds_the_length_and_avoids_barred_texts() -> None:
    seen = seen_by_server(tiny("bert", "classification", blocks=3), batch_of([SHORT], "classification"), "classification")
    truth = tuple(SHORT[1:-1])
    for start in (truth[:-1], (*truth, 9)):
        beam = beam_search(
            objective_of(seen), [start], [3, 9, 40, 41], width=2, floor=1e-9, sweeps=4, rng=generator(0), resize=True
        )
        assert beam[0][1] == truth
    beam = beam_search(
        objective_of(seen), [truth[::-1]], [3, 9], width=2, floor=1e-9, sweeps=4, rng=generator(0), barred=truth.__eq__
    )
    assert all(text != truth for _, text in beam)


def test_words_twice_and_words_of_known_texts_do_not_fit() -> None:
    batch = batch_of(TEXTS[:2], "classification")
    objective = objective_of(seen_by_server(tiny("bert", "classification", blocks=3), batch, "classification"))
    one, two = (tuple(text[1:-1]) for text in TEXTS[:2])
    changed = (*one[:-1], two[-1])
    before = objective.texts([one, changed, two])
    objective.exclude([one])
    after = objective.texts([one, changed, two])
    assert after[2] < 1e-7 and before[[0, 2]].max() < 1e-9
    assert after[1] > 2 * before[1] > 0


def test_a_model_that_takes_no_embeddings_is_not_attacked() -> None:
    seen = seen_by_server(tiny("t5", "classification"), batch_of([[40, 41, SEP]], "classification"), "classification")
    for attack in (SpanMatching(), dlg()):
        with pytest.raises(NotApplicable, match="T5ForSequenceClassification takes no embeddings"):
            attack(seen, rng=generator(0), budget=Budget("quick"))


@pytest.mark.parametrize("family", FAMILIES)
def test_readout_is_what_the_head_reads_of_a_text(family: str) -> None:
    position = 0 if family in ENCODERS else -1
    batch = batch_of([SHORT], "classification")
    model = tiny(family, "classification")
    assert read_position(model) == position
    seen = seen_by_server(model, batch, "classification")
    read = readout(seen, 1)
    assert read is not None and read.position == position
    assert objective_of(seen).texts([tuple(SHORT[1:-1])])[0] < 1e-9
    assert readout(seen, 2) is None


def test_no_readout_where_every_position_counts_or_the_last_block_is_out_of_sight() -> None:
    assert read_position(tiny("gpt2", "causal")) is None
    batch = batch_of([SHORT], "classification")
    assert readout(seen_by_server(tiny("bert", "classification"), batch, "classification", keep="layer.0."), 1) is None


def test_neighbours_differ_and_keep_the_length_unless_they_may_change_it() -> None:
    text = (5, 6, 7, 6)
    out = neighbours(text, 1, [8, 6], resize=False)
    assert text not in out and (5, 8, 7, 6) in out and (6, 5, 7, 6) in out and (5, 7, 6, 6) in out
    assert all(len(t) == 4 for t in out)
    assert {len(t) for t in neighbours(text, 1, [8], resize=True)} == {3, 4, 5}


def test_a_hole_is_filled_with_a_token_that_is_in_no_pool() -> None:
    seen = seen_by_server(tiny("bert", "classification", blocks=3), batch_of([SHORT], "classification"), "classification")
    objective, truth = objective_of(seen), tuple(SHORT[1:-1])
    table = seen.model.get_input_embeddings().weight.detach()  # type: ignore[operator,union-attr]
    ordinary = torch.arange(3, len(table))
    mended = fill_holes(objective, [(truth[0], 77, *truth[2:])], table, ordinary, rate=0.01, rng=generator(0))
    assert mended[0] == truth


def test_says_when_it_cannot_be_tried_or_sees_nothing() -> None:
    batch = batch_of([SHORT], "classification")
    seen = seen_by_server(tiny("bert", "classification"), batch, "classification", keep="classifier")
    with pytest.raises(NotApplicable):
        SpanMatching()(seen, rng=generator(0), budget=Budget("quick"))
    seen = seen_by_server(tiny("bert", "classification"), batch, "classification")
    noisy = {n: torch.randn(g.shape, generator=generator(1)) for n, g in seen.gradients.items()}
    with pytest.raises(AttackFailed, match="no visible layer shows a row space"):
        SpanMatching()(Observation(Message(noisy), seen.task, seen.granted), rng=generator(0), budget=Budget("quick"))


def guided_of(seen: Observation, length: int) -> Guided:
    table = seen.model.get_input_embeddings().weight.detach()  # type: ignore[operator,union-attr]
    return Guided(objective_of(seen), table, torch.arange(3, len(table)), [9, 40], length, 1e-9, generator(0))


def test_the_lens_tells_distances_as_the_fitted_inputs_do_one_by_one() -> None:
    rng = generator(3)
    table, basis = torch.randn(30, 8, generator=rng), torch.linalg.qr(torch.randn(6, 3, generator=rng).double()).Q
    bodies = [tuple(row) for row in torch.randint(30, (40, 4), generator=rng).tolist()]
    inputs = torch.randn(40, 4, 6, generator=rng)
    lens = Lens(table.double(), basis, bodies, inputs.double())
    ids = torch.tensor([2, 5, 7])
    found = lens.outside(ids)
    for place in range(4):
        for k, token in enumerate(ids):
            x = table[token].double() @ lens.slope + lens.place[place]
            outside = x - basis @ (basis.T @ x)
            assert found[place, k] == pytest.approx(float(outside.square().sum() / x.square().sum()), abs=1e-9)


def test_the_lens_finds_linear_inputs_and_where_they_stand() -> None:
    rng = generator(4)
    table, slope = torch.randn(60, 8, generator=rng), torch.randn(8, 20, generator=rng)
    places = 3 * torch.randn(5, 20, generator=rng)
    truth = (11, 22, 33, 44, 55)
    basis = torch.linalg.qr((table[list(truth)] @ slope + places).T).Q
    bodies = [tuple(row) for row in torch.randint(60, (200, 5), generator=rng).tolist()]
    inputs = table[torch.tensor(bodies)] @ slope + places
    found = Lens(table, basis, bodies, inputs).outside(torch.arange(60))
    assert tuple(found.argmin(1).tolist()) == truth


def test_likely_words_climb_to_the_text_and_no_text_is_judged_twice() -> None:
    seen = seen_by_server(tiny("bert", "classification", blocks=3), batch_of([SHORT], "classification"), "classification",
                          keep="layer.2.")  # fmt: skip
    guided = guided_of(seen, 4)
    judged: list[tuple[int, ...]] = []
    run = guided._run
    guided._run = lambda bodies: judged.extend(bodies) or run(bodies)  # type: ignore[method-assign,func-returns-value]
    beam = guided.climb(guided.start(2), 2)
    assert beam[0][1] == tuple(SHORT[1:-1]) and beam[0][0] < 1e-9
    assert len(judged) == len(set(judged)) == len(guided.scores)
    some = judged[:20]
    alone = [float(guided.objective.texts([body])[0]) for body in some]
    assert [guided.scores[body] for body in some] == pytest.approx(alone, abs=1e-6)


def test_orders_swap_two_tokens_or_move_a_run() -> None:
    text = (1, 2, 3, 4, 5, 6)
    found = set(rearranged(text, 0, len(text), RUN))
    assert {sum(a != b for a, b in zip(x, text)) for x in found} >= {2, 3, 6}
    assert (6, 2, 3, 4, 5, 1) in found and (3, 4, 5, 1, 2, 6) in found and (2, 3, 4, 5, 6, 1) in found
    assert all(sorted(x) == list(text) for x in found) and text not in found
    assert rearranged((1,), 0, 1, RUN) == []


def with_unlike_heads(family: str) -> nn.Module:
    """A tiny model whose heads attend to different tokens, as those of trained models do."""
    model = tiny(family, "classification", blocks=3)
    with torch.no_grad():
        for lin in parts(model).blocks[-1].qkv[:2]:
            model.get_parameter(lin.weight).mul_(8.0)
    return model


def last_block_of(seen: Observation) -> tuple[Equations | None, torch.Tensor]:
    """What the last block's heads say, and its row space's basis."""
    block = parts(seen.model).blocks[-1]
    space = block_spaces(seen, [block])[block.index]
    return equations(seen, space, block), space.basis


def inputs_of(seen: Observation, text: list[int]) -> torch.Tensor:
    """What goes into the last block's attention for ``text``."""
    module = parts(seen.model).blocks[-1].qkv[0].module
    ids = torch.tensor([text])
    with torch.no_grad():
        return layer_inputs(seen.model, [module], input_ids=ids, attention_mask=torch.ones_like(ids))[module][0].double()


@pytest.mark.parametrize("family", ENCODERS)
def test_the_heads_of_the_last_attention_give_the_inputs_of_all_tokens(family: str) -> None:
    batch = batch_of([SHORT], "classification")
    seen = seen_by_server(with_unlike_heads(family), batch, "classification", keep="layer.2.")
    wanted, basis = last_block_of(seen)
    assert wanted is not None
    true = inputs_of(seen, SHORT)
    errors, _ = wanted(true[1:] @ basis)
    assert float(errors.norm()) < 1e-4
    rows = torch.randint(3, 90, (4, len(SHORT) - 2), generator=generator(0)).tolist()
    ends = [solve(wanted, inputs_of(seen, [CLS, *words, SEP])[1:] @ basis) for words in rows]
    found = [end @ basis.T for end in ends if end is not None]
    assert found  # starts may end elsewhere, and then say so
    for inputs in found:
        apart = torch.cdist(true[1:], inputs).amin(1) / true[1:].norm(dim=1)
        assert float(apart.max()) < 1e-2


def test_slopes_of_the_heads_equations_are_those_of_autograd() -> None:
    rng = generator(6)
    heads, rank = 3, 5
    read, *rest = (torch.randn(*shape, generator=rng).double() for shape in ((rank,), *[(heads, rank)] * 4))
    wanted, x = Equations(read, *rest), torch.randn(rank - 1, rank, generator=rng).double()
    slopes = torch.autograd.functional.jacobian(lambda z: wanted(z)[0], x).flatten(1)
    torch.testing.assert_close(wanted(x)[1], slopes, rtol=1e-10, atol=1e-12)


def test_no_inputs_from_heads_that_are_too_few_out_of_sight_or_under_dropout() -> None:
    long = [CLS, *range(20, 30), SEP]
    model = with_unlike_heads("bert")
    seen = seen_by_server(model, batch_of([long], "classification"), "classification", keep="layer.2.")
    assert last_block_of(seen)[0] is None  # 12 tokens, 4 heads
    seen = seen_by_server(model, batch_of([SHORT], "classification"), "classification", keep="layer.2.")
    wanted, basis = last_block_of(seen)
    assert wanted is not None
    kept = {n: g for n, g in seen.gradients.items() if "value.bias" not in n}
    assert last_block_of(Observation(Message(kept), seen.task, seen.granted))[0] is None
    start = inputs_of(seen, [CLS, 30, 31, 32, 33, SEP])[1:] @ basis
    assert solve(wanted, start) is not None
    assert solve(replace(wanted, means=wanted.means * 1.1), start) is None
    alike = seen_by_server(tiny("bert", "classification", blocks=3), batch_of([SHORT], "classification"), "classification",
                           keep="layer.2.")  # fmt: skip
    wanted, basis = last_block_of(alike)
    assert wanted is not None
    found = solve(wanted, inputs_of(alike, [CLS, 30, 31, 32, 33, SEP])[1:] @ basis)
    if found is not None:  # little is certain where all heads attend alike; what is taken must be right
        true = inputs_of(alike, SHORT)[1:]
        assert float((torch.cdist(true, found @ basis.T).amin(1) / true.norm(dim=1)).max()) < 3 * TRUSTED


def test_the_sharp_lens_deals_known_inputs_out_to_their_words_and_places() -> None:
    rng = generator(4)
    table, slope = torch.randn(60, 8, generator=rng), torch.randn(8, 20, generator=rng)
    places, frame = 3 * torch.randn(5, 20, generator=rng), torch.randn(1, 20, generator=rng)
    truth = (11, 22, 33, 22, 55)
    states = torch.cat([table[list(truth)] @ slope + places, frame])[torch.randperm(6, generator=rng)]
    bodies = [tuple(row) for row in torch.randint(60, (200, 5), generator=rng).tolist()]
    inputs = table[torch.tensor(bodies)] @ slope + places
    lens = Sharp(table, states, bodies, inputs + 0.01 * torch.randn(inputs.shape, generator=rng), frame)
    assert lens.assigned(torch.arange(60)) == truth
    assert tuple(lens.outside(torch.arange(60)).argmin(1).tolist()) == truth


def test_a_word_that_fits_least_gives_way_to_one_at_another_place() -> None:
    seen = seen_by_server(with_unlike_heads("bert"), batch_of([SHORT], "classification"), "classification", keep="layer.2.")
    objective, table = objective_of(seen), seen.model.get_input_embeddings().weight.detach()  # type: ignore[operator,union-attr]
    guided = Guided(
        objective, table, torch.arange(3, len(table)), [9], 4, 1e-7, generator(0), equations=last_block_of(seen)[0]
    )
    assert isinstance(guided.lens, Sharp)
    truth = tuple(SHORT[1:-1])
    for wrong in ((*truth[1:], 77), (77, *truth[:-1])):  # a word is missing, another too many, the rest moved
        assert guided._reseated(guided.best([wrong], 1), guided.lens)[0][1] == truth


def test_a_text_above_the_floor_is_judged_by_its_distance_from_known_inputs() -> None:
    seen = seen_by_server(with_unlike_heads("bert"), batch_of([SHORT], "classification"), "classification", keep="layer.2.")
    objective, table = objective_of(seen), seen.model.get_input_embeddings().weight.detach()  # type: ignore[operator,union-attr]
    guided = Guided(
        objective, table, torch.arange(3, len(table)), [9], 4, 1e-7, generator(0), equations=last_block_of(seen)[0]
    )
    truth = tuple(SHORT[1:-1])
    guided.judge([truth, truth[::-1], (77, *truth[1:])])
    assert guided.scores[truth] < 1e-7
    own = inputs_of(seen, SHORT)[1:]
    for body in (truth[::-1], (77, *truth[1:])):
        other = inputs_of(seen, [CLS, *body, SEP])[1:]
        orders = torch.tensor(list(itertools.permutations(range(5))))
        nearest = (other[orders] - own).square().sum((1, 2)).min() / own.square().sum()
        assert guided.scores[body] == pytest.approx(float(nearest), rel=1e-2)
    assert guided.climb(guided.start(2), 2)[0][1] == truth
