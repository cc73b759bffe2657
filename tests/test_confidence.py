"""What an attack may claim: proofs and their decoys, the null of a row space, and what settles the portfolio."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from null_setting import chance_limit, stand_clear
from torch import Tensor, nn

import rasura
from rasura.attacks.shared.decoys import decoys, free_places, weakest
from rasura.attacks.shared.verify import apart, check, entries, in_span, prove, prove_rows, told, verified
from rasura.attacks.updates.best import EXPLAINS_NOTHING, _rank, _settled, matching
from rasura.attacks.updates.embedding_rows import EmbeddingRows, Rows, told_apart
from rasura.attacks.updates.gradient_matching.presets import dlg, lamp_weighted, tag
from rasura.attacks.updates.noise_in_sight import shows_noise
from rasura.attacks.updates.span import Span
from rasura.attacks.updates.span.attack import dager
from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.null import (
    each_once,
    explained,
    outside,
    rows_believed,
)
from rasura.attacks.updates.span.rows import RowSpace
from rasura.attacks.updates.span.tokens import Row
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, WITH_LABELS_AND_LENGTHS, adversary_copy, observe
from rasura.core.values import UNKNOWN, Grant, Message, Observation, Proof, Reconstruction, Vocabulary
from rasura.registry import attack as make_attack
from rasura.registry import parse_defense
from rasura.testing.tiny import CAUSAL_VOCABULARY, CLS, PAD, SEP, VOCABULARY, WORDS, batch_of, tiny
from rasura.victims.models import layer_inputs, parts
from rasura.victims.step import step

TEXT = [CLS, 40, 3, 41, 9, 42, SEP]
PACKAGE = Path(rasura.__file__).parent
QUICK = Budget("quick")


def seen_of(model: nn.Module, rows: list[list[int]], task: str = "classification", defense: str = "none") -> Observation:
    vocabulary = CAUSAL_VOCABULARY if task == "causal" else VOCABULARY
    batch = batch_of(rows, task, [1, 0, 2][: len(rows)])
    rng = generator(0, "step")
    sent = step(model, batch, parse_defense(defense), task=task, vocabulary=vocabulary, rng=rng)  # type: ignore[arg-type]
    return observe(sent, HONEST_SERVER)


def only(seen: Observation, *names: str) -> Observation:
    return replace(seen, message=Message({n: g for n, g in seen.gradients.items() if n in names}))


# --- proofs


def test_what_is_verified_has_a_proof_of_just_that() -> None:
    tokens = ((1, 40, 2),)
    proof = Proof("gradient", tokens, 1e-6, 0.1)
    assert verified(proof, {"rank": 3}).details == {"rank": 3, "proof": "gradient"}
    with pytest.raises(ValueError, match="verified needs a proof"):
        Reconstruction(tokens, "verified")
    with pytest.raises(ValueError, match="verified needs a proof"):
        Reconstruction(tokens, "matched", proof=proof)
    with pytest.raises(ValueError, match="proof is for other tokens"):
        replace(verified(proof, {}), tokens=((1, 41, 2),))
    with pytest.raises(ValueError, match="proof is for other tokens"):
        replace(verified(proof, {}), ordered=False)
    for error, least in [(0.1, 0.1), (0.2, 0.1), (math.nan, 0.1), (-1.0, 0.1), (0.0, math.nan)]:
        with pytest.raises(ValueError, match="decoys that fit worse"):
            Proof("gradient", tokens, error, least)


def test_one_module_alone_makes_proofs_and_says_verified_or_span() -> None:
    speakers = set()
    for path in PACKAGE.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
            values = [*call.args, *(k.value for k in call.keywords)]
            said = {v.value for root in values for v in ast.walk(root) if isinstance(v, ast.Constant)}
            if name == "Span":  # its own name
                continue
            if name == "Proof" or (name in ("Reconstruction", "replace") and said & {"verified", "span"}):
                speakers.add(path.relative_to(PACKAGE.parent).as_posix())
    assert speakers == {"rasura/attacks/shared/verify.py"}
    said_by = [path for path in (PACKAGE / "attacks").rglob("*.py") if 'Confidence = "' in path.read_text()]
    assert [path.name for path in said_by] == ["verify.py"]


def test_apart_wants_ten_times_the_error_and_more_than_float_precision() -> None:
    assert apart(1e-4, 1.001e-3) and not apart(1e-4, 1e-3)
    assert apart(0.0, 1.01e-5) and not apart(0.0, 0.99e-5)
    assert not apart(math.nan, 1.0) or not told(1000, math.nan, 1.0, 3, 300)


def test_told_counts_numbers_against_texts() -> None:
    # 3 words of 300, one chance in a million: 17.1 + 13.8 nats; an entry told to one in e**4.6 gives 4.6.
    nats = 3 * math.log(300) + math.log(1e6)
    enough = math.floor(nats / math.log(100)) + 2
    assert told(enough, 1e-3, 0.1, 3, 300) and not told(enough - 1, 1e-3, 0.1, 3, 300)
    assert not told(10**6, 0.1, 0.1, 3, 300) and not told(10**6, 0.2, 0.1, 3, 300)
    assert not told(0, 1e-6, 0.1, 3, 300) and not told(10**6, math.nan, 0.1, 3, 300)
    assert not told(10**6, 1e-6, math.inf, 3, 300)
    # No error is smaller than what float32 leaves.
    assert told(4, 0.0, 0.1, 1, 300) == told(4, 1e-6, 0.1, 1, 300)
    few = next(n for n in range(1, 99) if told(n, 0.0, 0.1, 3, 300))
    assert few == math.floor(nats / math.log(1e5)) + 2
    assert not told(few, 0.0, 0.1, 4, 300) and not told(few, 0.0, 0.1, 3, 10**5)
    assert not told(2, 0.0, 1e-6 * 1.001, 1, 0)


@pytest.mark.parametrize("rows", [1, 2])
def test_the_truth_is_proven_by_its_gradient(rows: int) -> None:
    texts = [TEXT, [CLS, 50, 51, 52, SEP]][:rows]
    seen = seen_of(tiny("bert", "classification"), texts)
    proof = prove(seen, texts)
    assert proof is not None and proof.name == "gradient" and proof.tokens == tuple(map(tuple, texts))
    assert proof.error < 1e-5 and proof.decoys > 10 * proof.error
    assert proof.labels == (1, 0)[:rows]


def test_an_error_below_the_tolerance_proves_nothing_where_decoys_fit_as_well() -> None:
    # On a random model two neighbours exchanged change the gradient by less than the tolerance.
    seen = seen_of(tiny("bert", "classification"), [TEXT])
    others = [[*TEXT[:n], TEXT[n + 1], TEXT[n], *TEXT[n + 2 :]] for n in range(1, 5)]
    near = [other for other in others if check(seen, [other])[0] < 1e-3]
    assert near and all(prove(seen, [other]) is None for other in near)


def test_too_few_entries_prove_nothing() -> None:
    seen = seen_of(tiny("bert", "classification"), [TEXT])
    assert prove(only(seen, "classifier.bias"), [TEXT]) is None
    gradient = seen.gradients["bert.encoder.layer.0.output.dense.bias"]
    some = only(seen, "bert.encoder.layer.0.output.dense.bias")
    assert entries(some) == gradient.numel() == 64
    for kept, proven in [(5, False), (64, True)]:
        mask = torch.zeros_like(gradient, dtype=torch.bool)
        mask[:kept] = True
        message = Message({"bert.encoder.layer.0.output.dense.bias": gradient * mask},
                          {"bert.encoder.layer.0.output.dense.bias": mask})  # fmt: skip
        part = replace(seen, message=message)
        assert entries(part) == kept and check(part, [TEXT])[0] < 1e-5
        assert (prove(part, [TEXT]) is not None) == proven


def test_a_text_without_words_and_one_with_holes_are_never_proven() -> None:
    seen = seen_of(tiny("bert", "classification"), [[CLS, SEP]])
    assert check(seen, [[CLS, SEP]])[0] < 1e-5 and prove(seen, [[CLS, SEP]]) is None
    assert prove(seen, [[CLS, UNKNOWN, SEP]]) is None and prove(seen, []) is None
    both = seen_of(tiny("bert", "classification"), [TEXT, [CLS, SEP]])
    assert check(both, [TEXT, [CLS, SEP]])[0] < 1e-5 and prove(both, [TEXT, [CLS, SEP]]) is None


def unknown_words(rows: list[list[int]]) -> Observation:
    """What is seen of ``rows`` by a tokenizer for which the word 3 stands for all that it does not know."""
    seen = seen_of(tiny("bert", "classification"), rows)
    known = replace(VOCABULARY, special_ids=VOCABULARY.special_ids | {3})
    return replace(seen, granted={**seen.granted, Grant.BASE_MODEL: known})


def test_a_text_of_unknown_words_alone_is_never_verified() -> None:
    words = replace(VOCABULARY, special_ids=VOCABULARY.special_ids | {3})
    assert prove_rows((CLS, 3, 40, SEP), 1e-7, 0.5, 64, 4, VOCABULARY) is not None
    assert prove_rows((CLS, 3, 40, SEP), 1e-7, 0.5, 64, 4, words) is not None
    assert prove_rows((CLS, 3, 3, SEP), 1e-7, 0.5, 64, 3, words) is None
    read = EmbeddingRows()(seen_of(tiny("bert", "classification"), [[CLS, 3, 3, SEP]]), rng=generator(1), budget=QUICK)
    assert read.confidence == "verified", "of a tokenizer that knows the word"
    for attack in (EmbeddingRows(), Span()):
        with pytest.raises(AttackFailed, match="only special tokens were found"):
            attack(unknown_words([[CLS, 3, 3, SEP]]), rng=generator(1), budget=QUICK)


def test_a_batch_with_a_text_of_unknown_words_is_not_verified_as_a_whole() -> None:
    both = Span()(unknown_words([TEXT, [CLS, 3, 3, SEP]]), rng=generator(1), budget=QUICK)
    assert sorted(both.tokens) == sorted([tuple(TEXT), (CLS, 3, 3, SEP)]) and both.confidence == "span"


@pytest.mark.parametrize("make", [dlg, tag])
@pytest.mark.parametrize("classes", [2, 3])
def test_the_bias_of_a_head_verifies_no_text(make: object, classes: int) -> None:
    seen = only(seen_of(tiny("bert", "classification", num_labels=classes), [TEXT]), "classifier.bias")
    guess = make()(seen, rng=generator(0, "a"), budget=QUICK)  # type: ignore[operator]
    assert guess.confidence == "matched"


def test_decoys_are_other_texts_of_the_same_lengths_and_frames() -> None:
    texts = (tuple(TEXT), (CLS, 50, 51, 52, SEP))
    seen = seen_of(tiny("bert", "classification"), [list(t) for t in texts])
    ids, mask = (torch.tensor([[*texts[0]], [*texts[1], PAD, PAD]]), torch.tensor([[1] * 7, [1] * 5 + [0] * 2]))
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([1, 0])}
    made = list(decoys(seen, texts, inputs=inputs, weakest=[1, 0], rng=generator(0)))
    assert len(made) == 10 and len(set(made)) >= 9 and texts not in made, "two texts may exchange the same token twice"
    for decoy in made:
        assert [len(t) for t in decoy] == [7, 5]
        assert all((t[0], t[-1]) == (CLS, SEP) and not {*t[1:-1]} & VOCABULARY.special_ids for t in decoy)
    changed = [[(r, n) for r in (0, 1) for n in range(len(d[r])) if d[r][n] != texts[r][n]] for d in made]
    for first, row in ((0, 1), (4, 0)):
        one, other, order, across = changed[first : first + 4]
        assert len(one) == len(other) == 1 and one[0][0] == other[0][0] == row
        assert len(order) == 2 and {r for r, _ in order} == {row} and order[1][1] - order[0][1] == 1
        assert sorted(made[first + 2][row]) == sorted(texts[row])
        assert len(across) == 2 and across[0][1] == across[1][1] and {r for r, _ in across} == {0, 1}
    assert len(changed[-1]) == len(changed[-2]) == 8
    assert free_places(texts, VOCABULARY) == [[1, 2, 3, 4, 5], [1, 2, 3]]


def test_the_weakest_texts_are_those_whose_label_is_expected() -> None:
    logits = torch.tensor([[0.0, 0.0], [9.0, 0.0], [2.0, 0.0]])
    assert weakest(logits, torch.tensor([0, 0, 0]), torch.ones(3, 4)) == [1, 2, 0]
    assert weakest(logits, torch.tensor([0, 1, 0]), torch.ones(3, 4)) == [2, 0, 1]
    ids, mask = torch.tensor([[0, 1, 1], [0, 1, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    even = torch.zeros(2, 3, 2)
    assert weakest(even, torch.where(mask.bool(), ids, -100), mask) == [1, 0], "a target less"
    assert len(weakest(torch.zeros(9, 2), torch.zeros(9, dtype=torch.long), torch.ones(9, 4))) == 4


def test_embedding_rows_prove_by_their_own_arithmetic() -> None:
    rng = generator(3)
    places = torch.randn(4, 64, generator=rng, dtype=torch.double)
    words = torch.stack([places[0] + places[2], places[1], places[3]])
    shown = torch.ones(4, 64, dtype=torch.bool)
    w, p = Rows(torch.tensor([7, 8, 9]), words, shown[:3], False), Rows(torch.arange(4), places, shown, False)
    error, least, numbers = told_apart(w, p, [0, 1, 0, 2])
    assert error < 1e-12 and least > 0.3 and numbers == 64
    proof = prove_rows((7, 8, 7, 9), error, least, numbers, 3, VOCABULARY)
    assert proof is not None and proof.name == "embedding-rows" and proof.tokens == ((7, 8, 7, 9),)
    assert told_apart(w, p, [1, 0, 0, 2])[0] > 0.3, "an exchange does not add up"
    twins = replace(p, values=places[[0, 1, 2, 1]])
    same = replace(w, values=torch.stack([places[0] + places[2], places[1], places[1]]))
    error, least, _ = told_apart(same, twins, [0, 1, 0, 2])
    assert error < 1e-12 and least == 0 and prove_rows((7, 8, 7, 9), error, least, 64, 3, VOCABULARY) is None
    assert prove_rows((7, 8, UNKNOWN, 9), 1e-7, 0.5, 64, 3, VOCABULARY) is None
    assert (
        prove_rows((7, 8), 1.1e-4, 0.5, 64, 2, VOCABULARY) is None
        and prove_rows((7, 8), 0.9e-4, 0.5, 64, 2, VOCABULARY) is not None
    )
    assert prove_rows((7, 8), 0.9e-4, 8e-4, 640, 2, VOCABULARY) is None
    assert prove_rows((7, 8), 1e-7, 0.5, 2, 2, VOCABULARY) is None


def test_active_dropout_and_another_head_leave_the_proof_of_the_rows() -> None:
    model = tiny("bert", "classification")
    guess = EmbeddingRows()(seen_of(model, [TEXT], defense="dropout:0.2"), rng=generator(0), budget=QUICK)
    assert guess.details["proof"] == "embedding-rows" and guess.tokens == (tuple(TEXT),)
    other = adversary_copy(tiny("bert", "classification"))
    with torch.no_grad():
        parts(other)
        other.classifier.weight.add_(1.0)  # type: ignore[union-attr, operator]
    seen = seen_of(model, [TEXT])
    guess = EmbeddingRows()(replace(seen, granted={**seen.granted, Grant.MODEL: other}), rng=generator(0), budget=QUICK)
    assert guess.details["proof"] == "embedding-rows" and guess.tokens == (tuple(TEXT),)


@pytest.mark.parametrize("defense", ["none", "dropout:0.1"])
def test_texts_that_are_beginnings_of_another_are_no_single_text(defense: str) -> None:
    """GPT-2 puts no end behind a text. The rows of three such texts add up as those of the longest one do."""
    whole = seen_of(tiny("gpt2", "classification"), [[40, 41, 42, 43, 44], [40, 41, 42], [40]], defense=defense)
    unknown = replace(whole, granted={g: v for g, v in whole.granted.items() if g is not Grant.BATCH_SIZE})
    stated = replace(whole, granted={**whole.granted, Grant.BATCH_SIZE: 1}, claimed=frozenset({Grant.BATCH_SIZE}))
    for seen in (unknown, stated):
        guess = EmbeddingRows()(seen, rng=generator(0), budget=QUICK)
        assert guess.confidence == "span" and guess.tokens == ((40, 41, 42, 43, 44),)
        assert guess.details["beginnings"] and not _settled(guess, seen)
    alone = seen_of(tiny("gpt2", "classification"), [[40, 41, 42, 43, 44]], defense=defense)
    seen = replace(alone, granted={g: v for g, v in alone.granted.items() if g is not Grant.BATCH_SIZE})
    guess = EmbeddingRows()(seen, rng=generator(0), budget=QUICK)
    assert guess.confidence == ("verified" if defense == "none" else "span")
    assert EmbeddingRows()(alone, rng=generator(0), budget=QUICK).confidence == "verified", "the number of texts is known"


def test_a_pair_ends_twice_and_is_proven_by_the_rows_where_it_is_known_to_be_alone() -> None:
    pair = [CLS, 40, 41, SEP, 50, 51, SEP]
    whole = seen_of(tiny("bert", "classification"), [pair], defense="dropout:0.1")
    unknown = replace(whole, granted={g: v for g, v in whole.granted.items() if g is not Grant.BATCH_SIZE})
    for seen, confidence in ((whole, "verified"), (unknown, "span")):
        assert EmbeddingRows()(seen, rng=generator(0), budget=QUICK).confidence == confidence


def test_an_end_token_that_no_row_shows_is_proven_by_the_gradient_or_not_at_all() -> None:
    ended = Vocabulary(WORDS, VOCABULARY.decode, VOCABULARY.encode, (CLS,), (SEP,), PAD, VOCABULARY.special_ids)
    model = tiny("gpt2", "causal", tied=False)
    for last, confidence in ((SEP, "verified"), (77, "span")):  # a text that was cut off has no end token
        seen = seen_of(model, [[CLS, 40, 3, 41, last]], "causal")
        seen = replace(seen, granted={**seen.granted, Grant.BASE_MODEL: ended})
        guess = EmbeddingRows()(seen, rng=generator(0), budget=QUICK)
        assert guess.tokens == ((CLS, 40, 3, 41, SEP if last == SEP else UNKNOWN),) and guess.confidence == confidence
        assert guess.details.get("proof") == ("gradient" if last == SEP else None)


# --- the null of a row space


def test_chance_limit_is_exact_in_one_dimension() -> None:
    x = torch.linspace(-1, 1, 201, dtype=torch.double)[:, None]
    deviation = float(x.std())
    assert chance_limit(x, 100.0) == pytest.approx(1e-4 * math.sqrt(math.pi / 2) * deviation, rel=1e-6)
    assert chance_limit(x, 10.0) == pytest.approx(10 * chance_limit(x, 100.0), rel=1e-6)
    assert chance_limit(x + 5, 100.0) == pytest.approx(chance_limit(x, 100.0), rel=1e-6)


@pytest.mark.parametrize("dimensions", [2, 6, 30])
def test_fewer_than_one_search_in_a_hundred_has_a_token_below_the_limit(dimensions: int) -> None:
    rng, trials = generator(dimensions), 50
    shape = torch.logspace(0, -1, dimensions, dtype=torch.double)
    limit = chance_limit(torch.randn(600, dimensions, generator=rng, dtype=torch.double) * shape, trials)
    draws = torch.randn(4000, trials, dimensions, generator=rng, dtype=torch.double) * shape
    hits = (draws.norm(dim=-1) < limit).any(1).double().mean()
    assert limit > 0 and float(hits) <= 0.015
    wide = (draws.norm(dim=-1) < 3 * limit).any(1).double().mean()
    assert float(wide) > float(hits), "the limit is no empty one"


def test_without_others_or_directions_no_limit_is_known() -> None:
    for nothing in (torch.empty(0, 4), torch.ones(1, 4), torch.ones(9, 4)):
        assert chance_limit(nothing, 10) == 0
    assert chance_limit(torch.full((9, 4), math.nan), 10) == 0
    assert not stand_clear(torch.zeros(1), [], 10) and not stand_clear(torch.zeros(0), [torch.randn(9, 4)], 10)
    assert not stand_clear(torch.zeros(1), [torch.empty(0, 4)], 10)


def test_a_residual_stands_clear_at_half_of_the_next() -> None:
    beside = torch.nn.functional.normalize(torch.randn(400, 40, generator=generator(1), dtype=torch.double), dim=1)
    assert chance_limit(beside, 100) > 0.4
    assert stand_clear(torch.tensor([0.1, 0.3]), [beside, beside], 100)
    near = torch.cat([beside, 0.5 * beside[:1]])
    assert stand_clear(torch.tensor([0.24]), [near], 100) and not stand_clear(torch.tensor([0.26]), [near], 100)
    assert not stand_clear(torch.tensor([0.1, 0.3]), [beside, near], 100)
    assert not stand_clear(torch.tensor([math.nan]), [beside], 100)


def space_of(x: Tensor, noise: float = 1e-9) -> RowSpace:
    basis = torch.linalg.qr(x.T).Q
    return RowSpace(basis, torch.full((basis.shape[1],), noise, dtype=torch.double))


def test_a_guess_explains_the_whole_row_space_or_is_not_believed() -> None:
    x = torch.randn(6, 40, generator=generator(2), dtype=torch.double)
    space = space_of(x)
    assert explained(space, x) and explained(space, torch.cat([x, x[:1]]))
    assert not explained(space, x[:5])
    assert not explained(space, x[[0, 0, 0, 0, 0, 0]])
    assert not explained(space, torch.cat([x[:5], x[:1]]))
    noisy = replace(space, noise=torch.tensor([1e-9] * 5 + [0.9], dtype=torch.double))
    tilted = torch.cat([space.basis.T[:5], torch.randn(1, 40, generator=generator(3), dtype=torch.double)])
    assert explained(noisy, tilted) and not explained(space, tilted)


def test_texts_that_use_a_row_twice_or_leave_one_out_are_not_believed() -> None:
    rows = [Row(n, t, 0, torch.ones(4), 0.0) for n, t in ((0, CLS), (1, 7), (1, 8), (2, 9), (3, SEP))]
    one, other = [(CLS, 0), (7, 0), (9, 0), (SEP, 0)], [(CLS, 0), (8, 0), (SEP, 0)]
    assert each_once(rows, [one, other], {CLS, SEP})
    assert each_once(rows, [one, [*other, (UNKNOWN, 0)]], {CLS, SEP})
    assert not each_once(rows, [one, [(CLS, 0), (7, 0), (SEP, 0)]], {CLS, SEP})
    assert not each_once(rows, [one], {CLS, SEP})
    assert not each_once(rows, [one, other, other], {CLS, SEP})
    assert not each_once(rows, [[(CLS, 0), (9, 0), (7, 0)], other], {CLS, SEP})


def test_outside_leaves_out_inputs_of_size_zero() -> None:
    x = torch.randn(6, 40, generator=generator(2), dtype=torch.double)
    left = outside(space_of(x[:3]), torch.cat([x, torch.zeros(1, 40)]))
    assert len(left) == 6 and float(left[:3].norm(dim=1).max()) < 1e-9 < float(left[3:].norm(dim=1).min())
    assert torch.allclose(left.norm(dim=1), space_of(x[:3]).residual(x), atol=1e-12)


def test_rows_are_believed_if_they_fill_the_row_space_and_leave_too_little_for_chance() -> None:
    space = space_of(torch.randn(8, 128, generator=generator(0), dtype=torch.double))
    row = Row(0, 1, 0, torch.ones(128), 1e-6)
    assert rows_believed(space, [row] * 8, 1e4, 0) and rows_believed(space, [row] * 7, 1e4, 1)
    assert not rows_believed(space, [row] * 7 + [replace(row, residual=0.9)], 1e4, 0)
    assert not rows_believed(space, [], 1e4, 8)
    for count in (7, 9):
        assert not rows_believed(space, [row] * count, 1e4, 0)


def test_special_tokens_alone_are_no_text() -> None:
    seen = seen_of(tiny("bert", "classification"), [TEXT])
    with pytest.raises(AttackFailed, match="only special tokens"):
        in_span(((CLS, UNKNOWN, SEP),), seen, believed=True)
    assert in_span(((CLS, 40, SEP),), seen, believed=True).confidence == "span"
    assert in_span(((CLS, 40, SEP),), seen, believed=False).confidence == "matched"


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_an_overfull_row_space_is_never_a_span(family: str) -> None:
    model = tiny(family, "causal", hidden=16)
    for seed in range(2):
        rows = [[CLS, *(20 + torch.randint(200, (11,), generator=generator(seed, k))).tolist()] for k in range(4)]
        seen = seen_of(model, rows, "causal")
        for name in ("span", "dager"):
            try:
                guess = make_attack(name)(seen, rng=generator(0), budget=QUICK)
            except (AttackFailed, NotApplicable):
                continue
            assert guess.confidence not in ("span", "verified") or sorted(guess.tokens) == sorted(map(tuple, rows))


def test_stories_that_overfill_the_width_are_never_a_span(shared: Path) -> None:
    from rasura.data.text import load_examples
    from rasura.victims.loading import load

    victim = load(shared / "models" / "stories260K-hf", "causal")
    texts = [e.text for e in load_examples(shared / "data" / "tinystories.validation.parquet")[4:8]]
    vocabulary = victim.vocabulary
    rows = [[*vocabulary.prefix, *vocabulary.encode(text[:800])[30:53]] for text in texts]
    assert len({t for row in rows for t in row}) > 64
    batch = batch_of(rows, "causal")
    sent = step(victim.model, batch, task="causal", vocabulary=vocabulary, rng=generator(0))
    for keep in ("", "layers.1", "layers.3"):
        seen = observe(sent, HONEST_SERVER)
        seen = only(seen, *[n for n in seen.gradients if keep in n])
        try:
            guess = Span()(seen, rng=generator(0), budget=QUICK)
        except (AttackFailed, NotApplicable):
            continue
        assert guess.confidence in ("matched", "none")


def test_positions_that_a_model_counts_itself_are_read_right() -> None:
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, ffn_dim=128, num_attention_heads=4, pad_token_id=PAD,
        max_position_embeddings=64, word_embed_proj_dim=64, bos_token_id=CLS, eos_token_id=SEP, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.OPTForSequenceClassification(config).eval()
    inputs, ids = Inputs(model), torch.tensor([TEXT[:-1]])
    module = inputs.parts.blocks[0].qkv[0].module
    whole = layer_inputs(model, [module], input_ids=ids, attention_mask=torch.ones_like(ids))[module][0]
    alone = torch.cat([inputs.first(t[None], n) for n, t in enumerate(ids[0])])
    assert torch.allclose(alone, whole, atol=1e-5)
    guess = Span()(seen_of(model, [TEXT[:-1]]), rng=generator(0), budget=QUICK)
    assert guess.tokens == (tuple(TEXT[:-1]),) and guess.confidence == "verified"


def minilm(path: Path, defense: str, scale: float = 0.0) -> Observation:
    """What is seen of one sentence, with the adversary's weights off by ``scale`` of their deviation."""
    from rasura.victims.loading import load

    victim = load(path, "classification")
    ids = victim.vocabulary.encode("the cat sat on the old mat")
    row = [*victim.vocabulary.prefix, *ids, *victim.vocabulary.suffix]
    batch = replace(batch_of([row], "classification", [1]), special_ids=victim.vocabulary.special_ids)
    rng = generator(0, "step")
    sent = step(
        victim.model, batch, parse_defense(defense), task="classification", vocabulary=victim.vocabulary, rng=rng
    )  # fmt: skip
    seen = observe(sent, HONEST_SERVER)
    with torch.no_grad():
        for p in victim.model.parameters():
            p.add_(scale * p.std() * torch.randn(p.shape, generator=rng) if p.numel() > 1 else 0.0)
    return replace(seen, granted={**seen.granted, Grant.MODEL: adversary_copy(victim.model)})


