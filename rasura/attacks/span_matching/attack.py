"""Span matching: optimise the text's embeddings to lie in the row spaces of all visible layers, then settle on tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rasura.attacks.span.rows import RowSpace, block_spaces, visible_blocks
from rasura.attacks.span_matching.discrete import improve, repair
from rasura.attacks.span_matching.objective import Objective
from rasura.attacks.verify import VERIFIED, check
from rasura.interfaces import AttackFailed, Budget, NotApplicable
from rasura.values import Grant, Observation, Parameter, Reconstruction, Vocabulary

FLOOR = 1e-7
"""Squared relative residual under which a text is exact: float32 leaves 1e-12 to 1e-9, one wrong token 1e-3 and more."""

MOST_LAYOUTS = 24


@dataclass(frozen=True)
class Work:
    """Work of one level: restarts and steps of the continuous search, how many survive half-way, rounds, sweeps."""

    restarts: int
    steps: int
    survivors: int
    starts: int
    rounds: int
    sweeps: int = 8


LEVELS: Mapping[str, Work] = {
    "quick": Work(8, 200, 4, 2, 1),
    "default": Work(24, 400, 8, 4, 4),
    "paper": Work(48, 800, 16, 8, 8),
}
"""Starting point: 8 restarts, 400 steps, Adam .03 found 5 to 7 of 8 sentences; more restarts that are halved half-way cost
about the same and miss fewer."""


@dataclass(frozen=True)
class SpanMatching:
    """Ours: the general attack for whatever layers are visible, first-order only.

    Minimises the mean distance of every visible layer's inputs from the observed row spaces minus a coverage term that
    falls to zero, over the embeddings, from many restarts as one batch; then tokens by nearest neighbour and a discrete
    pass. Needs no labels. A residual at the float floor, and then the gradient itself, verify the text. With dropout active
    the text with the least residual is ``matched``.
    """

    name: str = "span-matching"
    needs: frozenset[Grant] = frozenset({Grant.MODEL, Grant.BASE_MODEL})
    uses: frozenset[Grant] = frozenset({Grant.BATCH_SIZE, Grant.LABELS, Grant.LENGTHS})
    learning_rate: float = 0.03
    coverage: float = 0.01
    levels: Mapping[str, Work] = field(default_factory=lambda: LEVELS)

    def __call__(self, seen: Observation, *, rng: torch.Generator, budget: Budget) -> Reconstruction:
        blocks = visible_blocks(seen)
        if not blocks:
            raise NotApplicable("no whole query, key or value gradient is visible")
        spaces = block_spaces(seen, blocks)
        if not spaces:
            raise AttackFailed("no visible layer shows a row space: too many tokens for its width, or noise covers the gap")
        work = self.levels[budget.level]
        size = seen.batch_size if Grant.BATCH_SIZE in seen else 1
        layouts = self._layouts(seen, spaces, size)
        best: tuple[float, Tensor, tuple[int, ...]] | None = None
        bag: Counter[int] = Counter()
        rounds = 0
        while rounds < work.rounds:
            rounds += 1
            found = self._round(seen, spaces, layouts, work, bag, rng, best)
            if best is None or found[0] < best[0]:
                best = found
            if best[0] < FLOOR:
                break
            layouts = [best[2]]
        assert best is not None
        residual, ids, lengths = best
        tokens = tuple(tuple(int(t) for t in row[:n]) for row, n in zip(ids, lengths))
        details: dict[str, Parameter] = {
            "rounds": rounds,
            "blocks": ",".join(map(str, sorted(spaces))),
            "lengths": ",".join(map(str, lengths)),
        }
        if residual < FLOOR:
            error, labels = check(seen, tokens)
            if error < VERIFIED:
                return Reconstruction(tokens, "verified", labels=labels, residual=error, details=details)
        return Reconstruction(tokens, "matched", residual=residual**0.5, details=details)

    def _layouts(self, seen: Observation, spaces: Mapping[int, RowSpace], size: int) -> list[tuple[int, ...]]:
        """Which lengths the texts may have: the granted ones, or all ways to share out the rank."""
        if Grant.LENGTHS in seen:
            return [seen.lengths]
        total = Counter(space.rank for space in spaces.values()).most_common(1)[0][0]
        if size == 1:
            return [(total,)]
        least = len(seen.vocabulary.prefix) + len(seen.vocabulary.suffix) + 1
        if size == 2:
            every: list[tuple[int, ...]] = [(total - n, n) for n in range(least, total // 2 + 1)]
            # Spread over the range where there are more than can be tried.
            return every[:: max(1, -(-len(every) // MOST_LAYOUTS))] or [(total - total // 2, total // 2)]
        even = total // size
        return [tuple(even + (1 if k < total % size else 0) for k in range(size))]

    def _round(
        self,
        seen: Observation,
        spaces: Mapping[int, RowSpace],
        layouts: list[tuple[int, ...]],
        work: Work,
        bag: Counter[int],
        rng: torch.Generator,
        last: tuple[float, Tensor, tuple[int, ...]] | None,
    ) -> tuple[float, Tensor, tuple[int, ...]]:
        vocabulary = seen.vocabulary
        longest = max(max(lay) for lay in layouts)
        restarts = max(work.restarts, 2 * len(layouts))
        chosen = [layouts[k % len(layouts)] for k in range(restarts)]
        mask = torch.stack([_mask(lay, longest) for lay in chosen])
        template, fixed = _template(vocabulary, chosen, longest)
        table = _table(seen.model, vocabulary)
        barred = vocabulary.special_ids | vocabulary.unused_ids
        ordinary = torch.tensor([i for i in range(vocabulary.size) if i not in barred])
        draw = ordinary[torch.randint(len(ordinary), template.shape, generator=rng)]
        if last is not None:
            # Later rounds: half of the restarts keep most of the best text so far, the rest start from tokens seen before.
            draw = _perturbed(draw, last[1], torch.tensor([t for t, _ in bag.most_common(60)]), rng)
        ids = torch.where(fixed, template, draw)
        objective = Objective(seen.model, spaces, mask)
        e, loss, kept = self._descend(objective, table[ids], fixed, work)
        near = _nearest(e, table, ordinary)
        tokens = torch.where(fixed[kept], template[kept], near)
        for row, real in zip(tokens, (mask[kept].bool() & ~fixed[kept])):
            bag.update(row[real].tolist())
        best: tuple[float, Tensor, tuple[int, ...]] | None = None
        for index in loss.argsort()[: work.starts].tolist():
            layout = chosen[int(kept[index])]
            single = Objective(seen.model, spaces, _mask(layout, longest)[None])
            free = [(b, i) for b, n in enumerate(layout) for i in range(n) if not bool(fixed[kept[index], b, i])]
            pool = torch.tensor([t for t, _ in bag.most_common(50 * len(layout))])
            text, residual = improve(single, tokens[index], pool, free, floor=FLOOR, rng=rng, sweeps=work.sweeps)
            if residual >= FLOOR and index == int(loss.argmin()):
                mended = repair(single, text, free, table, ordinary, rate=self.learning_rate)
                text, residual = improve(single, mended, pool, free, floor=FLOOR, rng=rng, sweeps=work.sweeps)
            if best is None or residual < best[0]:
                best = (residual, text, layout)
            if residual < FLOOR:
                break
        assert best is not None
        return best

    def _descend(self, objective: Objective, start: Tensor, fixed: Tensor, work: Work) -> tuple[Tensor, Tensor, Tensor]:
        """Adam on the free embeddings; half-way only the best survive. Returns embeddings, losses, surviving indices."""
        kept = torch.arange(len(start))
        e = start.clone()
        half = work.steps // 3
        for begin, end in ((0, half), (half, work.steps)):
            e = e.detach().requires_grad_(True)
            frozen = fixed[kept][..., None]
            optimizer = torch.optim.Adam([e], lr=self.learning_rate)
            loss = torch.zeros(len(e))
            for step in range(begin, end):
                optimizer.zero_grad()
                loss = objective.embeddings(e, self.coverage * max(0.0, 1 - step / (0.9 * work.steps)))
                (gradient,) = torch.autograd.grad(loss.sum(), e)
                if not bool(torch.isfinite(gradient).all()):
                    raise AttackFailed("the optimisation diverged (gradient not finite)")
                e.grad = gradient.masked_fill(frozen, 0.0)
                optimizer.step()
            if end == half:
                best = loss.detach().argsort()[: work.survivors]
                e, kept = e.detach()[best], kept[best]
                objective = objective.narrowed(best)
        with torch.no_grad():
            return e.detach(), objective.embeddings(e, 0.0), kept


def _mask(layout: tuple[int, ...], longest: int) -> Tensor:
    return torch.stack([(torch.arange(longest) < n).long() for n in layout])


def _template(vocabulary: Vocabulary, layouts: list[tuple[int, ...]], longest: int) -> tuple[Tensor, Tensor]:
    """Ids ``(restarts, batch, length)`` with the tokenizer's own tokens and padding in place, and where they are fixed."""
    ids = torch.full((len(layouts), len(layouts[0]), longest), vocabulary.pad_id or 0)
    fixed = torch.ones_like(ids, dtype=torch.bool)
    for k, layout in enumerate(layouts):
        for b, n in enumerate(layout):
            first, last = len(vocabulary.prefix), n - len(vocabulary.suffix)
            ids[k, b, :first] = torch.tensor(vocabulary.prefix, dtype=torch.long)[:n]
            ids[k, b, last:n] = torch.tensor(vocabulary.suffix, dtype=torch.long)
            fixed[k, b, first:last] = False
    return ids, fixed


def _table(model: nn.Module, vocabulary: Vocabulary) -> Tensor:
    """What the model makes of every single id before positions are added (Gemma scales its rows)."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]  # a Hugging Face model
    with torch.no_grad():
        table: Tensor = embedding(torch.arange(vocabulary.size)).float()
    return table


def _nearest(e: Tensor, table: Tensor, ordinary: Tensor) -> Tensor:
    rows = nn.functional.normalize(table[ordinary], dim=1)
    flat = nn.functional.normalize(e.flatten(0, -2), dim=1)
    return ordinary[(flat @ rows.T).argmax(1)].reshape(e.shape[:-1])


def _perturbed(draw: Tensor, best: Tensor, bag: Tensor, rng: torch.Generator) -> Tensor:
    seen_before = bag[torch.randint(len(bag), draw.shape, generator=rng)]
    out = torch.where(torch.rand(draw.shape, generator=rng) < 0.5, seen_before, draw)
    half = len(out) // 2
    keep = torch.rand(out[:half].shape, generator=rng) < 0.6
    width = best.shape[-1]
    out[:half, :, :width] = torch.where(keep[..., :width], best, out[:half, :, :width])
    return out
