"""Randomness: one seed gives named, independent generators; secrets and real noise come from the operating system.

A secret must not depend on a seed: PyTorch's CPU generator keeps 32 bits of one, and dropout draws each mask from as many,
which a laptop tries in minutes. PyTorch refuses a ``SecretGenerator``; the functions here draw from either kind.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_AT_ONCE = 1 << 20
"""How many numbers are drawn from the operating system at once."""

_DROPOUTS = frozenset((
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d, functional.alpha_dropout,
    functional.feature_alpha_dropout, torch.dropout, torch.dropout_, torch.alpha_dropout, torch.feature_dropout,
))  # fmt: skip


class SecretGenerator:
    """Randomness of the operating system (ChaCha20 on Linux). It has no seed and no state, and no draw can be repeated.

    It is not a ``torch.Generator``: ``torch.rand(3, generator=secret)`` raises ``TypeError``. Draw with the functions of
    this module.
    """

    __slots__ = ()

    def words(self, count: int) -> NDArray[np.uint64]:
        """``count`` numbers of 64 random bits."""
        return np.frombuffer(os.urandom(8 * count), np.uint64)


Randomness: TypeAlias = torch.Generator | SecretGenerator
"""The source of random numbers: a seeded generator, for experiments, or the operating system."""


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream ``names``; the same on every machine and in every process.

    >>> derive(0, "step") == derive(0, "step"), derive(0, "step") == derive(1, "step")
    (True, False)
    """
    label = "\x1f".join([str(seed), *map(str, names)]).encode()
    return int.from_bytes(hashlib.sha256(label).digest()[:8], "big") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """A CPU generator for the stream ``names``. For experiments only: anyone who knows the seed can repeat its draws."""
    return torch.Generator().manual_seed(derive(seed, *names))


def secret_generator() -> SecretGenerator:
    """The operating system's randomness, for noise, masks and keys of a real deployment."""
    return SecretGenerator()


def child(rng: torch.Generator) -> int:
    """A new seed drawn from ``rng``, to start an independent stream of an experiment. Raises ``TypeError`` for a
    ``SecretGenerator``: the stream would be only as secret as a 63-bit seed.
    """
    if not isinstance(rng, torch.Generator):
        raise TypeError(f"a seed drawn from a {type(rng).__name__} would hold all of its secret; pass the generator itself")
    return int(torch.randint(1 << 62, (1,), generator=rng))


def uniform(shape: Sequence[int], rng: Randomness) -> Tensor:
    """Numbers strictly between 0 and 1, float64, with 52 random bits each."""
    # 52 bits and half a step fit a float64: never 0, never 1.
    if isinstance(rng, torch.Generator):
        return (torch.randint(1 << 52, tuple(shape), generator=rng).double() + 0.5) * 2.0**-52
    return torch.from_numpy(_uniform(math.prod(shape), rng)).reshape(tuple(shape))


