"""The engine behind DLG, TAG and their kin: K restarts as one batch, the best iterate kept, tokens only at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rasura.attacks.dummies import nearest_tokens, ordinary_ids, template, token_table
from rasura.attacks.gradient_matching.factors import Factoriser
from rasura.attacks.gradient_matching.objective import Distance, Kind, soft_cross_entropy
from rasura.attacks.gradient_matching.reorder import orders, reordered
from rasura.attacks.span.rows import block_spaces, visible_blocks
from rasura.attacks.verify import VERIFIED, check
from rasura.interfaces import AttackFailed, Budget, NotApplicable
from rasura.priors import language
from rasura.values import Grant, Observation, Reconstruction
from rasura.victims.models import is_eager, parts


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
    """Work of one budget level; where tokens are reordered, ``orders`` are tried every ``every`` steps."""

    candidates: int
    restarts: int
    steps: int
    orders: int = 0
    every: int = 1


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
        lengths = self._lengths(seen, size)
        return self._optimise(seen, factoriser, observed, visible, lengths, self.levels[budget.level], rng)

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

    def _optimise(
        self,
        seen: Observation,
        factoriser: Factoriser,
        observed: Mapping[str, Tensor],
        visible: Mapping[str, Tensor],
        lengths: tuple[int, ...],
        work: Work,
        rng: torch.Generator,
    ) -> Reconstruction:
        s, vocabulary, model = self.settings, seen.vocabulary, seen.model
        size = len(lengths)
        frame, mask, free = template(vocabulary, lengths)
        table, ordinary = token_table(model, vocabulary), ordinary_ids(vocabulary)
        draws = ordinary[torch.randint(len(ordinary), (work.candidates, *frame.shape), generator=rng)]
        starts = table[torch.where(free, draws, frame)]
        granted = seen.labels if Grant.LABELS in seen else None
        classes = int(model.config.num_labels)  # type: ignore[union-attr, arg-type]  # a Hugging Face config
        guesses = torch.zeros(work.candidates, size, classes)

        prior = language(seen) if s.prior else None
        distance = Distance(observed, s.objective, alpha=s.alpha, visible=visible)

        def misfit(e: Tensor, labels: Tensor, graph: bool) -> Tensor:
            targets = labels.softmax(-1)
            if granted is not None:
                targets = nn.functional.one_hot(granted, classes).to(e.dtype).expand(len(e), -1, -1)
            found = factoriser(e, mask, lambda logits: soft_cross_entropy(logits, targets), graph=graph)
            return distance(found)

        first = []
        for chunk, labels in zip(starts.split(4), guesses.split(4)):  # type: ignore[no-untyped-call]
            first.append(misfit(chunk.clone().requires_grad_(True), labels, False).detach())
        kept = torch.cat(first).topk(min(work.restarts, work.candidates), largest=False).indices
        e = starts[kept].clone().requires_grad_(True)
        y = (guesses[kept] + 0.1 * torch.randn(guesses[kept].shape, generator=rng)).requires_grad_(True)
        rates = {"e": s.learning_rate * float(table.std()), "y": s.learning_rate}
        groups = [{"params": [e], "lr": rates["e"]}, {"params": [y], "lr": rates["y"]}]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.0)

        def reorder() -> None:
            for k in range(len(e)):
                same = torch.arange(free.shape[1]).expand(1, *free.shape)
                tried = torch.cat([same, orders(free, work.orders, rng)])
                moved = reordered(e[k].detach().expand(len(tried), -1, -1, -1), tried)
                parted = torch.split(moved, 16)
                scores = torch.cat([misfit(x.requires_grad_(True), y[[k] * len(x)], False).detach() for x in parted])
                if prior is not None:
                    ids = nearest_tokens(e[k].detach(), table, ordinary, 1)[..., 0]
                    turned_ids = ids.expand_as(tried).gather(-1, tried)
                    texts = [batch[b][free[b]].tolist() for batch in turned_ids for b in range(size)]
                    likely = torch.tensor([prior.log_probability(t) for t in texts]).view(-1, size).sum(1)
                    scores -= s.prior * likely / free.sum()
                best = int(scores.argmin())
                with torch.no_grad():
                    state = optimizer.state[e]
                    for x in (e, state["exp_avg"], state["exp_avg_sq"]):
                        x[k] = reordered(x[k], tried[best])

        typical = table.norm(dim=1).mean()
        best = torch.full((len(e),), float("inf"))
        best_e = e.detach().clone()
        for step in range(work.steps):
            for group, rate in zip(optimizer.param_groups, rates.values()):
                group["lr"] = rate * s.decay ** (step // s.decay_every)
            loss = misfit(e, y, True)
            with torch.no_grad():
                better = loss < best
                best = torch.where(better, loss, best)
                best_e = torch.where(better[:, None, None, None], e, best_e)
            whole = loss
            if s.embedding_norm:
                whole = whole + s.embedding_norm * (e.norm(dim=-1).mean((1, 2)) - typical).square()
            wanted = [e] if granted is not None else [e, y]
            slopes = torch.autograd.grad(whole.sum(), wanted, allow_unused=True)
            if not all(bool(torch.isfinite(g).all()) for g in slopes if g is not None):
                raise AttackFailed(f"the optimisation diverged at step {step} (gradient not finite)")
            for variable, slope in zip(wanted, slopes):
                variable.grad = slope
            assert e.grad is not None
            e.grad = e.grad * free[..., None]
            optimizer.step()
            if s.reorder and step >= work.steps // 10 and step % work.every == work.every - 1:
                reorder()
        winner = int(best.argmin())
        near = nearest_tokens(best_e[winner], table, ordinary, 1)[..., 0]
        ids = torch.where(free, near, frame)
        tokens = tuple(tuple(int(t) for t in row[:n]) for row, n in zip(ids, lengths))
        details = {"restarts": len(e), "steps": work.steps, "objective": s.objective}
        error, labels_found = check(seen, tokens)
        if error < VERIFIED:
            return Reconstruction(tokens, "verified", labels=labels_found, residual=error, details=details)
        return Reconstruction(tokens, "matched", residual=float(best[winner]), details=details)
