"""Single draws by hand: what given bytes of the operating system or a seed become, on which device and of which kind."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from secret_setting import DISTRIBUTIONS, flat, system
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rasura.core.rng import (
    SecretGenerator,
    bernoulli,
    child,
    derive,
    drawing,
    gamma,
    generator,
    integers,
    secret_generator,
    seeded,
    uniform,
)


def test_seeds_of_streams_are_the_same_on_every_machine() -> None:
    assert derive(0) == int(hashlib.sha256(b"0").hexdigest()[:16], 16) // 2 == 3456079177858693020
    assert derive(7, "noise", 3) == int(hashlib.sha256(b"7\x1fnoise\x1f3").hexdigest()[:16], 16) // 2
    assert derive(1, "ab", "c") != derive(1, "a", "bc") and derive(2**80) < 2**63


def test_streams_of_other_names_are_others() -> None:
    found = [child(generator(1, *names)) for names in ((), ("a",), ("b",), ("a", 1))]
    assert len(set(found)) == 4 and found == [child(generator(1, *names)) for names in ((), ("a",), ("b",), ("a", 1))]


def test_a_seed_that_is_drawn_has_62_bits() -> None:
    rng = generator(0)
    drawn = [child(rng) for _ in range(64)]
    assert len(set(drawn)) == 64 and 2**61 < max(drawn) < 2**62 and len({seed % 1024 for seed in drawn}) > 40


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_seeded_draw_hangs_on_its_generator_alone(name: str) -> None:
    found = []
    for seed, other in ((1, 5), (1, 6), (2, 6)):
        torch.manual_seed(other)
        before = torch.random.get_rng_state()
        found.append(flat(DISTRIBUTIONS[name](generator(seed))))
        assert torch.equal(torch.random.get_rng_state(), before)
    assert found[0] == found[1] != found[2]


def test_gamma_is_that_of_marsaglia_and_tsang(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of a normal number of -8.6 the cube is below 0, so that it is drawn again; one of the root of log 2, or of less than 0
    # by as much, is taken but for the largest uniform numbers.
    most = int(0.999 * 2**64)
    words = (0, 2**63, 0, 2**63, 3 * 2**61, most, 2**63, 2**61, most, 2**63, 2**61, 2**62)

    def of(shape: float) -> float:
        d = shape - 1 / 3
        return d * (1 + math.sqrt(math.log(2)) / math.sqrt(9 * d)) ** 3

    for shape in (1.0, 1.5):
        system(monkeypatch, *words)
        found = gamma(torch.tensor([shape], dtype=torch.float64), SecretGenerator())
        assert found.tolist() == pytest.approx([of(shape)], rel=1e-12)
    # Below 1: times a uniform number, here a quarter, to the power of 1 over the shape.
    system(monkeypatch, 2**62, *words)
    found = gamma(torch.tensor([0.5], dtype=torch.float64), SecretGenerator())
    assert found.tolist() == pytest.approx([of(1.5) / 16], rel=1e-12)


@pytest.mark.parametrize("shapes", [(3.0,), (1.0, 40.0), (0.3, 2.0)])
def test_gammas_of_several_shapes_have_each_its_law(shapes: tuple[float, ...]) -> None:
    asked = torch.tensor(shapes, dtype=torch.float64).repeat_interleave(4000)
    for rng in (secret_generator(), generator(0)):
        for shape, found in zip(shapes, gamma(asked, rng).reshape(len(shapes), 4000)):
            assert stats.kstest(found.numpy(), stats.gamma(shape).cdf).pvalue > 1e-6


def test_the_chance_itself_is_not_below_it() -> None:
    (drawn,) = uniform((1,), generator(4)).tolist()
    assert bernoulli(drawn, (1,), generator(4)).tolist() == [False]
    assert bernoulli(float(np.nextafter(drawn, 1)), (1,), generator(4)).tolist() == [True]


def test_a_seeded_uniform_is_half_a_step_above_a_number_of_52_bits() -> None:
    whole = torch.randint(2**52, (50,), generator=generator(3)).double()
    assert torch.equal(uniform((50,), generator(3)) * 2**52, whole + 0.5)
    assert uniform((2, 3), secret_generator()).dtype == uniform((2, 3), generator(0)).dtype == torch.float64


def test_of_one_number_there_is_one_choice() -> None:
    for rng in (secret_generator(), generator(0)):
        assert integers(1, (2, 3), rng).tolist() == [[0, 0, 0]] * 2


# --- what torch draws by itself


def test_seeded_numbers_repeat_and_other_streams_go_on() -> None:
    torch.manual_seed(7)
    wanted, draws = torch.rand(3), []
    torch.manual_seed(7)
    for _ in range(2):
        with seeded(3):
            draws.append(torch.rand(3))
    with pytest.raises(ZeroDivisionError), seeded(4):
        _ = 1 // 0
    assert torch.equal(*draws) and not torch.equal(draws[0], wanted) and torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_upper_end_of_a_uniform_is_left_out_in_every_kind(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for low, high in ((0.0, 1.0), (1.0, 1.1), (-3.0, -2.0)):
        system(monkeypatch, 2**64 - 1, 0)
        with drawing(SecretGenerator()):
            found = torch.empty(2, dtype=dtype).uniform_(low, high)
        ends = torch.tensor([high, low], dtype=dtype)
        assert found[0] < ends[0] and torch.allclose(found[1], ends[1], rtol=0, atol=1e-15)
        assert torch.nextafter(found[0], ends[0]) == ends[0]


def test_what_is_drawn_lies_where_it_is_asked_for_and_is_of_the_kind() -> None:
    """On torch's device without memory, since every machine has it."""
    away = torch.ones(5, device="meta")
    with drawing(secret_generator()):
        out, kept = torch.native_dropout(away, 0.5, True)
        made = [
            out, kept, torch.randn_like(away), torch.randn_like(torch.ones(5), device="meta"), torch.rand(5, device="meta"),
            torch.empty(5, device="meta").uniform_(), torch.empty(5, device="meta").bernoulli_(0.5),
        ]  # fmt: skip
        kinds = [torch.rand(2, dtype=torch.float64), torch.randn_like(torch.ones(2, dtype=torch.float64)), torch.rand(2)]
    assert {t.device.type for t in made} == {"meta"} and {t.shape for t in made} == {(5,)}
    assert [t.dtype for t in kinds] == [torch.float64, torch.float64, torch.float32]


