"""What the metrics say, on texts and ids made for it."""

from __future__ import annotations

import math
import unicodedata
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score import tokenizers
from torch import nn

from rasura.core.batches import Batch
from rasura.core.interfaces import InputError, Metric, Unavailable
from rasura.core.rng import generator
from rasura.core.values import UNKNOWN, Message, Reconstruction, Transcript
from rasura.metrics.chrf import chrf
from rasura.metrics.chrf import score as chrf_score
from rasura.metrics.embeddings import wasserstein
from rasura.metrics.sensitive import Sensitive, marked_words, plain_words, sensitive_spans
from rasura.metrics.text import (
    Meteor,
    RougeWords,
    exact_match,
    jaccard,
    meteor,
    position_exact,
    rouge,
    token_precision,
    token_recall,
    wordnet,
    words,
)  # fmt: skip
from rasura.registry import METRICS
from rasura.registry import metric as make_metric
from rasura.runs.scoring import recovered, score
from rasura.testing.tiny import CLS, SEP, VOCABULARY, batch_of, tiny
from rasura.victims.step import step
from rasura.victims.tokenizers import load_tokenizer

WORDS = st.lists(st.integers(11, 290), min_size=1, max_size=8)
EVERY: list[Metric[Reconstruction]] = [
    rouge("rouge1"), rouge("rouge2"), rouge("rougeL"), jaccard(), token_precision(), token_recall(), position_exact(),
    exact_match(),
]  # fmt: skip


def truth(*rows: list[int], texts: tuple[str, ...] | None = None) -> Transcript:
    batch = batch_of([[CLS, *r, SEP] for r in rows], "classification")
    if texts:
        batch = Batch(batch.input_ids, batch.attention_mask, batch.labels, texts, texts, special_ids=batch.special_ids)
    return Transcript(batch, nn.Identity(), Message({}), (), 0.0, "classification", VOCABULARY)


KNOWN = replace(VOCABULARY, special_ids=VOCABULARY.special_ids | {7}, unknown_ids=frozenset({7}))
"""A tokenizer that puts id 7 in place of every word which it does not know."""


def test_words_that_the_tokenizer_does_not_know_count_as_not_read() -> None:
    said = replace(truth([40, 7, 41, 7], [42, 43], [7, 7]), vocabulary=KNOWN)
    exact = guess([40, 7, 41, 7], [42, 43], [7, 7])
    for metric, share in ((token_recall(), 0.5), (position_exact(), 0.5), (exact_match(), 0.0), (token_precision(), 1.0)):
        some, other, none = metric(exact, said)
        assert (some, other) == (share, 1.0) and math.isnan(none)
    for measured, share in ((rouge("rouge1"), 2 / 3), (rouge("rouge2"), 0.0), (rouge("rougeL"), 2 / 3), (jaccard(), 2 / 3)):
        values = score(measured, exact, seen(said))["per_record"]
        assert values[:2] == pytest.approx([share, 1.0]) and math.isnan(values[2]), measured.name
    assert KNOWN.text([CLS, 40, 7, 7, 41, SEP]) == "w40 · · w41" and VOCABULARY.text([CLS, 40, SEP]) == "w40"
    shown = Reconstruction((), texts=tuple(map(KNOWN.text, exact.tokens)))
    assert rouge("rouge1")(shown, seen(said)) == rouge("rouge1")(exact, seen(said)), "texts alone, with their marks"
    first, second, _ = recovered(exact, said, True)
    assert first["unknown"] == [2, 4] and "unknown" not in second


def seen(said: Transcript) -> Transcript:
    """``said`` with its texts as its own tokenizer shows them."""
    batch = said.text_batch
    texts = tuple(said.vocabulary.text(batch.ids(row)) for row in range(len(batch)))
    return replace(said, batch=replace(batch, seen=texts))


def guess(*rows: list[int], ordered: bool = True) -> Reconstruction:
    return Reconstruction(tuple((CLS, *r, SEP) for r in rows), ordered=ordered)


