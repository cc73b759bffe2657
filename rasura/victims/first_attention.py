"""What each token adds to a decoder's state behind the attention of block 0.

There the state of a token is ``z = x + sum of w[h, s] u[h, s]``: its own embedding ``x``, and for every head h and every
earlier or own token s the value ``u`` that the head passes on, weighed by attention. ``x`` and ``u`` depend on the token
alone, whatever its place. Only the weights w depend on the order of the text, and on dropout of attention weights.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rasura.victims.calls import Stop, hooked
from rasura.victims.models import Linear, evaluating, layer_inputs, parts
from rasura.victims.positions import first_inputs

SAME = 1e-4
"""Largest relative error of the sum above on the model itself: float32 leaves 1e-6."""


@dataclass(frozen=True)
class FirstAttention:
    """Block 0 of ``model``. ``linears``: the layers behind the norm of z, whose weight gradients show it as ``gain * z``, up
    to a factor; ``gain`` ``(hidden,)``. ``value`` and ``output``: the attention's layers, by name. ``after`` ``(hidden,)``:
    what a norm between attention and residual multiplies by; ones where there is none. ``free``: it also scales by itself.
    """

    model: nn.Module
    linears: tuple[Linear, ...]
    gain: Tensor
    value: str
    output: str
    heads: int
    after: Tensor
    free: bool

    def embedded(self, tokens: Tensor) -> Tensor:
        """X of ``tokens`` ``(k,)``: ``(k, hidden)``, float64."""
        block = parts(self.model).blocks[0].module
        ids = tokens[:, None]
        with evaluating(self.model):
            return layer_inputs(self.model, [block], input_ids=ids, attention_mask=torch.ones_like(ids))[block][
                :, 0
            ].double()

    @torch.no_grad()
    def shares(self, tokens: Tensor) -> Tensor:
        """U of ``tokens`` ``(k,)``: ``(k, heads, hidden)``, float64."""
        values = self.model.get_submodule(self.value)(first_inputs(self.model, tokens, 0)).double()
        weight = self.model.get_submodule(self.output).weight.double()
        assert isinstance(weight, Tensor)
        size = weight.shape[1] // self.heads
        values = values.view(len(tokens), -1, size)
        values = values.repeat_interleave(self.heads // values.shape[1], dim=1)
        return torch.einsum("khd,ohd->kho", values, weight.view(-1, self.heads, size)) * self.after

    def weights(self, ids: Tensor) -> Tensor:
        """W of the last token of each of ``ids`` ``(k, length)``, without dropout: ``(k, heads, length)``, float64."""
        found = _attention(self.model, self.output, ids)
        assert found is not None
        return found[:, :, -1].double()


def first_attention(model: nn.Module) -> FirstAttention | None:
    """Block 0 of ``model``, found by running it; None where its attention has another form, or does not return its weights.

    Covered: decoders without position embeddings whose values have a layer of their own and whose norm behind attention is
    a root mean square (Llama, Mistral, Qwen, SmolLM, Phi-3 in unfused form, Gemma).
    """
    known = parts(model)
    block = known.blocks[0]
    if not known.causal or known.position_embedding is not None or len(block.qkv) != 3:
        return None
    ids = torch.tensor([[5, 6, 7, 8, 9]]) % len(model.get_parameter(known.word_embedding))
    ran = _ran(model, block.module, ids)
    qkv = [one.module for one in block.qkv]
    linears = {one.module: one for one in known.linears}
    inside = [name for name in ran if name in linears and name not in qkv]
    if len(inside) < 2 or any(name not in ran for name in qkv):
        return None
    output, first = inside[0], inside[1]
    given = ran[first][0]
    norm = next((n for n, (_, out) in ran.items() if out is given), None)
    weights = _attention(model, output, ids)
    values = [n for n in qkv if "v" in n.rpartition(".")[2]]
    if norm is None or weights is None or len(values) != 1:
        return None
    sent = ran[output][1]
    scaled = next((n for n, (x, out) in ran.items() if x is sent and not torch.equal(out, x)), None)
    gain, after = _gain(model, norm), _gain(model, scaled) if scaled else torch.ones(known.hidden).double()
    if gain is None or after is None:
        return None
    behind = tuple(linears[n] for n in inside[1:] if ran[n][0] is given)
    found = FirstAttention(model, behind, gain, values[0], output, weights.shape[1], after, scaled is not None)
    return found if _holds(found, ids, ran[norm][0][0].double(), weights[0].double()) else None


def _holds(found: FirstAttention, ids: Tensor, z: Tensor, weights: Tensor) -> bool:
    """Whether the states ``z`` ``(length, hidden)`` of ``ids`` are the sum that this module is about."""
    try:
        x, u = found.embedded(ids[0]), found.shares(ids[0])
    except (RuntimeError, AttributeError, IndexError, KeyError):
        return False
    added = torch.einsum("hts,sho->to", weights, u)
    left = z - x
    if found.free:
        added = added * (left * added).sum(1, keepdim=True) / added.square().sum(1, keepdim=True)
    return bool((left - added).norm() <= SAME * left.norm())


def _ran(model: nn.Module, block: str, ids: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Input and output of every module of ``block`` that takes and gives a tensor, in the order in which they end."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str, _: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if name == block:
            raise Stop
        if args and isinstance(args[0], Tensor) and isinstance(out, Tensor):
            found[name] = args[0], out

    modules = [(n, m) for n, m in model.named_modules() if n == block or n.startswith(block + ".")]
    handles = [m.register_forward_hook(partial(keep, n)) for n, m in modules]
    with hooked(*handles), evaluating(model), suppress(Stop):
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    return found


def _attention(model: nn.Module, output: str, ids: Tensor) -> Tensor | None:
    """The attention weights of the module that holds the layer ``output``, ``(k, heads, length, length)``; None where the
    module does not return them."""
    found: list[Tensor] = []

    def keep(_: nn.Module, __: tuple[Any, ...], out: Any) -> None:
        rest = out[1:] if isinstance(out, tuple) else ()
        found.extend(t for t in rest if isinstance(t, Tensor) and t.dim() == 4 and t.shape[2:] == (ids.shape[1],) * 2)
        raise Stop

    handle = model.get_submodule(output.rpartition(".")[0]).register_forward_hook(keep)
    with hooked(handle), evaluating(model), suppress(Stop):
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    return found[0] if found else None


def _gain(model: nn.Module, norm: str) -> Tensor | None:
    """What the module ``norm`` multiplies each entry by once it divided by the root mean square, ``(hidden,)`` float64; None
    if it does anything else."""
    module: Callable[[Tensor], Tensor] = model.get_submodule(norm)
    weight = next(model.get_submodule(norm).parameters(), None)
    if weight is None or weight.dim() != 1:
        return None
    probe = torch.linspace(-1, 2, len(weight), dtype=weight.dtype)
    with torch.no_grad():
        gain = module(torch.ones_like(probe)).double()
        given, expected = module(probe).double(), gain * probe.double() / probe.double().square().mean().sqrt()
    return gain if bool((given - expected).norm() <= 1e-3 * expected.norm()) else None
