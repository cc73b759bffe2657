"""What one observation tells before any optimisation: shapes, places of known tokens, and how a candidate is judged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rasura.attacks.gradient_matching.factors import Factoriser
from rasura.attacks.gradient_matching.objective import Kind, distance, soft_cross_entropy, soft_next_token_loss
from rasura.attacks.span.rows import block_spaces, visible_blocks
from rasura.interfaces import AttackFailed, NotApplicable
from rasura.values import Grant, Observation, Vocabulary
from rasura.victims.models import is_eager, parts

SENTENCE = 12
"""Length that is assumed when nothing tells: a common sentence, special tokens included."""

SHARPNESS = 50.0
"""Soft next-token targets are ``softmax(SHARPNESS * cosine)``: at an exact embedding all but the token itself vanish."""


@dataclass(frozen=True)
class Problem:
    """Candidates are embeddings ``e`` ``(candidates, batch, length, hidden)`` and label logits ``y``
    ``(candidates, batch, classes)``; ``misfit`` judges them, ``tokens`` reads them.

    ``mask`` ``(batch, length)`` marks real positions, ``free`` those whose token is unknown, ``template`` holds the others'
    ids. ``ordinary``: ids that a text can hold; ``table``: embeddings of all ids. ``labels``: granted labels as one-hots.
    """

    factoriser: Factoriser
    observed: Mapping[str, Tensor]
    visible: Mapping[str, Tensor]
    lengths: tuple[int, ...]
    mask: Tensor
    template: Tensor
    free: Tensor
    table: Tensor
    ordinary: Tensor
    classes: int
    labels: Tensor | None
    causal: bool
    clipped: bool

    @property
    def solves_labels(self) -> bool:
        """Whether labels are unknown and have to be optimised with the text."""
        return not self.causal and self.labels is None

    def misfit(self, e: Tensor, y: Tensor, kind: Kind, alpha: float, *, graph: bool) -> Tensor:
        """Distance from the observed gradient, ``(candidates,)``; squared distances are shares of the observed square."""

        def loss(logits: Tensor) -> Tensor:
            if self.causal:
                return soft_next_token_loss(logits, self._next_tokens(e), self.mask)
            targets = y.softmax(-1) if self.labels is None else self.labels.expand(len(e), -1, -1)
            return soft_cross_entropy(logits, targets)

        factors = self.factoriser(e, self.mask, loss, graph=graph)
        found = distance(factors, self.observed, kind, alpha=alpha, visible=self.visible, rescale=self.clipped)
        if kind in ("cosine", "global-cosine"):
            return found
        # One constant for all: optimisers with an epsilon would otherwise stand still on small gradients.
        return found / torch.stack([self.observed[n].square().sum() for n in factors]).sum()

    def _next_tokens(self, e: Tensor) -> Tensor:
        """Probabilities of the tokens that ``e`` stands for; known tokens are certain."""
        unit = nn.functional.normalize(self.table, dim=-1)
        soft = (SHARPNESS * nn.functional.normalize(e, dim=-1) @ unit.T).softmax(-1)
        hard = nn.functional.one_hot(self.template, len(self.table)).to(soft.dtype)
        return torch.where(self.free[..., None], soft, hard)

    def norm_gap(self, e: Tensor) -> Tensor:
        """LAMP's regulariser: squared difference of the mean norm of a candidate's embeddings and of the table's."""
        norms = (e.norm(dim=-1) * self.mask).sum((1, 2)) / self.mask.sum()
        return (norms - self.table.norm(dim=1).mean()).square()

    def draw(self, count: int, rng: torch.Generator) -> Tensor:
        """Embeddings of ``count`` random texts with the known tokens in place, ``(count, batch, length, hidden)``."""
        picks = torch.randint(len(self.ordinary), (count, *self.mask.shape), generator=rng).to(self.ordinary.device)
        return self.table[torch.where(self.free, self.ordinary[picks], self.template)]

    def tokens(self, e: Tensor) -> tuple[tuple[int, ...], ...]:
        """The nearest ordinary tokens (by cosine) of one candidate ``e`` ``(batch, length, hidden)``, padding cut off."""
        unit = nn.functional.normalize(self.table[self.ordinary], dim=1)
        near = self.ordinary[(nn.functional.normalize(e, dim=-1) @ unit.T).argmax(-1)]
        ids = torch.where(self.free, near, self.template).tolist()
        return tuple(tuple(row[:n]) for row, n in zip(ids, self.lengths))


