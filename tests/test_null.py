"""The null of a row space, number by number: where it ends, which other tokens it tries, and whom it believes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
import torch
import transformers
from null_setting import chance_limit, stand_clear
from torch import Tensor

from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.null import (
    NEIGHBOURS,
    OTHERS,
    Chance,
    explained,
    others_of,
    outside,
    prefixes_believed,
    tokens_believed,
)
from rasura.attacks.updates.span.passing import FALSE
from rasura.attacks.updates.span.rows import RowSpace
from rasura.core.rng import generator
from rasura.core.values import UNKNOWN
from rasura.testing.tiny import CLS, SEP, WORDS, tiny

IDS = torch.arange(3, WORDS)


def space_of(x: Tensor, noise: float | Sequence[float] = 1e-9, known: Tensor | None = None) -> RowSpace:
    """The row space of the rows ``x``."""
    basis = torch.linalg.qr(x.double().T).Q
    widths = [noise] * basis.shape[1] if isinstance(noise, float) else list(noise)
    return RowSpace(basis, torch.tensor(widths, dtype=torch.double), known)


# --- the limit of chance


def axes(deviations: Sequence[float], times: int = 1) -> Tensor:
    """Points on both sides of every axis, ``times`` over, whose deviations are just these."""
    count = 2 * len(deviations) * times
    points = torch.diag(torch.tensor(deviations, dtype=torch.double)) * math.sqrt((count - 1) / (2 * times))
    return torch.cat([points, -points]).repeat(times, 1)


def ball(deviations: Sequence[float], trials: float) -> float:
    """The radius of the ball of which a Gaussian of these deviations puts ``FALSE / trials`` inside, at most."""
    k = len(deviations)
    volume = math.pi ** (k / 2) / math.gamma(k / 2 + 1)
    density = 1 / ((2 * math.pi) ** (k / 2) * math.prod(deviations))
    return (FALSE / trials / volume / density) ** (1 / k)


def test_places_one_by_one_give_the_limit_of_all_at_once() -> None:
    rng = generator(4)
    shape = torch.logspace(0, -5, 12, dtype=torch.double)
    places = [torch.randn(n, 12, generator=rng, dtype=torch.double) * shape + 0.3 for n in (1, 7, 40, 90)]
    chance = Chance()
    least = [chance.add(x) for x in places]
    assert least == [float(x.norm(dim=1).min()) for x in places] and math.isnan(chance.add(places[0][:0]))
    every = torch.cat(places)
    variance = torch.linalg.svdvals(every - every.mean(0)).square() / (len(every) - 1)
    best = max(ball(variance.sqrt()[:k].tolist(), 1e3) for k in range(1, 13))
    assert chance.limit(1e3) == pytest.approx(best, rel=1e-6)
    chance.add(torch.full((1, 12), math.nan))
    assert chance.limit(1e3) == 0.0


@pytest.mark.parametrize("trials", [1.0, 1e3, 1e9])
@pytest.mark.parametrize("deviations", [[2.0], [1.0, 0.5], [3.0, 2.0, 0.01], [1.0, 0.9, 0.8, 0.7, 0.6]])
def test_the_limit_is_the_best_ball_over_the_largest_axes(deviations: list[float], trials: float) -> None:
    best = max(ball(deviations[:k], trials) for k in range(1, len(deviations) + 1))
    for shift in (torch.zeros(1), torch.arange(len(deviations)) + 7.0):
        assert chance_limit(axes(deviations, 8) + shift, trials) == pytest.approx(best, rel=1e-9)
    assert chance_limit(1e-9 * axes(deviations, 8), trials) == pytest.approx(1e-9 * best, rel=1e-9)
    assert chance_limit(axes(deviations, 8).float(), trials) == pytest.approx(best, rel=1e-5)


def test_no_more_axes_are_counted_than_a_quarter_of_the_others() -> None:
    deviations = [1.0] * 8
    for times, axes_counted in ((1, 4), (2, 8)):
        assert chance_limit(axes(deviations, times), 1e6) == pytest.approx(ball(deviations[:axes_counted], 1e6), rel=1e-9)
    # Two or three others have one axis all the same.
    two = torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.double)
    assert chance_limit(two, 100.0) == pytest.approx(ball([math.sqrt(0.5)], 100.0), rel=1e-9)
    assert chance_limit(two[:1], 100.0) == 0.0


def test_an_axis_that_is_hardly_there_is_rounding_and_does_not_count() -> None:
    assert chance_limit(axes([1.0, 1e-7], 4), 1e9) == pytest.approx(ball([1.0], 1e9), rel=1e-6)
    counted = ball([1.0, 1e-5], 1e9)
    assert chance_limit(axes([1.0, 1e-5], 4), 1e9) == pytest.approx(counted, rel=1e-6) and counted > 10 * ball([1.0], 1e9)


def test_less_than_one_trial_counts_as_one() -> None:
    x = axes([1.0, 0.5], 4)
    assert chance_limit(x, 0.0) == chance_limit(x, 0.5) == chance_limit(x, 1.0) > chance_limit(x, 2.0)


def test_one_endless_number_leaves_no_limit() -> None:
    x = axes([1.0, 0.5], 4)
    x[3, 1] = math.inf
    assert chance_limit(x, 1.0) == 0.0


def test_a_residual_may_lie_on_the_limit_and_on_half_of_the_next_one() -> None:
    beside = axes([1.0, 0.5], 4)  # the least is .5 * sqrt(15 / 8)
    least = float(beside.norm(dim=1).min())
    limit = chance_limit(beside, 1.0)
    assert limit < 0.5 * least
    at = torch.tensor([limit], dtype=torch.double)
    assert stand_clear(at, [beside], 1.0) and not stand_clear(at * (1 + 1e-12), [beside], 1.0)
    # The same others for two tokens are counted once.
    assert stand_clear(at.repeat(2), [beside, beside], 1.0) and not stand_clear(at.repeat(2) * 1.001, [beside] * 2, 1.0)
    wide = torch.cat([100 * beside, beside[:1] * 0.1])
    edge = torch.tensor([0.5 * float(wide.norm(dim=1).min())], dtype=torch.double)
    assert chance_limit(wide, 1.0) > float(edge)
    assert stand_clear(edge, [wide], 1.0) and not stand_clear(edge * (1 + 1e-12), [wide], 1.0)
    both = torch.cat([edge, 10 * edge])
    assert stand_clear(both, [wide, 100 * beside], 1.0) and not stand_clear(both.flip(0), [wide, 100 * beside], 1.0)
    assert not stand_clear(both, [wide, beside[:0]], 1.0)


# --- what a guess explains


@pytest.mark.parametrize(("noise", "allowed"), [(1e-9, 0.3), (0.2, 0.3), (0.4, 0.6)])
def test_a_direction_may_be_left_by_its_part_or_by_its_noise(noise: float, allowed: float) -> None:
    space = space_of(torch.eye(6)[:2], [1e-9, noise])
    for left, explains in ((allowed - 0.01, True), (allowed + 0.01, False)):
        off = torch.zeros(2, 6)
        off[0, 0], off[1, 1], off[1, 4] = 1e-12, 5 * math.sqrt(1 - left**2), 5 * left
        assert explained(space, off) == explains, "however small or large the states are"
        assert explained(space, torch.cat([off, torch.zeros(1, 6)])) == explains, "an input of zeros is none"
        assert not explained(space, off[1:])


def test_states_that_hardly_differ_explain_one_direction() -> None:
    space = space_of(torch.eye(6)[:2])
    for apart, explains in ((1e-7, False), (1e-5, True)):
        x = torch.eye(6, dtype=torch.double)[[0, 0]]
        x[1, 1] = apart
        assert explained(space, x) == explains


def test_inputs_that_are_not_shown_count_on_neither_side() -> None:
    known = torch.tensor([True] * 4 + [False] * 2)
    space = space_of(torch.eye(6)[:2], known=known)
    x = torch.eye(6)[:2]
    x[:, 4:] = 100.0
    assert explained(space, x) and not explained(space_of(torch.eye(6)[:2]), x)
    left = outside(space, torch.tensor([[3.0, 0, 4, 0, 100, 100], [0, 0, 0, 0, 100, 0], [0, 1, 0, 0, 0, 1]]))
    assert torch.allclose(left, torch.tensor([[0.0, 0, 0.8, 0, 0, 0], [0] * 6], dtype=torch.double)), "one is all hidden"


def test_what_is_left_is_over_the_size_and_inputs_of_no_size_are_left_out() -> None:
    space = space_of(torch.eye(6)[:2])
    x = torch.tensor([[3.0, 0, 0, 4, 0, 0]])
    sizes = [1.0, 1e-11, 1e-13, 0.0, 1e6]
    left = outside(space, torch.cat([size / 5 * x for size in sizes]))
    assert left.dtype == torch.double and left.shape == (3, 6)
    assert torch.allclose(left, torch.tensor([[0.0, 0, 0, 0.8, 0, 0]], dtype=torch.double), rtol=1e-6)


# --- other tokens


def words_of(count: int) -> Inputs:
    config = transformers.BertConfig(
        vocab_size=count, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    torch.manual_seed(0)
    return Inputs(transformers.BertForSequenceClassification(config).eval())


def test_few_other_tokens_are_all_tried() -> None:
    inputs = words_of(OTHERS + 2)
    ids = torch.arange(OTHERS + 2).flip(0)
    assert torch.equal(others_of(inputs, ids, {5, 9}), ids[(ids != 5) & (ids != 9)])
    assert others_of(inputs, ids[:2], {int(i) for i in ids[:2]}).tolist() == []


def test_of_many_tokens_the_nearest_and_some_from_everywhere_are_tried() -> None:
    inputs = words_of(2000)
    found = {100, 1500}
    rest = [i for i in range(10, 2000) if i not in found]
    spread = {rest[int(k * (len(rest) - 1) / (OTHERS - 1))] for k in range(OTHERS)}
    assert rest[0] in spread and rest[-1] in spread
    skipped = [i for i in rest if i not in spread]
    table = inputs.model.get_parameter(inputs.parts.word_embedding)
    near = {100: skipped[20:30], 1500: skipped[300:310]}
    with torch.no_grad():
        table.normal_()
        for token, neighbours in near.items():
            for distance, n in enumerate(neighbours, 1):
                table[n] = table[token] + 0.1 + 0.01 * distance  # beyond the distance of twins
    others = others_of(inputs, torch.arange(10, 2000), found)
    nearest = {n for neighbours in near.values() for n in neighbours[:NEIGHBOURS]}
    assert others.tolist() == sorted(spread | nearest) and others.dtype == torch.long


# --- whom the null of block 0 believes

TEXT = [(CLS, 0), (40, 0), (41, 0), (50, 1), (SEP, 1)]


@pytest.fixture(scope="module")
def bert() -> Inputs:
    return Inputs(tiny("bert", "classification"))


def states_of(inputs: Inputs, text: Sequence[tuple[int, int]], positional: bool = True) -> Tensor:
    """The inputs of block 0 for ``text``, at their places or all at the first."""
    return torch.cat([inputs.first(torch.tensor([t]), n * positional, s) for n, (t, s) in enumerate(text)]).double()


@pytest.mark.parametrize("positional", [True, False])
def test_tokens_are_believed_where_they_stand(bert: Inputs, positional: bool) -> None:
    space = space_of(states_of(bert, TEXT, positional))

    def believed(*texts: Sequence[tuple[int, int]]) -> bool:
        return tokens_believed(space, bert, IDS, texts, positional=positional)

    assert believed(TEXT) and believed(TEXT, TEXT[:3])
    hole = [*TEXT[:2], (UNKNOWN, 0), *TEXT[3:]]
    assert not believed(hole), "a part of the row space is not explained"
    assert believed(TEXT, hole), "another text explains it"
    assert not believed([*TEXT, (77, 0)]) and not believed([*TEXT[:3], (51, 1), TEXT[4]])
    assert not believed([*TEXT[:3], (50, 0), TEXT[4]]), "in the wrong segment"
    swapped = [TEXT[0], TEXT[2], TEXT[1], *TEXT[3:]]
    assert believed(swapped) == (not positional)


def test_where_nothing_stands_or_nothing_else_is_tried_nothing_is_believed(bert: Inputs) -> None:
    space = space_of(states_of(bert, TEXT))
    assert not tokens_believed(space, bert, IDS, [], positional=True)
    assert not tokens_believed(space, bert, IDS, [[(UNKNOWN, 0)]], positional=True)
    own = torch.tensor(sorted({t for t, _ in TEXT}))
    assert not tokens_believed(space, bert, own, [TEXT], positional=True)
    assert tokens_believed(space, bert, torch.cat([own, IDS[60:72]]), [TEXT], positional=True)


def off(states: Tensor) -> Tensor:
    """``states`` a little off: by more than float32 rounds an other token's."""
    return states + 1e-4 * states.norm(dim=1, keepdim=True) / 8 * torch.randn(states.shape, generator=generator(2)).double()


