"""Which protections can be combined with a mechanism that has a formal guarantee, and why the guarantee still holds.

A combination that is not in this table has no proof, and so no guarantee. A new protection has none until its reason is
added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rasura.core.values import OWN, Mechanism

POISSON = ("dp-sgd", "normalised")
"""Mechanisms whose guarantee assumes that every text joins a batch independently at random."""

DIRECTIONAL = "directional"

BANDED = "dp-ftrl"
"""The mechanism whose guarantee assumes one fixed order of batches, the same in every pass."""

FORMAL = (*POISSON, DIRECTIONAL, BANDED)
"""Mechanisms with a formal guarantee."""

Verdict = Literal["proven", "refused", "no formal guarantee"]

SMALLER = "a smaller model is trained; which layers does not depend on the texts"
AFTERWARDS = "computed from the protected update alone, so it reveals nothing more (post-processing)"
MIXTURE = "masks do not depend on the texts: the step is private for every choice of masks, and so for random masks"

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
"""For each mechanism of ``FORMAL``, the protections that keep its guarantee, with the reason."""

OPEN: Mapping[str, str] = {
    "accumulate": "the time of sending depends on the texts, and random batches are merged",
    "ghost": "the obfuscation of a text may depend on other texts",
}
"""Why other known protections are not in the table."""

SEES_TEXTS = "the mask of sealing by sensitivity is made from the texts themselves"


@dataclass(frozen=True)
class Composition:
    """Whether a guarantee holds for a combination of protections, and why. ``formal``: the mechanism that carries it."""

    verdict: Verdict
    why: str
    formal: Mechanism | None = None


def composition(defense: Sequence[Mechanism]) -> Composition:
    """What is proven for ``defense``: a guarantee needs exactly one mechanism, and a proof for everything combined with
    it."""
    carriers = [m for m in defense if m.name in FORMAL]
    names = " + ".join(m.name for m in defense) or "none"
    if own := [m.name for m in defense if m.name.startswith(OWN)]:
        why = f"{own[0]} is a method of your own or of a plug-in, whatever its mechanism says"
        return Composition("no formal guarantee", f"nothing is proven for {names}: {why}")
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
    """Why nothing is proven for ``part`` combined with a mechanism; empty if there is a proof."""
    if part.name not in PROVEN:
        return OPEN.get(part.name, f"{part.name} is not in the table of proven compositions")
    if part.name == "sealing" and str(part.parameters.get("metric", "sens")).startswith("sens"):
        return SEES_TEXTS
    return ""
