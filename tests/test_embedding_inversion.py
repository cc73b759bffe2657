"""What the operator of a service reads of an obfuscated model: the one door, the attacks' laws and plain readings."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import nnls
from torch import nn

from rasura import registry
from rasura.attacks.services.dimensions import changed, mixing
from rasura.attacks.services.mixture import matched, mixtures
from rasura.attacks.services.substitution import judge_of
from rasura.attacks.services.tables import Tables, word_table
from rasura.attacks.services.trained import Inverter
from rasura.core.answers import ServiceTranscript, TokenReading
from rasura.core.interfaces import Budget, NotApplicable
from rasura.core.rng import generator
from rasura.core.threat import observe_service
from rasura.core.values import Mechanism, Stage
from rasura.metrics.service import BagF1, RougeL, TopTokens
from rasura.service_protections.obfuslm.model import obfuscate
from rasura.service_protections.obfuslm.settings import ObfuscationSettings
from rasura.testing.tiny import CLS, FAMILIES, SEP, VOCABULARY, WORDS, tiny

TEXTS = tuple(" ".join(f"w{20 + (7 * n + 3 * k) % 60}" if k % 3 else "the" for k in range(4 + n % 4)) for n in range(30))


def service(settings: ObfuscationSettings, family: str = "bert", texts: int = 6) -> ServiceTranscript:
    model = tiny(family, "causal" if family in ("gpt2", "llama") else "classification")
    made = obfuscate(model, settings, VOCABULARY.special_ids, generator(7))
    ids = tuple((CLS, *VOCABULARY.encode(t), SEP) for t in TEXTS[:texts])
    told = Mechanism("obfuslm", Stage.MODEL, settings.to_dict())
    return ServiceTranscript(model, made.model, made.tokens, ids, VOCABULARY, told)


def read(name: str, truth: ServiceTranscript, reference: tuple[str, ...] = TEXTS[6:]) -> TokenReading:
    seen = observe_service(truth, reference_text=reference)
    return registry.SERVICE_ATTACKS[name].make()(seen, rng=generator(0, name), budget=Budget("quick"))


def top1(name: str, truth: ServiceTranscript) -> float:
    return float(np.mean(TopTokens(1)(read(name, truth), truth) or [0.0]))


def test_the_operator_sees_ids_of_the_key_and_never_the_key() -> None:
    truth = service(ObfuscationSettings(k=4))
    seen = observe_service(truth)
    assert seen.ids[0] == tuple(truth.tokens[list(truth.ids[0])].tolist()) != truth.ids[0]
    assert seen.ids[0][0] == CLS and seen.ids[0][-1] == SEP
    assert not [v for v in vars(seen).values() if v is truth.tokens or v is truth.ids]


@pytest.mark.parametrize("name", ["knn", "ednn", "row-mixture", "decipherment"])
def test_a_permutation_alone_hides_nothing_from_who_has_the_public_table(name: str) -> None:
    truth = service(ObfuscationSettings(k=1))
    guess = read(name, truth)
    for metric in (TopTokens(1), TopTokens(3), RougeL(), BagF1()):
        assert metric(guess, truth) == pytest.approx([1.0] * 6), metric.name


def test_public_ids_are_read_though_their_rows_are_alike_or_were_trained() -> None:
    """An audit of an unprotected service named 74 % of the tokens of a small decoder, whose rare tokens are nearly alike."""
    whole = service(ObfuscationSettings(k=1))
    trained = copy.deepcopy(whole.public)
    with torch.no_grad():
        for model in (whole.public, trained):
            word = model.get_input_embeddings().weight  # type: ignore[operator]
            word[SEP + 1 :] = word[SEP + 1]
        word += torch.randn(word.shape, generator=generator(3))
    for served in (whole.public, trained):
        plain = replace(whole, served=served, tokens=torch.arange(WORDS), mechanism=Mechanism("none", Stage.DATA))
        assert TopTokens(1)(read("knn", plain), plain) == pytest.approx([1.0] * 6)


@pytest.mark.parametrize(
    "name", [n for n in registry.SERVICE_ATTACKS if not n.endswith("era") and n not in ("preimage", "isometry")]
)
def test_every_attack_guesses_each_place_the_same_way_twice(name: str) -> None:
    truth = service(ObfuscationSettings(k=4, epsilon=0.5, plus=name.startswith("realigned")))
    first, second = read(name, truth), read(name, truth)
    for text, a, b in zip(truth.ids, first.ranked, second.ranked, strict=True):
        assert torch.equal(a, b) and int(a.max()) < WORDS
        assert len(a) == (len(text) if first.ordered else len(text) - 2)
        if first.ordered:
            assert int(a[0, 0]) == CLS and int(a[-1, 0]) == SEP
    assert (TopTokens(1)(first, truth) is None) is not first.ordered


def test_mixing_stops_the_nearest_row_and_the_mechanism_gives_it_back() -> None:
    truth = service(ObfuscationSettings(k=4, epsilon=3.0), texts=24)
    knn, ours, blind = top1("knn", truth), top1("decipherment", truth), top1("blind", truth)
    assert ours > knn > 0 and ours > blind


def test_wide_noise_does_not_stop_who_finds_the_whole_cluster() -> None:
    # Calibrated noise leaves a row's own weight as small as any, so the largest weights say nothing.
    truth = service(ObfuscationSettings(k=8, epsilon=0.1, calibrated=True), texts=24)
    assert top1("decipherment", truth) > top1("blind", truth) > top1("knn", truth)


def test_a_trained_inverter_reads_a_plain_permutation() -> None:
    truth = service(ObfuscationSettings(k=1))
    seen = observe_service(truth, reference_text=TEXTS * 20)
    guess = registry.SERVICE_ATTACKS["invbert"].make()(seen, rng=generator(0), budget=Budget("default"))
    assert np.mean(TopTokens(1)(guess, truth) or [0.0]) > 0.9


def test_an_inverter_names_tokens_that_no_reference_text_holds() -> None:
    table = torch.randn(50, 8, generator=generator(3))
    named = torch.arange(10, 30)
    inverter = Inverter(table[named])
    with torch.no_grad():
        for part in (*inverter.first.parameters(), *inverter.second.parameters(), inverter.skip.bias):
            part.zero_()
        inverter.skip.weight.copy_(torch.eye(8))  # states are turned into rows of the table as they are
        inverter.bias.copy_(torch.linspace(-0.2, 0.2, len(named)))
    usable = torch.arange(5, 50)
    whole = inverter.widened(table[usable], torch.searchsorted(usable, named))
    assert torch.allclose(whole(table)[:, named - 5], inverter(table))
    assert usable[whole(table[usable]).argmax(1)].tolist() == usable.tolist()


def test_the_public_head_names_what_a_permuted_model_says_next() -> None:
    truth = service(ObfuscationSettings(k=1), family="llama", texts=1)
    prompt = torch.tensor([truth.ids[0][:-1]])
    with torch.no_grad():
        said = truth.public.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False)  # type: ignore[operator]
    own = replace(truth, ids=(tuple(said[0].tolist()),))
    found = read("era", own).ranked[0][:, 0].tolist()
    told = [(a, b) for a, b in zip(found, own.ids[0]) if b not in VOCABULARY.special_ids]
    assert [a for a, _ in told[-4:]] == [b for _, b in told[-4:]]
    with pytest.raises(NotApplicable, match="does not generate text"):
        read("era", service(ObfuscationSettings(k=1)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_mixing_of_dimensions_is_read_off_the_weights(family: str) -> None:
    settings = ObfuscationSettings(k=4, plus=True, hidden_k=6)
    # The same randomness: what ObfusLM+ does before it touches the hidden dimension.
    plain, plus = service(replace(settings, plus=False), family), service(settings, family)
    found = mixing(observe_service(plus))
    assert found.error < 1e-5 and found.matrix.sum(1).numpy() == pytest.approx(1.0, abs=1e-4)
    assert float(found.matrix.min()) > -1e-4
    undone, table = word_table(changed(plus.served, found.inverse)), word_table(plain.served)
    assert torch.allclose(undone, table, atol=1e-3 * float(table.abs().max()))
    assert not torch.allclose(word_table(plus.served), table, atol=0.1 * float(table.abs().max()))


@pytest.mark.parametrize("name", ["knn", "row-mixture", "decipherment"])
def test_realigned_attacks_read_of_plus_what_the_others_read_without_it(name: str) -> None:
    settings = ObfuscationSettings(k=4, epsilon=3.0)
    plain, plus = service(settings, texts=24), service(replace(settings, plus=True), texts=24)
    assert top1(f"realigned-{name}", plus) == pytest.approx(top1(name, plain), abs=0.03)
    with pytest.raises(NotApplicable, match=f"use {name}"):
        read(f"realigned-{name}", plain)


@pytest.mark.parametrize("name", ["row-mixture", "decipherment"])
@pytest.mark.parametrize("plus", [False, True])
def test_training_hides_nothing_from_who_kept_what_was_uploaded(name: str, plus: bool) -> None:
    truth = service(ObfuscationSettings(k=4, epsilon=3.0, plus=plus), texts=24)
    trained, rng = replace(truth, uploaded=copy.deepcopy(truth.served)), generator(5)
    with torch.no_grad():
        for parameter in trained.served.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=rng))
    name = f"realigned-{name}" if plus else name
    untrained = replace(truth, served=trained.uploaded or truth.served)
    for a, b in zip(read(name, trained).ranked, read(name, untrained).ranked, strict=True):
        assert torch.equal(a, b)


def test_realigned_attacks_bear_a_little_training() -> None:
    truth = service(ObfuscationSettings(k=1, plus=True), texts=24)
    rng = generator(5)
    with torch.no_grad():
        for parameter in truth.served.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=rng), alpha=1e-3)
    assert top1("realigned-knn", truth) > 0.9 > 0.5 > top1("knn", truth)


def test_realigned_attacks_take_the_mixing_from_what_was_uploaded() -> None:
    truth = service(ObfuscationSettings(k=1, plus=True), texts=24)
    before, uploaded, rng = mixing(observe_service(truth)), copy.deepcopy(truth.served), generator(5)
    with torch.no_grad():
        for parameter in truth.served.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=rng), alpha=1e-2)
    both = replace(truth, uploaded=uploaded)
    found, alone = mixing(observe_service(both)), mixing(observe_service(truth))
    assert torch.allclose(found.matrix, before.matrix, atol=1e-9) and before.error < 1e-5 < 0.1 < found.error
    assert float((alone.matrix - before.matrix).abs().max()) > 1e-2
    assert top1("realigned-knn", both) > top1("realigned-knn", truth) + 0.1


def test_the_public_head_reads_a_model_whose_dimensions_are_mixed() -> None:
    truth = service(ObfuscationSettings(k=1, plus=True, hidden_k=1), family="llama", texts=1)
    prompt = torch.tensor([truth.ids[0][:-1]])
    with torch.no_grad():
        said = truth.public.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False)  # type: ignore[operator]
    own = replace(truth, ids=(tuple(said[0].tolist()),))
    found = read("realigned-era", own).ranked[0][:, 0].tolist()
    told = [(a, b) for a, b in zip(found, own.ids[0]) if b not in VOCABULARY.special_ids]
    assert [a for a, _ in told[-4:]] == [b for _, b in told[-4:]]


def test_an_embedding_alone_is_read_as_that_of_a_model_is() -> None:
    truth = service(ObfuscationSettings(k=4))
    alone = replace(truth, public=nn.Embedding(1, 1), served=nn.Embedding(1, 1))
    alone.public.weight, alone.served.weight = (nn.Parameter(word_table(m)) for m in (truth.public, truth.served))
    for name in ("knn", "decipherment"):
        assert all(torch.equal(a, b) for a, b in zip(read(name, truth).ranked, read(name, alone).ranked, strict=True))


def test_mixtures_are_those_of_scipy() -> None:
    rng = generator(3)
    parts = torch.randn(5, 12, 20, generator=rng, dtype=torch.float64)
    weights = torch.rand(5, 12, generator=rng, dtype=torch.float64) * (torch.rand(5, 12, generator=rng) < 0.4)
    rows = (weights[:, :, None] * parts).sum(1) + 0.01 * torch.randn(5, 20, generator=rng, dtype=torch.float64)
    expected = np.stack([nnls(p.T.numpy(), r.numpy())[0] for p, r in zip(parts, rows)])
    assert np.allclose(mixtures(rows, parts).numpy(), expected, atol=1e-3)


def test_a_matching_gives_each_token_to_one_id() -> None:
    assert matched([{1: -0.1, 2: -0.2}, {1: -0.1, 3: -5.0}, {1: -0.5}]) in ([2, 3, 1],)
    assert matched([{1: -0.1}, {1: -0.2}]) == [1, 1]


def test_what_cannot_be_tried_is_said() -> None:
    for name in ("row-mixture", "decipherment"):
        with pytest.raises(NotApplicable, match="hidden dimension"):
            read(name, service(ObfuscationSettings(k=4, plus=True)))
    for name in ("invbert", "mlc", "sda"):
        with pytest.raises(NotApplicable, match="no reference text"):
            read(name, service(ObfuscationSettings(k=4)), ())


def test_a_judge_is_not_kept_for_another_model_of_the_same_embedding() -> None:
    judges = []
    for seed in (0, 1, 0):
        truth = service(ObfuscationSettings(k=1))
        with torch.no_grad():
            for name, p in truth.public.named_parameters():
                if "word_embeddings" not in name:
                    p.add_(seed)
        seen = observe_service(truth, reference_text=TEXTS[6:])
        judges.append(judge_of(seen, Tables(seen), 4, epochs=1, tried=2))
    assert judges[0] is judges[2] is not judges[1]
