"""The engine behind DLG, TAG and their kin: K restarts as one batch, the best iterate kept, tokens only at the end."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rasura.attacks.dummies import nearest_tokens, ordinary_ids, template, token_table
from rasura.attacks.gradient_matching.factors import Factoriser
from rasura.attacks.gradient_matching.objective import Distance, Kind, soft_cross_entropy
from rasura.attacks.gradient_matching.reorder import orders, reordered
from rasura.attacks.span.rows import block_spaces, visible_blocks
from rasura.attacks.verify import VERIFIED, check
from rasura.interfaces import AttackFailed, Budget, InputError, NotApplicable, Prior
from rasura.priors import language
from rasura.values import Grant, Observation, Reconstruction
from rasura.victims.models import is_eager, parts

CHUNK = 16
"""Candidates in one evaluation: more gain little, and memory grows."""


@dataclass(frozen=True)
class Settings:
    """One method of the family.

    ``learning_rate`` is in units of the embedding table's standard deviation, so that one value fits all models: GRAB's 0.01
    on BERT-base, whose entries deviate by about .04, is 0.25. It decays by ``decay`` every ``decay_every`` steps (GRAB,
    sec. 5.1). ``embedding_norm``: weight of LAMP's regulariser. With ``reorder``, after a first tenth of the steps, restarts
    try other orders of their tokens now and then and keep what has the least distance plus ``prior`` times the mean negative
    log-likelihood of a token (LAMP).
    """

    objective: Kind
    alpha: float = 0.0
    learning_rate: float = 0.25
    decay: float = 0.89
    decay_every: int = 50
    embedding_norm: float = 0.0
    reorder: bool = False
    prior: float = 0.0


@dataclass(frozen=True)
class Work:
    """Work of one budget level.

    Where tokens are reordered, ``orders`` are tried every ``every`` steps. With a ``beam``, each of ``rounds`` ends with a
    beam search of so many ``sweeps`` over the texts' own tokens, from the best of ``orders``.
    """

    candidates: int
    restarts: int
    steps: int
    orders: int = 0
    every: int = 1
    rounds: int = 1
    beam: int = 0
    sweeps: int = 0


# GRAB's public defaults are 2,000 candidates and 2,000 steps a round (sec. 5.1); ``paper`` spends that on eight restarts.
LEVELS: Mapping[str, Work] = {"quick": Work(8, 2, 80), "default": Work(64, 8, 500), "paper": Work(2000, 8, 2000)}


@dataclass(frozen=True)
class GradientMatching:
    """Optimises dummy embeddings (and soft labels where none are granted) to the observed gradient; classifiers only.

    Embedding gradients are not used (GRAB's benchmark setting). Lengths that are not granted are read off the rank of an
    attention gradient and shared out evenly. Raises ``AttackFailed`` on divergence, with the reason.
    """

    name: str
    settings: Settings
    needs: frozenset[Grant] = frozenset({Grant.MODEL, Grant.BASE_MODEL})
    uses: frozenset[Grant] = frozenset({Grant.BATCH_SIZE, Grant.LABELS, Grant.LENGTHS, Grant.REFERENCE_TEXT})
    levels: Mapping[str, Work] = field(default_factory=lambda: LEVELS)

    def __call__(self, seen: Observation, *, rng: torch.Generator, budget: Budget) -> Reconstruction:
        if seen.task != "classification":
            raise NotApplicable("gradient matching is built for classifiers; for causal models use span")
        if not is_eager(seen.model):
            raise NotApplicable(
                "fused attention cannot be differentiated twice; load the model with attn_implementation='eager'"
            )
        factoriser = Factoriser(seen.model, list(seen.gradients))
        if not factoriser.layers:
            raise NotApplicable("no gradient of a linear or LayerNorm layer is visible")
        observed = factoriser.observed(seen.gradients)
        if not all(bool(torch.isfinite(g).all()) for g in observed.values()):
            raise AttackFailed("the observed gradient is not finite")
        turned = {s.weight for s in factoriser.layers if s.linear is not None and s.linear.transposed}
        visible = {n: m.T if n in turned else m for n, m in seen.visible.items() if n in observed}
        size = seen.batch_size if Grant.BATCH_SIZE in seen else 1
        settings, work = self.settings, self.levels[budget.level]
        return _Run(settings, work, seen, factoriser, observed, visible, self._lengths(seen, size), rng)()

    def _lengths(self, seen: Observation, size: int) -> tuple[int, ...]:
        if Grant.LENGTHS in seen:
            return seen.lengths
        spaces = block_spaces(seen, visible_blocks(seen)[:1])
        name = parts(seen.model).position_embedding
        rows = seen.gradients[name].norm(dim=1) > 0 if name is not None and name in seen.gradients else None
        if spaces:
            total = max(space.rank for space in spaces.values())
        elif rows is not None and not bool(rows.all()):
            total = size * int(rows.sum())
        else:
            total = 12 * size  # noise fills every row, or nothing is visible: a common sentence
        return tuple(max(3, total // size + (1 if k < total % size else 0)) for k in range(size))


class _Run:
    """One attack on one observation.

    Texts are embeddings ``e`` ``(restarts, batch, length, hidden)`` or ids, labels are logits ``y`` ``(restarts, batch,
    classes)``.
    """

    def __init__(
        self,
        settings: Settings,
        work: Work,
        seen: Observation,
        factoriser: Factoriser,
        observed: Mapping[str, Tensor],
        visible: Mapping[str, Tensor],
        lengths: tuple[int, ...],
        rng: torch.Generator,
    ) -> None:
        self.settings, self.work, self.seen, self.factoriser, self.rng = settings, work, seen, factoriser, rng
        self.lengths = lengths
        vocabulary, model = seen.vocabulary, seen.model
        self.frame, self.mask, self.free = template(vocabulary, lengths)
        self.table, self.ordinary = token_table(model, vocabulary), ordinary_ids(vocabulary)
        self.distance = Distance(observed, settings.objective, alpha=settings.alpha, visible=visible)
        self.classes = int(model.config.num_labels)  # type: ignore[union-attr, arg-type]  # a Hugging Face config
        self.granted = seen.labels if Grant.LABELS in seen else None
        self.prior: Prior | None = None
        with suppress(InputError):  # a vocabulary of another language, and no reference text
            self.prior = language(seen) if settings.prior else None

    def __call__(self) -> Reconstruction:
        e, y = self._start()
        rounds = 0
        best, tokens = float("inf"), self.frame
        while rounds < self.work.rounds:
            rounds += 1
            e, y, loss = self._continuous(e, y)
            winner = int(loss.argmin())
            if float(loss[winner]) < best:
                best, tokens = float(loss[winner]), self._tokens(e[winner])
            if not self.work.beam:
                break
            found = [self._discrete(self._tokens(x), labels) for x, labels in zip(e, y)]
            score, ids = min(found, key=lambda f: f[0])
            if score >= best:
                break
            best, tokens = score, ids
            e = self.table[torch.stack([x for _, x in found])]
        texts = tuple(tuple(int(t) for t in row[:n]) for row, n in zip(tokens, self.lengths))
        details = {"restarts": len(e), "steps": self.work.steps, "rounds": rounds, "objective": self.settings.objective}
        error, labels = check(self.seen, texts)
        if error < VERIFIED:
            return Reconstruction(texts, "verified", labels=labels, residual=error, details=details)
        return Reconstruction(texts, "matched", residual=best, details=details)

    def _misfit(self, e: Tensor, y: Tensor, graph: bool) -> Tensor:
        targets = y.softmax(-1)
        if self.granted is not None:
            targets = nn.functional.one_hot(self.granted, self.classes).to(e.dtype).expand(len(e), -1, -1)
        found = self.factoriser(e, self.mask, lambda logits: soft_cross_entropy(logits, targets), graph=graph)
        return self.distance(found)

    def _scores(self, e: Tensor, y: Tensor) -> Tensor:
        """The distance of each of ``e``, without a graph; ``y`` may be one for all."""
        parted = zip(torch.split(e, CHUNK), torch.split(y.expand(len(e), -1, -1), CHUNK))
        return torch.cat([self._misfit(x.clone().requires_grad_(True), labels, False).detach() for x, labels in parted])

    def _tokens(self, e: Tensor) -> Tensor:
        near = nearest_tokens(e, self.table, self.ordinary, 1)[..., 0]
        return torch.where(self.free, near, self.frame)

    def _start(self) -> tuple[Tensor, Tensor]:
        """The best of random texts."""
        work = self.work
        draws = torch.randint(len(self.ordinary), (work.candidates, *self.frame.shape), generator=self.rng)
        e = self.table[torch.where(self.free, self.ordinary[draws], self.frame)]
        y = torch.zeros(len(self.lengths), self.classes)
        kept = self._scores(e, y).topk(min(work.restarts, work.candidates), largest=False).indices
        return e[kept], y + 0.1 * torch.randn(len(kept), *y.shape, generator=self.rng)

    def _continuous(self, e: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The best texts, labels and distances that each restart passed."""
        s, work = self.settings, self.work
        e, y = e.clone().requires_grad_(True), y.clone().requires_grad_(True)
        rates = [s.learning_rate * float(self.table.std()), s.learning_rate]
        optimizer = torch.optim.AdamW([{"params": [x], "lr": r} for x, r in zip((e, y), rates)], weight_decay=0.0)
        typical = self.table.norm(dim=1).mean()
        best = torch.full((len(e),), float("inf"))
        best_e, best_y = e.detach().clone(), y.detach().clone()
        wanted = [e] if self.granted is not None else [e, y]
        for step in range(work.steps):
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate * s.decay ** (step // s.decay_every)
            loss = self._misfit(e, y, True)
            with torch.no_grad():
                better = loss < best
                best[better], best_e[better], best_y[better] = loss[better], e[better], y[better]
            whole = loss
            if s.embedding_norm:
                whole = whole + s.embedding_norm * (e.norm(dim=-1).mean((1, 2)) - typical).square()
            slopes = torch.autograd.grad(whole.sum(), wanted, allow_unused=True)
            if not all(bool(torch.isfinite(g).all()) for g in slopes if g is not None):
                raise AttackFailed(f"the optimisation diverged at step {step} (gradient not finite)")
            for variable, slope in zip(wanted, slopes):
                variable.grad = slope
            assert e.grad is not None
            e.grad = e.grad * self.free[..., None]
            optimizer.step()
            if s.reorder and step >= work.steps // 10 and step % work.every == work.every - 1:
                self._reorder(e, y, optimizer)
        return best_e, best_y, best

    def _reorder(self, e: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Each restart takes the best of some other orders of its embeddings (LAMP)."""
        same = torch.arange(self.free.shape[1]).expand(1, *self.free.shape)
        for k in range(len(e)):
            tried = torch.cat([same, orders(self.free, self.work.orders, self.rng)])
            scores = self._scores(reordered(e[k].detach().expand(len(tried), -1, -1, -1), tried), y[k].detach())
            if self.prior is not None:
                ids = self._tokens(e[k].detach()).expand_as(tried).gather(-1, tried)
                likely = [self.prior.log_probability(x[real].tolist()) for batch in ids for x, real in zip(batch, self.free)]
                per_text = torch.tensor(likely).view(len(tried), -1)
                scores -= self.settings.prior * per_text.sum(1) / self.free.sum()
            best = tried[int(scores.argmin())]
            with torch.no_grad():
                state = optimizer.state[e]
                for x in (e, state["exp_avg"], state["exp_avg_sq"]):
                    x[k] = reordered(x[k], best)

    def _discrete(self, ids: Tensor, y: Tensor) -> tuple[float, Tensor]:
        """The best texts of a beam search over the tokens of ``ids`` ``(batch, length)``, with their distance.

        GRAB, Algorithm 3: the beams begin with the best of random orders; place after place takes every token of its text.
        """
        work = self.work
        beam = torch.cat([ids[None], self._shuffled(ids, work.orders)])
        scores = self._scores(self.table[beam], y)
        places = self.free.nonzero().tolist()
        for _ in range(work.sweeps):
            before = float(scores.min())
            for text, place in places:
                kept = scores.topk(min(work.beam, len(scores)), largest=False).indices
                beam, scores = beam[kept], scores[kept]
                fresh = []
                for x in beam:
                    tokens = torch.unique(x[text][self.free[text]])
                    changed = x.repeat(len(tokens), 1, 1)
                    changed[:, text, place] = tokens
                    fresh.append(changed[tokens != x[text, place]])
                new = torch.unique(torch.cat(fresh), dim=0)
                if len(new):
                    beam, scores = torch.cat([beam, new]), torch.cat([scores, self._scores(self.table[new], y)])
            if float(scores.min()) >= before:
                break
        best = int(scores.argmin())
        return float(scores[best]), beam[best]

    def _shuffled(self, ids: Tensor, count: int) -> Tensor:
        """``count`` copies of ``ids`` with the free tokens of each text in random order."""
        out = ids.repeat(count, 1, 1)
        for row in out:
            for text, real in zip(row, self.free):
                spots = real.nonzero().flatten()
                text[spots] = text[spots[torch.randperm(len(spots), generator=self.rng)]]
        return out