@pytest.mark.parametrize("segment", [0, 1])
def test_others_are_tried_in_the_segment_of_the_text(segment: int) -> None:
    model = tiny("bert", "classification")
    with torch.no_grad():  # one place is like the other, so that a repeated token leaves a direction to somebody else
        model.get_parameter("bert.embeddings.position_embeddings.weight").mul_(1e-6)
        model.get_parameter("bert.embeddings.token_type_embeddings.weight").normal_()
    inputs, text = Inputs(model), [(CLS, 1), (40, 1), (40, 1)]
    distinct, other = states_of(inputs, text[:2]), states_of(inputs, [(200, segment)])
    space = space_of(torch.cat([off(distinct), other]), [1e-9, 1e-9, 0.9])
    assert tokens_believed(space, inputs, IDS, [text], positional=True) == (segment == 0)


def test_tokens_that_changed_places_are_not_believed_where_noise_is_large() -> None:
    """No other token was near, and those of the guess itself were not tried: 'your with appointment' counted as read."""
    model = tiny("bert", "classification")
    with torch.no_grad():
        table = model.get_parameter("bert.embeddings.position_embeddings.weight")
        table[2] = table[1] + 1e-2 * table[2]  # both orders are nearly in the row space
    inputs = Inputs(model)
    swapped = [TEXT[0], TEXT[2], TEXT[1], *TEXT[3:]]
    space = space_of(states_of(inputs, TEXT), 0.5)
    assert float(space.residual(states_of(inputs, swapped)).max()) < 0.1
    assert tokens_believed(space, inputs, IDS, [TEXT], positional=True)
    assert not tokens_believed(space, inputs, IDS, [swapped], positional=True)


