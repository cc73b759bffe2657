"""The protections that ObfusLM is compared to, and what the operator reads of each: laws, exact recovery, bad input."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rasura import registry
from rasura.attacks.services.isometry import moved
from rasura.attacks.services.preimage import in_context
from rasura.attacks.services.trained import own_service
from rasura.core.answers import TokenReading
from rasura.core.interfaces import Budget, InputError, NotApplicable
from rasura.core.rng import generator
from rasura.core.threat import observe_service, service_transcript
from rasura.core.values import UNKNOWN
from rasura.metrics.service import TopTokens
from rasura.priors import trigrams
from rasura.service_protections.glide import glide
from rasura.service_protections.noisy_states import MatrixGaussian, analytic_sigma
from rasura.service_protections.obfuslm.settings import ObfuscationSettings
from rasura.service_protections.replacement import CusText, Replacement, SanText, Words, replaced
from rasura.service_protections.service import Service
from rasura.service_protections.split import Change, Split
from rasura.service_protections.word_vectors import glove
from rasura.testing.tiny import CLS, SEP, VOCABULARY, WORDS, batch_for, tiny
from rasura.victims.step import step

TEXTS = tuple(" ".join(f"w{20 + (7 * n + 3 * k) % 60}" if k % 3 else "the" for k in range(4 + n % 4)) for n in range(30))
IDS = tuple((CLS, *VOCABULARY.encode(t), SEP) for t in TEXTS[:8])
TABLE = torch.randn(WORDS, 16, generator=generator(1))
USUAL = torch.tensor([i for i in range(WORDS) if i not in VOCABULARY.special_ids])


def service(name: str, family: str = "bert", **options: object) -> Service:
    drawn = {"rng": generator(5)} if name in ("sentinellms", "obfuslm") else {}
    texts = (IDS,) if name in ("cape", "textobfuscator") else ()
    model = tiny(family, "classification", blocks=4)
    made: Service = registry.SERVICE_PROTECTIONS[name].make(model, VOCABULARY, *texts, **options, **drawn)
    return made


def read(name: str, made: Service, budget: str = "quick") -> TokenReading:
    seen = observe_service(service_transcript(made, IDS, generator(2)), reference_text=TEXTS[8:])
    return registry.SERVICE_ATTACKS[name].make()(seen, rng=generator(0, name), budget=Budget(budget))  # type: ignore[arg-type]


def top1(name: str, made: Service) -> float:
    return float(np.mean(TopTokens(1)(read(name, made), service_transcript(made, IDS, generator(2))) or [0.0]))


def replacements(epsilon: float = 2.0) -> list[Replacement]:
    words = Words.of(TABLE, VOCABULARY)
    known = words.known & (torch.arange(WORDS) % 3 > 0)  # as with a file that lacks words
    some = Words(TABLE, known, words.order[known[words.order]], "file")
    return [
        SanText(some, epsilon),
        CusText(some, epsilon),
        SanText(words, epsilon),
        CusText(words, epsilon),
        CusText(words, epsilon, size=7, stop=frozenset({3, 5})),
    ]


@pytest.mark.parametrize("made", replacements())
def test_what_is_drawn_is_a_distribution_that_the_adversary_computes_alike(made: Replacement) -> None:
    chances = made.chances(USUAL)
    assert torch.allclose(chances.exp().sum(1), torch.ones(len(USUAL)), atol=1e-4)
    assert not chances[:, sorted(VOCABULARY.special_ids)].isfinite().any()
    backwards = made.likelihoods(USUAL)[:, USUAL].T
    assert torch.allclose(chances[:, USUAL].exp(), backwards.exp(), atol=1e-5)


def test_santext_keeps_the_loss_of_privacy_in_proportion_to_the_distance() -> None:
    made = SanText(Words.of(TABLE, VOCABULARY), epsilon=2.0, share=1.0)
    chances = made.chances(USUAL)[:, USUAL]
    lost = (chances[:, None] - chances[None]).abs().amax(2)
    assert bool((lost <= 2.0 * torch.cdist(TABLE[USUAL], TABLE[USUAL]) + 1e-4).all())


def test_santext_draws_only_sensitive_tokens_and_keeps_some_of_the_others() -> None:
    made = SanText(Words.of(TABLE, VOCABULARY), epsilon=1.0, share=0.9, change=0.3)
    ids = [i for i in USUAL.tolist() if i not in set(made.sensitive.tolist())] * 200
    (sent,) = replaced(made, [ids], VOCABULARY.special_ids, generator(3))
    kept = np.mean([a == b for a, b in zip(ids, sent)])
    assert abs(kept - 0.7) < 0.03
    assert all(b in set(made.sensitive.tolist()) for a, b in zip(ids, sent) if a != b)


def test_custext_stays_in_its_group_within_epsilon_half_and_keeps_stop_words() -> None:
    made = CusText(Words.of(TABLE, VOCABULARY), epsilon=2.0, size=9, stop=frozenset({3}))
    groups = {tuple(sorted(g[g >= 0].tolist())) for g in made.groups[USUAL]}
    assert sorted(i for g in groups for i in g) == USUAL.tolist()
    assert sorted(map(len, groups))[1:] == [9] * (len(groups) - 1)
    whole = USUAL[(made.groups[USUAL] >= 0).all(1) & (USUAL != 3)]
    inside = made.chances(whole)
    assert bool((inside.isfinite().sum(1) == 9).all())
    assert float(inside[inside.isfinite()].max()) <= math.log(math.e / (8 + math.e)) + 1e-5
    lost = inside.masked_fill(~inside.isfinite(), 0)  # of two tokens of a group
    same = made.groups[whole].amin(1)[:, None] == made.groups[whole].amin(1)[None]
    assert float((lost[:, None] - lost[None]).abs().amax(2)[same].max()) <= 2.0 + 1e-5
    assert replaced(made, [[3, CLS]], VOCABULARY.special_ids, generator(0)) == ((3, CLS),)


@pytest.mark.parametrize(("name", "epsilon"), [("santext+", 200.0), ("custext+", 1e4)])
def test_without_privacy_tokens_stay_and_with_it_they_are_drawn_anew(name: str, epsilon: float) -> None:
    loose = service(name, epsilon=epsilon, **(dict[str, Any](share=1.0) if name == "santext+" else {}))
    assert service_transcript(loose, IDS, generator(1)).sent == IDS
    tight = service(name, epsilon=0.5)
    assert tight.sent(IDS, generator(1)) != tight.sent(IDS, generator(2))
    assert {t[0] for t in tight.sent(IDS, generator(1))} == {CLS}


@pytest.mark.parametrize("name", ["santext+", "custext+"])
def test_knowing_the_distribution_reads_no_less_than_taking_what_was_sent(name: str) -> None:
    made = service(name, epsilon=1.0)
    assert top1("preimage", made) >= top1("knn", made)


def test_the_tokens_around_it_decide_between_preimages_that_are_alike() -> None:
    language = trigrams(VOCABULARY, ("w20 w21 w22 w23",) * 5 + ("w30 w31",) * 9)
    places = [{20: 0.0}, {31: -0.1, 21: -0.2, 40: -0.3}, {22: -1.0, 31: 0.0}]
    read = in_context(places, language, 3)
    assert [row[0] for row in read] == [20, 21, 22] and read[1] == [21, 31, 40]
    assert in_context([], language, 2) == []


def test_dp_forward_noise_is_the_least_for_its_budget() -> None:
    # Balle and Wang: the analytic mechanism needs less than sqrt(2 ln(1.25 / delta)) / epsilon, and spends all of delta.
    assert 0.5 < analytic_sigma(1.0, 1e-5) / math.sqrt(2 * math.log(1.25e5)) < 0.9
    assert analytic_sigma(8.0, 1e-5) < analytic_sigma(1.0, 1e-5)
    change = MatrixGaussian(1e6, 0.5, clip=2.0)
    states, mask = torch.randn(3, 5, 8), torch.tensor([[1, 1, 1, 0, 0]] * 3)
    sent = change(states, mask)
    assert torch.allclose(sent.flatten(1).norm(dim=1), torch.full((3,), 2.0), atol=0.05)
    assert not sent[:, 3:].any()


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("depth", [0, 2])
def test_a_split_model_without_noise_is_the_model(family: str, depth: int) -> None:
    model = tiny(family, "classification", blocks=4)
    split = Split(model, depth, MatrixGaussian(1e9, 0.5, clip=1e6)).eval()
    split.change.sigma = 0.0  # type: ignore[assignment]
    batch = batch_for("classification")
    inputs = {k: v for k, v in batch.inputs().items() if k != "labels"}
    assert torch.allclose(split(**inputs).logits, model(**inputs).logits, atol=1e-5)
    sent = split.sent(**inputs)
    states = split.states(sent, batch.attention_mask)
    assert len(states) == 4 - depth + 1 and states[0] is sent
    expected = model(**inputs, output_hidden_states=True).hidden_states
    for ours, theirs in zip(states[1:-1], expected[depth + 1 : -1]):
        assert torch.allclose(ours[batch.attention_mask.bool()], theirs[batch.attention_mask.bool()], atol=1e-5)


@pytest.mark.parametrize("name", ["dp-forward", "cape", "textobfuscator"])
def test_states_are_sent_in_place_of_ids_and_the_private_ones_stay_unseen(name: str) -> None:
    made = service(name)
    truth = service_transcript(made, IDS, generator(0))
    seen = observe_service(truth)
    if name == "dp-forward":
        assert "for any two texts the sensitivity is twice the clip" in str(seen.mechanism.parameters["neighbours"])
    assert set(seen.ids[0]) == {CLS, SEP, UNKNOWN}
    assert [v.shape for v in seen.vectors] == [(len(t), 64) for t in IDS]
    for attack in ("knn", "ednn", "invbert", "mlc", "blind", "sda"):
        guess = read(attack, made)
        assert len(guess.ranked) == len(IDS)
    with pytest.raises(NotApplicable, match="counted"):
        read("tfa", made)


@pytest.mark.parametrize("name", ["cape", "textobfuscator"])
def test_training_reaches_the_clients_half(name: str) -> None:
    made = service(name, depth=2)
    batch = batch_for("classification")
    told = step(made.served, batch, (), task="classification", vocabulary=VOCABULARY, rng=generator(0)).message.gradients
    assert float(told["model.bert.embeddings.word_embeddings.weight"].norm()) > 0
    assert any(name.startswith("change.") for name in told)


def test_the_adversary_of_cape_learns_what_the_client_unlearns() -> None:
    made = service("cape", depth=2, adversary=0.0, epsilon=1e6)
    batch = batch_for("classification")
    inputs = batch.inputs()
    split = made.served
    assert isinstance(split, Split)
    losses = []
    for weight in (0.0, 1.0):
        split.change.weight = weight  # type: ignore[assignment]
        losses.append(torch.autograd.grad(split(**inputs).loss, split.get_input_embeddings().get_parameter("weight"))[0])
    # With weight 0 no gradient of the adversary comes back; with 1 it comes back turned round.
    split.change.loss = lambda *_: None  # type: ignore[method-assign]
    plain = torch.autograd.grad(split(**inputs).loss, split.get_input_embeddings().get_parameter("weight"))[0]
    assert torch.allclose(losses[0], plain, atol=1e-6) and not torch.allclose(losses[1], plain, atol=1e-4)


def test_dp_forward_is_read_where_its_budget_is_loose() -> None:
    assert top1("preimage", service("dp-forward", epsilon=1e7)) == 1.0
    assert top1("preimage", service("dp-forward", epsilon=0.1)) < 0.6


@pytest.mark.parametrize(
    ("name", "loose", "tight"),
    [
        ("dp-forward", {"epsilon": 2000.0}, {"epsilon": 0.1}),
        ("cape", {"epsilon": 10.0}, {"epsilon": 0.01}),
        ("textobfuscator", {"noise": 1.0}, {"noise": 1000.0}),
    ],
)
def test_states_behind_blocks_are_read_through_their_noise(name: str, loose: dict[str, Any], tight: dict[str, Any]) -> None:
    made = service(name, depth=2, **loose)
    assert top1("preimage", made) > max(0.6, top1("invbert", made) + 0.2)
    assert top1("preimage", service(name, depth=2, **tight)) < 0.6


def test_what_an_unknown_change_sends_is_not_said_to_be_read() -> None:
    made = service("textobfuscator", depth=2)
    made.served.change = type("Own", (Change,), {"forward": lambda self, states, mask: states})()
    with pytest.raises(NotApplicable, match="closed form"):
        read("preimage", made)


def test_glide_reflections_keep_all_distances() -> None:
    for directions in ("ones", "random"):
        before = TABLE.double()
        after = glide(before, 3, directions, generator(4))  # type: ignore[arg-type]
        assert torch.allclose(torch.cdist(after, after), torch.cdist(before, before), atol=1e-6)
        assert not torch.allclose(after, before, atol=0.1)


def test_an_even_number_of_the_published_reflections_adds_one_constant() -> None:
    away = glide(TABLE, 10, "ones", generator(4)) - TABLE
    assert torch.allclose(away, away[0, 0].expand_as(away), atol=1e-5)


@pytest.mark.parametrize("directions", ["ones", "random"])
def test_distances_give_the_tokens_of_sentinellms_away(directions: str) -> None:
    made = service("sentinellms", directions=directions)
    assert top1("isometry", made) == 1.0
    with pytest.raises(NotApplicable, match="distances"):
        read("isometry", service("obfuslm", settings=ObfuscationSettings(k=4)))


def test_a_rigid_motion_is_found_from_its_pairs() -> None:
    turned = glide(TABLE, 5, "random", generator(4)).double()
    assert torch.allclose(moved(turned, turned[:40], TABLE[:40].double()), TABLE.double(), atol=1e-5)


def test_the_adversary_has_keys_and_draws_of_its_own() -> None:
    for name in ("sentinellms", "santext+"):
        made = service(name)
        seen = observe_service(service_transcript(made, IDS, generator(0)), reference_text=TEXTS)
        own = own_service(seen, 30, 1)
        assert own.ids[0] == list(IDS[0]) and own.sent[0] != list(seen.ids[0])


def test_vectors_of_a_file_take_the_place_of_the_models_table(tmp_path: Path) -> None:
    file = tmp_path / "glove.txt"
    file.write_text("w20 1.0 0.0\n. . 0.5 0.5\nw21 0.9 0.1\nnobody 1 1\nw22 -1.0 0.0\n", encoding="utf-8")
    table, known = glove(file, VOCABULARY)
    assert known.nonzero().flatten().tolist() == [20, 21, 22] and table[21].tolist() == pytest.approx([0.9, 0.1])
    made = service("custext+", vectors=str(file), epsilon=1.0, size=2)
    (sent,) = made.sent([[20] * 50 + [40]], generator(0))
    assert set(sent) == {20, 21, 40}
    for text, told in (
        ("w20 1.0 0.0\nw21 1.0\n", "expected 2"),
        ("nobody 1 1\n", "no word"),
        ("w20 a b\n", "cannot be read"),
    ):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match=told):
            glove(file, VOCABULARY)


@pytest.mark.slow
def test_settings_that_cannot_be_are_refused() -> None:
    numbers = {
        "santext+": ("epsilon", "share", "change"), "custext+": ("epsilon",), "madlib": ("epsilon",),
        "dp-forward": ("epsilon", "delta", "clip"), "cape": ("epsilon", "adversary"),
        "textobfuscator": ("close", "away", "noise"),
    }  # fmt: skip
    for name, options in numbers.items():
        for option, wrong in product(options, (-1, math.nan, math.inf)):
            given: dict[str, Any] = {option: wrong}
            with pytest.raises(InputError, match="expected"):
                service(name, **given)
    zero = (("santext+", "epsilon"), ("custext+", "size"), ("dp-forward", "clip"), ("cape", "epsilon"))
    for name, option in (*zero, ("sentinellms", "times")):
        given = {option: 0}
        with pytest.raises(InputError, match="expected"):
            service(name, **given)


class Overflow(Change):
    def forward(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return states * torch.inf


class Nothing(SanText):
    def chances(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.full((len(tokens), WORDS), torch.nan)


def test_what_no_model_can_use_is_not_taken_for_a_protection() -> None:
    states = service("none")
    states = replace(states, served=Split(states.served, 0, Overflow()))
    drawn = replace(service("santext+"), replacement=Nothing(Words.of(TABLE, VOCABULARY)))
    for made, why in ((states, "not finite"), (drawn, "outside the vocabulary")):
        with pytest.raises(NotApplicable, match=f"{why}, so nothing can be measured"):
            service_transcript(made, IDS, generator(2))


# --- Madlib


def test_madlib_keeps_tokens_without_privacy_and_sends_any_with_it() -> None:
    rows = [list(text) for text in IDS]
    kept, lost = service("madlib", epsilon=1e6), service("madlib", epsilon=1e-3)
    assert kept.sent(rows, generator(1)) == tuple(map(tuple, rows))
    sent = lost.sent(rows * 20, generator(1))
    pairs = [(a, b) for row, text in zip(rows * 20, sent) for a, b in zip(row, text, strict=True)]
    assert all((a in VOCABULARY.special_ids) == (b in VOCABULARY.special_ids) for a, b in pairs)
    assert all(a == b for a, b in pairs if a in VOCABULARY.special_ids)
    assert np.mean([a == b for a, b in pairs if a not in VOCABULARY.special_ids]) < 0.1
    assert lost.sent(rows) != lost.sent(rows), "nobody can repeat what the operating system drew"


def test_madlibs_loss_of_privacy_is_in_proportion_to_the_distance() -> None:
    """On a line of two tokens at distance 1 the noise is Laplace's: the other one is sent with exp(-epsilon / 2) / 2."""
    made: Any = service("madlib")
    table = torch.zeros(WORDS, 1)
    table[41] = 1.0
    known = torch.zeros(WORDS, dtype=torch.bool)
    known[[40, 41]] = True
    line = replace(made, words=Words(table, known, USUAL, "line"), epsilon=2.0)
    (sent,) = line.sent([[40] * 20_000], generator(4))
    assert set(sent) == {40, 41} and np.mean(np.array(sent) == 41) == pytest.approx(math.exp(-1) / 2, abs=0.01)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.inf, math.nan])
def test_madlib_takes_a_finite_epsilon_above_0(epsilon: float) -> None:
    with pytest.raises(InputError, match="madlib: epsilon is"):
        service("madlib", epsilon=epsilon)
