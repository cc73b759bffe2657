"""The last token of a text in a causal loss: no block's input shows it, since nothing is predicted from it.

It is the target of the position before it. So the output layer's gradient names it; where that is hidden, any other
linear layer does. With the inputs of all positions known, the layer's gradient ``sum_t delta_t x_t^T`` is solved for the
``delta`` of a text's last position. This is ``J^T (softmax - onehot(last token))``, J the Jacobian of its logits by the
layer's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rasura.attacks.shared.verify import VERIFIED, check
from rasura.attacks.updates.span.prefixes import Prefix
from rasura.attacks.updates.span.rows import Inputs, visible_gradients
from rasura.core.values import UNKNOWN, Observation
from rasura.victims.models import Linear, layer_inputs

NEAREST = 32
"""Last tokens for which ``delta`` is computed exactly: those for which it points most in the direction that was found."""

ALIKE = 0.9
"""Least cosine of a last token's ``delta`` with the one that was found. True ones were above .999, others below .8."""

OPTIONS = 4
"""Last tokens of each text that are tried against the whole update."""


def finish(
    observed: Observation, seen: Observation, prefixes: Sequence[Prefix], inputs: Inputs, *, search: bool
) -> list[tuple[int, ...]]:
    """The texts with their last tokens; ``UNKNOWN`` where nothing names one.

    ``seen``: the update with what could be completed of its hidden entries. With ``search`` the likeliest last tokens are
    tried against the whole update ``observed``, which is worth its time where the prefixes are right. Classification losses
    have no such token: the prefixes are the texts.
    """
    if seen.task != "causal":
        return [p.tokens for p in prefixes]
    options = _from_output_layer(observed, prefixes, inputs) or _from_another_layer(seen, prefixes, inputs)
    texts = [(*p.tokens, o[0]) for p, o in zip(prefixes, options)]
    if not search or not all(map(len, options)) or any(UNKNOWN in text for text in texts):
        return texts
    error, _ = check(observed, texts)
    for k, choices in enumerate(options):
        for token in choices[1:]:
            if error < VERIFIED:
                return texts
            tried = [*texts[:k], (*texts[k][:-1], token), *texts[k + 1 :]]
            now, _ = check(observed, tried)
            if now < error:
                texts, error = tried, now
    return texts


def _states(prefixes: Sequence[Prefix], inputs: Inputs, module: str) -> list[Tensor]:
    out = []
    with torch.no_grad():
        for prefix in prefixes:
            ids = torch.tensor([prefix.tokens])
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


def _from_output_layer(seen: Observation, prefixes: Sequence[Prefix], inputs: Inputs) -> list[list[int]] | None:
    """Tokens that may follow each prefix, likeliest first; None where the output layer's gradient is hidden.

    There ``delta`` is ``softmax - onehot(next token)`` itself. With tied weights the rows of the text's own tokens also hold
    their input gradients, so these are all options.
    """
    known = inputs.parts
    if known.head is None:
        return None
    name = known.word_embedding if known.tied else known.head.weight
    gradient = seen.gradients.get(name)
    if gradient is None or name in seen.visible:
        return None
    deltas = _last_deltas(gradient, _states(prefixes, inputs, known.head.module))
    if deltas is None:
        return None
    scores = -deltas
    own = sorted({t for p in prefixes for t in p.tokens}) if known.tied else []
    scores[:, own] = -torch.inf
    return [[int(t) for t in row.topk(OPTIONS).indices] + own for row in scores]


def _from_another_layer(seen: Observation, prefixes: Sequence[Prefix], inputs: Inputs) -> list[list[int]]:
    """The same from the last linear layer that is visible and wide enough; ``UNKNOWN`` where it tells none."""
    known = inputs.parts
    nothing = [[UNKNOWN] for _ in prefixes]
    for lin in reversed(known.linears):
        gradients = [] if lin == known.head else visible_gradients(seen, [lin])
        if not gradients or not any(lin.module.startswith(f"{b.module}.") for b in known.blocks):
            continue
        states = _states(prefixes, inputs, lin.module)
        if any(s.dim() != 2 or len(s) != len(p.tokens) for s, p in zip(states, prefixes)):
            continue  # a layer of an expert, which reads some of the tokens
        deltas = _last_deltas(gradients[0], states)
        if deltas is not None:
            return [_named(inputs.model, lin, p.tokens, delta) or n for p, delta, n in zip(prefixes, deltas, nothing)]
    return nothing


def _named(model: nn.Module, lin: Linear, tokens: Sequence[int], delta: Tensor) -> list[int]:
    """Tokens whose loss behind ``tokens`` has a gradient in the direction of ``delta`` by the output of ``lin``.

    Of the whole vocabulary at once: ``<J^T (p - e_y), delta>`` is ``<p, J delta> - (J delta)_y``. Then exactly for the best.
    """
    outputs: list[Tensor] = []

    def keep(_: nn.Module, __: tuple[Any, ...], out: Tensor) -> Tensor:
        outputs.append(out.detach().requires_grad_(True))
        return outputs[-1].clone()  # Falcon adds to it in place

    ids = torch.tensor([list(tokens)])
    handle = model.get_submodule(lin.module).register_forward_hook(keep)
    try:
        with torch.enable_grad():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -1]
            out = outputs[-1]
            ones = torch.zeros_like(logits, requires_grad=True)
            (back,) = torch.autograd.grad(logits, out, ones, create_graph=True)
            direction = torch.zeros_like(out)
            direction.view(-1, len(delta))[-1] = (delta / delta.norm().clamp_min(1e-300)).to(out.dtype)
            (pushed,) = torch.autograd.grad(back, ones, direction, retain_graph=True)
        nearest = (-pushed).topk(min(NEAREST, len(pushed))).indices
        wanted = logits.detach().softmax(0).repeat(len(nearest), 1)
        wanted[torch.arange(len(nearest)), nearest] -= 1
        (own,) = torch.autograd.grad(logits, out, wanted, is_grads_batched=True)
        own = own.reshape(len(nearest), -1, len(delta))[:, -1].double()
        cosines = own @ delta / (own.norm(dim=1) * delta.norm()).clamp_min(1e-300)
    finally:
        handle.remove()
    best = cosines.argsort(descending=True)[:OPTIONS].tolist()
    return [int(nearest[k]) for k in best if float(cosines[k]) > ALIKE]