def test_weights_that_are_a_little_off_give_the_text_or_a_failure_in_words(minilm_path: Path) -> None:
    seen = minilm(minilm_path, "frozen-embeddings", 1e-4)
    guess = Span()(seen, rng=generator(0), budget=QUICK)
    assert seen.vocabulary.text(guess.tokens[0]) == "the cat sat on the old mat"
    with pytest.raises(AttackFailed, match="only special tokens"):
        dager()(seen, rng=generator(0), budget=QUICK)


@pytest.mark.parametrize("defense", ["gaussian:1e-5", "random-pruning:0.5"])
def test_a_residual_that_other_tokens_reach_is_no_span(minilm_path: Path, defense: str) -> None:
    seen = minilm(minilm_path, f"frozen-embeddings+{defense}")
    guess = dager()(seen, rng=generator(0), budget=QUICK)
    assert guess.confidence == "matched" and guess.residual is not None and guess.residual > 0.3


@pytest.mark.slow
def test_in_weak_noise_the_portfolio_goes_on_to_the_sentence(minilm_path: Path) -> None:
    seen = minilm(minilm_path, "frozen-embeddings+gaussian:1e-5")
    guess = make_attack("best")(seen, rng=generator(0), budget=QUICK)
    assert guess.details["attack"] == "pursuit"
    assert seen.vocabulary.text(guess.tokens[0]) == "the cat sat on the old mat"


