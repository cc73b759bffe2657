"""The model services that ObfusLM's Table 2 compares: one function a protection, each makes a ``Service``."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rasura.core.rng import Randomness, secret_generator
from rasura.core.specs import ServiceProtectionSpec
from rasura.core.values import Mechanism, Parameter, Stage, Vocabulary
from rasura.service_protections.glide import Directions, glide
from rasura.service_protections.noisy_states import Cape, MatrixGaussian, Prototypes, prototypes
from rasura.service_protections.obfuslm.model import obfuscate
from rasura.service_protections.obfuslm.settings import ObfuscationSettings
from rasura.service_protections.replacement import replacement
from rasura.service_protections.service import Service
from rasura.service_protections.split import Split
from rasura.victims.models import parts


def _same(model: nn.Module) -> Tensor:
    return torch.arange(len(model.get_parameter(parts(model).word_embedding)))


def plain(model: nn.Module, vocabulary: Vocabulary) -> Service:
    """No protection: the public model, and a text's own ids."""
    return Service(model, model, vocabulary, Mechanism("none", Stage.DATA), _same(model))


def santext(
    model: nn.Module, vocabulary: Vocabulary, *, epsilon: float = 3.0, share: float = 0.9, change: float = 0.3,
    vectors: str = "model",
) -> Service:  # fmt: skip
    """SANTEXT+: see ``replacement.SanText``; ``vectors`` is a file in GloVe's format, or ``model``."""
    return _replacing(
        model, vocabulary, "santext+", {"epsilon": epsilon, "share": share, "change": change, "vectors": vectors}
    )


def custext(
    model: nn.Module, vocabulary: Vocabulary, *, epsilon: float = 3.0, size: int = 20, vectors: str = "model"
) -> Service:
    """CUSTEXT+: see ``replacement.CusText``."""
    return _replacing(model, vocabulary, "custext+", {"epsilon": epsilon, "size": size, "vectors": vectors})


def _replacing(model: nn.Module, vocabulary: Vocabulary, name: str, told: dict[str, Parameter]) -> Service:
    mechanism = Mechanism(name, Stage.DATA, told)
    table = model.get_parameter(parts(model).word_embedding)
    return Service(model, model, vocabulary, mechanism, _same(model), replacement(mechanism, table, vocabulary))


def obfuslm(
    model: nn.Module, vocabulary: Vocabulary, *, settings: ObfuscationSettings, fixed: frozenset[int] | None = None,
    rng: Randomness | None = None,
) -> Service:  # fmt: skip
    """ObfusLM; ``fixed`` as for ``obfuscate``, the special tokens if None."""
    made = obfuscate(model, settings, vocabulary.special_ids if fixed is None else fixed, rng)
    told = Mechanism("obfuslm", Stage.MODEL, settings.to_dict())
    return Service(model, made.model, vocabulary, told, made.tokens)


def sentinel(
    model: nn.Module, vocabulary: Vocabulary, *, times: int = 10, directions: Directions = "random",
    rng: Randomness | None = None,
) -> Service:  # fmt: skip
    """SentinelLMs: shuffled ids, and ``times`` glide reflections of the word embedding (``glide``).

    Special tokens keep their ids; their rows move with the others.
    """
    rng = rng or secret_generator()
    made = obfuscate(model, ObfuscationSettings(k=1), vocabulary.special_ids, rng)
    table = made.model.get_parameter(parts(made.model).word_embedding)
    with torch.no_grad():
        table.copy_(glide(table, times, directions, rng))
    told = Mechanism("sentinellms", Stage.MODEL, {"times": times, "directions": directions})
    return Service(model, made.model, vocabulary, told, made.tokens)


NEIGHBOURS = (
    "one pass over a text's states, or over zeros in their place; for any two texts the sensitivity is twice the clip, and "
    "epsilon is larger"
)
"""What epsilon of DP-Forward is about, beside that figure wherever a result holds it."""


def dp_forward(
    model: nn.Module, vocabulary: Vocabulary, *, epsilon: float = 8.0, delta: float = 1e-5, clip: float = 1.0, depth: int = 0
) -> Service:
    """DP-Forward: see ``noisy_states.MatrixGaussian``, on the word embedding's rows or the states behind ``depth`` blocks.

    ``model`` is copied. The model is to be trained through ``served``.
    """
    told: dict[str, Parameter] = {"epsilon": epsilon, "delta": delta, "clip": clip, "depth": depth, "neighbours": NEIGHBOURS}
    return _split(model, vocabulary, "dp-forward", depth, MatrixGaussian(epsilon, delta, clip), told)


