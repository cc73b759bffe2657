"""Names for attacks, defenses and metrics; alone imports the concrete ones, and only when they are asked for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from rasura.interfaces import Attack, Defense, InputError, MembershipAttack, Metric, ServiceAttack, Transform
from rasura.updates import RATES, Local
from rasura.values import Reconstruction, Stage


def _lazy(module: str, name: str) -> Callable[..., Any]:
    def build(*arguments: Any, **named: Any) -> Any:
        return built(build)(*arguments, **named)

    _TARGETS[build] = (module, name)
    return build


_TARGETS: dict[Callable[..., Any], tuple[str, str]] = {}


def built(build: Callable[..., Any]) -> Callable[..., Any]:
    """The function or class behind a builder of these tables, imported now."""
    module, name = _TARGETS[build]
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


ATTACKS: Mapping[str, Callable[[], Attack[Reconstruction]]] = {
    "blind": _lazy("rasura.attacks.blind", "Blind"),
    "embedding-rows": _lazy("rasura.attacks.embedding_rows", "EmbeddingRows"),
    "labels": _lazy("rasura.attacks.label_recovery", "LabelRecovery"),
    "span": _lazy("rasura.attacks.span", "Span"),
    "dager": _lazy("rasura.attacks.span.attack", "dager"),
    "mask-positions": _lazy("rasura.attacks.mask_positions", "MaskPositions"),
    "span-matching": _lazy("rasura.attacks.span_matching", "SpanMatching"),
    "pursuit": _lazy("rasura.attacks.pursuit", "Pursuit"),
    "dlg": _lazy("rasura.attacks.gradient_matching.presets", "dlg"),
    "tag": _lazy("rasura.attacks.gradient_matching.presets", "tag"),
    "lamp-cos": _lazy("rasura.attacks.gradient_matching.presets", "lamp_cos"),
    "lamp-l1l2": _lazy("rasura.attacks.gradient_matching.presets", "lamp_l1l2"),
    "grab": _lazy("rasura.attacks.gradient_matching.presets", "grab"),
    "best": _lazy("rasura.attacks.best", "Best"),
    "ghost-lattice": _lazy("rasura.attacks.shadow_inversion", "lattice"),
    "ghost-sampling": _lazy("rasura.attacks.shadow_inversion", "sampling"),
    "ghost-maximum": _lazy("rasura.attacks.shadow_inversion", "maximum"),
    "ghost-median": _lazy("rasura.attacks.shadow_inversion", "median"),
    "ghost-mean": _lazy("rasura.attacks.shadow_inversion", "mean"),
    "ghost-generation": _lazy("rasura.attacks.shadow_generation", "ShadowGeneration"),
    "inverting-gradients": _lazy("rasura.attacks.inverting_gradients", "inverting_gradients"),
    "feature-matching": _lazy("rasura.attacks.inverting_gradients", "feature_matching"),
    "decepticons": _lazy("rasura.attacks.decepticons", "Decepticons"),
}
ABOUT_ATTACKS: Mapping[str, str] = {
    "blind": "guesses from the language alone, without looking at the update",
    "embedding-rows": "reads the words off the embedding's gradient (Melis et al., APRIL)",
    "labels": "reads the labels off the classifier's gradient",
    "span": "exact tokens from attention gradients (DAGER and beyond: dropout, any block of a decoder)",
    "dager": "the plain test of blocks 0 and 1 (DAGER as published): hidden entries count as zeros",
    "mask-positions": "which entries of the word embedding are sealed or dropped names the words",
    "span-matching": "one text that fits all visible layers, whichever they are",
    "pursuit": "tokens one by one from gradients in noise, or from their signs alone",
    "dlg": "gradient matching, squared distance (DLG)",
    "tag": "gradient matching, squared plus absolute distance (TAG)",
    "lamp-cos": "gradient matching, cosine, with reordering by gradient and language (LAMP)",
    "lamp-l1l2": "the same with squared plus absolute distance (LAMP)",
    "grab": "gradient matching that learns dropout masks and ends in a beam search (GRAB)",
    "best": "the portfolio: cheap attacks first, until a text is certain",
    "ghost-lattice": "behind ghost: what substitutes stand for, by chance and language (ours)",
    "ghost-sampling": "behind ghost: a token drawn by its similarity to the substitute",
    "ghost-maximum": "behind ghost: the token most similar to the substitute",
    "ghost-median": "behind ghost: the token of median similarity",
    "ghost-mean": "behind ghost: the token nearest to the mean of all that the substitute may stand for",
    "ghost-generation": "behind ghost: a model trained on reference texts names the originals",
    "inverting-gradients": "images: cosine distance, signed steps, total variation (Geiping et al.)",
    "feature-matching": "images: the same, from what linear layers give away of a single image, and with L-BFGS",
    "decepticons": "sends crafted weights, then reads every token from the update (needs --threat malicious-server)",
}

MEMBERSHIP: Mapping[str, tuple[Callable[[], MembershipAttack], str]] = {
    "blind": (_lazy("rasura.attacks.membership.plain", "Blind"), "the longer text, no model asked: should be at one half"),
    "loss": (_lazy("rasura.attacks.membership.plain", "Loss"), "members have a lower loss (Yeom et al.)"),
    "mia": (_lazy("rasura.attacks.membership.shadow", "Shadow"), "a classifier learned from shadow models (Shokri et al.)"),
    "mia-r": (
        _lazy("rasura.attacks.membership.references", "ReferenceModels"),
        "how rarely models without the text have so low a loss (Ye et al.)",
    ),
    "mia-n": (_lazy("rasura.attacks.membership.neighbours", "Neighbours"), "lower than neighbours' loss (Mattern et al.)"),
    "lira": (_lazy("rasura.attacks.membership.references", "Lira"), "likelihood ratio with and without (Carlini et al.)"),
    "rmia": (_lazy("rasura.attacks.membership.references", "Rmia"), "likelihood against other texts' (Zarifzadeh et al.)"),
}
"""Attacks on a trained model, which tell who it was trained on: name -> (attack, what it does)."""

# name -> (builder, type of the parameter, what it is); None: it takes no parameter, str: it may take options.
DEFENSES: Mapping[str, tuple[Callable[..., Any], type[int] | type[float] | type[str] | None, str]] = {
    "none": (_lazy("rasura.defenses.compose", "none"), None, "nothing: the plain gradient, dropout off"),
    "ghost": (
        _lazy("rasura.defenses.token_obfuscation", "described"),
        str,
        "tokens give way to near ones of other meaning; balanced: ghost:group=8",
    ),
    "accumulate": (
        _lazy("rasura.defenses.accumulate", "described"),
        str,
        "sent only with N different tokens in it, or N times the hidden size: accumulate:768, accumulate:1.0d",
    ),
    "frozen-embeddings": (_lazy("rasura.defenses.frozen", "frozen_embeddings"), None, "the embeddings are not trained"),
    "frozen-blocks": (_lazy("rasura.defenses.frozen", "frozen_blocks"), int, "nor are the first N blocks"),
    "dropout": (_lazy("rasura.defenses.dropout", "dropout"), float, "active dropout with probability P"),
    "gaussian": (_lazy("rasura.defenses.noise", "gaussian_noise"), float, "clip to norm 1, Gaussian noise SIGMA per entry"),
    "laplace": (_lazy("rasura.defenses.noise", "laplace_noise"), float, "clip to norm 1, Laplace noise SCALE per entry"),
    "pruning": (_lazy("rasura.defenses.pruning", "magnitude_pruning"), float, "the smallest RATIO of all entries dropped"),
    "fp16": (_lazy("rasura.defenses.compression", "fp16"), None, "entries sent in half precision"),
    "bf16": (_lazy("rasura.defenses.compression", "bf16"), None, "entries sent in bfloat16"),
    "sign": (_lazy("rasura.defenses.compression", "sign"), None, "the signs alone are sent (signSGD)"),
    "sealing": (
        _lazy("rasura.defenses.sealing", "described"),
        str,
        "entries that matter most are encrypted: sealing:grad=0.1, sealing:structural, sealing:all",
    ),
    "random-pruning": (_lazy("rasura.defenses.pruning", "random_pruning"), float, "a random RATIO of all entries dropped"),
    "dp-sgd": (
        _lazy("rasura.defenses.dp_sgd", "described"),
        str,
        "every text clipped to norm 1, noise SIGMA on the sum: dp-sgd:1.0, dp-sgd:1.0/clip=0.5/noise=laplace",
    ),
    "normalised": (
        _lazy("rasura.defenses.dp_sgd", "normalised_gaussian"),
        float,
        "every text scaled to norm 1, noise SIGMA on the sum",
    ),
    "directional": (
        _lazy("rasura.defenses.directional", "described"),
        str,
        "every text's direction drawn anew around it: directional:KAPPA, directional:KAPPA/blocks=parameters",
    ),
}

_REALIGNED = _lazy("rasura.attacks.embedding_inversion.dimensions", "realigned")
SERVICE_ATTACKS: Mapping[str, Callable[[], ServiceAttack]] = {
    "blind": _lazy("rasura.attacks.embedding_inversion.nearest", "BlindTokens"),
    "knn": _lazy("rasura.attacks.embedding_inversion.nearest", "Knn"),
    "ednn": _lazy("rasura.attacks.embedding_inversion.nearest", "Ednn"),
    "invbert": _lazy("rasura.attacks.embedding_inversion.trained", "InvBert"),
    "mlc": _lazy("rasura.attacks.embedding_inversion.trained", "MultiLabel"),
    "tfa": _lazy("rasura.attacks.embedding_inversion.nearest", "TokenFrequency"),
    "sda": _lazy("rasura.attacks.embedding_inversion.substitution", "SubstitutionDecipherment"),
    "era": _lazy("rasura.attacks.embedding_inversion.nearest", "EmbeddingReplacement"),
    "row-mixture": _lazy("rasura.attacks.embedding_inversion.mixture", "RowMixture"),
    "decipherment": _lazy("rasura.attacks.embedding_inversion.mixture", "Decipherment"),
    "preimage": _lazy("rasura.attacks.embedding_inversion.preimage", "Preimage"),
    "isometry": _lazy("rasura.attacks.embedding_inversion.isometry", "Isometry"),
    "realigned-knn": partial(_REALIGNED, "knn"),
    "realigned-invbert": partial(_REALIGNED, "invbert"),
    "realigned-era": partial(_REALIGNED, "era"),
    "realigned-row-mixture": partial(_REALIGNED, "row-mixture"),
    "realigned-decipherment": partial(_REALIGNED, "decipherment"),
}
"""Attacks of a service's operator on an obfuscated model and the ids or states that clients send."""

