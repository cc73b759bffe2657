"""Matching pursuit: private tokens one by one, from gradients that show no row space, in noise or by their signs alone.

The gradient of block 0's attention is ``sum_t delta_t x_t^T``, and every input ``x_t`` is one of finitely many: a token at a
position. Noise and signs hide the row space from a decomposition long before they hide it from such a dictionary. Each step
takes the token whose input explains most of what is left, fits all coefficients ``delta`` again (by least squares, or by
logistic regression on the signs), and searches for the next token (orthogonal matching pursuit, Pati et al. 1993; for signs
after one-bit compressed sensing, Boufounos and Baraniuk 2008; its use as an attack on gradients is ours). The texts found in
this way are then improved position by position against all visible gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rasura.attacks.shared.precision import in_full_precision
from rasura.attacks.shared.verify import prove, verified
from rasura.attacks.updates.pursuit.fits import Fit, Signs, Squares, are_signs, signs_of
from rasura.attacks.updates.pursuit.following import following_words
from rasura.attacks.updates.pursuit.polish import Polish, Texts
from rasura.attacks.updates.pursuit.search import Search
from rasura.attacks.updates.span.rows import masked_gradients
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.specs import AttackSpec
from rasura.core.values import Grant, Observation, Reconstruction
from rasura.victims.models import is_eager, one_class_each, parts
from rasura.victims.positions import takes_embeddings


@dataclass(frozen=True)
class Pursuit:
    """Takes tokens greedily from block 0, then improves the texts on all visible gradients. For encoders with position
    embeddings; of a causal model, the words that follow, in order where one is found (``following_words``).

    Meant for noise, for sign compression and for AdamW's first steps, where ``span`` finds no row space. Needs fewer tokens
    in the batch than the layer has inputs. Several texts are told apart by how well they fit all gradients.
    """

    name: str = "pursuit"
    needs: frozenset[Grant] = frozenset({Grant.MODEL, Grant.BASE_MODEL})
    uses: frozenset[Grant] = frozenset({Grant.BATCH_SIZE, Grant.LABELS, Grant.LENGTHS, Grant.MECHANISM})
    work: Mapping[str, tuple[int, int, int]] = field(
        default_factory=lambda: {"quick": (300, 8, 1), "default": (600, 24, 3), "paper": (2000, 64, 8)}
    )
    """Budget level -> outputs of the layers that signs are fitted on, tokens tried at a place, sweeps over the text."""

    def __call__(self, seen: Observation, *, rng: torch.Generator, budget: Budget) -> Reconstruction:
        known = parts(seen.model)
        if seen.task == "causal":
            return following_words(seen, rng, budget)
        if known.causal or known.position_embedding is None or seen.task != "classification":
            raise NotApplicable("pursuit places tokens by their position embedding: of classifiers, only encoders")
        observed, seen = seen, in_full_precision(seen, budget)
        rows, shown = _rows(seen)
        outputs, tried, sweeps = self.work[budget.level]
        if not bool(torch.isfinite(rows).all()):
            raise AttackFailed("the observed gradient is not finite")
        signs = are_signs(seen, rows)
        fit: Fit = Squares(rows, shown)
        if signs:
            known_signs = signs_of(seen, rows, _rows(_weights(seen))[0])
            known_signs = known_signs[known_signs.abs().sum(1) > 0]
            fit = Signs(known_signs[torch.randperm(len(known_signs), generator=rng)[:outputs]])
        search = Search(seen, fit, budget.memory_mb, rng)
        found = search()
        texts = _texts(found, search.ends, search.batch)
        if not texts:
            raise AttackFailed("no token stands out from the noise")
        residual = None
        if is_eager(seen.model) and one_class_each(seen.model) and takes_embeddings(seen.model):
            texts, residual = Polish(seen, search, "cosine" if signs else "angle", rng)(texts, tried, sweeps)
        proof = prove(observed, texts)
        details = {"signs": signs, "tokens": len(found)}
        if proof is not None:
            return verified(proof, details)
        return Reconstruction(texts, "matched", residual=residual, details=details)


def _rows(seen: Observation) -> tuple[Tensor, Tensor | None]:
    """The query, key and value gradients of block 0 ``(outputs, inputs)``, zero where hidden; and which entries are visible
    (None: all)."""
    layers = [lin for lin in parts(seen.model).blocks[0].qkv if lin.weight in seen.gradients]
    rows, shown = (torch.cat(x) for x in masked_gradients(seen, layers)) if layers else (torch.empty(0), torch.empty(0))
    if not bool(shown.any()):
        raise NotApplicable("no query, key or value gradient of block 0 is visible")
    if bool(shown.all()):
        return rows.float(), None
    some = shown.any(1)
    return (rows * shown)[some].float(), shown[some].float()


def _weights(seen: Observation) -> Observation:
    """``seen``, with the weights in place of their gradients."""
    weights = {n: seen.model.get_parameter(n).detach() for n in seen.gradients}
    return replace(seen, message=replace(seen.message, gradients=weights))


def _texts(found: Mapping[int, Sequence[int]], ends: Sequence[int], batch: int) -> Texts:
    """One text for each end. The tokens of every position are dealt out in turn; where there are too few, the first is
    repeated."""
    if not found:
        return ()
    last = max(found) + 1
    lengths = (list(ends) + [last] * batch)[:batch]
    out = []
    for text, length in enumerate(lengths):
        tokens = []
        for place in range(length):
            here = found.get(place, [])
            live = [k for k, n in enumerate(lengths) if n > place]
            tokens.append(here[min(live.index(text), len(here) - 1)] if here else 0)
        out.append(tuple(tokens))
    return tuple(out)


SPEC = AttackSpec(
    name="pursuit",
    about="recovers tokens one by one from noisy gradients or from their signs, and words of causal models",
    source="Rasura, after orthogonal matching pursuit (Pati et al. 1993)",
    make=Pursuit,
    seconds=5.0,
    causal_seconds=1.0,
    growth=0.8,
    work={"quick": 0.37, "default": 1.0, "paper": 15.0},
)