# --- the portfolio


def test_only_whole_worded_ordered_spans_settle() -> None:
    seen = seen_of(tiny("bert", "classification"), [TEXT])
    whole = Reconstruction((tuple(TEXT),), "span")
    assert _settled(whole, seen) and not _settled(replace(whole, confidence="matched"), seen)
    assert not _settled(replace(whole, ordered=False), seen)
    for tokens in ((), ((CLS, SEP),), ((CLS, UNKNOWN, 40, SEP),), ((CLS, 40, SEP), (CLS, SEP))):
        assert not _settled(replace(whole, tokens=tokens), seen)
    told_lengths = replace(seen, granted={**seen.granted, Grant.LENGTHS: (7,)})
    assert _settled(whole, told_lengths)
    assert not _settled(replace(whole, tokens=((CLS, 40, SEP),)), told_lengths)
    proven = prove(seen, [TEXT])
    assert proven is not None and _settled(verified(proven, {}), told_lengths)


def test_a_causal_text_settles_without_its_last_word() -> None:
    """It is no input. The portfolio went on for minutes to attacks that could not name it either."""
    seen = seen_of(tiny("llama", "causal"), [TEXT], "causal")
    whole = Reconstruction(((*TEXT[:-1], UNKNOWN),), "span")
    assert _settled(whole, seen) and not _settled(replace(whole, confidence="matched"), seen)
    assert not _settled(replace(whole, tokens=((*TEXT[:-2], UNKNOWN, TEXT[-1]),)), seen)
    assert not _settled(whole, seen_of(tiny("llama", "classification"), [TEXT]))


