"""Undoing ObfusLM+ (ours): its mixing of the hidden dimension is computed from the weights; then the attacks on ObfusLM
apply.

ObfusLM+ (sec. 4.4, equation 2) multiplies the hidden axis of all weights on the residual stream by one matrix A, the rows of
W* in another order. The other axis of those weights stays as it was: neurons, heads and positions keep their places, special
tokens their rows. So public and served weights are equations A x = y, thousands for the hidden dimension's few hundred
unknowns a row: least squares gives A, without a guess at clusters, noise or permutation.

Training moves the weights, so the equations no longer hold. But the server also has the model as it was uploaded, and A is
the same. It is computed from those weights, and undone in the trained ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rasura.attacks.services.mixture import Decipherment, RowMixture
from rasura.attacks.services.nearest import EmbeddingReplacement, Knn
from rasura.attacks.services.trained import InvBert
from rasura.core.answers import ServiceObservation, TokenReading
from rasura.core.interfaces import Budget, NotApplicable, ServiceAttack
from rasura.core.specs import ServiceAttackSpec
from rasura.service_protections.obfuslm.residual import change_stream, stream_axes
from rasura.victims.models import parts

RIDGE = 1e-12
"""Added to the equations' diagonal, as a share of its mean."""


@dataclass(frozen=True)
class Mixing:
    """``matrix`` ``(hidden, hidden)`` float64: row i makes the uploaded dimension i from the public ones. ``error``: what it
    leaves of the served weights unexplained, a share of their norm; about 1e-7 where nothing was trained."""

    matrix: Tensor
    error: float

    @property
    def inverse(self) -> Tensor:
        """Public dimensions from served ones; what ``error`` would drown is damped."""
        matrix = self.matrix
        floor = (self.error * torch.linalg.matrix_norm(matrix, 2)).square() * torch.eye(len(matrix), dtype=matrix.dtype)
        back: Tensor = torch.linalg.solve(matrix.T @ matrix + floor, matrix.T)
        return back


def mixing(seen: ServiceObservation) -> Mixing:
    """The mixing of the hidden dimension, from all uploaded weights whose rows are known: those of the blocks, norms,
    positions, and special tokens.

    Raises ``NotApplicable`` if the two models differ in more than the values of their weights.
    """
    known = parts(seen.public)
    rows, special = seen.vocabulary.size, sorted(seen.vocabulary.special_ids)
    inside = tuple(block.module + "." for block in known.blocks)
    # A head names tokens in a hidden order, or is the task's own and drawn anew.
    outside = {id(seen.public.get_parameter(lin.weight)) for lin in known.linears if not lin.module.startswith(inside)}
    table = id(seen.public.get_parameter(known.word_embedding))
    gram = torch.zeros(known.hidden, known.hidden, dtype=torch.float64)
    crossed, now, total = gram.clone(), gram.clone(), 0.0
    uploaded = seen.served if seen.uploaded is None else seen.uploaded
    models = (stream_axes(model) for model in (seen.public, uploaded, seen.served))
    for (public, axis), (sent, other), (served, _) in zip(*models, strict=True):
        if public.shape != sent.shape or axis != other:
            raise NotApplicable(
                "the served model's shapes differ from the public one's, so their weights cannot be compared"
            )
        x, y, z = (
            p.detach().movedim(axis, 0).flatten(1) if p.dim() > 1 else p.detach()[:, None] for p in (public, sent, served)
        )
        if id(public) == table or x.shape[1] == rows:
            x, y, z = x[:, special], y[:, special], z[:, special]
        elif id(public) in outside:
            continue
        x, y, z = x.double(), y.double(), z.double()
        gram += x @ x.T
        crossed += x @ y.T
        now += x @ z.T
        total += float(z.square().sum())
    eye = torch.eye(len(gram), dtype=gram.dtype)
    matrix = torch.linalg.solve(gram + RIDGE * gram.diagonal().mean() * eye, crossed).T
    left = total - 2 * float((matrix * now.T).sum()) + float(((matrix @ gram) * matrix).sum())
    return Mixing(matrix, (max(left, 0.0) / total) ** 0.5)


def changed(model: nn.Module, matrix: Tensor) -> nn.Module:
    """A copy of ``model`` with the hidden axis of all weights on the stream multiplied by ``matrix``."""
    made = copy.deepcopy(model)
    change_stream(made, lambda x: (matrix @ x.double().reshape(len(x), -1)).to(x.dtype).view(x.shape))
    return made


@dataclass(frozen=True)
class Realigned:
    """``inner`` after the hidden dimension is put right: in the served model, or where ``mixes_public`` by doing to the
    public one what was done to the other, for attacks that run the served model as it is."""

    name: str
    inner: ServiceAttack
    mixes_public: bool = False

    def __call__(self, seen: ServiceObservation, *, rng: torch.Generator, budget: Budget) -> TokenReading:
        if not seen.mechanism.parameters.get("plus"):
            raise NotApplicable(f"the hidden dimension is not mixed; use {self.inner.name}")
        if isinstance(self.inner, RowMixture | Decipherment):
            seen = seen.as_uploaded
        found = mixing(seen)
        told = replace(seen.mechanism, parameters={**seen.mechanism.parameters, "plus": False})
        if self.mixes_public:
            right = replace(seen, public=changed(seen.public, found.matrix), mechanism=told)
        else:
            right = replace(seen, served=changed(seen.served, found.inverse), mechanism=told)
        guess = self.inner(right, rng=rng, budget=budget)
        return replace(guess, details={**guess.details, "unexplained": found.error})


_INNER: dict[str, tuple[Callable[[], ServiceAttack], bool]] = {
    "knn": (Knn, False),
    "invbert": (InvBert, True),
    "era": (EmbeddingReplacement, True),
    "row-mixture": (RowMixture, False),
    "decipherment": (Decipherment, False),
}


def realigned(inner: str) -> Realigned:
    """The attack ``inner`` on a model of ObfusLM+."""
    make, mixes_public = _INNER[inner]
    return Realigned(f"realigned-{inner}", make(), mixes_public)


REALIGNED_KNN = ServiceAttackSpec(
    name="realigned-knn",
    about="knn after the mixing of dimensions is undone",
    source="Rasura",
    make=lambda: realigned("knn"),
    home=("obfuslm:k=4/plus=true", "bert"),
    protection=True,
)

REALIGNED_INVBERT = ServiceAttackSpec(
    name="realigned-invbert",
    about="invbert after the mixing of dimensions is undone",
    source="Rasura",
    make=lambda: realigned("invbert"),
    home=("obfuslm:k=4/plus=true", "bert"),
    protection=True,
)

REALIGNED_ERA = ServiceAttackSpec(
    name="realigned-era",
    about="era after the mixing of dimensions is undone",
    source="Rasura",
    make=lambda: realigned("era"),
    home=("obfuslm:k=4/plus=true", "llama"),
    protection=True,
)

REALIGNED_ROW_MIXTURE = ServiceAttackSpec(
    name="realigned-row-mixture",
    about="row-mixture after the mixing of dimensions is undone",
    source="Rasura",
    make=lambda: realigned("row-mixture"),
    home=("obfuslm:k=4/plus=true", "bert"),
    protection=True,
)

REALIGNED_DECIPHERMENT = ServiceAttackSpec(
    name="realigned-decipherment",
    about="decipherment after the mixing of dimensions is undone",
    source="Rasura",
    make=lambda: realigned("decipherment"),
    home=("obfuslm:k=4/plus=true", "bert"),
    protection=True,
)
