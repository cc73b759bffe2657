"""Large models: a client's gradient as a file, and ``rasura read`` of it from a cold start.

python benchmarks/large_model.py TEXTS.parquet --folder runs/7b --tokenizer MODELS/smollm2       # 6.9 billion weights
python benchmarks/large_model.py TEXTS.parquet --folder runs/qwen --like MODELS/qwen-coder       # a trained model
python benchmarks/large_model.py TEXTS.parquet --folder runs/all --like MODELS/qwen-coder --rank 0 --size 4

Without ``--like`` a Llama-shaped model with random weights in bfloat16 is made, so that only seconds and memory mean
anything; exact recovery is shown on trained models. Adapters of ``--rank`` are on queries and values, with B drawn at
random as in any round but the first; rank 0: all weights are trained but the embeddings. Texts have at least six words.
Client and reader are processes of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rasura.core.rng import derive
from rasura.data.text import Example, encode, load_examples
from rasura.victims.loading import load

MIN_WORDS = 6
SHAPE = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32}
POOL = 1 << 26
"""Random values drawn once; tensors are pieces of them, since drawing seven billion takes minutes."""


def make(folder: Path, tokenizer: Path, layers: int) -> None:
    """Write a Llama-shaped model with random weights in shards of four blocks."""
    from transformers import AutoTokenizer, LlamaConfig

    words = AutoTokenizer.from_pretrained(tokenizer)
    size = len(words)
    config = LlamaConfig(
        vocab_size=size, num_hidden_layers=layers, max_position_embeddings=4096, rms_norm_eps=1e-5, dtype="bfloat16",
        tie_word_embeddings=False, architectures=["LlamaForCausalLM"], bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id, **SHAPE,
    )  # fmt: skip
    folder.mkdir(parents=True)
    words.save_pretrained(folder)
    config.save_pretrained(folder)
    rng = torch.Generator().manual_seed(0)
    pool = torch.randn(POOL, generator=rng).bfloat16()
    where: dict[str, str] = {}

    def drawn(rows: int, columns: int, scale: float = 0.02) -> Tensor:
        out, at = torch.empty(rows * columns, dtype=torch.bfloat16), 0
        while at < len(out):
            count = min(len(out) - at, int(torch.randint(1 << 18, 1 << 20, (), generator=rng)))
            start = int(torch.randint(0, POOL - count, (), generator=rng))
            torch.mul(pool[start : start + count], scale, out=out[at : at + count])
            at += count
        return out.view(rows, columns)

    def put(name: str, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, folder / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(tensors, name))

    hidden, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    ends = {"model.embed_tokens.weight": drawn(size, hidden, 1.0), "lm_head.weight": drawn(size, hidden)}
    put("model-00000.safetensors", {**ends, "model.norm.weight": ones})
    for first in range(0, layers, 4):
        tensors: dict[str, Tensor] = {}
        for layer in range(first, min(first + 4, layers)):
            at = f"model.layers.{layer}"
            tensors |= {f"{at}.self_attn.{n}_proj.weight": drawn(hidden, hidden) for n in "qkvo"}
            tensors |= {f"{at}.mlp.{n}_proj.weight": drawn(inner, hidden) for n in ("gate", "up")}
            tensors[f"{at}.mlp.down_proj.weight"] = drawn(hidden, inner)
            tensors |= {f"{at}.{n}_layernorm.weight": ones.clone() for n in ("input", "post_attention")}
        put(f"model-{first // 4 + 1:05d}.safetensors", tensors)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def texts(data: str, size: int) -> list[Example]:
    """The first texts of a file in an order drawn by chance."""
    every = [e for e in load_examples(data) if len(e.text.split()) >= MIN_WORDS]
    return sorted(every, key=lambda e: derive(0, e.text))[:size]


def client(base: Path, out: Path, some: Sequence[Example], rank: int) -> None:
    """Write the gradient of ``some`` texts, at a new adapter of a later round, which is written too, or of all weights."""
    victim = load(base, "causal", on_disk=rank > 0, attacked=False)
    model: nn.Module = victim.model
    if rank:
        import peft

        torch.manual_seed(0)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj"])
        adapted = peft.get_peft_model(victim.model, config)
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.02)
        adapted.save_pretrained(out / "adapter")
        model = adapted
    else:
        for p in model.parameters():
            p.requires_grad_(True)
        for part in (model.get_input_embeddings(), model.get_output_embeddings()):  # type: ignore[operator]
            part.requires_grad_(False)
    batch = encode(some, victim.tokenizer, "causal", max_length=64, num_labels=2)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    found = torch.autograd.grad(model.eval()(**batch.inputs()).loss, [p for _, p in named])
    save_file({n.replace(".default.", "."): g.contiguous() for (n, _), g in zip(named, found)}, out / "update.safetensors")
    print(json.dumps({"tokens": int(batch.attention_mask.sum())}))


def watched(command: list[str]) -> tuple[str, dict[str, float]]:
    """Output of a process, its wall and CPU seconds, and its largest memory in GB: all, and without mapped files."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = {"VmHWM": 0.0, "RssAnon": 0.0}

    def watch() -> None:
        while process.returncode is None:
            try:
                lines = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines()
            except OSError:
                return
            for line in lines:
                name, _, rest = line.partition(":")
                if name in peak:
                    peak[name] = max(peak[name], int(rest.split()[0]) / 1e6)
            time.sleep(0.1)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    seconds = {"wall": time.perf_counter() - start, "cpu": used.ru_utime + used.ru_stime}
    return output, {**seconds, "gb": peak["VmHWM"], "gb_without_files": peak["RssAnon"]}


def main() -> None:
    """Print one line for the client and one for the reader."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="texts")
    parser.add_argument("--folder", type=Path, required=True, help="what is made: model, adapter and update")
    parser.add_argument("--tokenizer", type=Path, help="folder whose tokenizer the shape gets")
    parser.add_argument("--like", type=Path, help="a trained model in place of random weights")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--size", type=int, default=1, help="texts of the update")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    told = parser.parse_args()
    base, some = told.like or told.folder / "model", texts(told.data, told.size)
    if told.client:
        return client(base, told.folder, some, told.rank)
    told.folder.mkdir(parents=True, exist_ok=True)
    if not base.exists():
        make(base, told.tokenizer, told.layers)
    update = told.folder / "update.safetensors"
    if not update.exists():
        said, took = watched([sys.executable, *sys.argv, "--client"])
        print(json.dumps({"what": "client", **json.loads(said), **took}), flush=True)
    command = [sys.executable, "-m", "rasura", "read", str(update), "--model", str(base), "--task", "causal", "--json"]
    command += ["--batch-size", str(told.size), "--attack", "span"]
    command += ["--names-from", str(told.folder / "adapter")] if told.rank else ["--frozen-embeddings"]
    said, took = watched(command)
    read = json.loads(said.strip().splitlines()[-1])
    exact = sum((Counter(e.text for e in some) & Counter(read.get("texts", ()))).values())
    kept = {name: read[name] for name in ("status", "confidence") if name in read}
    print(json.dumps({"what": "read", **kept, "exact": f"{exact} of {told.size}", **took}))
    return None


if __name__ == "__main__":
    main()