SERVICE_PROTECTIONS: Mapping[str, Callable[..., Any]] = {
    "none": _lazy("rasura.obfuscation.services", "plain"),
    "obfuslm": _lazy("rasura.obfuscation.services", "obfuslm"),
    "santext+": _lazy("rasura.obfuscation.services", "santext"),
    "custext+": _lazy("rasura.obfuscation.services", "custext"),
    "dp-forward": _lazy("rasura.obfuscation.services", "dp_forward"),
    "sentinellms": _lazy("rasura.obfuscation.services", "sentinel"),
    "cape": _lazy("rasura.obfuscation.services", "cape"),
    "textobfuscator": _lazy("rasura.obfuscation.services", "text_obfuscator"),
}
"""What these attacks are tried on: ObfusLM and what its Table 2 compares it to."""

UPDATES: Mapping[str, str] = {
    "fedsgd": "one gradient",
    "fedavg-sgd": "what STEPS of SGD at RATE changed, over the rate: fedavg-sgd:4 or fedavg-sgd:4:0.01",
    "fedavg-adamw": "what STEPS of AdamW at RATE changed, over the rate",
    "lora": "the gradient of fresh adapters of rank RANK: lora:8",
}
"""What is sent; smaller messages are joined with ``+``: ``fedavg-sgd:4+bf16``."""


