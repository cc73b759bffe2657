"""The last token of a text in a causal loss: no block's input shows it, since nothing is predicted from it.

It is the target of the position before it. So the output layer's gradient names it; where that is hidden, any other linear
layer can. With the inputs of all positions known, the layer's gradient ``sum_t delta_t x_t^T`` is solved for the ``delta``
of a text's last position. This is ``J^T (softmax - onehot(last token))``, J the Jacobian of its logits by the layer's
output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rasura.attacks.shared.comparing import PRECISION
from rasura.attacks.shared.verify import VERIFIED, check
from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.predicted import run
from rasura.attacks.updates.span.rows import visible_gradients
from rasura.core.values import UNKNOWN, Observation
from rasura.victims.models import Linear, layer_inputs

DIRECTIONS = 64
"""Directions of a layer's output that every word is compared in, the one of ``delta`` among them: all of an adapter's. The
true word fits in any of them."""

NEAREST = 32
"""Last tokens for which ``delta`` is computed exactly: those that fit best in these directions."""

ALIKE = 0.9
"""Least cosine of a last token's ``delta`` with the one that was found. True ones were above .999, in layers of 576 outputs
others below .8, in adapters of rank 16 below .997."""

CLEAR = 10.0
"""The best token must be so many times as good as the second best to be named: by the distance of its cosine from 1, or by
its part of the output layer's ``delta``."""

OPTIONS = 4
"""Last tokens of each text that are tried against the whole update."""


def finish(
    observed: Observation, seen: Observation, prefixes: Sequence[tuple[int, ...]], inputs: Inputs, *, search: bool
) -> list[tuple[int, ...]]:
    """The texts with their last tokens; ``UNKNOWN`` where nothing names one.

    ``seen``: the update with what could be completed of its hidden entries. With ``search``, the likeliest last tokens are
    tried against the whole update ``observed``; this is worth its time where the prefixes are right. Classification losses
    have no such token: the prefixes are the texts.
    """
    if seen.task != "causal":
        return list(prefixes)
    options = _options(observed, seen, prefixes, inputs)
    named = [(*p, o[0]) for p, o in zip(prefixes, options)]
    options = [[t for t in o if t != UNKNOWN] for o in options]
    if not search or not all(options):
        return named
    texts = [(*p, o[0]) for p, o in zip(prefixes, options)]
    error, _ = check(observed, texts)
    for k, choices in enumerate(options):
        for token in choices[1:]:
            if error < VERIFIED:
                return texts
            tried = [*texts[:k], (*texts[k][:-1], token), *texts[k + 1 :]]
            now, _ = check(observed, tried)
            if now < error:
                texts, error = tried, now
    return texts if error < VERIFIED else [n if n[-1] == UNKNOWN else t for n, t in zip(named, texts)]


def _options(
    observed: Observation, seen: Observation, prefixes: Sequence[tuple[int, ...]], inputs: Inputs
) -> list[list[int]]:
    """Tokens that may follow each prefix, likeliest first, ``UNKNOWN`` before them where none is clear.

    Of tied weights the output layer cannot tell the texts' own tokens apart, and each costs a pass over the whole update.
    So another layer is asked first, and the output layer for those texts where that one is not clear.
    """
    if not inputs.parts.tied:
        return _from_output_layer(observed, prefixes, inputs) or _from_another_layer(seen, prefixes, inputs)
    found = _from_another_layer(seen, prefixes, inputs)
    clear = [one[0] != UNKNOWN for one in found]
    direct = None if all(clear) else _from_output_layer(observed, prefixes, inputs)
    if direct is None:
        return found
    return [one if known else list(dict.fromkeys([*one, *more])) for known, one, more in zip(clear, found, direct)]


def _states(prefixes: Sequence[tuple[int, ...]], inputs: Inputs, module: str) -> list[Tensor]:
    out = []
    with torch.no_grad():
        for prefix in prefixes:
            ids = torch.tensor([prefix])
            found = layer_inputs(inputs.model, [module], input_ids=ids, attention_mask=torch.ones_like(ids))
            out.append(found[module][0].double())
    return out


def _last_deltas(gradient: Tensor, states: Sequence[Tensor]) -> Tensor | None:
    """``delta`` of each text's last position, ``(texts, outputs)``; None where the tokens outnumber the layer's inputs."""
    stacked = torch.cat(list(states))
    if len(stacked) > stacked.shape[1]:
        return None
    ends = torch.tensor([len(s) for s in states]).cumsum(0) - 1
    found: Tensor = (gradient.double() @ torch.linalg.pinv(stacked, rtol=1e-9)[:, ends]).T
    return found


