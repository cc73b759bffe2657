"""The engine behind DLG, TAG and their kin: K restarts as one batch, the best iterate kept, tokens only at the end."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from rasura.attacks.shared.precision import in_full_precision
from rasura.attacks.shared.verify import prove, verified
from rasura.attacks.updates.gradient_matching.discrete import TokenSearch
from rasura.attacks.updates.gradient_matching.factors import Factoriser
from rasura.attacks.updates.gradient_matching.guesses import Texts
from rasura.attacks.updates.gradient_matching.judging import Judge
from rasura.attacks.updates.gradient_matching.reorder import orders, reordered, shuffles
from rasura.attacks.updates.gradient_matching.settings import LEVELS, Settings, Work
from rasura.attacks.updates.span.rows import block_spaces, visible_blocks
from rasura.core.interfaces import AttackFailed, Budget, InputError, NotApplicable, Prior
from rasura.core.so_far import tell
from rasura.core.values import UNKNOWN as OVER
from rasura.core.values import Grant, Observation, Parameter, Reconstruction
from rasura.priors import language
from rasura.victims.models import is_eager, one_class_each, parts
from rasura.victims.positions import check_takes_embeddings, longest_text

TOLD = 5
"""A listener is told the nearest tokens after so many steps."""


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
            raise NotApplicable("gradient matching supports only classifiers; for causal models use span")
        if not one_class_each(seen.model):
            raise NotApplicable("gradient matching supports only classifiers with one label a text, of two classes or more")
        if not is_eager(seen.model):
            raise NotApplicable(
                "fused attention cannot be differentiated twice; load the model with attn_implementation='eager'"
            )
        check_takes_embeddings(seen.model)
        seen = in_full_precision(seen, budget)
        shown = [n for n in seen.gradients if n not in seen.visible or bool(seen.visible[n].any())]
        factoriser = Factoriser(seen.model if budget.device == "cpu" else copy.deepcopy(seen.model).to(budget.device), shown)
        if not factoriser.layers:
            raise NotApplicable("no gradient of a linear or LayerNorm layer is visible")
        observed = factoriser.observed(seen.gradients)
        if not all(bool(torch.isfinite(g).all()) for g in observed.values()):
            raise AttackFailed("the observed gradient is not finite")
        size = seen.batch_size if Grant.BATCH_SIZE in seen else 1
        lengths, exact = self._lengths(seen, size)
        work = self.levels[budget.level]
        work = work if budget.entries is None else replace(work, entries=budget.entries)
        judge = Judge(self.settings, work, seen, factoriser, observed, lengths, exact, rng, budget.memory_mb)
        if not judge.distance.observed:
            raise AttackFailed("noise covers every gradient that is visible")
        return _Run(judge)()

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
        total = min(total, size * longest_text(seen.model))
        lengths = tuple(max(3, total // size + (1 if k < total % size else 0)) for k in range(size))
        return lengths, size == 1 and bool(spaces)


class _Run:
    """One attack on one observation, which ``judge`` tells the distance to."""

    def __init__(self, judge: Judge) -> None:
        self.judge, self.search = judge, TokenSearch(judge)
        self.settings, self.work, self.seen, self.rng = judge.settings, judge.work, judge.seen, judge.rng
        self.prior: Prior | None = None
        with suppress(InputError):  # a vocabulary of another language, and no reference text
            self.prior = language(self.seen) if self.settings.prior else None

    def __call__(self) -> Reconstruction:
        texts = self._start()
        rounds = 0
        best, tokens = float("inf"), texts.lengths.new_empty(0)
        if self.judge.likely is not None:
            found = self.search(texts, self.judge.scores(texts))[1]
            tokens = found[0]
            best = float(self.judge.scores(replace(texts, e=self.judge.embedded(found)))[0])
        while rounds < self.work.rounds and self.judge.likely is None:
            rounds += 1
            texts, loss = self._continuous(self._permuted(texts) if self.work.beam else texts)
            if not self.work.beam:
                best, tokens = float(loss.min()), self.judge.nearest(texts)[int(loss.argmin())]
                break
            score, found = self.search(texts, loss)
            if score >= best:
                break
            best, tokens = score, found[0]
            tell(partial(_read, found[0]))
            y = texts.y[loss.argmin()].expand(len(found), -1, -1)
            texts = Texts(self.judge.embedded(found), (found != OVER).sum(-1), y)
        read = _read(tokens)
        details: dict[str, Parameter] = {"restarts": len(texts), "steps": self.work.steps if rounds else 0, "rounds": rounds}
        details |= {
            "objective": self.settings.objective,
            "l1": self.judge.distance.alpha,
            "entries": self.work.entries or 1.0,
        }
        if self.judge.rate:  # the masks are not known exactly, so nothing can be recomputed
            return Reconstruction(read, "matched", residual=best, details=details)
        proof = prove(self.seen, read)
        if proof is not None:
            return verified(proof, details)
        return Reconstruction(read, "matched", residual=best, details=details)

    def _start(self) -> Texts:
        """The best of random texts, or of those that ``likely`` finds."""
        work = self.work
        ids, free = self.judge.frame(torch.tensor(self.judge.lengths).expand(work.candidates, -1))
        if self.judge.likely is None:
            draws = torch.randint(len(self.judge.ordinary), ids.shape, generator=self.rng)
            ids = torch.where(free, self.judge.ordinary[draws], ids)
        else:
            ids = self.judge.likely.texts(ids[0, 0], free[0, 0], self.rng)[:, None]
        y = torch.zeros(1, len(self.judge.lengths), self.judge.classes)
        judged = self.judge.judged(ids, y.to(self.judge.device))
        ids = ids[judged.topk(min(work.restarts, work.candidates), largest=False).indices]
        y = y + 0.1 * torch.randn(len(ids), *y.shape[1:], generator=self.rng)
        return Texts(self.judge.embedded(ids), (ids != OVER).sum(-1), y.to(self.judge.device))

    def _permuted(self, texts: Texts) -> Texts:
        """Each restart with the free places of its texts in the best of some random orders (GRAB, Algorithm 2, line 1)."""
        _, free = self.judge.frame(texts.lengths)
        e = texts.e.clone()
        for k in range(len(texts)):
            tried = torch.cat([_same(free[k]), shuffles(free[k], self.work.orders, self.rng)])
            e[k] = reordered(e[k], tried[int(self.judge.in_orders(texts.at(slice(k, k + 1)), tried).argmin())])
        return replace(texts, e=e)

    def _continuous(self, texts: Texts) -> tuple[Texts, Tensor]:
        """The best that each restart passed, with its distance."""
        s, work = self.settings, self.work
        masks = self.judge.masks(len(texts))
        texts = Texts(texts.e.detach().clone(), texts.lengths, texts.y.detach().clone())
        kept = Texts(texts.e.clone(), texts.lengths, texts.y.clone())
        variables = [texts.e, texts.y, *masks]
        rates = [s.learning_rate * float(self.judge.table.std()), s.learning_rate, *[s.mask_rate] * len(masks)]
        groups = [{"params": [v.requires_grad_(True)], "lr": r} for v, r in zip(variables, rates)]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        typical = self.judge.table.norm(dim=1).mean()
        free = self.judge.frame(texts.lengths)[1]
        real, moving = self.judge.real(texts.lengths).float(), free.to(self.judge.device)[..., None]
        best = torch.full((len(texts),), float("inf"), device=self.judge.device)
        for step in range(work.steps):
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate * s.rate(step, work.steps)
            losses = []
            optimizer.zero_grad()
            # Restarts do not touch each other, so they go through in parts that fit the memory.
            for part in torch.split(torch.arange(len(texts)), self.judge.chunk):
                some = texts.at(part)
                loss = self.judge.misfit(some, True, [m[part] for m in masks])
                losses.append(loss.detach())
                if s.embedding_norm:
                    size = (some.e.norm(dim=-1) * real[part]).sum((1, 2)) / real[part].sum((1, 2))
                    loss = loss + s.embedding_norm * (size - typical).square()
                for v, slope in zip(variables, torch.autograd.grad(loss.sum(), variables, allow_unused=True)):
                    if slope is not None:
                        v.grad = slope if v.grad is None else v.grad + slope
            now = torch.cat(losses)
            better = now < best
            best.copy_(torch.where(better, now, best))
            kept.e.copy_(torch.where(better[:, None, None, None], texts.e.detach(), kept.e))
            kept.y.copy_(torch.where(better[:, None, None], texts.y.detach(), kept.y))
            if step % TOLD == 0:
                tell(lambda: _read(self.judge.nearest(kept.at(best.cpu().argmin(dim=0, keepdim=True)))[0]))
            assert texts.e.grad is not None
            if not bool(torch.stack([torch.isfinite(v.grad).all() for v in variables if v.grad is not None]).all()):
                raise AttackFailed(f"the optimisation diverged at step {step} (gradient not finite)")
            texts.e.grad *= moving
            if s.steepest < math.inf:
                texts.e.grad *= (s.steepest / texts.e.grad.flatten(1).norm(dim=1)).clamp(max=1)[:, None, None, None]
            optimizer.step()
            with torch.no_grad():
                for m in masks:
                    m.clamp_(0, 1)
            if s.reorder and step >= work.steps // 10 and step % work.every == work.every - 1:
                self._reorder(texts, free, optimizer)
        return kept, best

    def _reorder(self, texts: Texts, free: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Each restart takes the best of some other orders of its embeddings (LAMP)."""
        ids = self.judge.nearest(texts)
        for k in range(len(texts)):
            tried = torch.cat([_same(free[k]), orders(free[k], self.work.orders, self.rng)])
            scores = self.judge.in_orders(texts.at(slice(k, k + 1)), tried)
            if self.prior is not None:
                moved = ids[k].expand_as(tried).gather(-1, tried)
                likely = [self.prior.log_probability(x[spots].tolist()) for b in moved for x, spots in zip(b, free[k])]
                scores -= self.settings.prior * torch.tensor(likely).view(len(tried), -1).sum(1) / free[k].sum()
            best = tried[int(scores.argmin())]
            with torch.no_grad():
                state = optimizer.state[texts.e]
                for x in (texts.e, state["exp_avg"], state["exp_avg_sq"]):
                    x[k] = reordered(x[k], best)


def _read(ids: Tensor) -> tuple[tuple[int, ...], ...]:
    """The texts of ``ids`` ``(batch, width)``."""
    return tuple(tuple(int(t) for t in row if t != OVER) for row in ids)


def _same(free: Tensor) -> Tensor:
    """The order that changes nothing, ``(1, batch, width)``."""
    return torch.arange(free.shape[-1]).expand(1, *free.shape)