def tilted(states: Tensor, by: float) -> RowSpace:
    """A row space of which every one of ``states`` is ``by`` of its size outside."""
    free = torch.linalg.qr(
        torch.cat([states, torch.randn(len(states), states.shape[1], generator=generator(1)).double()]).T
    ).Q
    beside = free[:, len(states) :].T * states.norm(dim=1, keepdim=True)
    return space_of(math.sqrt(1 - by**2) * states + by * beside)


def test_the_tokens_and_places_that_were_tried_lower_the_limit(bert: Inputs) -> None:
    text, ids = TEXT[:3], torch.tensor([CLS, 40, 41, 60, 61, 62, 63])
    states = states_of(bert, text)
    rest = ids[3:]

    def limit(space: RowSpace, trials: float) -> float:
        left = torch.cat([outside(space, bert.first(rest, n, 0)) for n in range(3)])
        return chance_limit(left, trials)

    middle = limit(tilted(states, 0.01), 7 * 3)
    for share, believed in ((0.9, True), (1.1, False)):
        space = tilted(states, share * middle)
        found = space.residual(states)
        assert bool((found <= limit(space, 7 * 3)).all()) == believed and bool((found <= limit(space, 7 / 3)).all())
        assert tokens_believed(space, bert, ids, [text], positional=True) == believed