def _sentence_cosine(encoder: str = "minilm") -> Metric[Reconstruction]:
    from rasura.metrics.semantic import SentenceCosine
    from rasura.victims.encoder import sentence_encoder

    return SentenceCosine(sentence_encoder(encoder))


METRICS: Mapping[str, Callable[..., Metric[Reconstruction]]] = {
    "rouge1": lambda: _lazy("rasura.metrics.text", "rouge")("rouge1"),
    "rouge2": lambda: _lazy("rasura.metrics.text", "rouge")("rouge2"),
    "rougeL": lambda: _lazy("rasura.metrics.text", "rouge")("rougeL"),
    "meteor": _lazy("rasura.metrics.text", "Meteor"),
    "jaccard": _lazy("rasura.metrics.text", "jaccard"),
    "token_precision": _lazy("rasura.metrics.text", "token_precision"),
    "token_recall": _lazy("rasura.metrics.text", "token_recall"),
    "position_exact": _lazy("rasura.metrics.text", "position_exact"),
    "exact_match": _lazy("rasura.metrics.text", "exact_match"),
    "sensitive": _lazy("rasura.metrics.sensitive", "Sensitive"),
    "sentence_cosine": _sentence_cosine,
}

USUAL_METRICS = tuple(name for name in METRICS if name != "sentence_cosine")
"""What an audit computes unless told otherwise: all that needs no model of its own."""