@settings(max_examples=30, deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=3, unique_by=tuple))
def test_laws(rows: list[list[int]]) -> None:
    for metric in EVERY:
        none = [math.nan if metric.name == "rouge2" and len(row) == 1 else 0.0 for row in rows]  # one word has no pair
        perfect = metric(guess(*rows), truth(*rows))
        assert metric(guess(*rows[::-1]), truth(*rows)) == pytest.approx(perfect, nan_ok=True), "in any order"
        assert perfect == pytest.approx([1.0 + v for v in none], nan_ok=True)
        assert all(0 <= v <= 1 for v in metric(guess(rows[0]), truth(*rows)) if v == v)
        assert metric(guess(), truth(*rows)) == pytest.approx(none, nan_ok=True)
        assert metric(guess([3, 4, 5]), truth(*rows)) == pytest.approx(none, nan_ok=True), "nothing in common"


def test_tokens_and_places() -> None:
    t = truth([20, 21, 22, 23])
    half = guess([20, 22, 21, 99])
    assert token_recall()(half, t) == [0.75] and token_precision()(half, t) == [0.75]
    assert position_exact()(half, t) == [0.25] and exact_match()(half, t) == [0.0]
    assert position_exact()(guess([20, 21, 22, 23], ordered=False), t) == [0.0]
    holes = Reconstruction(((CLS, 20, UNKNOWN, 22, UNKNOWN, SEP),))
    assert position_exact()(holes, t) == [0.5] and token_precision()(holes, t) == [1.0]


def test_a_text_that_a_batch_holds_twice_is_read_by_one_guess() -> None:
    said, once = truth([20, 21], [20, 21], [30, 31]), guess([30, 31], [20, 21])
    for metric in EVERY:
        assert metric(once, said) == pytest.approx([1.0, 1.0, 1.0]), metric.name
        assert metric(guess([20, 21]), said) == pytest.approx([1.0, 1.0, 0.0]), "another text has no part in it"
    assert [row["read"] for row in recovered(once, said, True)] == ["w20 w21", "w20 w21", "w30 w31"]
    assert token_recall()(guess([20, 21]), truth([20, 21], [21, 20])) == [1.0, 0.0], "the same words, another text"


def test_everything_named_gives_high_recall_at_low_precision() -> None:
    t, all_words = truth([20, 21]), guess(list(range(11, 111)))
    assert token_recall()(all_words, t) == [1.0] and token_precision()(all_words, t) == [0.02]


def test_a_text_without_a_word_of_its_own_is_not_measured() -> None:
    unknown, read = truth([], [20, 21]), guess([], [20, 21])
    for metric in EVERY:
        values = [v["per_record"] for v in (score(metric, read, unknown), score(metric, guess(), unknown))]
        assert all(math.isnan(blank) for blank, _ in values) and [own for _, own in values] == [1.0, 0.0]
        assert score(metric, read, unknown)["n"] == 1
    for metric in (token_recall(), token_precision(), position_exact(), exact_match()):
        assert math.isnan(metric(read, unknown)[0]) and metric(read, unknown)[1] == 1.0


def spans_of(text: str) -> list[str] | None:
    found = sensitive_spans(text)
    return None if found is None else [text[a:b] for a, b in found]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Пациент Иван Петров живёт в Москве", ["Пациент Иван Петров", "Москве"]),
        ("Борис Орлов должен 4250 рублей", ["Борис Орлов", "4250"]),
        ("Ο ασθενής Γιώργος Παπαδόπουλος", ["Γιώργος Παπαδόπουλος"]), ("Please call Łukasz Żak", ["Łukasz Żak"]),
        ("Please call E\u0301mile Zola", ["E\u0301mile Zola"]), ("Nothing of the ordinary, 5 µg", ["5"]), ("42", ["42"]),
        ("المريض أحمد علي يسكن في القاهرة", None), ("患者李小明住在北京", None), ("გიორგი ბერიძე", None),
        ("Dear 李小明, please call", None), ("patient john smith owes 400", None),
    ],
)  # fmt: skip
def test_names_are_told_by_the_capitals_of_their_script_or_not_known(text: str, found: list[str] | None) -> None:
    assert spans_of(text) == found
    assert [hurts for _, _, hurts in marked_words("Dear 李小明 owes 400", "")] == [False, False, False, True]
    if found is None:
        assert math.isnan(Sensitive()(guess([20]), truth([20], texts=(text,)))[0])