# --- whom the null of a decoder's upper blocks believes

ROW = [CLS, 40, 41, 42, 43, 44, 45]
"""Seven tokens: others are tried at places 0, 3 and 6."""


@pytest.fixture(scope="module")
def gpt2() -> Inputs:
    return Inputs(tiny("gpt2", "causal", blocks=3))


def deep(inputs: Inputs, rows: Sequence[Sequence[int]]) -> dict[int, Tensor]:
    """The inputs of every block's attention for the tokens of ``rows``."""
    found: dict[int, list[Tensor]] = {}
    for row in rows:
        ids = torch.tensor([row])
        for index, x in inputs.deep(ids, torch.ones_like(ids), inputs.parts.blocks).items():
            found.setdefault(index, []).append(x[0].double())
    return {index: torch.cat(states) for index, states in found.items()}


def spaces_of(inputs: Inputs, rows: Sequence[Sequence[int]]) -> Mapping[int, RowSpace]:
    return {index: space_of(states) for index, states in deep(inputs, rows).items()}


def test_texts_are_believed_by_any_block_above_the_first(gpt2: Inputs) -> None:
    right, wrong = spaces_of(gpt2, [ROW]), spaces_of(gpt2, [[CLS, 90, 91, 92, 93, 94, 95]])

    def believed(spaces: Mapping[int, RowSpace], *texts: Sequence[int]) -> bool:
        return prefixes_believed(spaces, gpt2, IDS, texts)

    for index in (1, 2):
        assert believed({index: right[index]}, ROW)
    assert not believed({0: right[0]}, ROW) and not believed({}, ROW), "block 0 tells no prefix"
    assert believed({1: wrong[1], 2: right[2]}, ROW) and believed({1: right[1], 2: wrong[2]}, ROW)
    assert not believed({1: wrong[1], 2: wrong[2]}, ROW)
    assert not believed(right, ROW[:-1]), "a direction is left over"
    assert not believed(right, [*ROW[:-1], 46]) and not believed(right, [CLS, 41, 40, *ROW[3:]])
    assert not believed(right, ROW, []) and not believed(right)
    assert not prefixes_believed(right, gpt2, torch.tensor(ROW), [ROW]), "no other token is known"


