"""Joint pursuit: the words of a batch from adapters whose gradients show fewer dimensions than it has tokens.

The gradient of LoRA's matrix A is ``B^T sum_t delta_t x_t^T``: ``rank`` combinations of the layer's inputs, so once there
are more tokens than combinations, no single input lies in the observed space. However, all combinations are made of the same
few inputs, and in block 0 these are known for every token. This is a joint sparse recovery problem (multiple measurement
vectors). Each step takes the token whose input lies most in the part of the observed space that is not explained yet, until
nothing is left unexplained (rank-aware order recursive matching pursuit, Davies and Eldar 2012; its use as an attack on
gradients is ours). Once the missing tokens are no more than the dimensions, each of them lies exactly in what is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rasura.attacks.shared.mechanism import announced_dropout
from rasura.attacks.shared.verify import in_span, prove, verified
from rasura.attacks.updates.span.endings import finish
from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.rows import CHUNK, visible_gradients
from rasura.attacks.updates.span.tokens import candidates
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.specs import AttackSpec, Home
from rasura.core.updates import announced_update
from rasura.core.values import UNKNOWN, Grant, Observation, Parameter, Reconstruction
from rasura.victims.models import parts
from rasura.victims.positions import positions

FLOOR = 1e-5
"""Directions of the observed space below this fraction of the strongest are rounding."""

UNEXPLAINED = 1e-3
"""A direction counts as explained when less than this is left of it."""

MIN_LEFT = 0.5
"""A token is taken while at least this fraction of the rest of its input lies in the observed space (true tokens: .6 and
more, others: .6 at most)."""

TOGETHER = 0.98
"""Tokens taken at once: those within this fraction of the best, at most ``AT_ONCE``."""

AT_ONCE = 8

CERTAIN = 0.9999
"""From this fraction on, a token's input counts as lying wholly in the observed space."""

FULL = 0.9
"""Fraction of the layer's inputs that tokens may fill. Beyond it, any token would be explained."""

NEAR = 2048
"""Where there are many positions: how many tokens of a position (the best at first) are evaluated again in each step."""

CLEAR = 10.0
"""What a token alone explains must be at least this many times what is left unexplained in the end."""

SURE = math.log(1e6)
"""Nats by which the observed numbers must outweigh the number of possible bags."""

LONGEST = 64
"""Positions that are searched where the length is unknown."""


@dataclass
class Found:
    """Tokens ``(position, token)`` that explain the seen space; ``alone``: what each token explains that no other does,
    relative to 1; ``left``: what all of them leave unexplained."""

    rows: list[tuple[int, int]] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    left: float = 1.0

    def believed(self, dimensions: int, width: int, choices: int) -> bool:
        """Whether chance cannot explain it: every token is needed, and the numbers outweigh all bags of ``choices``."""
        if not self.rows or min(self.alone) < CLEAR * self.left or len(self.rows) >= FULL * width or not 0 <= self.left < 1:
            return False
        seen = dimensions * (width - len(self.rows)) * -math.log(max(self.left, 1e-6))
        return seen > len(self.rows) * math.log(choices) + SURE