IMAGE_METRICS: Mapping[str, Callable[[], Metric[Reconstruction]]] = {
    "mse": _lazy("rasura.metrics.image", "image_mse"),
    "psnr": _lazy("rasura.metrics.image", "image_psnr"),
    "ssim": _lazy("rasura.metrics.image", "image_ssim"),
    "lpips": _lazy("rasura.metrics.image", "image_lpips"),
}

IMAGE_ATTACKS = ("blind", "inverting-gradients", "feature-matching")
IMAGE_DEFENSES = (
    "none", "gaussian", "laplace", "pruning", "random-pruning", "fp16", "bf16", "sign", "sealing", "dp-sgd", "normalised",
    "directional",
)  # fmt: skip
"""What works on the task ``vision``; its other attacks and defenses are those of texts."""

SUITES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "quick": (
        ("blind", "embedding-rows", "span"),
        ("none", "frozen-embeddings+dropout:0.1"),
    ),
    "full": (
        ("blind", "embedding-rows", "labels", "span", "span-matching", "tag", "best"),
        ("none", "frozen-embeddings+dropout:0.1", "frozen-blocks:1", "pruning:0.9", "gaussian:0.001"),
    ),
}
"""Suite -> (attacks, defenses)."""


def known(kind: str, name: str, names: Iterable[str]) -> str:
    """``name`` if it is one of ``names``; else ``InputError`` that offers the nearest ones."""
    every = list(names)
    if name in every:
        return name
    near = difflib.get_close_matches(name, every, 3, 0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(every)}"
    raise InputError(f"unknown {kind} {name!r}; {hint}")


def attack(name: str) -> Attack[Reconstruction]:
    """The attack called ``name``."""
    return ATTACKS[known("attack", name, ATTACKS)]()


def membership_attack(name: str) -> MembershipAttack:
    """The membership attack called ``name``."""
    return MEMBERSHIP[known("membership attack", name, MEMBERSHIP)][0]()


