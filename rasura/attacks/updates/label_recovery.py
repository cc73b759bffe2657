"""Labels from the head: softmax minus one-hot, summed over the batch, is the gradient of the classifier's bias.

The sign names the labels that are present (iDLG, Zhao et al. 2020); with the batch size their counts follow (GradInversion,
Yin et al. 2021), up to the head's own mean prediction, which the attacker's model estimates.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Generator, Tensor, nn

from rasura.attacks.shared.mechanism import announced_noise
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.specs import CLASSIFIERS, AttackSpec
from rasura.core.updates import announced_update
from rasura.core.values import Grant, Observation, Reconstruction, Vocabulary
from rasura.victims.models import Linear, layer_inputs, one_class_each, parts

_PROBES = 16
_PROBE_TOKENS = 12
_ALIGNED = 3.0
"""Least cosine between the head's typical input and the observed one at which the sign of a bias-free head can be told, in
multiples of what chance gives, 1 / sqrt(hidden)."""

UNBALANCED = 0.005
"""Share of its size by which the gradient of an output bias may sum to other than zero: rounding the entries to 16 bits
leaves 0.002 or less."""

UNSIGNED = "the labels depend on the sign of the update, which is not known; state its kind (--update fedsgd: a gradient)"


def _probe(model: nn.Module, head: Linear, rng: Generator, vocabulary: Vocabulary | None) -> tuple[Tensor, Tensor]:
    """What the model makes of random texts: mean class probabilities ``(classes,)`` and mean head input ``(hidden,)``."""
    embedding = model.get_submodule(parts(model).word_embedding.rsplit(".", 1)[0])
    assert isinstance(embedding, nn.Embedding)
    ids = torch.randint(0, embedding.num_embeddings, (_PROBES, _PROBE_TOKENS), generator=rng)
    if vocabulary is not None:
        barred = torch.tensor(sorted(vocabulary.special_ids | vocabulary.unused_ids), dtype=torch.long)
        ids[torch.isin(ids, barred)] = next(i for i in range(vocabulary.size) if i not in set(barred.tolist()))
        prefix, suffix = torch.tensor(vocabulary.prefix).long(), torch.tensor(vocabulary.suffix).long()
        ids = torch.cat([prefix.expand(_PROBES, -1), ids, suffix.expand(_PROBES, -1)], dim=1)
    ids = ids.to(next(model.parameters()).device)
    probabilities, inputs = [], []
    with torch.no_grad():
        # One at a time: decoders without a padding token refuse a batch.
        for row in torch.split(ids, 1):
            mask = torch.ones_like(row)
            logits = model(input_ids=row, attention_mask=mask).logits
            states = layer_inputs(model, [head.module], input_ids=row, attention_mask=mask)[head.module]
            probabilities.append(logits[0].double().softmax(0))
            inputs.append(states.reshape(-1, states.shape[-1])[-1].double())  # decoders score every position, use the last
    return torch.stack(probabilities).mean(0).cpu(), torch.stack(inputs).mean(0).cpu()


def _last_linear(model: nn.Module) -> Linear | None:
    """The head of an image classifier."""
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    bias = names and dict(model.named_modules())[names[-1]].bias is not None
    return Linear(names[-1], f"{names[-1]}.weight", f"{names[-1]}.bias" if bias else None, False) if names else None


def _probe_images(model: nn.Module, head: Linear, rng: Generator) -> tuple[Tensor, Tensor]:
    """As ``_probe``, of grey images with noise."""
    config: Any = model.config
    size = (_PROBES, config.num_channels, config.image_size, config.image_size)
    pixels = (0.5 + 0.2 * torch.randn(size, generator=rng)).clamp(0, 1)
    with torch.no_grad():
        probabilities = model(pixel_values=pixels).logits.double().softmax(1)
        inputs = layer_inputs(model, [head.module], pixel_values=pixels)[head.module].double()
    return probabilities.mean(0), inputs.mean(0)


def class_deltas(seen: Observation, head: Linear, typical: Tensor) -> tuple[Tensor, bool]:
    """Mean over the batch of softmax minus one-hot, ``(classes,)`` up to a positive factor, and whether it is exact.

    From the head's bias; else from the bias of the norm before the head, whose gradient is the head's weight times the
    deltas; else from the head's weight gradient and the ``typical`` input of the head. Raises ``NotApplicable`` when none of
    them is in the update, ``AttackFailed`` when the last one leaves the sign open.
    """
    bias = seen.gradients.get(head.bias) if head.bias is not None else None
    if head.bias is not None and bias is not None and bool(seen.visible.get(head.bias, torch.ones(1)).all()):
        return bias.double().cpu(), True
    weight = dict(seen.model.named_parameters())[head.weight].detach().double().cpu()
    weight = weight.T if head.transposed else weight  # (classes, hidden)
    for name, gradient in seen.gradients.items():
        # Only a layer that adds into the head's input has a gradient within the head's few rows.
        if gradient.shape == typical.shape and name not in seen.visible and name != head.bias and len(weight) < len(typical):
            target = gradient.double().cpu()
            deltas = torch.linalg.lstsq(weight.T, target[:, None], driver="gelsd").solution.flatten()
            if bool(target.any()) and (deltas @ weight - target).norm() < 1e-4 * target.norm():
                return deltas, True
    gradient = seen.gradients.get(head.weight, torch.empty(0))
    if not gradient.numel() or (head.weight in seen.visible and not bool(seen.visible[head.weight].any())):
        raise NotApplicable(f"neither the head's bias nor its weight ({head.weight}) is in the update")
    rows = (gradient.T if head.transposed else gradient).double().cpu()
    direction = torch.linalg.svd(rows, full_matrices=False).Vh[0]
    cosine = abs(float(direction @ typical)) / float(typical.norm())
    needed = _ALIGNED / len(typical) ** 0.5
    if not cosine > needed:
        raise AttackFailed(
            f"the head has no bias, and its input is not aligned with a typical one (cosine {cosine:.2f}, needed "
            f"{needed:.2f}): the sign of its gradient does not identify a label"
        )
    return rows @ typical, False


def _off(deltas: Tensor) -> float:
    """How far ``deltas`` ``(classes,)`` are from a sum of zero. Softmax and one-hot both sum to one, so true ones have that
    sum; independent noise does not, nor does another loss."""
    return abs(float(deltas.sum())) / math.sqrt(len(deltas))


def refuse_other_losses(seen: Observation, deltas: Tensor) -> None:
    """Raises ``AttackFailed`` where the gradient ``deltas`` ``(classes,)`` of an output bias, from a file of unknown loss,
    cannot be that of plain cross entropy. AdamW's steps sum to anything."""
    if seen.message.sign == "known" or announced_noise(seen)[0] > 0 or announced_update(seen).adaptive:
        return
    if _off(deltas) > UNBALANCED * float(deltas.norm()):
        raise AttackFailed(
            "the gradient of the head's bias does not sum to zero over the labels, as that of plain cross entropy does. The "
            "loss was another one, or noise or rounding moved it, so no label is named"
        )


