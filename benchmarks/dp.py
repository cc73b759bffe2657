"""What per-example gradients and directional noise cost, as ratios within one run.

python benchmarks/dp.py gradients TEXTS.parquet
python benchmarks/dp.py gradients TEXTS.parquet --model FOLDER --lora 16
python benchmarks/dp.py clipped TEXTS.parquet --batch 32
python benchmarks/dp.py sum
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.functorch import ft_compute_per_sample_gradient  # noqa: F401  (loaded for every way alike)
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping
from torch import Tensor

from rasura.core.rng import generator
from rasura.core.updates import changed
from rasura.data.text import encode, load_examples
from rasura.defenses.von_mises_fisher import summed, summed_by_draws
from rasura.victims.adapters import with_fresh_adapter
from rasura.victims.layer_gradients import own_losses
from rasura.victims.loading import load
from rasura.victims.together import Together

WAYS = ("plain", "loop", "opacus", "opacus-ghost", "each", "weighted")


def model_and_inputs(
    texts: str, batch: int, length: int = 64, name: str = "minilm", lora: int = 0
) -> tuple[Any, dict[str, Tensor]]:
    """A classifier with a fresh head and all parameters trained, or LoRA adapters of a causal model; and a file's first
    texts."""
    task: Any = "causal" if lora else "classification"
    victim = load(name, task)
    found = encode(load_examples(texts)[:batch], victim.tokenizer, task, max_length=length, num_labels=2, truncate=True)
    return with_fresh_adapter(victim.model, task, lora, 0), found.inputs()


def opacus_inputs(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What Opacus needs beside the default call: of models whose embeddings of positions are trained."""
    if inputs["labels"].dim() == 2:
        return inputs
    ids = inputs["input_ids"]
    positions = torch.arange(ids.shape[1]).expand_as(ids).contiguous()
    return {"token_type_ids": torch.zeros_like(ids), **inputs, "position_ids": positions}


def one(way: str, model: Any, inputs: dict[str, Tensor]) -> Callable[[], Any]:
    """A call that comes to the gradients, or to the sum of those of norm 1, in the given way."""
    size = len(inputs["labels"])
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    if way == "plain":
        return lambda: changed(model, inputs, names)
    if way == "loop":

        def loop() -> None:
            for k in range(size):
                changed(model, {n: v[k : k + 1] for n, v in inputs.items()}, names)

        return loop
    if way == "each":

        def each() -> None:
            for _ in Together(model, inputs, size).each():
                pass

        return each
    if way == "weighted":
        return lambda: Together(model, inputs, size).weighted(lambda norms: (1 / norms).clamp(max=1))
    for module in model.modules():
        module.training = not isinstance(module, torch.nn.Dropout) and not list(module.children())
    full = opacus_inputs(inputs)
    if way == "opacus":
        wrapped = GradSampleModule(model, loss_reduction="mean")

        def hooks() -> Any:
            for p in model.parameters():
                p.grad = p.grad_sample = None
            wrapped(**full).loss.backward()
            return [p.grad_sample for p in model.parameters()]

        return hooks
    ghost = GradSampleModuleFastGradientClipping(model, loss_reduction="mean", max_grad_norm=1.0)

    def clipped() -> Any:
        for p in model.parameters():
            p.grad = None
        losses = own_losses(ghost(**full), full["labels"])
        losses.mean().backward(retain_graph=True)
        ghost.disable_hooks()
        for p in model.parameters():
            p.grad = None
        (ghost.get_clipping_coef() * losses).sum().backward()
        ghost.enable_hooks()
        return [p.grad for p in model.parameters()]

    return clipped


def measured(way: str, texts: str, batch: int, repeats: int, name: str, lora: int) -> dict[str, float]:
    """CPU seconds of a call (the least of several) and the most memory of this process beyond the loaded model, in MB."""
    warnings.simplefilter("ignore")
    model, inputs = model_and_inputs(texts, batch, name=name, lora=lora)
    changed(model, {k: v[:1] for k, v in inputs.items()}, [n for n, p in model.named_parameters() if p.requires_grad][-1:])
    call = one(way, model, inputs)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return {"cpu": min(seconds), "mb": (status("VmHWM") - before) / 1024}


