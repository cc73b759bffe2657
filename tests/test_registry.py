"""Everything that has a name in the registry has a case in which it acts; here those of services, metrics and images."""

from __future__ import annotations

from dataclasses import replace

import pytest
import test_contracts
import test_images
import torch
from tiny import CLS, SEP, VOCABULARY, batch_of, tiny
from torch import nn

from rasura import recipes
from rasura.answers import ServiceTranscript, TokenReading
from rasura.interfaces import Budget, Unavailable
from rasura.obfuscation.services import Service
from rasura.obfuscation.settings import ObfuscationSettings
from rasura.rng import generator
from rasura.threat import observe_service, service_transcript
from rasura.values import NO_TEXT, ImageBatch, Message, Reconstruction, Transcript

TEXTS = tuple(" ".join(f"w{20 + (7 * n + 3 * k) % 60}" if k % 3 else "the" for k in range(4 + n % 4)) for n in range(30))
IDS = tuple((CLS, *VOCABULARY.encode(t), SEP) for t in TEXTS[:6])
PLUS = {"settings": ObfuscationSettings(k=4, plus=True)}

SERVICE_PROTECTIONS: dict[str, dict[str, object]] = {
    "none": {},
    "obfuslm": {"settings": ObfuscationSettings(k=4)},
    "santext+": {"epsilon": 0.5},
    "custext+": {"epsilon": 0.5},
    "dp-forward": {"epsilon": 1.0},
    "sentinellms": {},
    "cape": {},
    "textobfuscator": {},
}
"""Every protection of a service, with options at which it acts."""

SERVICE_ATTACKS: dict[str, tuple[str, dict[str, object]]] = {
    **{n: ("obfuslm", {}) for n in ("blind", "knn", "ednn", "invbert", "mlc", "tfa", "sda", "row-mixture", "decipherment")},
    "era": ("obfuslm", {"family": "llama"}),
    "preimage": ("santext+", {}),
    "isometry": ("sentinellms", {}),
    **{f"realigned-{n}": ("obfuslm", PLUS) for n in ("knn", "invbert", "row-mixture", "decipherment")},
    "realigned-era": ("obfuslm", {"family": "llama", **PLUS}),
}
"""Every attack on a service, with a protection and options at which it must guess."""

METRICS = set(recipes.USUAL_METRICS) | {"sentence_cosine"}
MEMBERSHIP = {"blind", "loss", "mia", "mia-r", "mia-n", "lira", "rmia"}
"""Their laws, which demand a score of each, go over the whole registry in test_membership.py."""


def service(name: str, family: str = "bert", **options: object) -> Service:
    drawn = {"rng": generator(5)} if name in ("sentinellms", "obfuslm") else {}
    fixed = {"fixed": VOCABULARY.special_ids} if name == "obfuslm" else {}
    texts = (IDS,) if name in ("cape", "textobfuscator") else ()
    model = tiny(family, "causal" if family == "llama" else "classification", blocks=4)
    known = {**SERVICE_PROTECTIONS[name], **options}
    made: Service = recipes.SERVICE_PROTECTIONS[name](model, VOCABULARY, *texts, **fixed, **known, **drawn)
    return made


def sent(made: Service) -> ServiceTranscript:
    return service_transcript(made, IDS, generator(2))


def test_every_name_in_the_registry_has_a_case() -> None:
    images = set(recipes.IMAGE_ATTACKS)
    assert set(test_contracts.ATTACKS) | {*test_images.ATTACKS, "blind"} == set(recipes.ATTACKS)
    assert {*test_images.ATTACKS, "blind"} == images
    assert set(test_contracts.DEFENSES) == set(recipes.DEFENSES)
    assert set(SERVICE_ATTACKS) == set(recipes.SERVICE_ATTACKS)
    assert set(SERVICE_PROTECTIONS) == set(recipes.SERVICE_PROTECTIONS)
    assert set(recipes.MEMBERSHIP) == MEMBERSHIP
    assert set(recipes.METRICS) == METRICS
    assert set(recipes.IMAGE_METRICS) == set(IMAGE_METRICS)


@pytest.mark.parametrize("name", SERVICE_ATTACKS)
def test_an_attack_on_a_service_guesses_where_it_is_at_home(name: str) -> None:
    protection, options = SERVICE_ATTACKS[name]
    seen = observe_service(sent(service(protection, **options)), reference_text=TEXTS[6:])  # type: ignore[arg-type]
    first, again = (
        recipes.SERVICE_ATTACKS[name]()(seen, rng=generator(0, name), budget=Budget("quick")) for _ in range(2)
    )
    assert isinstance(first, TokenReading) and len(first.ranked) == len(IDS)
    for text, one, other in zip(IDS, first.ranked, again.ranked, strict=True):
        assert len(one) and torch.equal(one, other) and len(one) <= len(text)


@pytest.mark.parametrize("name", [n for n in SERVICE_PROTECTIONS if n != "none"])
def test_a_protection_of_a_service_changes_what_the_service_sees(name: str) -> None:
    plain, behind = (observe_service(sent(service(n))) for n in ("none", name))
    assert plain.ids == IDS and not plain.vectors
    table = tiny("bert", "classification", blocks=4).get_parameter("bert.embeddings.word_embeddings.weight").detach()
    if behind.vectors:  # states in place of ids: not the rows of the public table
        assert not any(torch.allclose(v[1], table[i[1]]) for v, i in zip(behind.vectors, IDS))
    else:
        assert behind.ids != IDS


# --- metrics: the truth scores best, nothing scores worst


@pytest.mark.parametrize("name", recipes.METRICS)
def test_a_metric_tells_the_truth_from_another_text(name: str, minilm_path: object) -> None:
    text, other = [CLS, 11, 3, 40, SEP], [CLS, 250, 251, 252, SEP]
    batch = batch_of([text], "classification")
    private = "Ms Ingrid Berg, 12 May 2019"
    if name in ("sensitive", "meteor", "sentence_cosine"):
        batch = replace(batch, texts=(private,), seen=(private,))
    words = {11: private, 250: "lorem ipsum", 3: "", 40: "", 251: "", 252: ""}
    vocabulary = VOCABULARY
    if batch.texts == (private,):
        vocabulary = replace(VOCABULARY, decode=lambda ids: " ".join(words[i] for i in ids if words.get(i)))
    truth = Transcript(batch, nn.Identity(), Message({}), (), 0.0, "classification", vocabulary)
    metric = recipes.metric(name)
    try:
        right, wrong = (float(metric(Reconstruction((tuple(t),)), truth)[0]) for t in (text, other))
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert right > wrong if metric.higher_is == "worse" else right < wrong


IMAGE_METRICS = ("mse", "psnr", "ssim", "lpips")


@pytest.mark.parametrize("name", IMAGE_METRICS)
def test_an_image_metric_tells_the_truth_from_another_image(name: str) -> None:
    batch = test_images.image_batch(1, 32)
    assert isinstance(batch, ImageBatch)
    truth = Transcript(batch, nn.Identity(), Message({}), (), 0.0, "vision", NO_TEXT)  # type: ignore[arg-type]
    metric = recipes.metric(name)
    drawn = torch.rand(batch.pixel_values.shape, generator=generator(0))
    try:
        right, wrong = (float(metric(Reconstruction((), images=x), truth)[0]) for x in (batch.pixel_values, drawn))
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert right > wrong if metric.higher_is == "worse" else right < wrong
