"""Proofs and their decoys: what an attack may call verified."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from confidence_setting import TEXT, only, seen_of

import rasura
from rasura.attacks.shared.comparing import apart, told
from rasura.attacks.shared.decoys import decoys, free_places, weakest
from rasura.attacks.shared.verify import check, entries, prove, prove_rows, verified
from rasura.attacks.updates.best import _settled
from rasura.attacks.updates.embedding_rows import EmbeddingRows, Rows, told_apart
from rasura.attacks.updates.gradient_matching.presets import dlg, tag
from rasura.attacks.updates.span import Span
from rasura.core.interfaces import AttackFailed, Budget
from rasura.core.rng import generator
from rasura.core.threat import adversary_copy
from rasura.core.values import UNKNOWN, Grant, Message, Observation, Proof, Reconstruction, Vocabulary
from rasura.testing.tiny import CLS, PAD, SEP, VOCABULARY, WORDS, tiny
from rasura.victims.models import parts

PACKAGE = Path(rasura.__file__).parent
QUICK = Budget("quick")


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
        assert guess.details["beginnings"] and not _settled(guess, seen, "embedding-rows")
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