def status(name: str) -> int:
    """A figure of this process in kB, as Linux tells it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def gradients(texts: str, batch: int, repeats: int, name: str, lora: int) -> None:
    """Every way in a process of its own, and the error against the loop."""
    found = {}
    for way in WAYS:
        command = [sys.executable, __file__, "one", texts, "--way", way, "--batch", str(batch), "--repeats", str(repeats)]
        command += ["--model", name, "--lora", str(lora)]
        found[way] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
        ratio = found[way]["cpu"] / found["plain"]["cpu"]
        print(f"{way}: {found[way]['cpu']:.2f} s CPU ({ratio:.1f} x plain), {found[way]['mb']:.0f} MB", flush=True)
    model, inputs = model_and_inputs(texts, batch, name=name, lora=lora)
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    together = Together(model, inputs, batch)
    errors, total, weights = [], None, []
    for k, got in enumerate(together.each()):
        wanted, _ = changed(model, {n: v[k : k + 1] for n, v in inputs.items()}, names)
        flat, true = (torch.cat([g[n].reshape(-1) for n in wanted]).double() for g in (got, wanted))
        errors.append(float((flat - true).norm() / true.norm()))
        weights.append(min(1.0, 1 / float(true.norm())))
        total = weights[-1] * true if total is None else total + weights[-1] * true
    summed_up = together.weighted(lambda norms: (1 / norms).clamp(max=1))
    assert total is not None
    error = float((torch.cat([summed_up[n].reshape(-1) for n in wanted]).double() - total).norm() / total.norm())
    print(f"relative error: largest of {batch} gradients {max(errors):.1e}, clipped sum {error:.1e}")


def clipped(texts: str, batch: int, length: int, repeats: int) -> None:
    """The clipped sum and the plain gradient of the same batch in turn: medians of the CPU seconds and of the ratios."""
    model, inputs = model_and_inputs(texts, batch, length)
    calls = [one(way, model, inputs) for way in ("plain", "weighted")]
    for call in calls:
        call()
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for call, own in zip(calls, seconds):
            start = time.process_time()
            call()
            own.append(time.process_time() - start)
    ratios = sorted(ours / plain for plain, ours in zip(*seconds))
    shape = " x ".join(map(str, inputs["input_ids"].shape))
    print(f"{shape} tokens, {repeats} repeats: plain {median(seconds[0]):.3f} s CPU, clipped {median(seconds[1]):.3f} s, "
          f"median ratio {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")  # fmt: skip


def sums(batch: int, dimension: int, repeats: int) -> None:
    """The sum of a batch of draws in few Gaussian vectors against draw by draw."""
    rows = torch.randn((batch, dimension), generator=generator(0))
    rows /= rows.norm(dim=1, keepdim=True)
    for kappa in (1e3, 1e5):
        least = []
        for draw in (summed, summed_by_draws):
            seconds = []
            for k in range(repeats):
                start = time.process_time()
                draw(rows, kappa, generator(k))  # type: ignore[operator]  # rows of a matrix are vectors
                seconds.append(time.process_time() - start)
            least.append(min(seconds))
        print(f"B = {batch}, d = {dimension}, kappa {kappa:.0e}: {least[0]:.3f} s CPU, draws {least[1]:.3f} s: "
              f"{least[1] / least[0]:.1f} x", flush=True)  # fmt: skip


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("gradients", "clipped", "sum", "one"))
    parser.add_argument("texts", nargs="?", default="")
    parser.add_argument("--way", choices=WAYS, default="plain", help="for one way in this process")
    parser.add_argument("--model", default="minilm", help="folder or id, for 'gradients'")
    parser.add_argument("--lora", type=int, default=0, help="rank of the adapters of a causal model; 0: a classifier")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="longest text in tokens, for 'clipped'")
    parser.add_argument("--dimension", type=int, default=592_130, help="entries: BERT-base's head and pooler")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "sum":
        sums(128, options.dimension, options.repeats)
    elif options.what == "clipped":
        clipped(options.texts, options.batch, options.length, options.repeats)
    elif options.what == "one":
        print(json.dumps(measured(options.way, options.texts, options.batch, options.repeats, options.model, options.lora)))
    else:
        gradients(options.texts, options.batch, options.repeats, options.model, options.lora)


if __name__ == "__main__":
    main()