def test_a_bag_comes_before_an_ordered_text_that_explains_nothing_of_a_causal_update() -> None:
    text, wrong, near = (CLS, 40, 3, 41, 9, 42), (CLS, 77, 77, 77), (CLS, 40, 3, 41, 9, 43)
    seen = seen_of(tiny("llama", "causal"), [list(text)], task="causal")
    bag = Reconstruction((tuple(sorted(text)),), "matched", ordered=False)
    junk, close = (Reconstruction((tokens,), "matched") for tokens in (wrong, near))
    assert check(seen, [near])[0] < EXPLAINS_NOTHING < check(seen, [wrong])[0]
    assert _rank(junk, seen) < _rank(bag, seen) < _rank(close, seen)
    dropped = (parse_defense("dropout:0.1")[0].mechanism,)
    blurred = replace(seen, granted={**seen.granted, Grant.MECHANISM: dropped})
    assert _rank(junk, blurred) > _rank(bag, blurred), "of a right text, too, the error is large"
    noisy = seen_of(tiny("llama", "causal"), [list(text)], "causal", "gaussian:0.01")
    assert check(noisy, [text])[0] > EXPLAINS_NOTHING, "noise makes up most of the update"
    assert _rank(junk, noisy) < _rank(bag, noisy) < _rank(Reconstruction((text,), "matched"), noisy)


