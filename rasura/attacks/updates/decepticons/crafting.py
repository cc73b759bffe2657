"""Decepticons, the server's part: weights whose gradient holds every token of a batch by itself.

The first block's attention is made uniform and writes what a text has in common into a few coordinates; its feed-forward
layer measures each token in steps; all else lets the loss through to one coordinate. Text can then be read from the first
feed-forward weight alone.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Generator, Tensor, nn

from rasura.attacks.updates.decepticons.layout import (
    DIRECTIONS,
    Layout,
    layout,
    linears_in,
    matrix,
    norms_in,
    query_key_value,
)
from rasura.core.values import Task
from rasura.victims.models import layer_inputs

SHARPNESS = 1e6
"""How fast a step rises, in standard deviations of what is measured: a smooth activation becomes a step."""

AMPLIFIED = {False: 1e7, True: 1e14}
"""Scale of what is measured, where norms follow and where they come first: the larger, the more of the gradient's norm is in
the measuring layer; a norm that follows would lose the loss beside a larger one."""

CARRIED = 0.0025
"""How much the measurement moves the last coordinate, beside what a norm that follows has to hold."""

CODE = 2.5
"""Scale of what the attention writes of one token, where words and places have scale 1."""


def is_crafted(model: nn.Module, where: Layout) -> bool:
    """Whether ``model`` has the weights of ``crafted``: uniform attention, and one coordinate behind the measurement."""
    second = matrix(model, where.second)
    return not bool(second[:-1].any()) and not bool(_query(model, where).any())


def _query(model: nn.Module, where: Layout) -> Tensor:
    """The rows of the first block's query."""
    return matrix(model, where.attention[0])[: where.found.hidden]


def _codes(rows: int, width: int, rng: Generator) -> Tensor:
    """Random rows of mean 0 and variance 1: what is added to each of them then moves no norm."""
    drawn = torch.randn((rows, width), generator=rng)
    drawn -= drawn.mean(1, keepdim=True)
    return drawn / drawn.square().mean(1, keepdim=True).sqrt().clamp_min(1e-12)


def crafted(model: nn.Module, task: Task, rng: Generator) -> nn.Module:
    """A copy of ``model`` with the weights that a malicious server sends; its parameters keep their names and shapes.

    Decepticons (Fowl et al. 2022), sec. 4, with these departures. The paper's attention hands every token its text's first
    token; ours hands it the mean of all tokens that it sees, since the first token of BERT is the same in all texts. The
    paper measures one direction; we measure several, so that tokens that share a step can be told apart. The paper keeps
    the public embeddings and takes the loss of masked or next words; we write random codes into the embeddings, and a
    second block gathers the tokens for a classifier's head.
    """
    model = copy.deepcopy(model)
    where = layout(model, task)
    with torch.no_grad():
        _embed(model, where, task, rng)
        for index in range(len(where.found.blocks)):
            _quiet(model, where, index)
        _share(model, where, rng)
        if task != "causal":
            _gather(model, where)
        _carry(model, where, task, rng)
        _measure(model, where, rng)
        _balance(model, where, task, rng)
    return model


def _embed(model: nn.Module, where: Layout, task: Task, rng: Generator) -> None:
    found = where.found
    assert found.position_embedding is not None
    for name in found.embedding_names:
        parameter = model.get_parameter(name).zero_()
        if parameter.dim() == 1 and name.endswith("weight"):
            parameter[where.code.stop : -1] = 1.0
    for name, at in ((found.word_embedding, where.word), (found.position_embedding, where.place)):
        table = model.get_parameter(name)
        table[:, at] = _codes(len(table), at.stop - at.start, rng).to(table)
    if task == "causal":
        _signs(model.get_parameter(found.word_embedding)[:, -1], rng)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and f"{name}.weight" not in found.embedding_names:
            module.weight.zero_()  # MPNet's: by distance, so that attention would not be uniform


def _signs(column: Tensor, rng: Generator) -> None:
    column.copy_((torch.randint(0, 2, column.shape, generator=rng) * 2.0 - 1).to(column))


def _carrier(width: int) -> Tensor:
    """Signs of mean 0 in all coordinates but the last: they give a norm something to measure besides the loss."""
    out = torch.zeros(width)
    half = (width - 1) // 2
    out[:half], out[half : 2 * half] = 1, -1
    return out


def _set_norm(model: nn.Module, name: str, gain: float, *, last: float, carrier: bool = False) -> None:
    norm = model.get_submodule(name)
    weight, bias = norm.weight, norm.bias
    assert isinstance(weight, Tensor) and isinstance(bias, Tensor)
    weight.fill_(gain)
    weight[-1] = last
    bias.zero_()
    if carrier:
        bias.copy_(_carrier(len(bias)))


def _quiet(model: nn.Module, where: Layout, index: int) -> None:
    """Every linear layer of a block silent, every norm with only the last coordinate let through."""
    for lin in linears_in(where.found, index):
        matrix(model, lin).zero_()
        if lin.bias is not None:
            model.get_parameter(lin.bias).zero_()
    for name in norms_in(model, where.found.blocks[index].module + "."):
        _set_norm(model, name, 0.0, last=1.0, carrier=not where.before)


