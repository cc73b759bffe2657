"""Candidates: was a given text in the round? Compares the text's own gradient at the round's first weights with the update.

A step moves the weights along the gradients of its texts, so a text of the round agrees with the update more than other
texts of its kind. How much of this is left in a sum of many texts, and after many steps, is measured where the answer is
known: on simulated rounds of other texts (``runs.candidates``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from rasura.attacks.shared.comparing import cosine
from rasura.attacks.updates.text_gradients import TextGradient, TextGradients
from rasura.core.errors import InputError
from rasura.core.local import FEDSGD, Local
from rasura.core.updates import changed
from rasura.core.values import Gradients

KEPT = 2**31
"""Bytes of gradients that are kept at once when texts are compared with each other."""


def agreement(
    model: nn.Module, text: Mapping[str, Tensor], sent: Gradients, visible: Mapping[str, Tensor] | None = None
) -> float:
    """The cosine of the gradient of one ``text``, as keyword arguments of the model, and what was ``sent`` (as gradients),
    over visible entries; NaN if either is zero or not finite."""
    own, _ = changed(model, _moved(text, model), list(sent))
    return cosine(own, sent, visible)


def _moved(text: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in text.items()}


def last_weights(model: nn.Module, sent: Gradients, local: Local) -> dict[str, Tensor]:
    """The parameters that were ``sent`` as they are at the end of the round."""
    return {n: model.get_parameter(n).detach() - local.learning_rate * g.to(model.get_parameter(n)) for n, g in sent.items()}


def fall(model: nn.Module, text: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """How far the loss of one ``text`` falls from the round's first weights to its last, ``after``, over the first loss; NaN
    if the first is zero, or either is not finite."""
    inputs = _moved(text, model)
    with torch.no_grad():
        first = float(model(**inputs).loss)
        last = float(torch.func.functional_call(model, dict(after), (), inputs).loss)
    return (first - last) / first if 0 < first < math.inf and abs(last) < math.inf else math.nan


def scores(
    model: nn.Module,
    texts: Iterable[Mapping[str, Tensor]],
    sent: Gradients,
    local: Local = FEDSGD,
    visible: Mapping[str, Tensor] | None = None,
    signed: bool = True,
) -> list[float]:
    """How likely each of ``texts`` was in the round that ``sent`` came from; higher is likelier, the scale is arbitrary.

    Of one gradient, and where entries are hidden, the ``agreement``, or its size where the sign of what was ``sent`` is not
    known; of a training, which an adversary knows the weights before and after of, the ``fall`` of the loss. NaN for a text
    that has none. Raises ``InputError`` if what was ``sent`` is zero or not finite over visible entries.
    """
    if math.isnan(cosine(sent, sent, visible)):
        raise InputError("the update is zero or not finite, so candidates cannot be compared; expected one round's")
    if local.kind == "fedsgd" or visible:
        found = [agreement(model, text, sent, visible) for text in texts]
        return found if signed else [abs(score) for score in found]
    after = last_weights(model, sent, local)
    return [fall(model, text, after) for text in texts]


def like_earlier(
    model: nn.Module,
    texts: Sequence[Mapping[str, Tensor]],
    others: Sequence[Mapping[str, Tensor]],
    names: Sequence[str],
    visible: Mapping[str, Tensor] | None = None,
    signed: bool = True,
) -> list[bool]:
    """For each of ``texts``, whether it is much like one before it: that one's gradient of the parameters ``names`` agrees
    with its own more than with the gradient of any of ``others``. Where that cannot be computed, it counts as alike. As many
    gradients as fit in ``KEPT`` are compared with those of the others, each of which is computed once for all of them.

    A variant of a text in the round scores high because of that text. Texts that are unlike it are no evidence of how high
    a variant scores.
    """
    if len(texts) < 2:
        return [False] * len(texts)
    gradients = TextGradients(model, names, visible, _moved(texts[0], model))

    def made(text: Mapping[str, Tensor]) -> TextGradient:
        return gradients(_moved(text, model))

    def near(found: TextGradient, among: Sequence[TextGradient]) -> list[float]:
        told = [found.cosine(one) for one in among]
        return told if signed else [abs(c) for c in told]

    out, start = [False] * len(texts), 0
    while not all(out[start + 1 :]):
        kept: list[TextGradient] = []
        while start + len(kept) < len(texts) and sum(one.bytes for one in kept) < KEPT:
            kept.append(made(texts[start + len(kept)]))
        later = [k for k in range(start + 1, len(texts)) if not out[k]]
        own = {k: near(kept[k - start] if k - start < len(kept) else made(texts[k]), kept[: k - start]) for k in later}
        alike = {(k, j): c for k, every in own.items() for j, c in enumerate(every)}
        for text in others:
            if not alike:
                break
            other = near(made(text), kept)
            alike = {(k, j): c for (k, j), c in alike.items() if not other[j] >= c}
        for k, _ in alike:
            out[k] = True
        start += len(kept)
    return out
