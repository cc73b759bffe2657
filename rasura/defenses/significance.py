"""The importance of a gradient's entries: the significance metrics of selective encryption, and ours.

After "selective encryption" (``papers``: sec. 4.2, Table 1, and sec. 5): Sens, ProdSig, Grad, Param; Attn and OneFifth-i,
which name layers; Random; and Structural (ours): the embeddings and every linear weight of every block, whatever their size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.interfaces import InputError, NotApplicable
from rasura.core.rng import Randomness, uniform
from rasura.core.updates import classified
from rasura.defenses.structure import embedding_parameters, stacks, up_to_the_blocks

SCORED = ("grad", "param", "prodsig", "random", "sens", "sens-exact", "sens-discrete")
"""Metrics that score every entry; the entries with the largest scores are sealed."""

TOGETHER = 8
"""Number of probes of Sens computed at once, so that the weights are read once for all of them."""

NAMED = ("all", "structural", "attn", *(f"onefifth-{i}" for i in range(1, 6)))
"""Policies that name whole tensors."""

PROBES = 64
"""Number of probes of the randomised Sens. With 16, the masks of two runs at a tenth agree on seven tenths; fewer are not
reproducible."""


def scores(
    metric: str, model: nn.Module, gradients: Mapping[str, Tensor], inputs: Mapping[str, Tensor], rng: Randomness
) -> dict[str, Tensor]:
    """The significance of every entry of ``gradients`` by one of ``SCORED``; higher is more significant. ``inputs``: the
    model's inputs, labels included; only Sens uses them. The embeddings' entries are 0 for Sens, which has the input
    embeddings as its variable.
    """
    parameters = dict(model.named_parameters())
    if metric == "grad":
        return {n: g.abs() for n, g in gradients.items()}
    if metric == "param":
        return {n: parameters[n].detach().abs().cpu() for n in gradients}
    if metric == "prodsig":
        return {n: (g * parameters[n].detach().cpu()).abs() for n, g in gradients.items()}
    if metric == "random":
        return {n: uniform(g.shape, rng) for n, g in gradients.items()}
    if metric not in SCORED:
        raise InputError(f"unknown significance {metric!r}; known: {', '.join((*SCORED, *NAMED))}")
    found = sensitivity(model, inputs, gradients, metric.removeprefix("sens").strip("-") or "randomised", rng)
    return {n: found[n].cpu() if n in found else torch.zeros_like(g) for n, g in gradients.items()}


def sensitivity(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    names: Iterable[str],
    method: str,
    rng: Randomness,
    probes: int = PROBES,
) -> dict[str, Tensor]:
    """Sens: the mean over input coordinates j of |d g_i / d x_j|, x being the input embeddings or pixels, by parameter name.

    ``exact``: a forward-over-reverse product for every coordinate, for tiny models. ``discrete``: central differences with
    step 1, the paper's approximation (sec. 5.4). ``randomised`` (ours): of products with vectors of independent Cauchy
    entries each is Cauchy with the row's L1 norm as scale, and the log of such a variable's size has the mean log of that
    norm: the exponential of the mean log over ``probes`` products estimates it, at a cost that does not grow with the text.
    Parameters that the loss does not depend on behind the embeddings are left out.
    """
    at, gradient = _gradient_of_input(model, inputs, names)
    if method == "randomised":
        logs: dict[str, Tensor] = {}
        for start in range(0, probes, TOGETHER):
            count = min(TOGETHER, probes - start)
            probe = torch.tan(math.pi * (uniform((count, *at.shape), rng) - 0.5)).to(at)
            # The largest entries of a Cauchy vector are thousands; the product is linear, so it is taken at size 1.
            sizes = probe.flatten(1).abs().amax(1)
            moves = torch.func.vmap(lambda direction: _product(gradient, at, direction))(
                probe / sizes.view(-1, *[1] * at.dim())
            )
            for n, m in moves.items():
                sized = m.abs() * sizes.view(-1, *[1] * (m.dim() - 1))
                logs[n] = logs.get(n, torch.zeros_like(m[0])) + sized.clamp_min(1e-30).log().sum(0)
        return {n: (log / probes).exp() / at.numel() for n, log in logs.items()}
    sums: dict[str, Tensor] = {}
    for j in range(at.numel()):
        unit = torch.zeros_like(at)
        unit.view(-1)[j] = 1
        if method == "exact":
            moved = _product(gradient, at, unit)
        else:
            above, below = gradient(at + unit), gradient(at - unit)
            moved = {n: (above[n] - below[n]) / 2 for n in above}
        for n, m in moved.items():
            sums[n] = sums.get(n, torch.zeros_like(m)) + m.detach().abs()
    return {n: total / at.numel() for n, total in sums.items()}


def _product(gradient: Callable[[Tensor], dict[str, Tensor]], at: Tensor, direction: Tensor) -> dict[str, Tensor]:
    found: Any = torch.func.jvp(gradient, (at,), (direction,))
    return {n: m.detach() for n, m in found[1].items()}


def _gradient_of_input(
    model: nn.Module, inputs: Mapping[str, Tensor], names: Iterable[str]
) -> tuple[Tensor, Callable[[Tensor], dict[str, Tensor]]]:
    rest, below, variable = dict(inputs), set(), "pixel_values"
    if variable in rest:
        at = rest.pop(variable)
    else:
        word: Any = model.get_input_embeddings()  # type: ignore[operator]  # a Hugging Face model
        at, variable = word(rest.pop("input_ids")).detach(), "inputs_embeds"
        below = {id(p) for p in word.parameters()}
    wanted = set(names)
    own = {n: p.detach() for n, p in model.named_parameters() if n in wanted and id(p) not in below}
    losses = _Losses(model)

    def loss(some: dict[str, Tensor], e: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(losses, {f"model.{n}": p for n, p in some.items()}, (variable, e, rest))
        return out

    def gradient(e: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = torch.func.grad(loss)(own, e)
        return found

    return at, gradient


class Inseparable(NotApplicable, InputError):
    """The model takes no embeddings in place of tokens, so nothing tells how the gradient moves with them."""


class _Losses(nn.Module):
    """The loss of ``model`` on pixels or word embeddings."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, variable: str, at: Tensor, rest: Mapping[str, Tensor]) -> Tensor:
        labels = rest["labels"]
        try:
            if variable == "inputs_embeds" and labels.dim() == 1:
                others = {n: v for n, v in rest.items() if n not in ("labels", "attention_mask")}
                return nn.functional.cross_entropy(classified(self.model, at, rest["attention_mask"], **others), labels)
            out: Tensor = self.model(**rest, **{variable: at}).loss
        except NotImplementedError:  # T5's classifier
            of = type(self.model).__name__
            raise Inseparable(
                f"{of} takes no embeddings in place of tokens, which sens needs; seal by another one"
            ) from None
        return out


