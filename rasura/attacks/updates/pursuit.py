"""Matching pursuit: private tokens one by one, from gradients that show no row space, in noise or by their signs alone.

The gradient of block 0's attention is ``sum_t delta_t x_t^T``, and every input ``x_t`` is one of finitely many: a token at a
position. Noise and signs hide the row space from a decomposition long before they hide it from such a dictionary. So the
token whose input explains most of what is left is taken, all coefficients ``delta`` are fitted anew (by least squares, or by
logistic regression on the signs), and the next one is looked for (orthogonal matching pursuit, Pati et al. 1993; for signs
after one-bit compressed sensing, Boufounos and Baraniuk 2008; as an attack on gradients, ours). What is found that way is
then tried place by place against all visible gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from rasura.attacks.shared.dummies import token_table
from rasura.attacks.shared.verify import MOST_LABELINGS, pad, prove, verified
from rasura.attacks.updates.gradient_matching.engine import CHUNK
from rasura.attacks.updates.gradient_matching.factors import Factoriser
from rasura.attacks.updates.gradient_matching.objective import Distance, Kind, soft_cross_entropy
from rasura.attacks.updates.span.rows import Inputs, masked_gradients
from rasura.attacks.updates.span.sentences import rearranged
from rasura.attacks.updates.span.tokens import candidates
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.specs import AttackSpec
from rasura.core.updates import announced_update
from rasura.core.values import Grant, Observation, Reconstruction
from rasura.victims.models import is_eager, parts, positions

LONGEST = 40
"""Positions that are searched where the length is unknown."""

DIRECTIONS = 64
"""Directions of what is left that candidates are measured against: those with the most energy."""

MOST = 0.6
"""Share of the layer's inputs that tokens may fill: beyond it anything can be explained."""

STANDS_OUT = 1.1
"""A token is taken while its gain is so many times the best at places that no text reaches (true ones: 1.15 and more)."""

Texts = tuple[tuple[int, ...], ...]


class Fit(Protocol):
    """A model of the gradient ``(outputs, inputs)`` as a product of unknown coefficients and known inputs."""

    def left(self, inputs: Tensor) -> Tensor:
        """What ``inputs`` ``(tokens, hidden)`` leave unexplained: the loss's slope by the product, ``(outputs, hidden)``."""
        ...


@dataclass(frozen=True)
class Squares:
    """Least squares: the likelihood under Gaussian noise. ``shown``: the entries that count, None for all."""

    matrix: Tensor
    shown: Tensor | None = None

    def left(self, inputs: Tensor) -> Tensor:
        if not len(inputs):
            return self.matrix
        if self.shown is not None:
            # Every output has its own entries, hence its own equations.
            slope = self.matrix @ inputs.T
            curve = (inputs * self.shown[:, None, :]) @ inputs.T
            ridge = 1e-4 * curve.diagonal(dim1=1, dim2=2).mean() * torch.eye(len(inputs), dtype=curve.dtype)
            coefficients = torch.linalg.solve(curve + ridge, slope[..., None])[..., 0]
            masked: Tensor = self.matrix - self.shown * (coefficients @ inputs)
            return masked
        q = torch.linalg.qr(inputs.T).Q
        out: Tensor = self.matrix - (self.matrix @ q) @ q.T
        return out


@dataclass(frozen=True)
class Signs:
    """Logistic regression of every output's signs ``(outputs, hidden)`` on the inputs, by Newton's method."""

    signs: Tensor
    ridge: float = 1e-3
    steps: int = 8

    def left(self, inputs: Tensor) -> Tensor:
        signs, count = self.signs, len(inputs)
        coefficients = signs.new_zeros(len(signs), count)
        for _ in range(self.steps if count else 0):
            p = torch.sigmoid(-signs * (coefficients @ inputs))
            slope = (signs * p) @ inputs.T - self.ridge * coefficients
            weights = (p * (1 - p)).clamp_min(1e-6)
            curve = (inputs * weights[:, None, :]) @ inputs.T + self.ridge * torch.eye(count)
            # Signs that are separable have no finite optimum, so steps stay bounded.
            coefficients = coefficients + torch.linalg.solve(curve, slope[..., None])[..., 0].clamp(-20, 20)
        out: Tensor = signs * torch.sigmoid(-signs * (coefficients @ inputs))
        return out