class Pursuit:
    """The search in one observed space, ``(inputs, dimensions)`` orthonormal, over ``places`` of block 0."""

    def __init__(self, space: Tensor, inputs: Inputs, ids: Tensor, places: int, one_each: bool) -> None:
        self.space, self.inputs, self.ids = space, inputs, ids
        self.places, self.one_each = list(range(places)), one_each
        self.near: dict[int, Tensor] = {}
        self.explained = space.new_zeros(len(space), 0)
        self.rows: list[tuple[int, int]] = []
        self.states: list[Tensor] = []

    def __call__(self) -> Found:
        """The tokens found that explain the space."""
        while len(self.rows) < FULL * len(self.space):
            basis = self._left()
            if not basis.shape[1]:
                break
            whole = not self.near
            best = self._best(basis)
            if best and best[0][0] >= MIN_LEFT and sum(self._take(*one) for one in best):
                continue
            if whole:
                break
            self.near = {}  # look at all tokens again before giving up
        return self._needed()

    def _left(self) -> Tensor:
        """An orthonormal basis of what is not explained yet."""
        rest = self.space - self.explained @ (self.explained.T @ self.space)
        u, values, _ = torch.linalg.svd(rest, full_matrices=False)
        kept: Tensor = u[:, values > UNEXPLAINED]
        return kept

    def _best(self, basis: Tensor) -> list[tuple[float, int, int]]:
        """The best (fraction, position, token): how much of a token's input lies in ``basis``, without the explained
        part."""
        found: list[tuple[float, int, int]] = []
        shares: dict[int, list[Tensor]] = {}
        for place, tokens, x in self._every():
            size = x.square().sum(1)
            beside = size - (x @ self.explained.to(x.dtype)).square().sum(1)
            share = (x @ basis.to(x.dtype)).square().sum(1) / torch.maximum(beside, 1e-3 * size).clamp_min(1e-30)
            shares.setdefault(place, []).append(share)
            values, hits = share.topk(min(AT_ONCE, len(share)))
            pairs = zip(values.tolist(), tokens[hits].tolist())
            found = sorted([*found, *((v, place, t) for v, t in pairs if (place, t) not in self.rows)], reverse=True)[
                :AT_ONCE
            ]
        if len(self.places) > 1 and not self.near:
            max_near = min(NEAR, len(self.ids))
            self.near = {place: self.ids[torch.cat(some).topk(max_near).indices] for place, some in shares.items()}
        # With positions a token's neighbours are near copies of it, so that only a certain one is taken with others.
        least = TOGETHER * found[0][0] if len(self.places) == 1 else CERTAIN
        return [one for k, one in enumerate(found) if k == 0 or one[0] >= least]

    def _every(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        taken = {place for place, _ in self.rows} if self.one_each else set()
        for place in self.places:
            if place not in taken:
                for chunk in torch.split(self.near.get(place, self.ids), CHUNK):
                    yield place, chunk, self.inputs.first(chunk, place)

    def _take(self, share: float, place: int, token: int) -> bool:
        """Take a token, unless the tokens taken so far already explain its input."""
        if self.one_each and any(place == p for p, _ in self.rows):
            return False
        x = self.inputs.first(torch.tensor([token]), place)[0].to(self.space)
        rest = x - self.explained @ (self.explained.T @ x)
        rest = rest - self.explained @ (self.explained.T @ rest)
        if float(rest.norm()) < UNEXPLAINED * float(x.norm()):
            return False
        self.explained = torch.cat([self.explained, (rest / rest.norm())[:, None]], 1)
        self.rows.append((place, token))
        self.states.append(x / x.norm())
        return True

    def _needed(self) -> Found:
        """The tokens without those that explain nothing and were taken by mistake."""
        if not self.rows:
            return Found()
        states = torch.stack(self.states)
        rest = self.space - self.explained @ (self.explained.T @ self.space)
        left = float(torch.linalg.matrix_norm(rest, 2))
        # The dual of each state: what of it no other one has.
        dual = torch.linalg.pinv(states)
        alone = ((self.space.T @ dual) / dual.norm(dim=0)).norm(dim=0).tolist()
        kept = [k for k, a in enumerate(alone) if a > max(CLEAR * left, 1e-6)]
        return Found([self.rows[k] for k in kept], [alone[k] for k in kept], left)


class JointPursuit:
    """Reads the words from the attention of block 0, even where adapters show fewer dimensions than there are tokens; with a
    position embedding, it also reads the order of a single text. The first round of adapters, in which B is zero, shows
    nothing.

    Needs fewer different tokens than the layer has inputs. Without a position embedding, and for several texts, it returns
    the bag of words, repeated for every text. AdamW's weight differences hold little more than signs. Then the attack
    returns the tokens whose inputs lie most in the observed space, as many as that space has dimensions (``matched``).
    """

    name = "joint-pursuit"
    needs = frozenset({Grant.MODEL, Grant.BASE_MODEL})
    uses = frozenset({Grant.BATCH_SIZE, Grant.LENGTHS, Grant.MECHANISM, Grant.LABELS})

    def __call__(self, seen: Observation, *, rng: torch.Generator, budget: Budget) -> Reconstruction:
        known = parts(seen.model)
        matrices = [m.double() for m in visible_gradients(seen, known.blocks[0].qkv)]
        matrices = [m for m in matrices if bool(torch.isfinite(m).all()) and float(m.norm()) > 0]
        if not matrices:
            raise NotApplicable("no whole query, key or value gradient of block 0 is visible and above zero")
        if announced_dropout(seen):
            raise NotApplicable("dropout was active, so no layer input is determined by its token alone")
        _, values, rows = torch.linalg.svd(torch.cat([m / m.norm() for m in matrices]), full_matrices=False)
        space = rows[values > FLOOR * values[0]].T.contiguous()
        if space.shape[1] >= FULL * len(space):
            raise AttackFailed(
                f"the gradients show {space.shape[1]} of {len(space)} dimensions: as many as the layer has inputs"
            )
        size = seen.batch_size if Grant.BATCH_SIZE in seen else 0
        ids, inputs = candidates(seen.vocabulary), Inputs(seen.model)
        if announced_update(seen).adaptive:
            return self._nearest(seen, space, inputs, ids, max(1, size))
        places = 1
        if known.position_embedding is not None:
            longest = max(seen.lengths) if Grant.LENGTHS in seen else LONGEST
            places = min(longest, positions(seen.model) or longest)
        found = Pursuit(space, inputs, ids, places, one_each=size == 1 and places > 1)()
        if not found.rows:
            raise AttackFailed("no token's input stands out in the row space of block 0")
        believed = found.believed(space.shape[1], len(space), places * len(ids))
        details: dict[str, Parameter] = {
            "dimensions": space.shape[1], "distinct_tokens": len(found.rows), "unexplained": found.left,
        }  # fmt: skip
        if places > 1 and size == 1:
            return self._text(seen, inputs, found, believed, details)
        bag = tuple(sorted({token for _, token in found.rows}))
        return in_span(
            (bag,) * max(1, size), seen, believed=believed, residual=found.left, ordered=False, details=details
        )  # fmt: skip

    @staticmethod
    def _text(
        seen: Observation, inputs: Inputs, found: Found, believed: bool, details: dict[str, Parameter]
    ) -> Reconstruction:
        places = dict(found.rows)
        text = tuple(places.get(place, UNKNOWN) for place in range(max(places) + 1))
        if UNKNOWN not in text:
            text = finish(seen, seen, [text], inputs, search=believed)[0]
        elif seen.task == "causal":  # the last token has no gradient
            text = (*text, UNKNOWN)
        proof = prove(seen, [text])
        if proof is not None:
            return verified(proof, details)
        return in_span((text,), seen, believed=believed, residual=found.left, details=details)

    @staticmethod
    def _nearest(seen: Observation, space: Tensor, inputs: Inputs, ids: Tensor, size: int) -> Reconstruction:
        """The tokens whose inputs lie most in ``space``, without what all inputs have in common."""
        basis = space.float()
        every = [inputs.first(chunk, 0) for chunk in torch.split(ids, CHUNK)]
        mean = sum(x.sum(0) for x in every) / len(ids)
        share = torch.cat(
            [((x - mean) @ basis).square().sum(1) / (x - mean).square().sum(1).clamp_min(1e-30) for x in every]
        )
        special = torch.tensor(sorted(seen.vocabulary.special_ids), dtype=torch.long)
        share[torch.isin(ids, special)] = 0.0
        bag = tuple(sorted(ids[share.topk(min(basis.shape[1], len(share))).indices].tolist()))
        return in_span((bag,) * size, seen, believed=False, ordered=False, details={"signs": True})


SPEC = AttackSpec(
    name="joint-pursuit",
    about="recovers the words of a batch from LoRA adapters whose rank is below the number of tokens",
    source="Rasura, after joint sparse recovery (Davies and Eldar 2012)",
    make=JointPursuit,
    seconds=10.0,
    home=Home(reads=True),
)
