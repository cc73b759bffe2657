"""The engine behind DLG, TAG and their kin: K restarts as one batch, the best iterate kept, tokens only at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from rasura.attacks.shared.dummies import nearest_tokens, ordinary_ids, template, token_table
from rasura.attacks.shared.mechanism import announced_dropout, announced_noise
from rasura.attacks.shared.verify import prove, verified
from rasura.attacks.updates.gradient_matching.factors import Factoriser
from rasura.attacks.updates.gradient_matching.guesses import Beam, Texts
from rasura.attacks.updates.gradient_matching.masks import Masked, shapes
from rasura.attacks.updates.gradient_matching.objective import Distance, soft_cross_entropy
from rasura.attacks.updates.gradient_matching.reorder import orders, reordered, shuffles
from rasura.attacks.updates.gradient_matching.settings import LEVELS, Settings, Work
from rasura.attacks.updates.span.rows import block_spaces, visible_blocks
from rasura.core.interfaces import AttackFailed, Budget, InputError, NotApplicable, Prior
from rasura.core.values import UNKNOWN as OVER
from rasura.core.values import Grant, Observation, Parameter, Reconstruction
from rasura.priors import language
from rasura.victims.models import is_eager, parts

CHUNK = 16
"""Candidates in one evaluation: more gain little, and memory grows."""

NEAR = 2
"""Nearest tokens of each place that a beam search may use."""

FINALISTS, REFIT = 8, 40
"""Candidates of a beam search that have dropout masks learned for each, and the steps of that."""


@dataclass(frozen=True)
class GradientMatching:
    """Optimises dummy embeddings (and soft labels where none are granted) to the observed gradient; classifiers only.

    Embedding gradients are not used (GRAB's benchmark setting). Lengths that are not granted are read off the rank of an
    attention gradient and shared out evenly. Raises ``AttackFailed`` on divergence, with the reason.
    """

    name: str
    settings: Settings
    needs: frozenset[Grant] = frozenset({Grant.MODEL, Grant.BASE_MODEL})
    uses: frozenset[Grant] = frozenset(
        {Grant.BATCH_SIZE, Grant.LABELS, Grant.LENGTHS, Grant.REFERENCE_TEXT, Grant.LANGUAGE_MODEL, Grant.MECHANISM}
    )
    levels: Mapping[str, Work] = field(default_factory=lambda: LEVELS)

    def __call__(self, seen: Observation, *, rng: torch.Generator, budget: Budget) -> Reconstruction:
        if seen.task != "classification":
            raise NotApplicable("gradient matching is built for classifiers; for causal models use span")
        if not is_eager(seen.model):
            raise NotApplicable(
                "fused attention cannot be differentiated twice; load the model with attn_implementation='eager'"
            )
        shown = [n for n in seen.gradients if n not in seen.visible or bool(seen.visible[n].any())]
        factoriser = Factoriser(seen.model, shown)
        if not factoriser.layers:
            raise NotApplicable("no gradient of a linear or LayerNorm layer is visible")
        observed = factoriser.observed(seen.gradients)
        if not all(bool(torch.isfinite(g).all()) for g in observed.values()):
            raise AttackFailed("the observed gradient is not finite")
        size = seen.batch_size if Grant.BATCH_SIZE in seen else 1
        lengths, exact = self._lengths(seen, size)
        work = self.levels[budget.level]
        work = work if budget.entries is None else replace(work, entries=budget.entries)
        run = _Run(self.settings, work, seen, factoriser, observed, lengths, exact, rng)
        return run(budget.memory_mb)

    def _lengths(self, seen: Observation, size: int) -> tuple[tuple[int, ...], bool]:
        """The texts' lengths, and whether they are right."""
        if Grant.LENGTHS in seen:
            return seen.lengths, True
        spaces = block_spaces(seen, visible_blocks(seen)[:1])
        name = parts(seen.model).position_embedding
        rows = seen.gradients[name].norm(dim=1) > 0 if name is not None and name in seen.gradients else None
        if spaces:
            total = max(space.rank for space in spaces.values())
        elif rows is not None and not bool(rows.all()):
            total = size * int(rows.sum())
        else:
            total = 12 * size  # noise fills every row, or nothing is visible: a common sentence
        total = min(total, size * _longest(seen))
        lengths = tuple(max(3, total // size + (1 if k < total % size else 0)) for k in range(size))
        return lengths, size == 1 and bool(spaces)


class _Run:
    """One attack on one observation. Ids are ``(batch, width)``, ``OVER`` behind a text's end."""

    def __init__(
        self,
        settings: Settings,
        work: Work,
        seen: Observation,
        factoriser: Factoriser,
        observed: Mapping[str, Tensor],
        lengths: tuple[int, ...],
        exact: bool,
        rng: torch.Generator,
    ) -> None:
        self.settings, self.work, self.seen, self.factoriser, self.rng = settings, work, seen, factoriser, rng
        model, vocabulary = seen.model, seen.vocabulary
        self.prefix, self.suffix = len(vocabulary.prefix), len(vocabulary.suffix)
        self.lengths, self.vary = lengths, not exact
        # Where only the sum of the lengths is known, a text may be half as long again as the mean.
        self.width = max(lengths) if exact else min(math.ceil(1.5 * max(lengths)), max(max(lengths), _longest(seen)))
        self.table, self.ordinary = token_table(model, vocabulary), ordinary_ids(vocabulary)
        self.classes = int(model.config.num_labels)  # type: ignore[union-attr, arg-type]  # a Hugging Face config
        self.granted = seen.labels if Grant.LABELS in seen else None
        self.rate = announced_dropout(seen) if settings.learn_masks else 0.0
        self.shapes = shapes(model, len(lengths), self.width) if self.rate else []
        self.distance = Distance(
            observed, settings.objective, alpha=settings.alpha if work.entries else 0.0,
            visible=factoriser.observed(seen.visible), entries=work.entries or 1.0,
            norm=_clipped(seen, observed) if settings.match_norm else None, rng=rng,
        )  # fmt: skip
        self.pools: list[set[int]] = [set() for _ in lengths]
        self.prior: Prior | None = None
        with suppress(InputError):  # a vocabulary of another language, and no reference text
            self.prior = language(seen) if settings.prior else None

    def __call__(self, memory_mb: int) -> Reconstruction:
        self.chunk = max(1, min(CHUNK, (memory_mb << 20) // self._bytes()))
        texts = self._start()
        rounds = 0
        best, tokens = float("inf"), texts.lengths.new_empty(0)
        while rounds < self.work.rounds:
            rounds += 1
            texts, loss = self._continuous(self._permuted(texts) if self.work.beam else texts)
            if not self.work.beam:
                best, tokens = float(loss.min()), self._tokens(texts)[int(loss.argmin())]
                break
            score, found = self._discrete(texts, loss)
            if score >= best:
                break
            best, tokens = score, found[0]
            y = texts.y[loss.argmin()].expand(len(found), -1, -1)
            texts = Texts(self._embedded(found), (found != OVER).sum(-1), y)
        read = tuple(tuple(int(t) for t in row if t != OVER) for row in tokens)
        details: dict[str, Parameter] = {"restarts": len(texts), "steps": self.work.steps, "rounds": rounds}
        details |= {"objective": self.settings.objective, "l1": self.distance.alpha, "entries": self.work.entries or 1.0}
        if self.rate:  # the masks are not known exactly, so nothing can be recomputed
            return Reconstruction(read, "matched", residual=best, details=details)
        proof = prove(self.seen, read)
        if proof is not None:
            return verified(proof, details)
        return Reconstruction(read, "matched", residual=best, details=details)

    def _bytes(self) -> int:
        """Rough size of one candidate's step: entries that are formed, and a second derivative through the activations."""
        entries = sum(t.numel() for n, t in self.distance.targets.items() if self.distance.alpha or n in self.distance.shown)
        widths = sum(sum(g.shape) for g in self.distance.observed.values() if g.dim() == 2)
        return 4 * (5 * entries + 12 * widths * self.width * len(self.lengths)) + 1

    def _frame(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Ids with the tokenizer's own tokens in place, and which places are free, of texts of ``lengths``."""
        ids, real, free = template(self.seen.vocabulary, lengths, self.width)
        return torch.where(real.bool(), ids, OVER), free

    def _embedded(self, ids: Tensor) -> Tensor:
        return self.table[ids.clamp_min(0)]

    def _misfit(self, texts: Texts, graph: bool, masks: Sequence[Tensor] = ()) -> Tensor:
        targets = texts.y.softmax(-1)
        if self.granted is not None:
            targets = nn.functional.one_hot(self.granted, self.classes).to(targets.dtype).expand_as(targets)
        real = (torch.arange(self.width) < texts.lengths[..., None]).long()
        with Masked(masks, self.rate) if masks else nullcontext():
            found = self.factoriser(texts.e, real, lambda z: soft_cross_entropy(z, targets), graph=graph)
        return self.distance(found)

    def _scores(self, texts: Texts) -> Tensor:
        """The distance of each candidate with dropout off, without a graph; ``y`` may be one for all.

        Masks that were learned for one order of the tokens hide what is wrong with it, so orders are told apart without.
        """
        out = []
        for part in torch.split(torch.arange(len(texts)), self.chunk):
            some = Texts(texts.e[part], texts.lengths[part], texts.y.expand(len(texts), -1, -1)[part])
            e = some.e.detach().clone().requires_grad_(True)
            out.append(self._misfit(replace(some, e=e), False).detach())
        return torch.cat(out)

    def _judged(self, ids: Tensor, y: Tensor) -> Tensor:
        """The distance of each of ``ids`` ``(candidates, batch, width)``, with labels ``y`` ``(1, batch, classes)``."""
        return self._scores(Texts(self._embedded(ids), (ids != OVER).sum(-1), y))

    def _tokens(self, texts: Texts) -> Tensor:
        ids, free = self._frame(texts.lengths)
        near = nearest_tokens(texts.e.detach(), self.table, self.ordinary, 1)[..., 0]
        return torch.where(free, near, ids)

    def _start(self) -> Texts:
        """The best of random texts."""
        work = self.work
        ids, free = self._frame(torch.tensor(self.lengths).expand(work.candidates, -1))
        draws = torch.randint(len(self.ordinary), ids.shape, generator=self.rng)
        ids = torch.where(free, self.ordinary[draws], ids)
        y = torch.zeros(1, len(self.lengths), self.classes)
        kept = self._judged(ids, y).topk(min(work.restarts, work.candidates), largest=False).indices
        ids = ids[kept]
        y = y + 0.1 * torch.randn(len(kept), *y.shape[1:], generator=self.rng)
        return Texts(self._embedded(ids), (ids != OVER).sum(-1), y)

    def _permuted(self, texts: Texts) -> Texts:
        """Each restart with the free places of its texts in the best of some random orders (GRAB, Algorithm 2, line 1)."""
        _, free = self._frame(texts.lengths)
        e = texts.e.clone()
        for k in range(len(texts)):
            tried = torch.cat([_same(free[k]), shuffles(free[k], self.work.orders, self.rng)])
            e[k] = reordered(e[k], tried[int(self._in_orders(texts.at(slice(k, k + 1)), tried).argmin())])
        return replace(texts, e=e)

    def _in_orders(self, text: Texts, tried: Tensor) -> Tensor:
        e = reordered(text.e.expand(len(tried), -1, -1, -1), tried)
        return self._scores(Texts(e, text.lengths.expand(len(tried), -1), text.y))

    def _continuous(self, texts: Texts) -> tuple[Texts, Tensor]:
        """The best that each restart passed, with its distance."""
        s, work = self.settings, self.work
        masks = self._masks(len(texts))
        texts = Texts(texts.e.detach().clone(), texts.lengths, texts.y.detach().clone())
        kept = Texts(texts.e.clone(), texts.lengths, texts.y.clone())
        variables = [texts.e, texts.y, *masks]
        rates = [s.learning_rate * float(self.table.std()), s.learning_rate, *[s.mask_rate] * len(masks)]
        groups = [{"params": [v.requires_grad_(True)], "lr": r} for v, r in zip(variables, rates)]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        typical = self.table.norm(dim=1).mean()
        real = (torch.arange(self.width) < texts.lengths[..., None]).float()
        free = self._frame(texts.lengths)[1]
        best = torch.full((len(texts),), float("inf"))
        for step in range(work.steps):
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate * s.decay ** (step // s.decay_every)
            losses = []
            optimizer.zero_grad()
            # Restarts do not touch each other, so they go through in parts that fit the memory.
            for part in torch.split(torch.arange(len(texts)), self.chunk):
                some = texts.at(part)
                loss = self._misfit(some, True, [m[part] for m in masks])
                losses.append(loss.detach())
                if s.embedding_norm:
                    size = (some.e.norm(dim=-1) * real[part]).sum((1, 2)) / real[part].sum((1, 2))
                    loss = loss + s.embedding_norm * (size - typical).square()
                for v, slope in zip(variables, torch.autograd.grad(loss.sum(), variables, allow_unused=True)):
                    if slope is not None:
                        v.grad = slope if v.grad is None else v.grad + slope
            now = torch.cat(losses)
            better = now < best
            best[better] = now[better]
            kept.e[better], kept.y[better] = texts.e.detach()[better], texts.y.detach()[better]
            assert texts.e.grad is not None
            if not all(bool(torch.isfinite(v.grad).all()) for v in variables if v.grad is not None):
                raise AttackFailed(f"the optimisation diverged at step {step} (gradient not finite)")
            texts.e.grad *= free[..., None]
            optimizer.step()
            with torch.no_grad():
                for m in masks:
                    m.clamp_(0, 1)
            if s.reorder and step >= work.steps // 10 and step % work.every == work.every - 1:
                self._reorder(texts, free, optimizer)
        return kept, best

    def _masks(self, count: int) -> list[Tensor]:
        """Dropout masks of ``count`` candidates at their mean, which is much nearer to any mask than a random one is."""
        return [torch.full((count, *shape), 1 - self.rate) for shape in self.shapes]

    def _reorder(self, texts: Texts, free: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Each restart takes the best of some other orders of its embeddings (LAMP)."""
        ids = self._tokens(texts)
        for k in range(len(texts)):
            tried = torch.cat([_same(free[k]), orders(free[k], self.work.orders, self.rng)])
            scores = self._in_orders(texts.at(slice(k, k + 1)), tried)
            if self.prior is not None:
                moved = ids[k].expand_as(tried).gather(-1, tried)
                likely = [self.prior.log_probability(x[spots].tolist()) for b in moved for x, spots in zip(b, free[k])]
                scores -= self.settings.prior * torch.tensor(likely).view(len(tried), -1).sum(1) / free[k].sum()
            best = tried[int(scores.argmin())]
            with torch.no_grad():
                state = optimizer.state[texts.e]
                for x in (texts.e, state["exp_avg"], state["exp_avg_sq"]):
                    x[k] = reordered(x[k], best)

    def _discrete(self, texts: Texts, loss: Tensor) -> tuple[float, Tensor]:
        """The best ids of a beam search over the tokens of ``texts``, one for each of them, with the distance of the best.

        GRAB, Algorithm 3: the beams begin with the best of random orders; place after place takes every token that its text
        had so far. Where lengths are unknown, GRAB also tries padding there; here the token is taken out and what follows
        moves up, or a token is put in, so that a text ends where its closing token stands. Beyond the paper, LAMP's orders
        are tried after each sweep, and where dropout is on the last word is ``_refitted``'s.
        """
        work, y = self.work, texts.y[loss.argmin()][None]
        ids = self._tokens(texts)
        _, free = self._frame(texts.lengths)
        beam = Beam(lambda new: self._judged(new, y))
        near = nearest_tokens(texts.e.detach(), self.table, self.ordinary, NEAR)
        for x, tokens, spots in zip(ids, near, free):
            for pool, row, here in zip(self.pools, tokens, spots):
                pool.update(row[here].flatten().tolist())
            beam.add([x, *x.expand(work.orders, -1, -1).gather(-1, shuffles(spots, work.orders, self.rng))])
        pools = [torch.tensor(sorted(pool)) for pool in self.pools]
        for _ in range(work.sweeps):
            before = beam.least
            for row in range(len(pools)):
                for place in range(self.prefix, self.width):
                    starts = beam.top(work.beam)
                    beam.add([x for b in starts for x in self._variants(b, row, place, pools[row])])
            while True:
                last, best = beam.least, beam.top(1)
                spots = self._frame((best != OVER).sum(-1))[1][0]
                beam.add(list(best.expand(work.orders, -1, -1).gather(-1, orders(spots, work.orders, self.rng))))
                if beam.least >= last:
                    break
            if beam.least >= before:
                break
        if not self.rate:
            return beam.least, beam.top(len(texts))
        finalists = beam.top(FINALISTS)
        scores = self._refitted(finalists, y)
        return float(scores.min()), finalists[scores.topk(min(len(texts), len(scores)), largest=False).indices]

    def _refitted(self, ids: Tensor, y: Tensor) -> Tensor:
        """The distance of each of ``ids`` with dropout masks learned for it: masks explain the truth, and others less well.

        With dropout off, texts that are off by one word are sometimes nearer than the truth.
        """
        texts = Texts(self._embedded(ids), (ids != OVER).sum(-1), y.expand(len(ids), -1, -1))
        out = []
        for part in torch.split(torch.arange(len(ids)), self.chunk):
            some = texts.at(part)
            masks = [m.requires_grad_(True) for m in self._masks(len(some))]
            optimizer = torch.optim.AdamW(masks, weight_decay=0.0)
            for step in range(REFIT):
                for group in optimizer.param_groups:
                    group["lr"] = 3 * self.settings.mask_rate * 0.8 ** (10 * step // REFIT)
                loss = self._misfit(some, True, masks)
                for m, slope in zip(masks, torch.autograd.grad(loss.sum(), masks)):
                    m.grad = slope
                optimizer.step()
                with torch.no_grad():
                    for m in masks:
                        m.clamp_(0, 1)
            out.append(self._misfit(replace(some, e=some.e.clone().requires_grad_(True)), False, masks).detach())
        return torch.cat(out)

    def _variants(self, ids: Tensor, row: int, place: int, pool: Tensor) -> list[Tensor]:
        """``ids`` with another token at one place of one text and, where lengths are unknown, with one less or one more."""
        text = ids[row]
        end = int((text != OVER).sum()) - self.suffix
        if place >= end:
            return []
        changed = text.repeat(len(pool), 1)
        changed[:, place] = pool
        out = list(changed)
        if self.vary and end - self.prefix > 1:
            out.append(torch.cat([text[:place], text[place + 1 :], text.new_full((1,), OVER)]))
        if self.vary and text[-1] == OVER:
            out += [torch.cat([text[:place], token[None], text[place:-1]]) for token in pool]
        whole = ids.repeat(len(out), 1, 1)
        whole[:, row] = torch.stack(out)
        return list(whole)


def _longest(seen: Observation) -> int:
    """Tokens that the model takes at most."""
    return int(getattr(seen.model.config, "max_position_embeddings", 1 << 20))


def _same(free: Tensor) -> Tensor:
    """The order that changes nothing, ``(1, batch, width)``."""
    return torch.arange(free.shape[-1]).expand(1, *free.shape)


def _clipped(seen: Observation, observed: Mapping[str, Tensor]) -> float | None:
    """The norm that clipping left of ``observed``, without the noise's share; None where no clipping is announced."""
    deviation, clip = announced_noise(seen)
    if math.isinf(clip):
        return None
    shown = sum(int(seen.visible[n].sum()) if n in seen.visible else g.numel() for n, g in observed.items())
    signal = sum(float(g.square().sum()) for g in observed.values()) - shown * deviation**2
    return min(clip, math.sqrt(max(signal, 1e-4 * clip**2)))