def test_sensitive_spans() -> None:
    text = "Mr Okafor was given 14 units on 3 March , then Lena Brandt called a.b@c.org ."
    found = spans_of(text)
    assert found == ["Okafor", "14", "3 March", "Lena Brandt", "a.b@c.org"]
    assert sensitive_spans("Please call the doctor .") == []


def test_share_of_sensitive_words() -> None:
    t = truth([20], [21], texts=("Ask Lena Brandt about 14 units .", "nothing here"))
    read = Reconstruction((), texts=("lena got 14", "nothing here"))
    values = Sensitive()(read, t)
    assert values[0] == pytest.approx(2 / 3) and math.isnan(values[1])


INSIDE_WORDS = (
    "Patient Anna Müller took 40mg of the drug", "Give him 500mg twice", "Room B12 at 10am",
    "user_4250 logged in on 2024-01-05T10:00", "Der Kunde Öz hat IBAN DE89370400440532013000 genannt.",
    "Call O’Neil at 5pm", "Flight LH454 leaves", "Born in the 1980s", "Paid A4417 for Łukasz-Nowak", "İstanbul Mül\xadler 5",
    "Οδυσσεας ΟΔΥΣΣΕΑΣ 5",
)  # fmt: skip


def read_whole(text: str, read: str) -> float:
    return Sensitive()(Reconstruction((), texts=(read,)), truth([20], texts=(text,)))[0]


@pytest.mark.parametrize("text", INSIDE_WORDS)
def test_numbers_inside_words_are_recovered_with_the_whole_text(text: str, minilm_path: Path) -> None:
    tokenizer = load_tokenizer(str(minilm_path), trust_remote_code=False)
    assert read_whole(text, tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])) == 1.0
    assert read_whole(text, "nothing of it") == 0.0


@settings(max_examples=300, deadline=None)
@given(st.text() | st.text("aB1_ .-’İßΣσ5é\u0345\u00ad", max_size=30))
def test_a_text_that_was_read_whole_has_every_sensitive_word(text: str) -> None:
    share = read_whole(text, text)
    assert share == 1.0 or math.isnan(share)
    assert all(hit for _, hit, _ in marked_words(text, text))


def test_marked_words_count_each_word_once() -> None:
    assert marked_words("a b a", "a") == [("a", True, False), ("b", False, False), ("a", False, False)]


def test_meteor_needs_wordnet_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    with pytest.raises(Unavailable, match="NLTK_DATA"):
        Meteor()(guess([20]), truth([20]))


def test_meteor_with_wordnet(monkeypatch: pytest.MonkeyPatch, shared: Path) -> None:
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(shared / "nltk_data")])
    assert wordnet()
    t = truth([20], texts=("the doctor called his mother today",))
    same = Reconstruction((), texts=("the doctor called his mother today",))
    synonym = Reconstruction((), texts=("the physician called his mother today",))
    other = Reconstruction((), texts=("green stones sleep",))
    a, b, c = (Meteor()(g, t)[0] for g in (same, synonym, other))
    assert a > 0.99 and 0.9 < b < 1 and c == 0.0


@pytest.mark.slow
def test_meteor_is_that_of_nltk_with_all_languages(monkeypatch: pytest.MonkeyPatch, shared: Path) -> None:
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(shared / "nltk_data")])
    from nltk.translate.meteor_score import meteor_score

    sent, read = (["the", *some, "called", "his", "mother"] for some in (["doctor", "swiftly"], ["quickly", "physician"]))
    assert 0 < meteor(" ".join(sent), " ".join(read)) == meteor_score([sent], read)


@settings(max_examples=50, deadline=None)
@given(WORDS, WORDS)
def test_jaccard_and_rouge_l_are_the_calibration_papers(a: list[int], b: list[int]) -> None:
    common = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            common[i + 1][j + 1] = common[i][j] + 1 if x == y else max(common[i][j + 1], common[i + 1][j])
    longest, t, read = common[-1][-1], truth(a), guess(b)
    value = rouge("rougeL")(read, t)[0]
    assert value == pytest.approx(2 * longest / (len(a) + len(b))) and value >= longest / max(len(a), len(b)) - 1e-12
    assert jaccard()(read, t) == pytest.approx([len({*a} & {*b}) / len({*a} | {*b})])


