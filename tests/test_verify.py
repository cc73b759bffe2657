"""What proves a guess, number by number: errors, labels that are tried, decoys, and what is said of a result."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rasura.attacks.shared import verify
from rasura.attacks.shared.comparing import apart, cosine, relative_error, told
from rasura.attacks.shared.decoys import decoys, of_other_lengths, weakest
from rasura.attacks.shared.labelings import labelings, may_be_turned, pad, turned
from rasura.attacks.shared.verify import check, entries, in_span, prove, prove_rows, verified
from rasura.attacks.updates.gradient_matching.presets import dlg
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.local import FEDSGD, Local
from rasura.core.mechanisms import Gaussian
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, WITH_LABELS, observe, observe_update
from rasura.core.updates import announced_update, changed
from rasura.core.values import UNKNOWN, Grant, Message, Observation, Proof
from rasura.testing.tiny import CAUSAL_VOCABULARY, CLS, PAD, SEP, VOCABULARY, WORDS, batch_of, tiny
from rasura.victims.models import parts
from rasura.victims.step import step

TEXT = [CLS, 40, 3, 41, 9, 42, SEP]
SHORT = [CLS, 50, 51, SEP]
MORE = [[CLS, 60 + k, 70 + 2 * k, 90 + k, SEP] for k in range(20)]
SEGMENTS = [0, 0, 0, 0, 1, 1, 1]


def seen_of(
    model: nn.Module,
    rows: list[list[int]],
    labels: list[int] | None = None,
    task: str = "classification",
    local: Local = FEDSGD,
    types: list[list[int]] | None = None,
    threat: Any = HONEST_SERVER,
) -> Observation:
    batch = batch_of(rows, task, labels)
    if types is not None:
        batch = replace(batch, token_type_ids=pad(types, 0)[0])
    vocabulary = CAUSAL_VOCABULARY if task == "causal" else VOCABULARY
    sent = step(model, batch, task=task, vocabulary=vocabulary, rng=generator(0), local=local)  # type: ignore[arg-type]
    return observe(sent, threat)


def only(seen: Observation, *names: str) -> Observation:
    return replace(seen, message=Message({n: g for n, g in seen.gradients.items() if n in names}))


def tried(seen: Observation, rows: list[list[int]], types: Tensor | None = None) -> list[list[int]]:
    return [labels.tolist() for labels in labelings(seen, *pad(rows, PAD), types)]


# --- errors


def test_texts_are_padded_on_the_right() -> None:
    ids, mask = pad([[5, 6, 7], [8]], 9)
    assert ids.tolist() == [[5, 6, 7], [8, 9, 9]] and mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert ids.dtype == mask.dtype == torch.long


def tensors(**values: list[float]) -> dict[str, Tensor]:
    return {name: torch.tensor(v, dtype=torch.double) for name, v in values.items()}


@pytest.mark.parametrize(
    ("guess", "observed", "error"),
    [
        ({"a": [1.0, 0.0]}, {"a": [3.0, 4.0]}, 0.8),
        ({"a": [1.0], "b": [1.0]}, {"a": [1.0], "b": [3.0]}, math.sqrt(0.2)),  # at scale 2
        ({"a": [6.0, 8.0]}, {"a": [3.0, 4.0], "b": [12.0]}, 12 / 13),  # what the guess does not have is missed
        ({"a": [0.3, 0.4], "c": [9.0]}, {"a": [3.0, 4.0]}, 0.0),  # what was not sent is not asked for
        ({"a": [4.0, -3.0]}, {"a": [3.0, 4.0]}, 1.0),
        ({"a": [-3.0, -4.0]}, {"a": [3.0, 4.0]}, 1.0),  # no scale turns a gradient around
        ({"a": [1.0, 1e-9]}, {"a": [1.0, 0.0]}, 1e-9),  # far below the root of the precision
        ({"a": [1e-3, 0.0]}, {"a": [3e-4, 4e-4]}, 0.8),
        ({"a": [1.0, 2.0]}, {"a": [0.0, 0.0]}, math.inf),
        ({"a": [0.0, 0.0]}, {"a": [1.0, 2.0]}, math.inf),
        ({"b": [1.0]}, {"a": [1.0, 2.0]}, math.inf),
    ],
)
def test_the_error_is_what_the_best_scale_leaves(guess: Any, observed: Any, error: float) -> None:
    assert relative_error(tensors(**guess), tensors(**observed)) == pytest.approx(error, rel=1e-6, abs=1e-12)


def test_the_error_of_an_exact_guess_does_not_grow_with_the_model() -> None:
    """Float32 sums of 20 million entries are off by 1e-4 and more, as much as with other threads they differ."""
    observed = {"w": torch.rand(20_000_000, generator=generator(0))}
    assert relative_error({"w": 3 * observed["w"]}, observed) < 1e-6
    assert cosine({"w": 3 * observed["w"]}, observed) == pytest.approx(1.0, abs=1e-6)


def test_hidden_entries_count_on_neither_side() -> None:
    shown = {"a": torch.tensor([True, True, False])}
    guess, observed = tensors(a=[1.0, 0.0, 50.0], b=[0.0]), tensors(a=[3.0, 4.0, 7.0], b=[0.0])
    assert relative_error(guess, observed, shown) == pytest.approx(0.8)
    assert relative_error(tensors(a=[1.0, 0.0, 50.0], b=[12.0]), tensors(a=[3.0, 4.0, 7.0], b=[36.0]), shown) == (
        pytest.approx(4 / math.sqrt(9 + 16 + 36**2), rel=1e-2)
    )
    assert relative_error(tensors(b=[1.0]), tensors(a=[3.0, 4.0, 9.0], b=[12.0]), shown) == pytest.approx(5 / 13)


def test_visible_entries_that_are_not_zero_are_counted() -> None:
    message = Message(tensors(a=[1.0, 0.0, 2.0], b=[3.0, 0.0]), {"a": torch.tensor([True, True, False])})
    assert entries(Observation(message, "classification", {})) == 2


# --- labels


def test_a_causal_model_has_one_labeling_padding_left_out() -> None:
    rows = [[CLS, 40, 41], [CLS, 42]]
    assert tried(seen_of(tiny("gpt2", "causal"), rows, task="causal"), rows) == [[[CLS, 40, 41], [CLS, 42, -100]]]


def test_granted_labels_are_tried_in_every_order_of_up_to_four() -> None:
    labels = [1, 1, 0, 2, 0]
    for count in (1, 4, 5):
        seen = seen_of(tiny("bert", "classification"), MORE[:count], labels[:count], threat=WITH_LABELS)
        orders = sorted(set(itertools.permutations(labels[:count])))
        assert tried(seen, MORE[:count]) == ([list(o) for o in orders] if count < 5 else [labels])


@pytest.mark.parametrize("local", [FEDSGD, Local("fedavg-sgd", 3, 0.001)])
@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "gpt2", "llama"])
def test_labels_are_solved_from_the_head(family: str, local: Local) -> None:
    rows, labels = [[CLS, 40, 3, SEP], *MORE[:3], [CLS, 9, 40, 41, 3, 42, SEP]], [2, 0, 0, 1, 2]
    seen = seen_of(tiny(family, "classification"), rows, labels, local=local)
    assert tried(seen, rows) == [labels]
    error, found = check(seen, rows)
    assert error < 1e-4 and found == tuple(labels)


@pytest.mark.parametrize("local", [FEDSGD, Local("fedavg-sgd", 3, 0.001)])
def test_copies_of_a_text_share_its_labels(local: Local) -> None:
    rows = [TEXT, SHORT, TEXT, TEXT]
    (found,) = tried(seen_of(tiny("bert", "classification"), rows, [0, 2, 1, 0], local=local), rows)
    assert found[1] == 2 and sorted([found[0], *found[2:]]) == [0, 0, 1]


@pytest.mark.parametrize("factor", [1e-4, 1e4])
def test_labels_are_solved_whatever_the_size_of_the_update(factor: float) -> None:
    rows, labels = [[CLS, 40, 3, SEP], *MORE[:3]], [2, 0, 0, 1]
    seen = seen_of(tiny("bert", "classification"), rows, labels)
    scaled = replace(seen, message=replace(seen.message, gradients={n: factor * g for n, g in seen.gradients.items()}))
    assert labels in tried(scaled, rows)
    error, found = check(scaled, rows)
    assert error < 1e-4 and found == tuple(labels)


def test_labels_are_solved_with_the_segments() -> None:
    model = tiny("bert", "classification", hidden=16)
    with torch.no_grad():
        model.get_parameter("bert.embeddings.token_type_embeddings.weight").mul_(100.0)
    # The segments say more of these texts than their words do.
    rows, types = [TEXT, [*TEXT[:-2], 43, SEP]], [SEGMENTS, [0] * 7]
    seen = seen_of(model, rows, [2, 0], types=types)
    assert tried(seen, rows, torch.tensor(types)) == [[2, 0]]
    assert check(seen, rows, types)[0] < 1e-5 < 1e-3 < check(seen, rows)[0]


def test_no_more_labels_are_solved_for_than_the_head_has_inputs() -> None:
    model, labels = tiny("bert", "classification", hidden=16), [k % 3 for k in range(17)]
    with torch.no_grad():  # texts far apart
        model.get_parameter("bert.embeddings.word_embeddings.weight").mul_(50.0)
    (found,) = tried(seen_of(model, MORE[:16], labels[:16]), MORE[:16])
    assert len(found) == 16
    assert tried(seen_of(model, MORE[:17], labels), MORE[:17]) == [], "and too many to try them all"


@pytest.mark.parametrize(("classes", "count", "found"), [(2, 1, 2), (3, 3, 27), (2, 6, 64), (2, 7, 0), (3, 4, 0)])
def test_without_a_head_every_labeling_is_tried_up_to_sixty_four(classes: int, count: int, found: int) -> None:
    seen = only(seen_of(tiny("bert", "classification", num_labels=classes), MORE[:count]), "bert.pooler.dense.bias")
    assert tried(seen, MORE[:count]) == [list(y) for y in itertools.product(range(classes), repeat=count)][:found]


def test_a_head_that_is_half_hidden_or_trained_by_adamw_tells_no_labels() -> None:
    model = tiny("bert", "classification")
    seen, every = seen_of(model, [TEXT], [2]), [[0], [1], [2]]
    mask = torch.ones_like(seen.gradients["classifier.weight"], dtype=torch.bool)
    hidden = replace(seen, message=replace(seen.message, visible={"classifier.weight": mask}))
    assert tried(seen, [TEXT]) == [[2]] and tried(hidden, [TEXT]) == every
    assert tried(seen_of(model, [TEXT], [2], local=Local("fedavg-adamw", 1, 1e-4)), [TEXT]) == every


# --- the error of a guess


@pytest.mark.parametrize("local", [FEDSGD, Local("fedavg-sgd", 3, 0.001)])
def test_granted_labels_of_another_number_of_texts_fit_no_guess(local: Local) -> None:
    seen = seen_of(tiny("distilbert", "classification"), [TEXT, SHORT], [2, 1], local=local, threat=WITH_LABELS)
    assert check(seen, [SHORT]) == check(seen, [SHORT, TEXT, TEXT]) == (math.inf, None)
    assert prove(seen, [SHORT]) is None


def test_a_check_says_the_error_and_the_labels() -> None:
    seen = seen_of(tiny("bert", "classification"), [TEXT, SHORT], [2, 1])
    error, labels = check(seen, [SHORT, TEXT])
    assert error < 1e-5 and labels == (1, 2)
    for guess in ([], [TEXT, []], [TEXT, [CLS, UNKNOWN, SEP]], [TEXT, [-2, 40]]):
        assert check(seen, guess) == (math.inf, None)
    causal = seen_of(tiny("gpt2", "causal"), [[CLS, 40, 41]], task="causal")
    error, labels = check(causal, [[CLS, 40, 41]])
    assert error < 1e-5 and labels is None
    many = only(seen_of(tiny("bert", "classification"), MORE[:4]), "bert.pooler.dense.bias")
    assert check(many, MORE[:4]) == (math.inf, None), "too many labelings"


def test_the_first_word_of_a_vocabulary_is_a_token_like_others() -> None:
    text = [0, 40, 41, SEP]  # RoBERTa's texts begin with it
    assert check(seen_of(tiny("bert", "classification"), [text]), [text])[0] < 1e-5


def test_without_a_padding_token_texts_are_padded_with_id_zero() -> None:
    seen = seen_of(tiny("bert", "classification"), [TEXT, SHORT], [2, 1])
    bare = replace(seen, granted={**seen.granted, Grant.BASE_MODEL: replace(VOCABULARY, pad_id=None)})
    assert check(bare, [TEXT, SHORT])[0] < 1e-5
    other = replace(seen, granted={**seen.granted, Grant.BASE_MODEL: replace(VOCABULARY, pad_id=77)})
    assert check(other, [TEXT, SHORT])[0] < 1e-5, "padding is not looked at"


def test_a_model_without_segments_is_told_of_none() -> None:
    text = [CLS, 40, 41, 42]
    seen = seen_of(tiny("gpt2", "classification"), [text])
    assert check(seen, [text], [[0, 0, 0, 0]])[0] < 1e-5 < 1e-3 < check(seen, [text], [[0, 0, 1, 1]])[0]


# --- proofs


def least_of(seen: Observation, texts: Sequence[Sequence[int]], labels: Tensor, types: Any = None) -> float:
    """The least error of the decoys of ``texts``, each with ``labels`` (causal: its own) and the segments ``types``."""

    def inputs(rows: Sequence[Sequence[int]], types: Any = types) -> dict[str, Tensor]:
        ids, mask = pad(rows, PAD)
        more = {} if types is None else {"token_type_ids": pad(types, 0)[0]}
        own = torch.where(mask.bool(), ids, -100) if seen.task == "causal" else labels
        return {"input_ids": ids, "attention_mask": mask, "labels": own, **more}

    guess = tuple(map(tuple, texts))
    whole = inputs(guess)
    logits = seen.model(**{k: v for k, v in whole.items() if k != "labels"}).logits
    weak = weakest(logits, whole["labels"], whole["attention_mask"])
    found: list[tuple[Any, Any]] = [*of_other_lengths(seen, guess, types, logits)]
    found += [(d, types) for d in decoys(seen, guess, inputs=whole, weakest=weak, rng=generator(0, "decoys"))]
    names, local = list(seen.gradients), announced_update(seen)
    return min(relative_error(changed(seen.model, inputs(*d), names, local)[0], seen.gradients, seen.visible) for d in found)


@pytest.mark.parametrize("kind", ["bert", "segments", "fedavg", "gpt2", "gpt2 causal", "llama causal"])
def test_a_proof_holds_the_error_the_labels_and_the_least_error_of_its_decoys(kind: str) -> None:
    family, _, task = kind.replace("segments", "bert").replace("fedavg", "bert").partition(" ")
    rows, labels = ([[CLS, 40, 3, 41], [CLS, 50, 51]], None) if task else ([TEXT, SHORT], [2, 1])
    types = [SEGMENTS, [0, 0, 1, 1]] if kind == "segments" else None
    local = Local("fedavg-sgd", 2, 0.01) if kind == "fedavg" else FEDSGD
    seen = seen_of(tiny(family, task or "classification"), rows, labels, task or "classification", local, types)
    proof = prove(seen, rows, types)
    assert proof is not None and proof.name == "gradient" and proof.tokens == tuple(map(tuple, rows))
    assert proof.labels == (None if task else (2, 1)) and proof.error == check(seen, rows, types)[0] < 1e-5
    assert proof.decoys == pytest.approx(least_of(seen, rows, torch.tensor(labels or [0, 0]), types), rel=1e-4)
    assert all(type(t) is int for text in proof.tokens for t in text)
    assert prove(seen, [*rows[:-1], [*rows[-1][:-2], 99, rows[-1][-1]]], types) is None
    if types is not None:
        assert prove(seen, rows) is None, "without its segments the text is another one"


def certain_of(model: nn.Module, text: Sequence[int]) -> nn.Module:
    """``model`` trained until it is all but certain of the last token of ``text``, and of no other."""
    ids = torch.tensor([list(text)])
    labels = torch.full_like(ids, -100)
    labels[0, -1] = ids[0, -1]
    steps = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        loss = model(input_ids=ids, labels=labels).loss
        if loss < 2e-3:
            break
        steps.zero_grad()
        loss.backward()
        steps.step()
    return model.eval()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("end", [(9, 42), (SEP, 42), (9, SEP)], ids=["words", "special before", "special last"])
def test_a_causal_text_is_not_proven_without_the_last_word_that_the_model_foresees(
    family: str, end: tuple[int, int]
) -> None:
    whole = [CLS, 40, 3, 41, *end]  # a chat template ends a text with a special token, and goes on
    model = certain_of(tiny(family, "causal"), whole)
    for sent, other in ((whole, whole[:-1]), (whole[:-1], whole)):
        seen = seen_of(model, [sent], task="causal")
        assert check(seen, [other])[0] < 1e-3, "the error alone would prove it"
        assert prove(seen, [other]) is None and prove(seen, [sent]) is not None
        batch = seen_of(model, [sent, MORE[0]], task="causal")
        assert prove(batch, [other, MORE[0]]) is None and prove(batch, [sent, MORE[0]]) is not None


def test_no_text_is_longer_than_the_positions_or_the_lengths_that_are_known() -> None:
    model = tiny("gpt2", "causal")
    whole = [CLS, *range(10, 73)]
    assert len(whole) == 64 and prove(seen_of(model, [whole], task="causal"), [whole]) is not None
    text = [CLS, 40, 3, 41, 9, 42]
    seen = seen_of(certain_of(model, text), [text[:-1]], task="causal")
    logits = model(input_ids=torch.tensor([text[:-1]])).logits
    found = [decoy for decoy, _ in of_other_lengths(seen, (tuple(text[:-1]),), None, logits)]
    assert found == [(tuple(text),), (tuple(text[:-2]),)]
    known = replace(seen, granted={**seen.granted, Grant.LENGTHS: torch.tensor([5])})
    assert not list(of_other_lengths(known, (tuple(text[:-1]),), None, logits))


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama causal"])
def test_the_last_tensors_of_a_large_update_never_say_more_than_the_whole(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, _, task = kind.partition(" ")
    rows = [[CLS, 40, 3, 41], [CLS, 50, 51]] if task else [TEXT, SHORT]
    seen = seen_of(tiny(family, task or "classification"), rows, None if task else [2, 1], task or "classification")
    whole = prove(seen, rows)
    monkeypatch.setattr(verify, "LARGE", 0)
    last, ids, mask = verify._Decoys(seen, entries(seen)).last, *pad([[CLS, 40, 7, 41, SEP]], PAD)
    assert 0 < len(last) < len(seen.gradients) and last == list(seen.gradients)[-len(last) :][::-1]
    squares = {n: float(g.square().sum()) for n, g in seen.gradients.items()}
    assert sum(squares[n] for n in last) >= 0.1 * sum(squares.values()) > sum(squares[n] for n in last[:-1])
    proof = prove(seen, rows)
    assert whole is not None and proof is not None and 10 * proof.error < proof.decoys <= whole.decoys * (1 + 1e-6)
    own = {"input_ids": ids, "attention_mask": mask, "labels": ids if task else torch.tensor([1])}
    exact = relative_error(changed(seen.model, own, list(seen.gradients))[0], seen.gradients)
    far = verify._Decoys(seen, entries(seen))
    assert far.missed(own, 1e-6) <= exact * (1 + 1e-6)
    assert far.missed(own, 0.09 * exact) == pytest.approx(exact, rel=1e-6), "the rest decides"
    monkeypatch.setattr(verify, "HELD", 1e-9)  # one tensor that decoys hardly move
    assert prove(seen, rows) is not None


def test_a_decoy_whose_update_is_no_number_proves_nothing() -> None:
    model = tiny("bert", "classification")
    seen = seen_of(model, [TEXT], [1])
    assert prove(seen, [TEXT]) is not None
    with torch.no_grad():
        seen.model.get_parameter("bert.embeddings.word_embeddings.weight")[60:] = torch.nan
    assert check(seen, [TEXT])[0] < 1e-5 and prove(seen, [TEXT]) is None


def test_as_many_entries_prove_a_text_as_tell_it_from_all_others() -> None:
    seen = seen_of(tiny("bert", "classification"), [TEXT], [1])
    name = "bert.encoder.layer.0.output.dense.bias"
    gradient, answers = seen.gradients[name], []
    for kept in (5, 7, 9, 64):
        mask = torch.arange(64) < kept
        part = replace(seen, message=Message({name: gradient * mask}, {name: mask}))
        error, least = check(part, [TEXT])[0], least_of(part, [TEXT], torch.tensor([1]))
        assert error < 1e-5, "hidden entries are left out"
        answers.append(prove(part, [TEXT]) is not None)
        assert answers[-1] == (apart(error, least) and told(kept, error, least, 5, WORDS - 3)), kept
    assert answers[0] is False and answers[-1] is True


def test_noise_beyond_the_tolerance_leaves_no_proof_however_far_decoys_are() -> None:
    name, text = "bert.embeddings.word_embeddings.weight", [CLS, 40, SEP]  # any other word has another row
    seen = only(seen_of(tiny("bert", "classification"), [text], [1]), name)
    seen = replace(seen, granted={**seen.granted, Grant.LENGTHS: (len(text),)})  # nor is there another word
    gradient = seen.gradients[name]
    for size, proven in ((1e-5, True), (9e-4, True), (1.2e-3, False)):
        noise = torch.randn(gradient.shape, generator=generator(1)) / math.sqrt(gradient.numel())
        part = replace(seen, message=Message({name: gradient + size * gradient.norm() * noise}))
        error, _ = check(part, [text])
        assert error == pytest.approx(size, rel=0.1) and apart(error, least_of(part, [text], torch.tensor([1])))
        assert (prove(part, [text]) is not None) == proven


def test_a_proof_repeats_and_its_decoys_take_no_randomness_from_elsewhere() -> None:
    model = tiny("bert", "classification")
    table = model.get_parameter("bert.embeddings.word_embeddings.weight")
    with torch.no_grad():
        # The nearest word is a rather different one; random ones are further away, but the norm behind makes them alike.
        row = 100 * table[40]
        table[3:] = 3 * row + row.norm() * torch.linspace(0.01, 0.3, WORDS - 3)[:, None] * torch.randn(WORDS - 3, 64) / 8
        table[40], table[41] = row, row + 0.7 * row.norm() * torch.randn(64) / 8
    seen = only(seen_of(model, [[CLS, 40, SEP]], [1]), "bert.pooler.dense.weight")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    proofs = [prove(seen, [[CLS, 40, SEP]]) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert proofs[0] == proofs[1] and proofs[0] is not None
    nearest, _ = check(seen, [[CLS, 41, SEP]])
    least = least_of(seen, [[CLS, 40, SEP]], torch.tensor([1]))
    assert least < nearest and proofs[0].decoys == pytest.approx(least, rel=1e-4)


def test_decoys_must_miss_by_more_than_ten_times_the_error_and_than_float_precision() -> None:
    assert not apart(1e-3, 1e-2) and apart(1e-3, 1.0001e-2)
    assert not apart(0.0, 0.9999e-5) and apart(0.0, 1.0001e-5) and apart(1e-7, 1.0001e-5)


@pytest.mark.parametrize("free", [0, 1, 6])
@pytest.mark.parametrize("choices", [1, 2, 300])
def test_numbers_are_told_from_all_texts_but_one_in_a_million(free: int, choices: int) -> None:
    # An error a hundredth of the least: a number tells one text in a hundred; one number is lost to the scale.
    wanted = (max(choices, 2) ** free * 1e6) ** (1 / math.log(100))
    enough = math.floor(math.log(wanted)) + 2
    for error, least in ((1e-3, 0.1), (1e-6, 1e-4), (0.0, 1e-4)):
        assert told(enough, error, least, free, choices) and not told(enough - 1, error, least, free, choices)
    for shown, error, least in (
        (0, 1e-3, 0.1),
        (99, 0.1, 0.1),
        (99, 0.0, 0.0),
        (99, -0.1, 0.1),
        (99, 1e-3, math.inf),
        (1, 1e-3, 0.1),
    ):
        assert not told(shown, error, least, free, choices)


def test_a_single_number_tells_nothing_however_far_decoys_are() -> None:
    assert not told(1, 0.0, 1e300, 0, 2) and told(2, 0.0, 1e300, 0, 2)


# --- labels and the sign of a file


def of_a_file(seen: Observation, sign: float = 1.0) -> Observation:
    """The same update in a file of which nobody said whether it holds a gradient or a change of weights."""
    entries = {n: sign * g for n, g in seen.gradients.items()}
    return replace(seen, message=replace(seen.message, gradients=entries, sign="unknown"))


@pytest.mark.parametrize("label", [0, 1])
def test_of_two_classes_a_file_tells_the_text_and_no_label(label: int) -> None:
    seen = seen_of(tiny("bert", "classification", num_labels=2), [TEXT], [label])
    known = prove(seen, [TEXT])
    assert known is not None and known.labels == (label,), "the audit made the update itself"
    for sign in (1.0, -0.01):
        proof = prove(of_a_file(seen, sign), [TEXT])
        assert proof is not None and proof.tokens == (tuple(TEXT),) and proof.labels is None
    for sign, labels in ((1.0, (label,)), (-0.01, None), (-1.0, None)):
        stated = replace(of_a_file(seen, sign).message, sign="stated")
        proof = prove(replace(seen, message=stated), [TEXT])
        assert proof is not None and proof.labels == labels, "a gradient, says the user"


def test_a_stated_sign_of_a_clipped_update_is_believed_as_its_size_says_nothing() -> None:
    seen = seen_of(tiny("bert", "classification", num_labels=2), [TEXT], [1])
    stated = replace(of_a_file(seen, 0.1).message, sign="stated")
    plain, clipped = (
        replace(seen, message=stated, granted={**seen.granted, Grant.MECHANISM: how})
        for how in ((), (Gaussian(sigma=0.0, clip=1.0),))
    )
    assert (proof := prove(plain, [TEXT])) is not None and proof.labels is None
    assert (proof := prove(clipped, [TEXT])) is not None and proof.labels == (1,)


def test_of_three_classes_or_granted_labels_a_file_tells_the_label() -> None:
    three = of_a_file(seen_of(tiny("bert", "classification"), [TEXT], [2]))
    proof = prove(three, [TEXT])
    assert proof is not None and proof.labels == (2,)
    two = tiny("bert", "classification", num_labels=2)
    granted = prove(of_a_file(seen_of(two, [TEXT], [1], threat=WITH_LABELS)), [TEXT])
    assert granted is not None and granted.labels == (1,)


def test_a_batch_whose_texts_all_turn_around_tells_no_labels() -> None:
    model = tiny("bert", "classification", num_labels=2)
    head = parts(model).head
    assert head is not None
    with torch.no_grad():
        model.get_parameter(head.weight).mul_(1e-6)  # each label as likely
    seen = seen_of(model, [TEXT, SHORT], [1, 0])
    proof, blind = prove(seen, [TEXT, SHORT]), prove(of_a_file(seen), [TEXT, SHORT])
    assert proof is None or proof.labels == (1, 0)
    assert blind is None or blind.labels is None


@pytest.mark.parametrize("labels", [[1, 1], [0, 0], [0, 1]])
@pytest.mark.parametrize("sign", [0.01, -0.01])
def test_copies_of_one_text_alone_are_proven_to_be_one(labels: list[int], sign: float) -> None:
    """Their labels add up to one number that scales the gradient of the text, and a file has any scale."""
    seen = seen_of(tiny("bert", "classification", num_labels=2), [TEXT, TEXT], labels)
    some = prove(of_a_file(seen, sign), [TEXT, TEXT])
    assert some is None or (some.tokens, some.labels) == ((tuple(TEXT),), None)
    message = replace(of_a_file(seen).message, sign="stated")
    whole = prove(replace(seen, message=message), [TEXT, TEXT])
    assert whole is not None and whole.tokens == (tuple(TEXT),)
    assert whole.labels == ((labels[0],) if labels[0] == labels[1] else None)
    clipped = replace(seen, message=replace(of_a_file(seen, sign).message, sign="stated"))
    clipped = replace(clipped, granted={**seen.granted, Grant.MECHANISM: (Gaussian(sigma=0.0, clip=1.0),)})
    some = prove(clipped, [TEXT, TEXT])
    assert some is None or some.labels is None


def test_a_text_that_is_not_proven_is_not_proven_by_a_copy() -> None:
    """Copies of opposite labels leave next to nothing: of A, A and B, the guess B was not proven, and B twice was."""
    model, other = tiny("bert", "classification", num_labels=2), MORE[1]
    with torch.no_grad():  # their weight is .0002 of that of B
        ids = torch.tensor([TEXT])
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
        model.get_parameter("classifier.bias")[1] += float(logits[0] - logits[1]) + 0.016
    seen = seen_of(model, [TEXT, TEXT, other], [0, 1, 0])
    without = replace(seen, granted={g: v for g, v in seen.granted.items() if g not in (Grant.LABELS, Grant.BATCH_SIZE)})
    assert 1e-5 < check(without, [other])[0] < verify.VERIFIED and prove(without, [other]) is None
    assert check(without, [other, other])[0] < verify.VERIFIED and prove(without, [other, other]) is None
    whole = prove(without, [TEXT, TEXT, other])
    assert whole is None or whole.tokens == (tuple(TEXT), tuple(TEXT), tuple(other))


@pytest.mark.parametrize("labels", [(0, 1), (1, 1, 1)])
def test_stated_labels_prove_no_copies(labels: tuple[int, ...]) -> None:
    seen = seen_of(tiny("bert", "classification", num_labels=2), [TEXT], [1])
    stated = {**seen.granted, Grant.LABELS: torch.tensor(labels), Grant.BATCH_SIZE: len(labels)}
    claimed = replace(seen, granted=stated, claimed=frozenset({Grant.LABELS, Grant.BATCH_SIZE}))
    proof = prove(claimed, [TEXT] * len(labels))
    assert proof is not None and (proof.tokens, proof.labels) == ((tuple(TEXT),), (1,))


@pytest.mark.parametrize("sign", ["unknown", "stated"])
def test_a_wrong_label_that_is_stated_is_not_proven(sign: Literal["unknown", "stated"]) -> None:
    """A change of weights is the gradient turned around: that of the other class."""
    seen = of_a_file(seen_of(tiny("bert", "classification", num_labels=2), [TEXT], [1]), -0.01)
    stated = {**seen.granted, Grant.LABELS: torch.tensor([0])}
    message = replace(seen.message, sign=sign)
    proof = prove(replace(seen, message=message, granted=stated, claimed=frozenset({Grant.LABELS})), [TEXT])
    assert proof is not None and proof.labels is None


def test_copies_that_change_the_weight_of_the_others_are_proven() -> None:
    seen = seen_of(tiny("bert", "classification"), [TEXT, TEXT, SHORT], [0, 0, 1])
    proof = prove(seen, [TEXT, TEXT, SHORT])
    assert proof is not None and proof.tokens == (tuple(TEXT), tuple(TEXT), tuple(SHORT))
    guess = in_span((tuple(TEXT[:-1]), tuple(TEXT), tuple(SHORT), tuple(SHORT)), seen, believed=True)
    assert guess.tokens == (tuple(TEXT), tuple(SHORT)), "none of them reads like another"


@pytest.mark.parametrize("claimed", [True, False])
def test_weights_of_texts_are_not_taken_for_copies_of_them(claimed: bool) -> None:
    """Parts of a batch that count alike though the last holds one text, and clients with weights, look like copies."""
    model, other = tiny("bert", "classification"), MORE[1]
    texts, labels, weights = [TEXT, SHORT, other], [0, 0, 1], [0.5, 0.25, 0.25]
    alone = [seen_of(model, [text], [label]).gradients for text, label in zip(texts, labels)]
    found = {n: torch.stack([w * each[n] for w, each in zip(weights, alone)]).sum(0) for n in alone[0]}
    seen = replace(seen_of(model, texts, labels), message=Message(found))
    stated: dict[Grant, Any] = {g: v for g, v in seen.granted.items() if g not in (Grant.LABELS, Grant.BATCH_SIZE)}
    if claimed:
        stated |= {Grant.BATCH_SIZE: 4, Grant.LABELS: torch.tensor([0, 0, 0, 1])}
    without = replace(seen, granted=stated, claimed=frozenset(stated) & {Grant.BATCH_SIZE, Grant.LABELS})
    proof = prove(without, [TEXT, TEXT, SHORT, other])
    assert proof is not None and proof.tokens == (tuple(TEXT), tuple(SHORT), tuple(other))
    assert proof.labels in (None, (0, 0, 1))


@pytest.mark.parametrize("rows", [[TEXT], [TEXT, SHORT]])
@pytest.mark.parametrize("sign", ["unknown", "stated"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_no_label_is_proven_where_smoothing_may_have_turned_the_sign(
    rows: list[list[int]], sign: Literal["unknown", "stated"], clip: float | None
) -> None:
    """The model is almost certain of the true label 1. Float32 rounds its gradient without smoothing away."""
    model = tiny("bert", "classification", num_labels=2)
    with torch.no_grad():
        model.get_parameter("classifier.bias").copy_(torch.tensor([0.0, 16.0]))
    ids, mask = pad(rows, 0)
    logits = model(input_ids=ids, attention_mask=mask).logits
    loss = functional.cross_entropy(logits, torch.ones(len(rows), dtype=torch.long), label_smoothing=0.1)
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    message = Message({n: g for n, g in zip(named, found) if g is not None}, sign=sign)
    how = () if clip is None else (Gaussian(sigma=0.0, clip=clip),)
    seen = observe_update(message, "classification", model=model, vocabulary=VOCABULARY, mechanism=how)
    proof = prove(seen, rows)
    assert proof is not None and proof.labels is None


def test_the_label_of_three_classes_is_told_by_the_logits_however_certain_the_model_is() -> None:
    for least, turns in ((0.0, False), (-16.0, True)):  # with a third class of no weight there are but two
        logits = torch.tensor([[0.0, 18.0, least]])
        assert may_be_turned(logits, torch.tensor([0])) == turns
    assert may_be_turned(torch.tensor([[0.0, 2000.0, 0.0]]), torch.tensor([1])), "nothing is left of its gradient"


@pytest.mark.parametrize(("classes", "kind"), [(1, None), (1, "regression"), (3, "multi_label_classification")])
def test_labels_that_are_no_classes_are_never_named(classes: int, kind: str | None) -> None:
    """A regression was said to have the class 0, and several labels a text ended in a traceback."""
    model = tiny("bert", "classification", num_labels=classes)
    model.config.problem_type = kind  # type: ignore[union-attr]  # a Hugging Face config
    ids = torch.tensor([TEXT])
    for value in (-2.0, 3.7):
        labels = torch.tensor([value]) if classes == 1 else torch.tensor([[1.0, 0.0, value > 0]])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        found, _ = changed(model, inputs, [n for n, _ in model.named_parameters()])
        seen = observe_update(Message(found, sign="unknown"), "classification", model=model, vocabulary=VOCABULARY)
        assert check(seen, [TEXT]) == (math.inf, None) and prove(seen, [TEXT]) is None
        with pytest.raises(NotApplicable, match="one label a text"):
            dlg()(seen, rng=torch.Generator().manual_seed(0), budget=Budget("quick"))


def test_the_likeliest_other_classes() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [0.0, 1.0, 2.0]])
    assert turned(logits, torch.tensor([0, 1, 0])).tolist() == [1, 0, 2]


# --- rows


def test_rows_prove_a_text_whose_places_add_up_in_one_way_alone() -> None:
    tokens = [5, 6, 7, 6]
    assert prove_rows(tokens, 1e-6, 0.5, 64, 3, VOCABULARY) == Proof("embedding-rows", ((5, 6, 7, 6),), 1e-6, 0.5)
    assert prove_rows([5, UNKNOWN, 7, 6], 1e-6, 0.5, 64, 3, VOCABULARY) is None
    assert (
        prove_rows(tokens, 0.99e-4, 0.5, 64, 3, VOCABULARY) is not None
        and prove_rows(tokens, 1e-4, 0.5, 64, 3, VOCABULARY) is None
    )
    assert prove_rows(tokens, math.nan, 0.5, 64, 3, VOCABULARY) is None
    assert (
        prove_rows(tokens, 5e-5, 4.9e-4, 64, 3, VOCABULARY) is None
        and prove_rows(tokens, 5e-5, 5.1e-4, 64, 3, VOCABULARY) is not None
    )
    # 4 places for 3 words, one in a million: 18.2 nats, of which each number but one gives 13.1.
    assert (
        prove_rows(tokens, 1e-6, 0.5, 3, 3, VOCABULARY) is not None
        and prove_rows(tokens, 1e-6, 0.5, 2, 3, VOCABULARY) is None
    )
    assert prove_rows(tokens, 1e-6, 0.5, 3, 10**4, VOCABULARY) is None


# --- what is said


def test_a_proven_guess_says_its_proof_its_labels_and_its_error() -> None:
    proof = Proof("gradient", ((1, 40, 2),), 1e-6, 0.1, (1,))
    said = verified(proof, {"rank": 3, "proof": "none"})
    assert said.tokens == proof.tokens and said.confidence == "verified" and said.ordered
    assert said.labels == (1,) and said.residual == 1e-6 and said.proof is proof
    assert said.details == {"rank": 3, "proof": "gradient"}


def test_a_believed_guess_says_what_it_is_given() -> None:
    seen = seen_of(tiny("bert", "classification"), [TEXT])
    said = in_span(((CLS, 40, SEP),), seen, believed=True)
    assert (
        said.confidence == "span"
        and said.ordered is True
        and said.residual is None
        and said.details == {}
        and said.proof is None
    )
    said = in_span(((CLS, 40),), seen, believed=False, residual=0.25, ordered=False, details={"rank": 3})
    assert (said.confidence, said.ordered, said.residual, said.details) == ("matched", False, 0.25, {"rank": 3})
    with pytest.raises(AttackFailed, match="only special tokens were found, which every text contains"):
        in_span(((CLS, UNKNOWN), (SEP, PAD)), seen, believed=True)
    assert in_span(((CLS, SEP), (CLS, 40)), seen, believed=True).tokens == ((CLS, SEP), (CLS, 40))
