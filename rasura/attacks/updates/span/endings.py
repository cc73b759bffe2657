"""The last token of a text in a causal loss: no block's gradient holds it, since nothing is predicted from it.

It is the target of the position before it, so the output layer's gradient names it; where that is hidden, the model's own
next-token guesses are tried against the whole visible gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rasura.attacks.shared.verify import VERIFIED, check
from rasura.attacks.updates.span.prefixes import Prefix
from rasura.attacks.updates.span.rows import Inputs
from rasura.core.values import UNKNOWN, Observation
from rasura.victims.models import layer_inputs

GUESSES = 512
"""Next tokens tried for each text where the output layer is hidden."""


def finish(seen: Observation, prefixes: Sequence[Prefix], inputs: Inputs, *, search: bool) -> list[tuple[int, ...]]:
    """The texts with their last tokens; ``UNKNOWN`` where nothing names one and no guess fits the gradient.

    With ``search`` every option is tried against the gradient, which is worth its time where the prefixes are right.
    Classification losses have no such token: the prefixes are the texts.
    """
    if seen.task != "causal":
        return [p.tokens for p in prefixes]
    named = _from_output_layer(seen, prefixes, inputs)
    if not search:
        return [(*p.tokens, o[0]) for p, o in zip(prefixes, named)] if named else [(*p.tokens, UNKNOWN) for p in prefixes]
    options = named or _from_model(inputs, prefixes)
    texts = [(*p.tokens, o[0]) for p, o in zip(prefixes, options)]
    error, _ = check(seen, texts)
    for _ in range(2):
        for k, choices in enumerate(options):
            for token in choices:
                if error < VERIFIED:
                    return texts
                tried = [*texts[:k], (*texts[k][:-1], token), *texts[k + 1 :]]
                now, _ = check(seen, tried)
                if now < error:
                    texts, error = tried, now
    return texts if named or error < VERIFIED else [(*p.tokens, UNKNOWN) for p in prefixes]


def _states(prefixes: Sequence[Prefix], inputs: Inputs, module: str) -> list[Tensor]:
    out = []
    with torch.no_grad():
        for prefix in prefixes:
            ids = torch.tensor([prefix.tokens])
            found = layer_inputs(inputs.model, [module], input_ids=ids, attention_mask=torch.ones_like(ids))
            out.append(found[module][0].double())
    return out


def _from_output_layer(seen: Observation, prefixes: Sequence[Prefix], inputs: Inputs) -> list[list[int]] | None:
    """Tokens that may follow each prefix, likeliest first; None where the output layer's gradient is hidden.

    Its gradient is ``sum_t delta_t h_t^T``, ``delta = softmax - onehot(next token)``: with all states known it is solved for
    delta. With tied weights the rows of the text's own tokens also hold their input gradients, so these are all options.
    """
    known = inputs.parts
    if known.head is None:
        return None
    name = known.word_embedding if known.tied else known.head.weight
    gradient = seen.gradients.get(name)
    if gradient is None or name in seen.visible:
        return None
    states = _states(prefixes, inputs, known.head.module)
    stacked = torch.cat(states)
    if len(stacked) > stacked.shape[1]:
        return None
    ends = torch.tensor([len(s) for s in states]).cumsum(0) - 1
    scores = -(gradient.double() @ torch.linalg.pinv(stacked, rtol=1e-9)).T[ends]
    own = sorted({t for p in prefixes for t in p.tokens}) if known.tied else []
    scores[:, own] = -torch.inf
    return [[int(t) for t in row.topk(4).indices] + own for row in scores]


def _from_model(inputs: Inputs, prefixes: Sequence[Prefix]) -> list[list[int]]:
    out = []
    with torch.no_grad():
        for prefix in prefixes:
            ids = torch.tensor([prefix.tokens])
            logits = inputs.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -1]
            out.append([int(t) for t in logits.topk(min(GUESSES, len(logits))).indices])
    return out