@dataclass(frozen=True)
class Pursuit:
    """Takes tokens greedily from block 0, then improves the texts on all visible gradients; encoders with positions only.

    Meant for noise, for sign compression and for AdamW's first steps, where ``span`` finds no row space. Needs fewer tokens
    in the batch than the layer has inputs. Several texts are told apart by how well all gradients are met.
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
        if known.causal or known.position_embedding is None or seen.task != "classification":
            raise NotApplicable("pursuit tells tokens by their position embedding and is built for encoders that classify")
        rows, shown = _rows(seen)
        outputs, tried, sweeps = self.work[budget.level]
        if not bool(torch.isfinite(rows).all()):
            raise AttackFailed("the observed gradient is not finite")
        signs = _are_signs(seen, rows)
        fit: Fit = Squares(rows, shown)
        if signs:
            known_signs = _without_decay(seen, rows).sign()
            known_signs = known_signs[known_signs.abs().sum(1) > 0]
            fit = Signs(known_signs[torch.randperm(len(known_signs), generator=rng)[:outputs]])
        search = _Search(seen, fit, budget.memory_mb)
        found = search()
        texts = _texts(found, search.ends, search.batch)
        if not texts:
            raise AttackFailed("no token stands out of the noise")
        residual = None
        if is_eager(seen.model):
            texts, residual = _Polish(seen, search, "cosine" if signs else "angle", rng)(texts, tried, sweeps)
        proof = prove(seen, texts)
        details = {"signs": signs, "tokens": len(found)}
        if proof is not None:
            return verified(proof, details)
        return Reconstruction(texts, "matched", residual=residual, details=details)


def _rows(seen: Observation) -> tuple[Tensor, Tensor | None]:
    """Block 0's query, key and value gradients ``(outputs, inputs)``, zero where hidden; and what is shown, None for all."""
    layers = [lin for lin in parts(seen.model).blocks[0].qkv if lin.weight in seen.gradients]
    rows, shown = (torch.cat(x) for x in masked_gradients(seen, layers)) if layers else (torch.empty(0), torch.empty(0))
    if not bool(shown.any()):
        raise NotApplicable("no query, key or value gradient of block 0 is visible")
    if bool(shown.all()):
        return rows.float(), None
    some = shown.any(1)
    return (rows * shown)[some].float(), shown[some].float()


def _are_signs(seen: Observation, rows: Tensor) -> bool:
    """Whether entries tell little but their sign: they say so, or nearly all have the same size."""
    if announced_update(seen).kind == "fedavg-adamw":
        return True
    sizes = rows[rows != 0].abs()
    return bool(len(sizes)) and float(sizes.std()) < 0.05 * float(sizes.mean())


def _without_decay(seen: Observation, rows: Tensor) -> Tensor:
    """``rows`` without the weights' own decay, which AdamW adds to what it sends."""
    local = announced_update(seen)
    if local.kind != "fedavg-adamw":
        return rows
    decay = float(local.mechanism.parameters["weight_decay"] or 0.0) * local.steps
    weights = {n: seen.model.get_parameter(n).detach() for n in seen.gradients}
    return rows - decay * _rows(replace(seen, message=replace(seen.message, gradients=weights)))[0]