def test_a_fused_dropout_takes_its_mask_from_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    system(monkeypatch, (2**31 << 32) + 2**31 - 1, (2**32 - 1) << 32)
    with drawing(SecretGenerator()):
        out, kept = torch.native_dropout(torch.tensor([1.0, 2.0, 3.0, 4.0]), 0.5, True)
    assert kept.tolist() == [True, False, True, False] and out.tolist() == [2.0, 0.0, 6.0, 0.0]


def test_attention_without_dropout_is_left_as_it_is() -> None:
    q, k, v = (torch.randn(1, 2, 6, 8, generator=generator(n)) for n in range(3))
    plain = nn.functional.scaled_dot_product_attention(q, k, v)
    with drawing(secret_generator()):
        assert torch.equal(nn.functional.scaled_dot_product_attention(q, k, v), plain)
        assert torch.equal(nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.0), plain)
        fused: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        with pytest.raises(RuntimeError, match="it is refused in a step with secret randomness"):
            fused(q, k, v, 0.5)


def test_without_autograd_a_dropout_that_is_off_is_let_through_and_another_refused() -> None:
    """In inference mode PyTorch hands over the whole operation, which draws where nobody can put a mask in its place."""
    x = torch.ones(3, 4)

    def layers(rate: float) -> nn.LSTM:
        return nn.LSTM(4, 4, num_layers=2, dropout=rate)

    off, on = layers(0.0), layers(0.5)
    expected = off(x)[0]
    with drawing(secret_generator()), torch.inference_mode():
        assert torch.equal(nn.functional.dropout(x, 0.5, training=False), x)
        assert torch.equal(nn.functional.dropout(x, 0.0, training=True), x)
        assert torch.allclose(off(x)[0], expected, atol=1e-6) and on.eval()(x)[0].shape == (3, 4)
        on.train()
        refused: dict[str, Any] = {
            "aten.dropout": lambda: nn.functional.dropout(x, 0.5), "aten.lstm": lambda: on(x),
            "aten.bernoulli": lambda: torch.bernoulli(torch.zeros(3), 0.0),
        }  # fmt: skip
        for name, draw in refused.items():
            with pytest.raises(RuntimeError, match=rf"^{name}.* draws from PyTorch's generator.* with secret randomness$"):
                draw()


def test_masks_between_layers_of_a_recurrent_network_are_secret() -> None:
    network, x = nn.LSTM(4, 4, num_layers=2, dropout=0.5), torch.ones(3, 4)
    found: list[Tensor] = []
    for _ in range(6):
        torch.manual_seed(0)
        with drawing(secret_generator()):
            found.append(network(x)[0].detach())
    assert len({flat(one) for one in found}) > 1


class Kernels(TorchDispatchMode):
    """Notes of every operation whether a fused attention could take it."""

    def __init__(self) -> None:
        super().__init__()
        self.fused: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.fused.append(torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.mem_efficient_sdp_enabled())
        return func(*args, **(kwargs or {}))


def test_attention_with_dropout_takes_no_fused_kernel_on_any_device() -> None:
    """A fused kernel draws its mask itself, from PyTorch's generator: on an accelerator, where fused ones have dropout."""
    q = torch.randn(1, 2, 6, 8, generator=generator(0))
    attend = nn.functional.scaled_dot_product_attention
    layer = nn.MultiheadAttention(8, 2, dropout=0.0)

    def fused(call: Any) -> bool:
        with drawing(secret_generator()), Kernels() as kernels:
            call()
        assert len(set(kernels.fused)) == 1
        return kernels.fused[0]

    with_dropout = (lambda: attend(q, q, q, None, 0.5), lambda: attend(q, q, q, dropout_p=0.5),
                    lambda: attend(q, q, q, None, 0.5, True))  # fmt: skip
    without = (lambda: attend(q, q, q), lambda: attend(q, q, q, None), lambda: attend(q, q, q, None, 0.0),
               lambda: attend(q, q, q, is_causal=True), lambda: layer(q[0], q[0], q[0]))  # fmt: skip
    assert not any(map(fused, with_dropout)) and all(map(fused, without))


def test_no_generator_is_no_generator_of_its_own() -> None:
    draws: list[Any] = [
        lambda: torch.empty(40).uniform_(generator=None), lambda: torch.empty(40).bernoulli_(0.5, generator=None),
        lambda: torch.ops.aten.uniform_(torch.empty(40), 0.0, 1.0, generator=None),
    ]  # fmt: skip
    for draw in draws:
        with drawing(secret_generator()):
            assert flat(draw()) != flat(draw())
