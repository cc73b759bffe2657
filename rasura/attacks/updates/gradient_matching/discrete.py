"""From embeddings to tokens: a beam search over the ids of each place (GRAB, Algorithm 3)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rasura.attacks.updates.gradient_matching.guesses import Beam, Texts
from rasura.attacks.updates.gradient_matching.judging import Judge
from rasura.attacks.updates.gradient_matching.reorder import orders, shuffles
from rasura.core.values import UNKNOWN as OVER

NEAR = 2
"""Nearest tokens of each place that a beam search may use."""

FINALISTS, REFIT = 8, 40
"""Candidates of a beam search that have dropout masks learned for each, and the steps of that."""


class TokenSearch:
    """The tokens of texts whose embeddings were optimised. ``pools``: the tokens that each text had so far."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.pools: list[list[set[int]]] = [self._pools() for _ in judge.lengths]

    def _pools(self) -> list[set[int]]:
        """The words that may stand at each place of a text: the likely ones there, else one set for all places."""
        if self.judge.likely is None:
            return [set()] * self.judge.width
        return [set(words) for words in self.judge.likely.words.tolist()]

    def __call__(self, texts: Texts, loss: Tensor) -> tuple[float, Tensor]:
        """The best ids of a beam search over the tokens of ``texts``, one for each of them, with the distance of the best.

        GRAB, Algorithm 3: the beams begin with the best of random orders; place after place takes every token that its text
        had so far. Where lengths are unknown, GRAB also tries padding there; here the token is taken out and what follows
        moves up, or a token is put in, so that a text ends where its closing token stands. Beyond the paper, LAMP's orders
        are tried after each sweep, and where dropout is on the last word is ``_refitted``'s.
        """
        work, y = self.judge.work, texts.y[loss.argmin()][None]
        ids = self.judge.nearest(texts)
        _, free = self.judge.frame(texts.lengths)
        tried = 0 if self.judge.likely is not None else work.orders
        beam = Beam(lambda new: self.judge.judged(new, y))
        for x, tokens, spots in zip(ids, self.judge.near(texts, NEAR), free):
            if self.judge.likely is None:
                for pools, row, here in zip(self.pools, tokens, spots):
                    pools[0].update(row[here].flatten().tolist())
            beam.add([x, *x.expand(tried, -1, -1).gather(-1, shuffles(spots, tried, self.judge.rng))])
        for _ in range(work.sweeps):
            before = beam.least
            for row, pools in enumerate(self.pools):
                for place in range(self.judge.prefix, self.judge.width):
                    pool = torch.tensor(sorted(pools[place]))
                    beam.add([x for b in beam.top(work.beam) for x in self._variants(b, row, place, pool)])
            while True:
                last, best = beam.least, beam.top(1)
                spots = self.judge.frame((best != OVER).sum(-1))[1][0]
                beam.add(list(best.expand(work.orders, -1, -1).gather(-1, orders(spots, work.orders, self.judge.rng))))
                if beam.least >= last:
                    break
            if beam.least >= before:
                break
        if not self.judge.rate or self.judge.likely is not None:
            return beam.least, beam.top(len(texts))
        finalists = beam.top(FINALISTS)
        scores = self._refitted(finalists, y)
        return float(scores.min()), finalists[scores.topk(min(len(texts), len(scores)), largest=False).indices.cpu()]

    def _refitted(self, ids: Tensor, y: Tensor) -> Tensor:
        """The distance of each of ``ids`` with dropout masks learned for it: masks explain the truth, and others less well.

        With dropout off, texts that are off by one word are sometimes nearer than the truth.
        """
        texts = Texts(self.judge.embedded(ids), (ids != OVER).sum(-1), y.expand(len(ids), -1, -1))
        out = []
        for part in torch.split(torch.arange(len(ids)), self.judge.chunk):
            some = texts.at(part)
            # The norm behind the embeddings comes before any mask, and its slope is asked for.
            some = replace(some, e=some.e.clone().requires_grad_(True))
            masks = [m.requires_grad_(True) for m in self.judge.masks(len(some))]
            optimizer = torch.optim.AdamW(masks, weight_decay=0.0)
            for step in range(REFIT):
                for group in optimizer.param_groups:
                    group["lr"] = 3 * self.judge.settings.mask_rate * 0.8 ** (10 * step // REFIT)
                loss = self.judge.misfit(some, True, masks)
                for m, slope in zip(masks, torch.autograd.grad(loss.sum(), masks)):
                    m.grad = slope
                optimizer.step()
                with torch.no_grad():
                    for m in masks:
                        m.clamp_(0, 1)
            out.append(self.judge.misfit(some, False, masks).detach())
        return torch.cat(out)

    def _variants(self, ids: Tensor, row: int, place: int, pool: Tensor) -> list[Tensor]:
        """``ids`` with another token at one place of one text and, where lengths are unknown, with one less or one more."""
        text = ids[row]
        end = int((text != OVER).sum()) - self.judge.suffix
        if place >= end:
            return []
        changed = text.repeat(len(pool), 1)
        changed[:, place] = pool
        out = list(changed)
        if self.judge.vary and end - self.judge.prefix > 1:
            out.append(torch.cat([text[:place], text[place + 1 :], text.new_full((1,), OVER)]))
        if self.judge.vary and text[-1] == OVER:
            out += [torch.cat([text[:place], token[None], text[place:-1]]) for token in pool]
        whole = ids.repeat(len(out), 1, 1)
        whole[:, row] = torch.stack(out)
        return list(whole)