@pytest.mark.parametrize(
    "defense", ["dp-sgd:1.0/clip=0.5", "normalised:1.0", "gaussian:0.001", "directional:1e5/blocks=parameters"]
)
def test_noise_that_shows_itself_is_played_with_weighted_lamp(defense: str) -> None:
    seen = seen_of(tiny("bert", "classification"), [TEXT], defense=defense)
    silent = replace(seen, granted={**seen.granted, Grant.MECHANISM: ()})
    assert shows_noise(silent) and matching(silent) is lamp_weighted
    frozen = {n: g for n, g in seen.gradients.items() if "embeddings" not in n}
    assert shows_noise(replace(silent, message=Message(frozen)))


@pytest.mark.parametrize("defense", ["none", "dropout:0.2", "fp16", "bf16", "frozen-embeddings", "pruning:0.5"])
def test_an_update_without_noise_shows_none(defense: str) -> None:
    for threat in (HONEST_SERVER, WITH_LABELS_AND_LENGTHS):
        rows = [TEXT, [CLS, 50, 51, 4, 52, SEP]]
        rng = generator(0, "step")
        sent = step(
            tiny("bert", "classification"), batch_of(rows, "classification", [1, 0]), parse_defense(defense),
            task="classification", vocabulary=VOCABULARY, rng=rng,
        )  # fmt: skip
        seen = observe(sent, threat)
        assert not shows_noise(seen) and matching(seen) is dlg


