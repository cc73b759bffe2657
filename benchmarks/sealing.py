"""What sealing costs in CPU seconds, as ratios within one run: packed BFV and CKKS, each beside bare TenSEAL, and Sens by
random probes against differences.

python benchmarks/sealing.py encryption
python benchmarks/sealing.py sensitivity
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from rasura.core.rng import generator
from rasura.core.values import Message
from rasura.core.wire import to_bytes
from rasura.data.text import Example, encode
from rasura.defenses.homomorphic import added, opened_sum, seal
from rasura.defenses.homomorphic_keys import Scheme, load_tenseal, make_keys, opened_context
from rasura.defenses.sealing import Sealing, agreed_scales, flattened, sealing
from rasura.defenses.significance import PROBES, sensitivity
from rasura.victims.loading import load
from rasura.victims.step import gradients

TEXT = "The patient was moved to the ward after the second blood test."


def timed(what: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of a call, and what it returns."""
    start = time.process_time()
    found = what()
    return time.process_time() - start, found


def model_and_inputs() -> tuple[Any, dict[str, torch.Tensor]]:
    """MiniLM with a fresh head, and one sentence as it takes it."""
    victim = load("minilm", "classification")
    batch = encode([Example(TEXT, None, 1)], victim.tokenizer, "classification", max_length=64, num_labels=2)
    return victim.model, batch.inputs()


def bare(scheme: str, keys: Any, rows: list[list[Any]]) -> tuple[Callable[[], Any], ...]:
    """TenSEAL by itself on the same slots ``rows``: encrypting, adding two and decrypting, with serialisation."""
    ts, context = load_tenseal(), opened_context(keys.data)
    vector, read = (ts.bfv_vector, ts.bfv_vector_from) if scheme == "bfv" else (ts.ckks_vector, ts.ckks_vector_from)
    sealed = [vector(context, row).serialize() for row in rows]

    def adding() -> list[bytes]:
        out = []
        for data in sealed:
            total = read(context, data)
            total.add_(read(context, data))
            out.append(total.serialize())
        return out

    sums = adding()
    return (
        lambda: [vector(context, row).serialize() for row in rows],
        adding,
        lambda: [np.asarray(read(context, data).decrypt()) for data in sums],
    )


def costs(scheme: Scheme, clients: int, values: Any, scale: Any, repeats: int) -> tuple[float, float]:
    """Microseconds and bytes a value to seal; prints them with those of bare TenSEAL, timed in turn."""
    keys = make_keys(clients, scheme)
    public, count = keys.public(), len(values)
    width = keys.parameters.values // (2 if scheme == "bfv" else 1)
    rng, blocks = np.random.default_rng(0), -(-count // keys.parameters.values)
    slots = rng.integers(0, 1 << 32, (blocks, width + 1)) if scheme == "bfv" else rng.normal(size=(blocks, width + 1))
    sealed, beyond = seal(values, scale, public)
    total = added([sealed, sealed], public)
    wrong = float(np.abs(opened_sum(total, scale, keys) - 2 * np.clip(values, -scale, scale)).max())
    ours = (
        lambda: seal(values, scale, public),
        lambda: added([sealed, sealed], public),
        lambda: opened_sum(total, scale, keys),
    )
    each = sum(map(len, sealed.ciphertexts)) / count
    print(f"{scheme}, up to {clients} clients, {count} values: {each:.2f} bytes each, {each / 4:.3f} x float32; "
          f"error of the sum {wrong:.1e}, step {scale.max() / 32767:.1e}; {beyond} beyond the scale")  # fmt: skip
    sealing_takes = 0.0
    for name, own, floor in zip(("seal", "add two", "open"), ours, bare(scheme, keys, slots.tolist())):
        pairs = [(1e6 * timed(own)[0] / count, 1e6 * timed(floor)[0] / count) for _ in range(repeats)]
        mine, least = median(p[0] for p in pairs), median(p[1] for p in pairs)
        sealing_takes = sealing_takes or mine
        ratios = sorted(p[0] / p[1] for p in pairs)
        print(f"  {name}: {mine:.3f} us CPU a value, bare TenSEAL {least:.3f}; "
              f"median ratio {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})", flush=True)  # fmt: skip
    return sealing_takes, each


def encryption(part: int, repeats: int) -> None:
    """BFV for up to 4 and up to 64 clients, and CKKS as other frameworks use it, on the first values of a gradient."""
    model, inputs = model_and_inputs()
    found, _ = gradients(model, inputs)
    scales = agreed_scales(found)
    everything = {n: torch.ones(g.shape, dtype=torch.bool) for n, g in found.items()}
    values, scale = (flat[:part] for flat in flattened(found, everything, scales))
    first = costs("bfv", 4, values, scale, repeats)
    costs("bfv", 64, values, scale, repeats)
    other = costs("ckks", 4, values, scale, repeats)
    print(f"BFV against CKKS: {other[0] / first[0]:.1f} x faster, {other[1] / first[1]:.1f} x smaller")
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
    parser.add_argument("--part", type=int, default=262_144, help="values that are sealed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--coordinates", type=int, default=4, help="coordinates that differences are timed on")
    options = parser.parse_args()
    if options.what == "encryption":
        encryption(options.part, options.repeats)
    else:
        sensing(options.coordinates)


if __name__ == "__main__":
    main()