def cape(
    model: nn.Module, vocabulary: Vocabulary, texts: Sequence[Sequence[int]], *, epsilon: float = 5.0,
    adversary: float = 0.1, depth: int = 3,
) -> Service:  # fmt: skip
    """CAPE: see ``noisy_states.Cape``, whose adversary names the tokens of ``texts``. To be trained through ``served``."""
    names = torch.tensor(sorted({i for text in texts for i in text} - vocabulary.special_ids))
    table = model.get_parameter(parts(model).word_embedding)
    change = Cape(table, names, epsilon, adversary)
    return _split(model, vocabulary, "cape", depth, change, {"epsilon": epsilon, "adversary": adversary, "depth": depth})


def text_obfuscator(
    model: nn.Module, vocabulary: Vocabulary, texts: Sequence[Sequence[int]], *, close: float = 0.03, away: float = 0.01,
    noise: float = 1.0, clusters: int = 100, depth: int = 3,
) -> Service:  # fmt: skip
    """TextObfuscator: see ``noisy_states.Prototypes``, over the tokens of ``texts``. To be trained through ``served``."""
    found, centres = prototypes(model, [list(t) for t in texts], depth, clusters, seed=0)
    found[sorted(vocabulary.special_ids)] = -1
    told: dict[str, Parameter] = {"close": close, "away": away, "noise": noise, "clusters": clusters, "depth": depth}
    return _split(model, vocabulary, "textobfuscator", depth, Prototypes(found, centres, close, away, noise), told)


def _split(
    model: nn.Module, vocabulary: Vocabulary, name: str, depth: int, change: MatrixGaussian | Cape | Prototypes,
    told: dict[str, Parameter],
) -> Service:  # fmt: skip
    made = Split(copy.deepcopy(model), depth, change).eval()
    return Service(model, made, vocabulary, Mechanism(name, Stage.MODEL, told), _same(model))


NONE = ServiceProtectionSpec(
    name="none",
    about="baseline: the public model, with the token ids of each text",
    source="Rasura: the baseline",
    make=plain,
    example="none",
    known_by=(),
)

OBFUSLM = ServiceProtectionSpec(
    name="obfuslm",
    about="permutes the vocabulary and mixes its embedding rows within clusters",
    source="ObfusLM, sec. 4",
    make=obfuslm,
    example="obfuslm:k=4",
    known_by=("decipherment", "invbert"),
    known_by_with={"plus": ("realigned-decipherment", "realigned-invbert")},
)

SANTEXT = ServiceProtectionSpec(
    name="santext+",
    about="replaces tokens by tokens with similar vectors",
    source="Yue et al. 2021 (SANTEXT+), sec. 4",
    make=santext,
    example="santext+:epsilon=0.5",
    known_by=("preimage", "invbert"),
    files=("vectors",),
)

CUSTEXT = ServiceProtectionSpec(
    name="custext+",
    about="replaces tokens within sets of similar tokens",
    source="Chen et al. 2023 (CUSTEXT+), sec. 4",
    make=custext,
    example="custext+:epsilon=0.5",
    known_by=("preimage", "invbert"),
    files=("vectors",),
)

DP_FORWARD = ServiceProtectionSpec(
    name="dp-forward",
    about="adds matrix Gaussian noise to the hidden states that are sent",
    source="Du et al. 2023 (DP-Forward), sec. 4",
    make=dp_forward,
    example="dp-forward:epsilon=1.0",
    known_by=("preimage", "invbert"),
)

SENTINEL = ServiceProtectionSpec(
    name="sentinellms",
    about="rotates the embedding table and permutes its ids",
    source="Mishra et al. 2024 (SentinelLMs), sec. 3",
    make=sentinel,
    example="sentinellms",
    known_by=("isometry", "invbert"),
)

CAPE = ServiceProtectionSpec(
    name="cape",
    about="trains hidden states against an adversary and adds Laplace noise",
    source="Plant et al. 2021 (CAPE), sec. 3",
    make=cape,
    example="cape",
    known_by=("preimage", "invbert"),
)

TEXTOBFUSCATOR = ServiceProtectionSpec(
    name="textobfuscator",
    about="pulls hidden states towards cluster prototypes and adds noise",
    source="Zhou et al. 2023 (TextObfuscator), sec. 3",
    make=text_obfuscator,
    example="textobfuscator",
    known_by=("preimage", "invbert"),
)