def _from_output_layer(seen: Observation, prefixes: Sequence[tuple[int, ...]], inputs: Inputs) -> list[list[int]] | None:
    """Tokens that may follow each prefix by the output layer, likeliest first; None where its gradient is hidden.

    In the output layer, ``delta`` is ``softmax - onehot(next token)`` itself, below zero for the next token alone; where no
    token is clearly the only one, ``UNKNOWN`` comes first. With tied weights, the rows of the text's own tokens also hold
    their input gradients, so all of these are options.
    """
    known = inputs.parts
    if known.head is None:
        return None
    name = known.word_embedding if known.tied else known.head.weight
    gradient = seen.gradients.get(name)
    turned = seen.message.sign == "unknown"
    if gradient is None or name in seen.visible or (turned and known.tied):
        return None
    deltas = _last_deltas(gradient, _states(prefixes, inputs, known.head.module))
    if deltas is None:
        return None
    scores = -deltas
    if turned:  # the next token's entry outweighs all others together
        scores *= torch.where(-deltas.amin(1) < deltas.amax(1), -1, 1)[:, None]
    own = sorted({t for p in prefixes for t in p}) if known.tied else []
    scores[:, own] = -torch.inf
    best = scores.topk(OPTIONS)
    clear = (best.values[:, 0] > CLEAR * best.values[:, 1].clamp_min(0)).tolist()
    return [[UNKNOWN] * (not one) + ids + own for one, ids in zip(clear, best.indices.tolist())]


def _from_another_layer(seen: Observation, prefixes: Sequence[tuple[int, ...]], inputs: Inputs) -> list[list[int]]:
    """The same by the last other linear layer that is visible and wide enough; ``UNKNOWN`` where it tells none."""
    known = inputs.parts
    nothing = [[UNKNOWN] for _ in prefixes]
    for lin in reversed(known.linears):
        gradients = [] if lin == known.head else visible_gradients(seen, [lin])
        if not gradients or not any(lin.module.startswith(f"{b.module}.") for b in known.blocks):
            continue
        states = _states(prefixes, inputs, lin.module)
        if any(s.dim() != 2 or len(s) != len(p) for s, p in zip(states, prefixes)):
            continue  # a layer of an expert, which reads some of the tokens
        deltas = _last_deltas(gradients[0], states)
        if deltas is not None:
            signs = (1, -1) if seen.message.sign == "unknown" else (1,)
            named = [
                max((_named(inputs.model, lin, p, s * delta) for s in signs), key=lambda one: one[0])
                for p, delta in zip(prefixes, deltas)
            ]
            return [found or n for (_, found), n in zip(named, nothing)]
    return nothing


def _named(model: nn.Module, lin: Linear, tokens: Sequence[int], delta: Tensor) -> tuple[float, list[int]]:
    """Tokens whose loss behind ``tokens`` has a gradient in the direction of ``delta`` by the output of ``lin``, best first;
    ``UNKNOWN`` before them where another one is about as good as the best. With the cosine of the best.

    Of the whole vocabulary by the sides of its ``delta``, then exactly for the best.
    """
    ran = run(model, lin, torch.tensor([list(tokens)]))
    logits = ran.logits[0]
    directions = _directions(delta).to(logits)
    (sides,) = ran.sides(directions)
    along = sides @ (directions @ delta.to(logits)) / sides.norm(dim=1).clamp_min(1e-30)
    nearest = along.topk(min(NEAREST, len(along))).indices
    wanted = logits.detach().softmax(0).repeat(len(nearest), 1)
    wanted[torch.arange(len(nearest)), nearest] -= 1
    (own,) = torch.autograd.grad(logits, ran.output, wanted, is_grads_batched=True)
    own = own.reshape(len(nearest), -1, len(delta))[:, -1].double()
    cosines = own @ delta / (own.norm(dim=1) * delta.norm()).clamp_min(1e-300)
    order = cosines.argsort(descending=True)
    off = (1 - cosines[order]).clamp_min(PRECISION).tolist()
    found = [int(nearest[k]) for k in order[:OPTIONS] if float(cosines[k]) > ALIKE]
    return float(cosines[order[0]]), found if off[1] > CLEAR * off[0] else [UNKNOWN, *found]


def _directions(delta: Tensor) -> Tensor:
    """Orthonormal rows, at most ``DIRECTIONS``: ``delta``'s direction, and others that fill up its space."""
    others = torch.eye(len(delta), DIRECTIONS - 1, dtype=delta.dtype)
    rows: Tensor = torch.linalg.qr(torch.cat([delta[:, None], others], 1)).Q.T
    return rows