def test_a_high_rank_shows_noise_where_lengths_allow_less() -> None:
    seen = seen_of(tiny("bert", "classification"), [TEXT])
    block = parts(seen.model).blocks[0]
    kept = {lin.weight: seen.gradients[lin.weight] for lin in block.qkv}
    for noise, shown in ((0.0, False), (1.0, True)):
        drawn = {n: g + noise * g.std() * torch.randn(g.shape, generator=generator(1)) for n, g in kept.items()}
        part = Observation(Message(drawn), seen.task, {**seen.granted, Grant.LENGTHS: (7,)})
        assert shows_noise(part) == shown
        assert not shows_noise(replace(part, granted=seen.granted)), "without lengths a full batch looks the same"


# --- the law


def null_draws() -> ModuleType:
    # By its path: another library installs a package of the name benchmarks.
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "null_draws.py"
    spec = spec_from_file_location("null_draws", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("draws", [3, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["embedding-rows", "span", "dager", "dlg", "decepticons"])
def test_where_nothing_can_be_read_nothing_is_claimed(name: str, draws: int) -> None:
    law = null_draws()
    rows = [law.run(name, kind, draw) for kind in law.KINDS for draw in range(draws)]
    assert not any(row["false"] for row in rows)
    assert sum(row["outcome"] != "not applicable" for row in rows) > len(rows) / 2


@pytest.mark.slow
def test_the_law_of_null_draws() -> None:
    law = null_draws()
    for name in law.ATTACKS:
        rows = [law.run(name, kind, draw) for kind in law.KINDS for draw in range(20)]
        assert not any(r["false"] and r["outcome"] == "verified" for r in rows), name
        assert sum(r["false"] for r in rows) <= 0.01 * len(rows), name