@pytest.mark.parametrize("other", [ROW[3], ROW[5]])
def test_a_word_of_the_text_that_fits_better_at_a_place_counts_against_it(gpt2: Inputs, other: int) -> None:
    own, better = deep(gpt2, [ROW])[1], deep(gpt2, [[*ROW[:6], other]])[1][-1:]
    aside = torch.randn(own.shape[1], generator=generator(3)).double()
    own[6] += 1e-2 * own[6].norm() * aside / aside.norm()
    spaces = [{1: space_of(x, [1e-9] * 7 + [0.9] * (len(x) - 7))} for x in (own, torch.cat([own, better]))]
    assert [prefixes_believed(space, gpt2, IDS, [ROW, ROW]) for space in spaces] == [True, False]


@pytest.mark.parametrize("place", range(7))
def test_others_are_tried_at_the_first_the_middle_and_the_last_place(gpt2: Inputs, place: int) -> None:
    # An other token's state is in the row space as well: that counts against the guess where it is tried.
    own, other = deep(gpt2, [ROW])[1], deep(gpt2, [[*ROW[:place], 200]])[1][-1:]
    space = space_of(torch.cat([off(own), other]), [1e-9] * 7 + [0.9])
    texts = [ROW, ROW]  # two copies: as many states as there are directions
    assert prefixes_believed({1: space}, gpt2, IDS, texts) == (place not in (0, 3, 6))


@pytest.mark.parametrize("number", range(6))
def test_others_are_tried_in_four_texts(gpt2: Inputs, number: int) -> None:
    rows = [[CLS, 50 + 10 * k, 51 + 10 * k, 52 + 10 * k] for k in range(6)]
    own, other = deep(gpt2, rows)[1], deep(gpt2, [[*rows[number][:-1], 250]])[1][-1:]
    distinct = torch.cat([own[:1], *(own[4 * k + 1 : 4 * k + 4] for k in range(6))])  # CLS has one state in all of them
    space = space_of(torch.cat([off(distinct), other]), [1e-9] * len(distinct) + [0.9])
    assert prefixes_believed({1: space}, gpt2, IDS, rows) == (number >= 4)


def test_tokens_and_words_of_texts_that_were_tried_lower_the_limit_of_a_decoder(gpt2: Inputs) -> None:
    row, ids = ROW[:3], torch.tensor([*ROW[:3], 60, 61, 62, 63])
    states = deep(gpt2, [row])[1]

    def limit(space: RowSpace, trials: float) -> float:
        left = [outside(space, deep(gpt2, [[*row[:n], int(t)]])[1][-1:]) for n in range(3) for t in ids[3:]]
        return chance_limit(torch.cat(left), trials)

    middle = limit(tilted(states, 0.01), 7 * 3)
    for share, believed in ((0.9, True), (1.1, False)):
        space = tilted(states, share * middle)
        found = space.residual(states)
        assert bool((found <= limit(space, 7 * 3)).all()) == believed and bool((found <= limit(space, 7 / 3)).all())
        assert prefixes_believed({1: space}, gpt2, ids, [row]) == believed