class _Search:
    """The pursuit: which token stands where. ``ends``: where texts end, as far as known."""

    def __init__(self, seen: Observation, fit: Fit, memory_mb: int) -> None:
        self.fit = fit
        self.inputs, self.ids = Inputs(seen.model), candidates(seen.vocabulary)
        self.batch = seen.batch_size if Grant.BATCH_SIZE in seen else 1
        self.ends = sorted(seen.lengths) if Grant.LENGTHS in seen else []
        most = max(self.ends) if self.ends else LONGEST
        longest = positions(seen.model) or most
        self.most = min(most, longest)
        self.known = bool(self.ends)
        # Where no text reaches, the best token's gain is what chance gives.
        self.control = list(range(longest - 1, self.most, -max(1, longest // 8)))[:4]
        self._cached: dict[int, Tensor] = {}
        self._most_cached = (memory_mb << 19) // (4 * len(self.ids) * self.inputs.parts.hidden)
        self.prefix, self.suffix = seen.vocabulary.prefix, seen.vocabulary.suffix

    def __call__(self) -> dict[int, list[int]]:
        """Position -> tokens, best first."""
        found: dict[int, list[int]] = {}
        for place, token in enumerate(self.prefix):
            found[place] = [token]
        for end in sorted(set(self.ends)):
            for place, token in enumerate(self.suffix, end - len(self.suffix)):
                found.setdefault(place, []).append(token)
        picked = 0
        # Gains fall as tokens are taken, so a place whose last gain is small need not be asked again.
        bounds = {place: (float("inf"), -1) for place in range(len(self.prefix), self.most)}
        while sum(map(len, found.values())) < MOST * self.inputs.parts.hidden:
            for place in [p for p in bounds if p >= self.most or len(found.get(p, [])) >= self._room(p)]:
                del bounds[place]
            if not bounds:
                break
            left = self.left(found)
            fresh: set[int] = set()
            while (place := max(bounds, key=lambda p: bounds[p][0])) not in fresh:
                gains = self.gains(left, place)
                gains[torch.isin(self.ids, torch.tensor(found.get(place, [])))] = 0.0
                bounds[place] = (float(gains.max()), int(self.ids[gains.argmax()]))
                fresh.add(place)
            gain, token = bounds[place]
            if (picked == 0 or not self.known) and gain < STANDS_OUT * self._chance(left):
                break
            picked += 1
            found.setdefault(place, []).append(token)
            bounds[place] = (float("inf"), -1)
            if not self.known and self.suffix and token == self.suffix[-1]:
                self.ends.append(place + 1)
                if len(self.ends) == self.batch:
                    self.most = max(self.ends)
                    found = {p: t for p, t in found.items() if p < self.most}
        return found if picked else {}

    def _chance(self, left: _Left) -> float:
        return max((float(self.gains(left, place).max()) for place in self.control), default=0.0)

    def left(self, found: Mapping[int, Sequence[int]]) -> _Left:
        """What the tokens of ``found`` leave unexplained."""
        some = [self.inputs.first(torch.tensor(tokens), place) for place, tokens in found.items() if tokens]
        inputs = torch.cat(some) if some else torch.empty(0, self.inputs.parts.hidden)
        left = self.fit.left(inputs)
        values, vectors = torch.linalg.eigh(left.T @ left)
        floor = values[: len(values) // 2].mean()
        strong = vectors[:, -DIRECTIONS:] * (values[-DIRECTIONS:] - floor).clamp_min(0).sqrt()
        return _Left(strong, torch.linalg.qr(inputs.T).Q)

    def _room(self, place: int) -> int:
        """How many texts may have a token of their own at ``place``."""
        if len(self.ends) < self.batch:
            return self.batch
        return sum(end > place for end in self.ends)

    def gains(self, left: _Left, place: int) -> Tensor:
        """How much of ``left`` each token at ``place`` would explain, ``(candidates,)``."""
        own = self._cached.get(place)
        if own is None:
            own = self.inputs.first(self.ids, place)
            if len(self._cached) < self._most_cached:
                self._cached[place] = own
        size = own.square().sum(1)
        beside = (size - (own @ left.explained).square().sum(1)).clamp_min(0.05 * float(size.mean()))
        gain: Tensor = (own @ left.strong).square().sum(1) / beside
        return gain


@dataclass(frozen=True)
class _Left:
    """``strong`` ``(hidden, DIRECTIONS)``: what is left, by direction. ``explained`` ``(hidden, tokens)``: orthonormal."""

    strong: Tensor
    explained: Tensor


class _Polish:
    """Improves texts place by place on the gradients of all linear and LayerNorm layers in sight."""

    def __init__(self, seen: Observation, search: _Search, kind: Kind, rng: torch.Generator) -> None:
        self.seen, self.search = seen, search
        self.factoriser = Factoriser(seen.model, list(seen.gradients))
        observed, visible = (self.factoriser.observed(x) for x in (seen.gradients, seen.visible))
        # Masks need every entry formed, and a part of them tells texts apart as well.
        self.distance = Distance(observed, kind, visible=visible, entries=0.1, rng=rng)
        self.table = token_table(seen.model, seen.vocabulary)
        self.classes = int(seen.model.config.num_labels)  # type: ignore[union-attr, arg-type]  # a Hugging Face config

    def __call__(self, texts: Texts, tried: int, sweeps: int) -> tuple[Texts, float]:
        labels = self._labels(texts)
        texts, best = self._moved(texts, float(self._scores([texts], labels)[0]), labels)
        for _ in range(sweeps):
            before = best
            for place in range(len(self.search.prefix), max(map(len, texts))):
                live = [k for k, text in enumerate(texts) if place < len(text) - len(self.search.suffix)]
                if not live:
                    continue
                rest = {p: sorted({t[p] for t in texts if p < len(t)}) for p in range(max(map(len, texts))) if p != place}
                gains = self.search.gains(self.search.left(rest), place)
                pool = self.search.ids[gains.topk(min(tried, len(gains))).indices].tolist()
                for k in live:
                    variants = [_with(texts, {k: t}, place) for t in pool]
                    variants += [_with(texts, {k: texts[j][place], j: texts[k][place]}, place) for j in live if j != k]
                    texts, best = self._better(texts, best, variants, labels)
            texts, best = self._moved(texts, best, labels)
            if best >= before:
                break
        return texts, best

    def _better(self, texts: Texts, best: float, others: Sequence[Texts], labels: Tensor) -> tuple[Texts, float]:
        scores = self._scores(others, labels)
        least = float(scores.min())
        return (others[int(scores.argmin())], least) if least < best else (texts, best)

    def _moved(self, texts: Texts, best: float, labels: Tensor) -> tuple[Texts, float]:
        """Neighbouring positions are alike, so a run of tokens may stand one place off: one token moved puts it right.

        So does one token less, where lengths are unknown and the closing token was found one place late.
        """
        last = float("inf")
        while best < last:
            last = best
            for k in range(len(texts)):
                if moves := self._moves(texts, k):
                    texts, best = self._better(texts, best, moves, labels)
                begin, end = len(self.search.prefix), len(texts[k]) - len(self.search.suffix)
                if not self.search.known and end - begin > 1:
                    less = sorted({(*texts[k][:i], *texts[k][i + 1 :]) for i in range(begin, end)})
                    texts, best = self._better(texts, best, [(*texts[:k], t, *texts[k + 1 :]) for t in less], labels)
        return texts, best

    def _moves(self, texts: Texts, k: int) -> list[Texts]:
        """``texts`` with one token of text ``k`` elsewhere, or two of its tokens swapped."""
        moved = rearranged(texts[k], len(self.search.prefix), len(texts[k]) - len(self.search.suffix))
        return [(*texts[:k], text, *texts[k + 1 :]) for text in moved]

    def _labels(self, texts: Texts) -> Tensor:
        """The likeliest labels; granted ones in every order, since texts stand by their length."""
        every: Iterable[tuple[int, ...]] = itertools.product(range(self.classes), repeat=len(texts))
        if Grant.LABELS in self.seen:
            every = sorted(set(itertools.permutations(self.seen.labels.tolist())))
        tried = [torch.tensor(y) for y in itertools.islice(every, MOST_LABELINGS)]
        return min(tried, key=lambda y: float(self._scores([texts], y)[0]))

    def _scores(self, many: Sequence[Texts], labels: Tensor) -> Tensor:
        """The distance of each of ``many`` batches of texts, all of the same lengths."""
        targets = nn.functional.one_hot(labels, self.classes).float()
        out = []
        for start in range(0, len(many), CHUNK):
            some = many[start : start + CHUNK]
            padded = [pad(texts, self.seen.vocabulary.pad_id or 0) for texts in some]
            e = self.table[torch.stack([ids for ids, _ in padded])].requires_grad_(True)
            goal = targets.expand(len(e), -1, -1)
            found = self.factoriser(e, padded[0][1], partial(soft_cross_entropy, targets=goal), graph=False)
            out.append(self.distance(found).detach())
        return torch.cat(out)


def _with(texts: Texts, tokens: Mapping[int, int], place: int) -> Texts:
    """``texts`` with other tokens at ``place``, by text."""
    return tuple((*t[:place], tokens[k], *t[place + 1 :]) if k in tokens else t for k, t in enumerate(texts))


def _texts(found: Mapping[int, Sequence[int]], ends: Sequence[int], batch: int) -> Texts:
    """One text for each end, the tokens of every place dealt out in turn; where there are too few, the first is repeated."""
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
    about="tokens one by one from gradients in noise, or from their signs alone",
    source="Rasura, after orthogonal matching pursuit (Pati et al. 1993)",
    make=Pursuit,
    seconds=60.0,
)
