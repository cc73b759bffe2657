"""What sealing costs, as ratios within one run: packed BFV against CKKS, and Sens by random probes against differences.

python benchmarks/sealing.py encryption
python benchmarks/sealing.py sensitivity
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rasura.core.rng import generator
from rasura.core.values import Message
from rasura.core.wire import to_bytes
from rasura.data.text import Example, encode
from rasura.defenses.homomorphic import added, opened_sum, seal
from rasura.defenses.homomorphic_keys import make_keys
from rasura.defenses.sealing import Sealing, agreed_scales, flattened, sealing
from rasura.defenses.significance import PROBES, sensitivity
from rasura.victims.loading import load
from rasura.victims.step import gradients

TEXT = "The patient was moved to the ward after the second blood test."


def timed(what: Callable[[], Any]) -> tuple[float, Any]:
    """Wall seconds of a call, and what it returns."""
    start = time.perf_counter()
    found = what()
    return time.perf_counter() - start, found


def model_and_inputs() -> tuple[Any, dict[str, torch.Tensor]]:
    """MiniLM with a fresh head, and one sentence as it takes it."""
    victim = load("minilm", "classification")
    batch = encode([Example(TEXT, None, 1)], victim.tokenizer, "classification", max_length=64, num_labels=2)
    return victim.model, batch.inputs()


def encryption(part: int) -> None:
    """Everything sealed for up to 4 and up to 64 clients; CKKS as other frameworks use it on a part; one process."""
    model, inputs = model_and_inputs()
    found, _ = gradients(model, inputs)
    scales = agreed_scales(found)
    everything = {n: torch.ones(g.shape, dtype=torch.bool) for n, g in found.items()}
    values, scale = flattened(found, everything, scales)
    for clients in (4, 64):
        keys = make_keys(clients)
        some = slice(None) if clients == 4 else slice(part)
        seconds, (sealed, beyond) = timed(lambda k=keys, s=some: seal(values[s], scale[s], k.public()))  # type: ignore[misc]
        count = len(values[some])
        size = sum(map(len, sealed.ciphertexts))
        adding, total = timed(lambda c=sealed, k=keys: added([c, c], k.public()))  # type: ignore[misc]
        opening, opened = timed(lambda t=total, k=keys, s=some: opened_sum(t, scale[s], k))  # type: ignore[misc]
        wrong = float(np.abs(opened - 2 * np.clip(values[some], -scale[some], scale[some])).max())
        each = [1e6 * s / count for s in (seconds, adding, opening)]
        print(
            f"BFV, up to {clients} clients, {count} values: {size / count:.2f} bytes each, {size / count / 4:.3f} x float32"
        )
        print(f"  seal {each[0]:.3f} us a value, add two {each[1]:.3f}, open {each[2]:.3f}; {beyond} beyond the scale")
        print(f"  error of the sum {wrong:.1e}, step {scale.max() / 32767:.1e}", flush=True)
        if clients == 4:
            first = seconds / count, size / count
    keys = make_keys(4, "ckks")
    seconds, (sealed, _) = timed(lambda: seal(values[:part], scale[:part], keys.public()))
    each_bytes = sum(map(len, sealed.ciphertexts)) / part
    print(f"CKKS 8192 [60, 40, 40]: {part} values, {each_bytes:.2f} bytes each, {1e6 * seconds / part:.3f} us a value")
    print(f"BFV against it: {seconds / part / first[0]:.1f} x faster, {each_bytes / first[1]:.1f} x smaller")
    settings = Sealing("all", scheme="bfv")
    keys = make_keys(4)
    part_of = sealing(settings, keys=keys, scales=scales)
    small = {n: g for n, g in found.items() if "layer.0" in n}
    message, _ = part_of.apply(Message(small), part_of.init((model, inputs)), generator(0))
    clear = sum(g.numel() for g in small.values())
    print(f"a whole message of one block: {len(to_bytes(message)) / (4 * clear):.3f} x float32")


def sensing(coordinates: int) -> None:
    """64 probes against central differences, extrapolated from some coordinates; how far two runs' masks agree."""
    model, inputs = model_and_inputs()
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    quick, one = timed(lambda: sensitivity(model, inputs, names, "randomised", generator(0)))
    two = sensitivity(model, inputs, names, "randomised", generator(1))
    embedded = inputs["input_ids"].numel() * model.config.hidden_size
    slow, _ = timed(lambda: [gradients(model, inputs) for _ in range(2 * coordinates)])
    whole = slow / coordinates * embedded
    print(f"{PROBES} probes {quick:.0f} s; differences {whole:.0f} s extrapolated to {embedded} coordinates")
    print(f"{whole / quick:.0f} x faster")
    flat = [torch.cat([f[n].reshape(-1) for n in sorted(f)]) for f in (one, two)]
    for share in (0.01, 0.1, 0.3):
        count = round(share * len(flat[0]))
        tops = [set(f.topk(count).indices.tolist()) for f in flat]
        print(f"masks of {100 * share:.0f} %: two runs share {100 * len(tops[0] & tops[1]) / count:.0f} %")


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("encryption", "sensitivity"))
    parser.add_argument("--part", type=int, default=262_144, help="values that the slower schemes are timed on")
    parser.add_argument("--coordinates", type=int, default=4, help="coordinates that differences are timed on")
    options = parser.parse_args()
    if options.what == "encryption":
        encryption(options.part)
    else:
        sensing(options.coordinates)


if __name__ == "__main__":
    main()
