"""The discrete pass: from near misses to texts at the float floor, by beam search over a small pool of tokens.

Scored by evaluation, the true token at a place is among the best few of a pool even while half of the others are wrong;
a gradient's linear estimate is not (measured on a trained BERT: rank 0 to 4 of 50 against 0 to 34).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rasura.attacks.shared.dummies import nearest_tokens
from rasura.attacks.shared.labelings import pad
from rasura.attacks.updates.span_matching.objective import Body, Objective

Beam = list[tuple[float, Body]]
"""Texts with their residuals, best first."""


def neighbours(text: Body, spot: int, pool: Sequence[int], *, resize: bool) -> set[Body]:
    """Texts one change away at ``spot``: a token of ``pool``, a swap, a move; with ``resize`` one token less or more."""
    before, token, after = text[:spot], text[spot], text[spot + 1 :]
    out = {(*before, t, *after) for t in pool}
    rest = (*before, *after)
    for j, other in enumerate(text):
        swapped = list(text)
        swapped[spot], swapped[j] = other, token
        out.add(tuple(swapped))
        out.add((*rest[:j], token, *rest[j:]))
    if resize:
        out |= {(*before, t, token, *after) for t in pool}
        if rest:
            out.add(rest)
    return out - {text}


def beam_search(
    objective: Objective,
    starts: Sequence[Body],
    pool: Sequence[int],
    *,
    width: int,
    floor: float,
    sweeps: int,
    rng: torch.Generator,
    resize: bool = False,
    barred: Callable[[Body], bool] = lambda text: False,
) -> Beam:
    """Up to ``width`` texts after sweeps over all spots, until one is under ``floor`` or a sweep changes nothing.

    ``barred`` texts are not followed.
    """
    texts = [s for s in dict.fromkeys(starts) if not barred(s)]
    if not texts:
        return []
    beam = _best(objective, texts, width)
    for _ in range(sweeps):
        before = beam[0][0]
        for spot in torch.randperm(max(len(t) for _, t in beam), generator=rng).tolist():
            tried: set[Body] = set()
            for _, text in beam:
                if spot < len(text):
                    tried |= neighbours(text, spot, pool, resize=resize)
            fresh = sorted(t for t in tried - {t for _, t in beam} if not barred(t))
            if fresh:
                beam = sorted([*beam, *_best(objective, fresh, width)])[:width]
            if beam[0][0] < floor:
                return beam
        if beam[0][0] >= before * (1 - 1e-6):
            break
    return beam


def _best(objective: Objective, texts: Sequence[Body], width: int) -> Beam:
    scores = objective.texts(texts)
    best = scores.topk(min(width, len(texts)), largest=False)
    return [(float(r), texts[int(i)]) for r, i in zip(best.values, best.indices)]


def fill_holes(
    objective: Objective,
    texts: Sequence[Body],
    table: Tensor,
    ordinary: Tensor,
    *,
    rate: float,
    rng: torch.Generator,
    holes: int = 16,
    steps: int = 60,
    nearest: int = 64,
) -> list[Body]:
    """``texts`` with one token taken away and a hole, there or elsewhere, filled with a token that may be in no pool.

    All (taken, opened) pairs are scored with a neutral hole; the best ``holes`` are filled by gradient descent on the
    hole's embedding alone, which is slow to reach its token but soon near it: so its ``nearest`` tokens of ``ordinary`` are
    tried, too. Returns texts, best first.
    """
    neutral = int(ordinary[0])
    open_texts = {
        ((*rest[:j], neutral, *rest[j:]), j)
        for text in texts
        for rest in {(*text[:i], *text[i + 1 :]) for i in range(len(text))}
        for j in range(len(text))
    }
    tried = sorted(open_texts)
    begin = len(objective.prefix)
    ids, mask = pad([objective.whole(body) for body, _ in tried], objective.pad_id)
    where = torch.tensor([begin + j for _, j in tried])
    embedded, mask = table[ids], mask[:, None]
    embedded[torch.arange(len(ids)), where] = table[ordinary].mean(0)
    with torch.no_grad():
        parts = zip(torch.split(embedded[:, None], 64), torch.split(mask, 64))
        scores = torch.cat([objective.embeddings(e, m, 0.0) for e, m in parts])
    best = scores.topk(min(holes, len(scores)), largest=False).indices
    rows, columns, base, mask = torch.arange(len(best)), where[best], embedded[best], mask[best]
    # A real token is a better start than the mean of all.
    hole = table[ordinary[torch.randint(len(ordinary), (len(best),), generator=rng)]].clone().requires_grad_(True)
    optimizer = torch.optim.Adam([hole], lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        e = base.clone()
        e[rows, columns] = hole
        (hole.grad,) = torch.autograd.grad(objective.embeddings(e[:, None], mask, 0.0).sum(), hole)
        optimizer.step()
    near = nearest_tokens(hole.detach(), table, ordinary, nearest).tolist()
    bodies = []
    for k, tokens in zip(best.tolist(), near):
        body, j = tried[k]
        bodies += [(*body[:j], token, *body[j + 1 :]) for token in tokens]
    bodies = list(dict.fromkeys(bodies))
    return [bodies[int(i)] for i in objective.texts(bodies).argsort()]