def named(policy: str, model: nn.Module, names: Iterable[str]) -> set[str]:
    """Which of the tensors ``names`` a policy of ``NAMED`` seals."""
    every = list(names)
    if policy == "all":
        return set(every)
    parameters = dict(model.named_parameters())
    embedding = {id(p) for p in embedding_parameters(model)}
    if policy == "structural":
        chosen = embedding | {id(p) for p in up_to_the_blocks(model) if p.dim() > 1}
        return {n for n in every if id(parameters[n]) in chosen}
    if policy == "attn":
        called = {m: name.rpartition(".")[2] for name, m in model.named_modules()}
        inside = ((f"{called[stack]}.{part}".lower(), m) for stack in stacks(model) for part, m in stack.named_modules())
        attention = {id(p) for part, m in inside if "attn" in part or "attention" in part for p in m.parameters()}
        found = {n for n in every if id(parameters[n]) in attention}
        if not found:
            raise InputError(f"{type(model).__name__} has no module named attention or attn in its blocks")
        return found
    fifth = int(policy.removeprefix("onefifth-")) if policy in NAMED else 0
    if not fifth:
        raise InputError(f"unknown significance {policy!r}; known: {', '.join((*SCORED, *NAMED))}")
    # The paper counts layers behind the embedding, which LAMP does not use (sec. 5.2).
    layers = [n for n in every if id(parameters[n]) not in embedding]
    start, end = ((fifth - 1) * len(layers)) // 5, (fifth * len(layers)) // 5
    return set(layers[start:end])