def token_obfuscation(table: Any, shadows: Any, beam: int) -> Transform[Any, Any, Any]:
    """GHOST with a table of shadow tokens at hand (``rasura.shadows.table``)."""
    from rasura.defenses.token_obfuscation import ghost
    from rasura.shadows.selection import Selection

    return ghost(table, shadows, Selection(beam=beam))


def sealing_keys(clients: int, scheme: Any) -> Any:
    """A fresh key pair for sealed updates (``rasura.defenses.homomorphic``)."""
    from rasura.defenses.homomorphic import make_keys

    return make_keys(clients, scheme)


def sealing_modules() -> tuple[Any, Any]:
    """``rasura.defenses.sealing`` and ``rasura.defenses.homomorphic``: what those who receive sealed updates need."""
    return import_module("rasura.defenses.sealing"), import_module("rasura.defenses.homomorphic")


def metric(name: str) -> Metric[Reconstruction]:
    """The metric called ``name``, of texts or images; ``sentence_cosine:FOLDER`` names its encoder."""
    every = {**METRICS, **IMAGE_METRICS}
    bare, _, encoder = name.partition(":")
    if encoder and bare != "sentence_cosine":
        raise InputError(f"metric {bare} takes no parameter, found {encoder!r}")
    return every[known("metric", bare, every)](*filter(None, [encoder]))


def parse_update(text: str) -> tuple[Local, Defense]:
    """``"fedavg-sgd:4:0.01+bf16"`` as local training, and what happens to the message behind every protection.

    Raises ``InputError`` for unknown names, figures out of range, and parts that are not applied to a message.
    """
    first, *rest = (part.strip() for part in text.split("+"))
    name, *figures = first.split(":")
    known("update", name, UPDATES)
    most = {"fedsgd": 0, "lora": 1}.get(name, 2)
    try:
        steps, rate = int(figures[0]) if figures else 1, float(figures[1]) if len(figures) > 1 else RATES.get(name, 1.0)
    except ValueError:
        raise InputError(f"update {first!r} has no whole number and rate; write {UPDATES[name].split(': ')[-1]}") from None
    if len(figures) > most or (name == "lora" and not figures):
        raise InputError(f"update {first!r} takes {most} figures, found {len(figures)}: {UPDATES[name]}")
    local = Local(lora=steps) if name == "lora" else Local(name, steps, rate)  # type: ignore[arg-type]  # known by now
    wire = parse_defense("+".join(rest)) if rest else ()
    for part in wire:
        if part.stage is not Stage.WIRE:
            raise InputError(f"update {text!r}: {part.mechanism.name} is a protection of the client; pass it as a defense")
    return local, wire


def parse_defense(text: str, sealing: Mapping[str, Any] | None = None) -> Defense:
    """``"frozen-embeddings+dropout:0.1"`` as a defense: names with their parameter, joined by ``+``, in any order.

    ``sealing``: what clients agreed on, by the names that ``rasura.defenses.sealing.sealing`` has for it. Raises
    ``InputError`` for unknown names, and for a parameter that is missing, out of range or not wanted.
    """
    from rasura.defenses.compose import chain

    built = []
    for part in text.split("+"):
        name, _, value = part.strip().partition(":")
        builder, kind, about = DEFENSES[known("defense", name, DEFENSES)]
        if kind is None:
            if value:
                raise InputError(f"defense {name} takes no parameter, found {value!r}")
            built.append(builder())
            continue
        try:
            built.append(builder(kind(value), **(sealing or {}) if name == "sealing" else {}))
        except InputError:
            raise
        except ValueError:
            raise InputError(f"defense {name} needs a number, found {value!r}; write {name}:... ({about})") from None
    flat = [t for d in built for t in (d if isinstance(d, tuple) else (d,))]
    order = ["data", "model", "aggregate", "wire"]
    return chain(*sorted(flat, key=lambda t: order.index(t.stage.value)))