def _uniform(count: int, rng: SecretGenerator) -> NDArray[np.float64]:
    return ((rng.words(count) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def laplace(shape: Sequence[int], rng: Randomness) -> Tensor:
    """Draws from the Laplace distribution of scale 1, float64; the largest is 36, which 1 in 2^52 draws would exceed."""
    centred = uniform(shape, rng) - 0.5
    return -centred.sign() * torch.log1p(-2 * centred.abs())


def normal(shape: Sequence[int], rng: Randomness, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers of type ``dtype``; from a ``SecretGenerator``, by Box and Muller.

    They are computed in float64 from uniforms of 52 bits, then rounded; the largest is 8.6, which 1 in 10^17 draws would
    exceed. They are drawn on the CPU, so a seed gives the same noise on every device. Leaks through floating-point rounding
    (Mironov 2012) are not addressed.
    """
    if isinstance(rng, torch.Generator):
        return torch.randn(tuple(shape), generator=rng, dtype=dtype)
    out = torch.empty(math.prod(shape), dtype=dtype)
    for start in range(0, len(out), _AT_ONCE):
        part = out[start : start + _AT_ONCE]
        half = (len(part) + 1) // 2
        radius, angle = np.sqrt(-2 * np.log(_uniform(half, rng))), 2 * math.pi * _uniform(half, rng)
        both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        part.copy_(torch.from_numpy(both[: len(part)]))
    return out.reshape(tuple(shape))


def gamma(shape: Tensor, rng: Randomness) -> Tensor:
    """A draw from the gamma distribution of scale 1 for each entry of ``shape``, float64 (Marsaglia, Tsang 2000)."""
    # Below 1 their method starts from shape + 1.
    small = shape < 1
    boost = torch.where(small, uniform(shape.shape, rng) ** (1 / shape), 1.0) if bool(small.any()) else 1.0
    d = shape + small.double() - 1 / 3
    out = torch.empty_like(shape)
    missing = torch.arange(len(shape))
    while len(missing):
        x, scale = normal((len(missing),), rng), d[missing]
        v = (1 + x / (9 * scale).sqrt()) ** 3
        # Of a v that is not above 0 this is no number, which nothing is below.
        limit = x * x / 2 + scale * (1 - v + v.log())
        good = uniform((len(missing),), rng).log() < limit
        out[missing[good]] = (scale * v)[good]
        missing = missing[~good]
    return out * boost


def integers(below: int, shape: Sequence[int], rng: Randomness) -> Tensor:
    """Uniform whole numbers from ``0 .. below - 1``, int64."""
    if isinstance(rng, torch.Generator):
        return torch.randint(below, tuple(shape), generator=rng)
    if below < 1:
        raise ValueError(f"integers below {below}; expected at least 1")
    found = rng.words(math.prod(shape)).copy()
    # The last numbers of 64 bits would favour the small remainders.
    fair = np.uint64((1 << 64) - 1 - (1 << 64) % below)
    while len(beyond := np.flatnonzero(found > fair)):
        found[beyond] = rng.words(len(beyond))
    return torch.from_numpy((found % np.uint64(below)).astype(np.int64)).reshape(tuple(shape))


def permutation(count: int, rng: Randomness) -> Tensor:
    """A random permutation of ``0 .. count - 1``, int64."""
    if isinstance(rng, torch.Generator):
        return torch.randperm(count, generator=rng)
    # By random names of 128 bits, of which no two are alike.
    return torch.from_numpy(np.lexsort((rng.words(count), rng.words(count))))


def bernoulli(chance: float, shape: Sequence[int], rng: Randomness) -> Tensor:
    """Bool, true with probability ``chance`` to within 2^-32: masks of dropout."""
    if not 0 <= chance <= 1:
        raise ValueError(f"chance {chance}; expected between 0 and 1")
    if isinstance(rng, torch.Generator):
        return uniform(shape, rng) < chance
    count = math.prod(shape)
    out = np.empty(count, dtype=bool)
    for start in range(0, count, _AT_ONCE):
        part = out[start : start + _AT_ONCE]
        np.less(rng.words((len(part) + 1) // 2).view(np.uint32)[: len(part)], round(chance * (1 << 32)), out=part)
    return torch.from_numpy(out).reshape(tuple(shape))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside the block, PyTorch's own generators start from ``seed``, those of a GPU that is in use, too. Afterwards all
    are as they were, and a GPU that was not in use yet starts as it would have: seeds of other code stay in force."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    apple: Any = torch.mps if torch.backends.mps.is_available() else None
    before = None if apple is None else apple.get_rng_state()
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(seed)
        if gpus:
            torch.cuda.manual_seed_all(seed)
        if apple is not None:
            apple.manual_seed(seed)
        try:
            yield
        finally:
            if apple is not None:
                apple.set_rng_state(before)


@contextmanager
def drawing(rng: Randomness) -> Iterator[None]:
    """Inside the block, what PyTorch draws in this thread (dropout masks, noise of a layer) comes from ``rng``.

    A seeded generator seeds PyTorch's own (``seeded``). With a ``SecretGenerator``, the numbers are replaced below
    autograd. An unknown drawing operation raises ``RuntimeError``, and so does a draw in a backward pass (gradient
    checkpointing repeats the forward pass and would get another mask).
    """
    if isinstance(rng, torch.Generator):
        with seeded(child(rng)):
            yield
        return
    if not isinstance(rng, SecretGenerator):
        raise TypeError(f"randomness of a {type(rng).__name__}; expected a torch.Generator or a SecretGenerator")
    with _PlainAttention(), _SecretDraws(rng):
        yield


class WithoutDropout(TorchFunctionMode):
    """Inside the block, no dropout is applied, neither by a layer nor by a function, whatever the mode of the modules."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


class _PlainAttention(TorchFunctionMode):
    """Attention with dropout, step by step: fused kernels draw their masks where they cannot be replaced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention and kwargs.get("dropout_p", args[4] if len(args) > 4 else 0):
            from torch.nn.attention import SDPBackend, sdpa_kernel

            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


class _SecretDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    def __init__(self, rng: SecretGenerator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rng = rng

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or _draws_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        drawn = _DRAWN.get(func)
        if drawn is None or kwargs.get("generator") is not None:
            _refused(f"{func} draws from PyTorch's generator, which has only 32 secret bits")
        if torch._C._current_graph_task_id() != -1:
            _refused(f"{func} draws again in the backward pass; turn off gradient checkpointing or dropout")
        return drawn(self.rng, *args, **kwargs)


def _refused(why: str) -> NoReturn:
    raise RuntimeError(f"{why}; it is refused in a step with secret randomness")


def _draws_nothing(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether dropout is off in this call of an operation that may draw."""
    arguments = func._schema.arguments
    given = {a.name: a.default_value for a in arguments} | dict(zip((a.name for a in arguments), args)) | kwargs
    names = ["dropout_p", "dropout", *(["p"] if "dropout" in func._schema.name else [])]
    rates = [given[name] for name in names if name in given]
    return bool(rates) and (rates[0] == 0 or given.get("train") is False)


def _bernoulli_(rng: SecretGenerator, into: Tensor, p: float = 0.5) -> Tensor:
    return into.copy_(bernoulli(p, into.shape, rng))


def _dropout(rng: SecretGenerator, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    kept = bernoulli(1 - p, x.shape, rng).to(x.device)
    return x * kept * (1 / (1 - p) if p < 1 else 0.0), kept


def _uniform_(rng: SecretGenerator, into: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    drawn = low + (high - low) * uniform(into.shape, rng)
    # Rounding to fewer digits may reach the upper end, which PyTorch leaves out.
    last = torch.nextafter(torch.tensor(high, dtype=into.dtype), torch.tensor(low, dtype=into.dtype))
    return into.copy_(torch.minimum(drawn, last))


def _normal_like(rng: SecretGenerator, like: Tensor, **kind: Any) -> Tensor:
    dtype = kind.get("dtype") or like.dtype
    return normal(like.shape, rng).to(kind.get("device") or like.device, dtype)


def _rand(rng: SecretGenerator, size: Sequence[int], **kind: Any) -> Tensor:
    return _uniform_(rng, torch.empty(size, **kind))


_DRAWN: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.bernoulli_.float: _bernoulli_,
    torch.ops.aten.native_dropout.default: _dropout,
    torch.ops.aten.uniform_.default: _uniform_,
    torch.ops.aten.rand.default: _rand,
    torch.ops.aten.randn_like.default: _normal_like,
}
"""PyTorch operations that draw, and their replacements."""