def test_meteor_weighs_recall_nine_times(monkeypatch: pytest.MonkeyPatch, shared: Path) -> None:
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(shared / "nltk_data")])
    t = truth([20], texts=("alpha bravo delta echo",))
    read = Reconstruction((), texts=("alpha bravo zulu",))
    precision, recall, chunks, matches = 2 / 3, 2 / 4, 1, 2
    expected = 10 * precision * recall / (recall + 9 * precision) * (1 - 0.5 * (chunks / matches) ** 3)
    assert Meteor()(read, t) == pytest.approx([expected])


def test_sentence_cosine_knows_meaning_and_pairs_texts(minilm_path: Path) -> None:
    judge = make_metric("sentence_cosine")
    assert make_metric(f"sentence_cosine:{minilm_path}").name == judge.name == "sentence_cosine"
    t = truth([20], [21], texts=("The doctor called his mother .", "Stocks fell sharply on Monday ."))

    def score(*texts: str) -> list[float]:
        return list(judge(Reconstruction((), texts=texts), t))

    assert score("Stocks fell sharply on Monday .", "The doctor called his mother .") == pytest.approx([1.0, 1.0])
    near = score("The physician phoned his mum .", "Shares dropped on Monday .")
    far = score("Green stones sleep .", "A cat sat on the mat .")
    assert min(near) > 0.6 > 0.4 > max(far)
    assert score() == [0.0, 0.0] and score("", "The doctor called his mother .") == pytest.approx([1.0, 0.0])


def test_a_metric_without_parameter_refuses_one() -> None:
    for name, says in (("jaccard:minilm", "takes no parameter"), ("sentence_cosin", "did you mean sentence_cosine")):
        with pytest.raises(InputError, match=says):
            make_metric(name)


def test_every_named_metric_has_name_and_unit() -> None:
    assert {n: make_metric(n).name for n in METRICS} == {n: n for n in METRICS}


def test_a_mark_that_stands_alone_is_marked_as_read() -> None:
    assert [hit for _, hit, _ in marked_words("Anna pays . today !", "anna pays today.")] == [True, True, True, True, False]
    assert [hit for _, hit, _ in marked_words("Anna pays today.", "anna pays today")] == [True, True, True]


def test_chrf_is_the_papers_by_hand() -> None:
    # "abc" read as "abd": 2 of 3 characters, 1 of 2 pairs, no triple; precision and recall are alike, so F3 is, too.
    assert chrf_score("a bc", "ab d") == pytest.approx((2 / 3 + 1 / 2) / 3)
    # "ab" read as "abab": all characters at precision 1/2 and the pair at 1/3; F3 = 10 p r / (9 p + r)
    assert chrf_score("ab", "abab") == pytest.approx((5 / 5.5 + (10 / 3) / 4) / 2)
    assert chrf_score("ab", "ab") == chrf_score("Lena pays 4,250 euros.", "Lena pays 4,250 euros.") == 1.0
    assert chrf_score("ab", " ") == chrf_score("", "ab") == 0.0 and chrf_score("ab", "cd") < 1e-12


SENTENCES = {
    "de": "Für Jürgen gab es 40 Äpfel.",
    "el": "Η Μαρία ζει στην Αθήνα.",
    "ru": "Анна живёт в Москве.",
    "zh": "她住在北京的医院里。",
    "ja": "患者は東京に住んでいます。",
    "ko": "그녀는 서울에 산다.",
    "ar": "تعيش في القاهرة",
    "hi": "वह दिल्ली में रहती है",
    "th": "เธออยู่ที่กรุงเทพ",
}