def counts(deltas: Tensor, expected: Tensor, size: int) -> list[int]:
    """How many texts have each label: ``size * (expected - deltas)``, rounded so that it sums to ``size``.

    ``expected``: the head's mean probabilities. A label with a negative delta is present for certain; the others share what
    is left by largest remainder.
    """
    share = (size * (expected - deltas)).clamp_min(0)
    min_counts = (deltas < 0).long()
    if int(min_counts.sum()) >= size:
        chosen = deltas.sort(stable=True).indices[:size]
        return [int(i in chosen.tolist()) for i in range(len(deltas))]
    whole = torch.maximum(share.floor().long(), min_counts)
    while int(whole.sum()) < size:
        whole[int((share - whole).argmax())] += 1
    while int(whole.sum()) > size:
        over = torch.where(whole > min_counts, whole - share, torch.full_like(share, -torch.inf))
        whole[int(over.argmax())] -= 1
    return [int(n) for n in whole]


class LabelRecovery:
    """Which labels the batch holds, from the head's gradient; no text is guessed (``tokens=()``).

    ``labels`` lists every text's label in ascending order (not by text). At batch size 1 the label is exact where the client
    is known to take plain cross entropy, as in an audit (``details['exact']``). In a captured file it is an estimate: label
    smoothing turns the sign where the model is certain of the label, and without the text the size tells nothing. At larger
    sizes the counts lean on the head's mean prediction, and on a gradient that was not rescaled by clipping. Without a
    granted batch size only the labels whose gradient is negative are listed, once each. Where the sign of the update is not
    known, only one text and three classes or more tell a label: its delta is the largest.

    Raises ``NotApplicable`` for a causal model, a regression or multi-label head, and where the head's gradient is not in
    the update; ``AttackFailed`` where noise hides the sign, or it is not known.
    """

    name = "labels"
    needs = frozenset({Grant.MODEL})
    uses = frozenset({Grant.BATCH_SIZE, Grant.BASE_MODEL})

    def __call__(self, seen: Observation, *, rng: Generator, budget: Budget) -> Reconstruction:
        if seen.task == "causal":
            raise NotApplicable("labels are of classifiers; those of a causal model are its own tokens")
        head = _last_linear(seen.model) if seen.task == "vision" else parts(seen.model).head
        if head is None or not one_class_each(seen.model):
            raise NotApplicable("the model has no single-label classification head of two classes or more")
        vocabulary = seen.vocabulary if Grant.BASE_MODEL in seen else None
        probe = _probe_images(seen.model, head, rng) if seen.task == "vision" else None
        expected, typical = probe or _probe(seen.model, head, rng, vocabulary)
        if len(expected) < 2:
            raise NotApplicable("the head has one output, a regression; expected two labels or more")
        deltas, exact = class_deltas(seen, head, typical)
        if not bool(torch.isfinite(deltas).all()) or not bool(deltas.any()):
            raise AttackFailed("the head's gradient is zero or not finite")
        if exact:
            refuse_other_losses(seen, deltas)
        off = _off(deltas)
        noisy = off > 1e-3 * float(deltas.norm())
        if noisy and -float(deltas.min()) < 3 * off:
            raise AttackFailed("the head's gradient does not sum to zero over the labels: noise hides the sign")
        size = seen.batch_size if Grant.BATCH_SIZE in seen else None
        labels: tuple[int, ...]
        ours = seen.message.sign == "known"  # so is the loss
        details = {"exact": ours and exact and size == 1 and not noisy, "from": "bias" if exact else "weight"}
        if seen.message.sign == "unknown":
            if size != 1 or len(deltas) < 3:
                raise AttackFailed(UNSIGNED)
            labels = (int(deltas.abs().argmax()),)
        elif size is None:
            labels = tuple(int(i) for i in (deltas < 0).nonzero().flatten())
        elif size == 1:
            labels = (int(deltas.argmin()),)
        else:
            if not exact:  # rows @ typical is in units of the typical input's squared norm
                deltas = deltas / typical.square().sum()
            found = counts(deltas, expected, size)
            labels = tuple(label for label, n in enumerate(found) for _ in range(n))
        return Reconstruction((), "none", labels=labels, details=details)


SPEC = AttackSpec(
    name="labels",
    about="recovers the labels from the gradient of the classifier",
    source="Zhao et al. 2020 (iDLG), sec. 3; Wainakh et al. 2022 (LLG), sec. 4",
    make=LabelRecovery,
    tasks=CLASSIFIERS,
    seconds=0.5,
    work={"quick": 1.0, "default": 1.0, "paper": 1.0},
)