def _share(model: nn.Module, where: Layout, rng: Generator) -> None:
    """The first block: attention writes its tokens' mean, seen through random directions, into the code's coordinates."""
    width, code = where.found.hidden, where.code.stop
    drawn = torch.randn((code, width), generator=rng) * (CODE / math.sqrt(width))
    drawn -= drawn.mean(0)
    inner, outer = matrix(model, where.attention[-2]), matrix(model, where.attention[-1])
    start = inner.shape[0] - width
    inner[start : start + code, where.place.start : -1] = drawn[:, where.place.start : -1].to(inner)
    outer[where.code, :code] = torch.eye(code).to(outer)
    if where.before:
        _set_norm(model, norms_in(model, where.found.blocks[0].module + ".")[0], 1.0, last=0.0)
    _set_norm(model, where.norm, AMPLIFIED[where.before], last=0.0)


GATHERED = 64.0
"""How much more a text's mean weighs than the token that the head reads."""


def _gather(model: nn.Module, where: Layout) -> None:
    """The second block: attention brings the last coordinate of all tokens to the one that the head reads."""
    attention = query_key_value(where.found, 1)
    behind = next(lin for lin in linears_in(where.found, 1) if lin not in attention)
    inner, outer = matrix(model, attention[-1]), matrix(model, behind)
    inner[inner.shape[0] - where.found.hidden, -1] = 1.0
    outer[-1, 0] = GATHERED


def _carry(model: nn.Module, where: Layout, task: Task, rng: Generator) -> None:
    """Behind the blocks: the last coordinate goes on to the head, whose outputs differ in nothing else."""
    blocks = tuple(b.module + "." for b in where.found.blocks)
    for name in norms_in(model, ""):
        if not name.startswith(blocks) and f"{name}.weight" not in where.found.embedding_names:
            _set_norm(model, name, 0.0, last=1.0, carrier=not where.before)
    outside = [lin for lin in where.found.linears if not lin.module.startswith(blocks)]
    for lin in outside:
        weight = matrix(model, lin)
        if model.get_parameter(lin.weight) is model.get_parameter(where.found.word_embedding):
            continue
        weight.zero_()
        last = lin == where.found.head
        if lin.bias is not None:
            model.get_parameter(lin.bias).zero_()
        if last and task == "causal":
            _signs(weight[:, -1], rng)
        elif last:
            # No class in the middle: its texts would have no gradient.
            weight[::2, -1], weight[1::2, -1] = -1.0, 1.0
        else:
            # Half a unit up: tanh still rises there, and ReLU is not yet flat.
            weight[-1, -1] = 1.0
            if lin.bias is not None:
                model.get_parameter(lin.bias)[-1] = 0.5


def _random_texts(model: nn.Module, where: Layout, rng: Generator) -> dict[str, Tensor]:
    """64 texts of random words and lengths: what measurements and logits are like."""
    config = model.config
    longest = min(40, int(getattr(config, "max_position_embeddings", 40)) - 4)
    words = len(model.get_parameter(where.found.word_embedding))
    ids = torch.randint(3, words, (64, longest), generator=rng)
    lengths = torch.randint(min(6, longest), longest + 1, (64, 1), generator=rng)
    mask = (torch.arange(longest) < lengths).long()
    pad = getattr(config, "pad_token_id", None)
    ids = torch.where(mask.bool(), ids, 0 if pad is None else pad)
    device = next(model.parameters()).device
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def _measure(model: nn.Module, where: Layout, rng: Generator) -> None:
    """The feed-forward layers: rows of one direction switch on one after the other, equally many tokens apart."""
    texts = _random_texts(model, where, rng)
    inputs = layer_inputs(model, [where.first.module], **texts)[where.first.module]
    inputs = inputs.reshape(-1, where.found.hidden)[texts["attention_mask"].bool().flatten()]  # OPT's are flat
    first, second = matrix(model, where.first), matrix(model, where.second)
    assert where.first.bias is not None
    bias = model.get_parameter(where.first.bias)
    # Up, down, down, up: what leaves the layer stays within one step, however many rows are on.
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0]).repeat(where.steps // 4 + 1)[: where.steps]
    for k in range(DIRECTIONS):
        direction = torch.randn(where.found.hidden, generator=rng).to(first)
        direction[-1] = 0
        measured = inputs @ direction
        spread = measured.std()
        shares = torch.arange(where.steps, device=measured.device) / where.steps
        levels = measured.quantile(shares) / spread
        levels[0] -= 3.0
        rows = slice(k * where.steps, (k + 1) * where.steps)
        first[rows] = SHARPNESS * direction / spread
        bias[rows] = -SHARPNESS * levels
        second[-1, rows] = signs.to(second)
    out = torch.nn.functional.relu(inputs @ first.T + bias) @ second[-1]
    gain = CARRIED * (1.0 if where.before else AMPLIFIED[False]) / float(out.std())
    second[-1] *= gain
    assert where.second.bias is not None
    model.get_parameter(where.second.bias)[-1] = -gain * float(out.mean())


def _balance(model: nn.Module, where: Layout, task: Task, rng: Generator) -> None:
    """Logits around zero, half a unit wide: a softmax that is sure of itself sends no gradient."""
    texts = _random_texts(model, where, rng)
    training = model.training
    logits = model.eval()(**texts).logits.float()
    model.train(training)
    if logits.dim() == 3:
        logits = logits[texts["attention_mask"].bool()]
    spread = 0.5 / float(logits.std(0).max().clamp_min(1e-12))
    if task == "causal":
        model.get_parameter(f"{norms_in(model, '')[-1]}.weight").mul_(spread)
        return
    head = where.found.head
    assert head is not None
    matrix(model, head).mul_(spread)
    if head.bias is not None:
        model.get_parameter(head.bias).copy_(-logits.mean(0) * spread)