@pytest.mark.parametrize("language", SENTENCES)
def test_rouge_reads_every_script(language: str) -> None:
    text = SENTENCES[language]
    half = text[: len(text) // 2]
    for kind in ("rouge1", "rouge2", "rougeL"):
        score = rouge(kind).score  # type: ignore[arg-type]
        assert score(text, text) == 1.0 and 0.0 < score(text, half) < 1.0 and score(text, "nothing of it") == 0.0


@pytest.mark.parametrize(
    ("text", "count", "other"),
    [
        ("मरीज को मधुमेह है", 4, "मोर जो कि मुधोमहा"),
        ("மருத்துவர் லேனா", 2, "மாருது லானே"),
        ("شُكْرًا جَزِيلًا", 2, "شكر جزل"),
    ],
)
def test_a_vowel_sign_does_not_end_a_word(text: str, count: int, other: str) -> None:
    """Words were split at their signs, so other words of the same letters counted as read."""
    assert len(words(text)) == len(plain_words(text)) == count
    assert rouge("rouge1").score(text, other) == jaccard().score(text, other) == 0.0


def test_an_accent_counts_alike_however_it_is_written() -> None:
    apart = unicodedata.normalize("NFD", "Café Müller")
    assert words(apart) == words("Café Müller") == ["café", "müller"]


@given(st.text(st.characters(codec="ascii")))
def test_the_words_of_english_are_those_of_the_package(text: str) -> None:
    assert RougeWords().tokenize(text) == tokenizers.DefaultTokenizer(use_stemmer=False).tokenize(text)


@pytest.mark.parametrize("text", ["?!. …", "😀 😀 🎉"])
def test_a_text_without_words_is_not_measured_by_words(text: str) -> None:
    """Read word for word, it scored 0: a text that was not read."""
    said = truth([40, 41], [42, 43], texts=(text, "w42 w43"))
    read = Reconstruction((), texts=(text, "w42 w43"))
    for metric in (rouge("rouge1"), rouge("rouge2"), rouge("rougeL"), jaccard()):
        for named in (read, Reconstruction((), texts=("w42 w43",)), Reconstruction(())):
            first, _ = metric(named, said)
            assert math.isnan(first), metric.name
        assert metric(read, said)[1] == 1.0
    assert chrf()(read, said) == [1.0, 1.0], "which compares characters"


def test_one_word_has_no_pair_of_words() -> None:
    said = truth([40], [41, 42], texts=("w40", "w41 w42"))
    one, two = rouge("rouge2")(Reconstruction((), texts=("w40", "w41 w42")), said)
    assert math.isnan(one) and two == 1.0


def test_meteor_of_a_text_without_words_is_not_measured(monkeypatch: pytest.MonkeyPatch, shared: Path) -> None:
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(shared / "nltk_data")])
    said = truth([40, 41], [42, 43], texts=("?! …", "患者李小明住院"))
    blank, other = Meteor()(Reconstruction((), texts=("?! …", "患者李大明住院")), said)
    assert math.isnan(blank) and other > 0.8


def test_jaccard_reads_scripts_without_spaces() -> None:
    said = truth([40], texts=("患者李小明住院",))
    assert jaccard()(Reconstruction((), texts=("患者李大明住院",)), said) == [pytest.approx(6 / 8)]


def test_the_distance_of_embeddings_is_that_of_the_cheapest_move() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(4, 3)), rng.normal(size=(4, 3))
    # Of as many rows on both sides, the cheapest plan is the best order, of all that there are.
    slow = min(np.mean([np.linalg.norm(x - b[k]) for x, k in zip(a, order)]) for order in permutations(range(4)))
    assert wasserstein(a, b) == pytest.approx(slow)
    # Each row twice is the same distribution: the linear program and the assignment agree.
    assert wasserstein(np.concatenate([a, a]), b) == pytest.approx(slow)
    assert wasserstein(a, a[::-1]) == 0.0
    assert np.isnan(wasserstein(a, a[:0]))


def test_texts_that_came_back_are_at_no_distance_and_one_without_a_guess_has_none() -> None:
    judge = make_metric("embedding_distance")
    assert list(judge(Reconstruction(tokens=((10, 11, 12), (20, 21))), two_texts())) == [0.0, 0.0]
    assert list(judge(Reconstruction(tokens=((20, 21), (12, 10, 11))), two_texts())) == [0.0, 0.0]
    far, none = judge(Reconstruction(tokens=((40, 41, 42),)), two_texts())
    assert (far > 0) != (none > 0) and np.isnan([far, none]).sum() == 1
    assert np.isnan(judge(Reconstruction(tokens=((UNKNOWN,), ())), two_texts())).all()


def two_texts() -> Transcript:
    """A step of a tiny model on the texts (10, 11, 12) and (20, 21)."""
    batch = batch_of([[CLS, 10, 11, 12, SEP], [CLS, 20, 21, SEP]], "classification", [0, 1])
    return step(tiny("bert", "classification"), batch, task="classification", vocabulary=VOCABULARY, rng=generator(0))
