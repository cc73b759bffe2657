"""Which protections may stand beside a mechanism with a formal guarantee, and why it then holds: a table of pairs.

What is not listed has no proof, and so no guarantee: a new protection has none until its reason stands here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rasura.core.values import Mechanism

POISSON = ("dp-sgd", "normalised")
"""Mechanisms whose guarantee assumes that every text joins a batch by chance, each for itself."""

DIRECTIONAL = "directional"

FORMAL = (*POISSON, DIRECTIONAL)
"""Mechanisms with a formal guarantee."""

Verdict = Literal["proven", "refused", "no formal guarantee"]

SMALLER = "a smaller model is trained; which layers does not depend on the texts"
AFTERWARDS = "computed from the protected update alone, so that it tells no more (post-processing)"
MIXTURE = "masks do not depend on the texts: the step is private for every choice of masks, and so for masks drawn at random"

PROVEN: Mapping[str, str] = {
    "none": "nothing is added",
    "mean": "nothing is added",
    "frozen-embeddings": SMALLER,
    "frozen-blocks": SMALLER,
    "dropout": MIXTURE,
    "gaussian": AFTERWARDS,
    "laplace": AFTERWARDS,
    "pruning": AFTERWARDS,
    "random-pruning": AFTERWARDS,
    "fp16": AFTERWARDS,
    "bf16": AFTERWARDS,
    "sign": AFTERWARDS,
    "sealing": AFTERWARDS,
}
"""Protections beside which the guarantee of each mechanism of ``FORMAL`` holds, with the reason."""

OPEN: Mapping[str, str] = {
    "accumulate": "when it sends depends on the texts, and batches drawn by chance are merged",
    "ghost": "what a text becomes may depend on other texts",
}
"""Why known protections are not among these."""

SEES_TEXTS = "the mask of sealing by sensitivity is made from the texts themselves"


@dataclass(frozen=True)
class Composition:
    """Whether a guarantee holds where protections stand together, and why. ``formal``: the mechanism that carries it."""

    verdict: Verdict
    why: str
    formal: Mechanism | None = None


def composition(defense: Sequence[Mechanism]) -> Composition:
    """What is proven for ``defense``: exactly one mechanism with a guarantee, and nothing beside it that lacks a proof."""
    carriers = [m for m in defense if m.name in FORMAL]
    names = " + ".join(m.name for m in defense) or "none"
    if not carriers:
        return Composition("no formal guarantee", f"nothing is proven for {names}")
    if len(carriers) > 1:
        return Composition("refused", " and ".join(f"'{m.name}'" for m in carriers) + " both aggregate the batch")
    for part in defense:
        if part is not carriers[0] and (reason := _doubt(part)):
            return Composition("no formal guarantee", f"nothing is proven for {names}: {reason}")
    reasons = dict.fromkeys(PROVEN[m.name] for m in defense if m is not carriers[0])
    return Composition("proven", "; ".join(reasons) or "the mechanism alone", carriers[0])


def _doubt(part: Mechanism) -> str:
    """Why nothing is proven with ``part`` beside a mechanism; nothing where it is."""
    if part.name not in PROVEN:
        return OPEN.get(part.name, f"{part.name} is not in the table of proven compositions")
    if part.name == "sealing" and str(part.parameters.get("metric", "sens")).startswith("sens"):
        return SEES_TEXTS
    return ""
