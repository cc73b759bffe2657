"""Scales of values that are summed securely: one for each tensor, and what a client can do that keeps to none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flower_setting import LocalGrid, app_of, flower
from rounds_setting import averaged, largest, model, trained

from rasura.core.interfaces import InputError
from rasura.core.wire import from_bytes, to_bytes
from rasura.defenses.secure_aggregation.encoding import CHECKS, packed, unpacked
from rasura.defenses.secure_aggregation.messages import HEAD
from rasura.integrations.flower.agreement import Agreement, agree
from rasura.integrations.flower.collector import RoundFailed
from rasura.integrations.flower.scales import block_scales, each

__all__ = ["flower"]

pytestmark = pytest.mark.usefixtures("flower")

HALF = (1 << 15) - 1
FIRST = 0.25


def agreed() -> Agreement:
    return agree("sealing:all/by=secagg", model())


def public_scales() -> dict[str, float]:
    """From steps on texts of people who take no part."""
    start = dict(agreed().start)
    return block_scales(start, *(trained(k, start) for k in range(5, 9)))


def test_sixteen_bits_of_each_tensors_own_scale_are_finer_than_of_one_scale_for_all() -> None:
    from rasura.integrations.flower import strategy

    scales, start = public_scales(), dict(agreed().start)
    made = strategy(agreed(), first_scale=scales)
    result = made.start(grid=LocalGrid(range(4), app_of(agreed())), num_rounds=1)
    assert result.train_metrics_clientapp[1]["rasura-beyond"] == 0
    expected, found = averaged(start, range(4)), dict(made.collector.clear)
    for name, scale in scales.items():
        # Up to a power of two, half a step, and what float32 rounds of the weights.
        bound = 2 * scale / HALF / 2 + 1e-6 * float(start[name].abs().max())
        assert float((found[name].double() - expected[name]).abs().max()) <= bound, name
    assert max(scales.values()) > 20 * min(scales.values())
    assert largest(found, expected) < FIRST / HALF / 2


def test_scales_of_other_tensors_or_of_no_size_are_refused_by_both_sides() -> None:
    from flwr.app import ConfigRecord

    from rasura.integrations.flower import strategy

    names = list(agreed().start)
    for wrong in (float("nan"), 0.0, -1.0, {names[0]: 1.0}, dict.fromkeys(names, float("inf")), True):
        with pytest.raises(InputError, match="scale"):
            strategy(agreed(), first_scale=wrong)
    with pytest.raises(InputError, match="a real round"):
        block_scales(agreed().start, agreed().start)
    assert each(1.0, ["a"]) == {"a": 1.0}
    errors: list[str] = []

    def heard(node: int, number: int, reply: Any) -> Any:
        errors.extend([reply.error.reason] if reply.has_error() else [])
        return reply

    for stated, why in (([1.0], "scale"), ([2.0] * len(names), "other terms")):
        app = app_of(agreed(), heard)

        def told(node: int, message: Any, app: Any = app, stated: Any = stated) -> Any:
            if "nonce" in message.content["rasura"]:
                message.content["rasura"] = ConfigRecord({**message.content["rasura"], "first-scale": stated})
            return app(node, message)

        with pytest.raises(RoundFailed):
            strategy(agreed(), first_scale=FIRST).start(grid=LocalGrid(range(3), told), num_rounds=1)
        assert why in errors[-1]


def poisoned(steps: int, clients: int) -> Callable[[int, int, Any], Any]:
    """Client 1 adds so many steps to its first entry, behind the check of its own code: masks are additive."""
    from flwr.app import ConfigRecord

    agreement = agreed()
    bits = 16 + (clients - 1).bit_length()

    def change(node: int, number: int, reply: Any) -> Any:
        if node != 1 or "metrics" not in reply.content or "rasura" not in reply.content:
            return reply
        message = from_bytes(reply.content["rasura"]["message"], agreement.limits)
        data = message.sealed["secagg/000000"]
        numbers = unpacked(data[HEAD:], agreement.count + CHECKS, bits)
        numbers[:1] += np.uint32(steps % (1 << 32))
        message.sealed["secagg/000000"] = data[:HEAD] + packed(numbers, bits)  # type: ignore[index]
        reply.content["rasura"] = ConfigRecord({"message": to_bytes(message)})
        return reply

    return change


@pytest.mark.parametrize("steps", [3 * HALF, -3 * HALF, 4 * HALF + 5000, 12345678])
def test_a_poisoned_entry_stays_within_the_scale_and_no_further_is_enforced(steps: int) -> None:
    """One client of four moves an entry of the mean three times as far as an honest one could, and nobody sees it. It does
    not move it beyond the scale."""
    from rasura.integrations.flower import strategy

    made = strategy(agreed(), first_scale=FIRST)
    made.start(grid=LocalGrid(range(4), app_of(agreed(), poisoned(steps, 4))), num_rounds=1)
    moved = {n: (made.collector.clear[n] - t).abs() for n, t in made.agreement.start.items()}
    first = float(next(iter(moved.values())).flatten()[0])
    assert first <= FIRST * (1 + 1e-4) and made.figures[1]["counted"] == 4
    if abs(steps) == 3 * HALF:
        assert first > 0.7 * FIRST > 2 * FIRST / 4


@pytest.mark.parametrize(("clients", "texts", "steps"), [(3, 0, 13 * HALF // 4), (4, 4, 2 * HALF)])
def test_a_sum_larger_than_the_weights_allow_is_not_given_out(clients: int, texts: int, steps: int) -> None:
    """Three clients reach three scales together, and four clients of weight 1/4 reach one."""
    from rasura.integrations.flower import strategy

    made = strategy(agreed(), first_scale=FIRST, max_examples=texts)
    grid = LocalGrid(range(clients), app_of(agreed(), poisoned(steps, clients)))
    with pytest.raises(RoundFailed, match=r"a client sent values beyond|is not a sum of 3 updates"):
        made.start(grid=grid, num_rounds=1)
    assert largest(dict(made.collector.clear), dict(made.agreement.start)) == 0
    assert torch.is_tensor(next(iter(made.collector.clear.values())))