def pose(seen: Observation) -> Problem:
    """The problem that ``seen`` poses.

    Raises ``NotApplicable`` where matching cannot be tried, with the reason, and ``AttackFailed`` for a broken gradient.
    """
    model, vocabulary = seen.model, seen.vocabulary
    if not is_eager(model):
        raise NotApplicable("fused attention cannot be differentiated twice; load the model with attn_implementation='eager'")
    causal = seen.task == "causal"
    classes = 0 if causal else int(model.config.num_labels)  # type: ignore[union-attr, arg-type]  # a Hugging Face config
    kind = getattr(model.config, "problem_type", None)
    if not causal and (classes < 2 or kind not in (None, "single_label_classification")):
        raise NotApplicable(f"the head has {classes} outputs and problem type {kind}; matching knows single-label classes")
    factoriser = Factoriser(model, list(seen.gradients), seen.task)
    if not factoriser.layers:
        raise NotApplicable("no gradient of a linear layer or norm is visible")
    observed = factoriser.observed(seen.gradients)
    broken = next((n for n, g in observed.items() if not bool(torch.isfinite(g).all())), None)
    if broken is not None:
        raise AttackFailed(f"the observed gradient is not finite ({broken})")
    if not any(bool(g.any()) for g in observed.values()):
        raise AttackFailed("the observed gradient is zero in all linear layers and norms")
    device = next(iter(observed.values())).device
    visible = {n: m.to(device) for n, m in factoriser.turned(seen.visible).items() if not bool(m.all())}
    lengths = seen.lengths if Grant.LENGTHS in seen else estimate_lengths(seen)
    template, free = layout(vocabulary, lengths)
    with torch.no_grad():
        ids = torch.arange(vocabulary.size, device=device)
        table: Tensor = model.get_input_embeddings()(ids)  # type: ignore[operator]  # a Hugging Face model
    barred = vocabulary.special_ids | vocabulary.unused_ids
    ordinary = torch.tensor([i for i in range(vocabulary.size) if i not in barred], device=device)
    labels = None
    if not causal and Grant.LABELS in seen:
        labels = nn.functional.one_hot(seen.labels.to(device), classes).to(table.dtype)
    mechanism = seen.mechanism if Grant.MECHANISM in seen else ()
    return Problem(
        factoriser,
        observed,
        visible,
        lengths,
        torch.stack([torch.arange(max(lengths)) < n for n in lengths]).long().to(device),
        template.to(device),
        free.to(device),
        table,
        ordinary,
        classes,
        labels,
        causal,
        any(math.isfinite(float(m.parameters.get("clip", math.inf))) for m in mechanism),
    )


def layout(vocabulary: Vocabulary, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Ids ``(batch, length)`` with the tokenizer's own tokens (and padding) in place, and which positions are free."""
    prefix, suffix = vocabulary.prefix, vocabulary.suffix
    ids = torch.full((len(lengths), max(lengths)), vocabulary.pad_id or 0)
    free = torch.zeros_like(ids, dtype=torch.bool)
    for row, n in enumerate(lengths):
        ids[row, : len(prefix)] = torch.tensor(prefix, dtype=torch.long)
        ids[row, n - len(suffix) : n] = torch.tensor(suffix, dtype=torch.long)
        free[row, len(prefix) : n - len(suffix)] = True
    return ids, free


def estimate_lengths(seen: Observation) -> tuple[int, ...]:
    """Lengths from what the gradients show; exact for one text without noise, else an assumption that keeps the total.

    The rows of the position embedding's gradient that are not zero give the longest text. The rank of the first visible
    block's attention gradient gives the number of tokens (in block 0 the texts' common first tokens count once). The longest
    text is put first and the rest shared out evenly. Where noise hides both, every text gets ``SENTENCE`` tokens.
    """
    size, vocabulary = seen.batch_size, seen.vocabulary
    fixed = len(vocabulary.prefix) + len(vocabulary.suffix)
    longest = None
    position = seen.gradients.get(parts(seen.model).position_embedding or "")
    if position is not None:
        used = position.norm(dim=1) > 0
        # Noise fills every row, pruning empties some: then the rows tell nothing.
        if not bool(used.all()) and parts(seen.model).position_embedding not in seen.visible and bool(used.any()):
            longest = int(used.sum())
    if size == 1 and longest is not None:
        return (longest,)
    spaces = block_spaces(seen, visible_blocks(seen)[:1])
    if spaces:
        ((index, space),) = spaces.items()
        total = space.rank + (len(vocabulary.prefix) * (size - 1) if index == 0 else 0)
    else:
        total = SENTENCE * size if longest is None else longest * size
    most = longest or int(getattr(seen.model.config, "max_position_embeddings", total))
    first = [longest] if longest is not None and size > 1 else []
    rest, many = total - sum(first), size - len(first)
    even = [rest // many + (1 if k < rest % many else 0) for k in range(many)]
    return tuple(min(max(fixed + 1, n), max(most, fixed + 1)) for n in (*first, *even))
