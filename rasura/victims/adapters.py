"""Low-rank adapters: those that a folder holds, and fresh ones for updates and training."""

from __future__ import annotations

import filecmp
import logging
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rasura.core.interfaces import InputError, MissingExtra
from rasura.core.local import Adapter
from rasura.core.rng import seeded
from rasura.core.values import Task
from rasura.victims.embedded import embedded_path
from rasura.victims.models import parts
from rasura.victims.on_disk import copied
from rasura.victims.weights import check_files, first_line, is_adapter, read_config, some

log = logging.getLogger(__name__)

LARGEST_RANK = 10_000
"""Largest rank of an adapter that is loaded. A larger one would not be low-rank."""


def base_of(folder: Path) -> str:
    """The base model that an adapter names; the folder of one that comes with a package."""
    base = read_config(folder / "adapter_config.json").get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise InputError(f"{folder}/adapter_config.json names no base model; expected base_model_name_or_path")
    if not Path(base).is_dir() and (Path(base).is_absolute() or base.startswith(".") or base.count("/") > 1):
        raise InputError(f"{folder}/adapter_config.json names {base} as its base model, and that folder does not exist")
    if is_adapter(base):
        raise InputError(f"{folder}/adapter_config.json names {base} as its base model, and that is an adapter itself")
    return base if Path(base).is_dir() else str(embedded_path(base) or base)


def revision_of(folder: Path, base: str) -> str | None:
    """The revision that the adapter in ``folder`` names, where ``base``, on which it is loaded, is the hub id that it names;
    otherwise None.

    A log line says what is not known: whether a folder holds that revision, and whether another name is the same model.
    Raises ``InputError`` where the named base is a folder with other weights.
    """
    base = str(embedded_path(base) or base)
    config = read_config(folder / "adapter_config.json")
    named, revision = (config.get(key) for key in ("base_model_name_or_path", "revision"))
    if not isinstance(revision, str | None):
        raise InputError(f"{folder}/adapter_config.json says revision = {str(revision)[:30]}; expected text")
    there = _held(named) if isinstance(named, str) else None
    if there is not None and Path(base).is_dir():
        if not _same_weights(there, Path(base)):
            raise InputError(
                f"{folder}/adapter_config.json names {named} as its base model, whose weights are not those of {base}; pass "
                f"{named}, or name the base model there on which the adapter was trained"
            )
    elif named != base:
        what = f"names {named} as its base model" if named else "names no base model"
        _say(f"{folder} {what}, and is loaded on {base}; whether that has the weights that it was trained on is not known")
        return None
    if revision in (None, "", "main"):
        return None
    if not Path(base).is_dir():
        return revision
    if Path(base).resolve().name != revision:  # as in the hub's cache
        _say(f"{folder} names the revision {revision} of its base model; whether {base} holds that one is not known")
    return None


def _held(named: str) -> Path | None:
    """The folder of the model called ``named``; None where it is not on this machine."""
    try:
        place = embedded_path(named) or Path(named)
    except MissingExtra:
        return None
    return place if place.is_dir() else None


def _same_weights(one: Path, other: Path) -> bool:
    if one.samefile(other):
        return True
    files = [sorted(p.name for pattern in ("*.safetensors", "*.bin") for p in f.glob(pattern)) for f in (one, other)]
    return files[0] == files[1] and all(filecmp.cmp(one / name, other / name, shallow=False) for name in files[0])


@cache
def _say(line: str) -> None:
    """Log ``line`` once in a process."""
    log.warning(line)


def turns_off(folder: Path) -> bool:
    """Whether a PEFT model with the adapter in ``folder`` is exactly its base model while the adapter is disabled.

    True for LoRA alone. Trained biases and layers that an adapter brings whole stay as they are when it is disabled.
    """
    from safetensors import safe_open

    config = read_config(folder / "adapter_config.json")
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or config.get("modules_to_save"):
        return False
    with safe_open(str(folder / "adapter_model.safetensors"), "pt") as file:
        return all(".lora_" in name for name in file.keys())  # noqa: SIM118  # it cannot be iterated


def with_adapter(model: nn.Module, folder: Path, fresh: tuple[str, ...]) -> tuple[nn.Module, tuple[str, ...]]:
    """``model`` with the adapter in ``folder``, and those of its ``fresh`` weights that the adapter does not hold either.

    Every weight of the adapter must be in its file, in its shape.
    """
    try:
        from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PeftModel, PromptLearningConfig, get_peft_model_state_dict
    except ImportError:
        raise MissingExtra(f"{folder} is a PEFT adapter; run: pip install 'rasura[lora]'") from None
    from safetensors.torch import load_file

    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise InputError(f"{folder} holds no adapter_model.safetensors; expected it beside adapter_config.json")
    check_files(folder)
    config = read_config(folder / "adapter_config.json")
    prompts = {k.value for k, made_by in PEFT_TYPE_TO_CONFIG_MAPPING.items() if issubclass(made_by, PromptLearningConfig)}
    if (kind := str(config.get("peft_type"))) in {*prompts, "IA3"}:
        what = "trained prompts" if kind in prompts else "factors of activations"
        raise InputError(
            f"{folder} holds {what} ({kind}), which are not supported; expected an adapter of the model's layers, "
            "such as LoRA"
        )
    rank = config.get("r", 1)
    if type(rank) is not int or not 0 < rank <= LARGEST_RANK:
        raise InputError(f"{folder}/adapter_config.json says r = {str(rank)[:30]}; expected 1 to {LARGEST_RANK}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of missing keys, which are refused below
            made: Any = PeftModel.from_pretrained(model, str(folder), is_trainable=True)  # type: ignore[arg-type]
        held = {n: tuple(t.shape) for n, t in load_file(str(file)).items()}
        wanted = {n: tuple(t.shape) for n, t in get_peft_model_state_dict(made, save_embedding_layers=False).items()}
    except Exception as error:
        raise InputError(f"{folder}: the adapter does not fit its base model ({first_line(error)})") from None
    lacking = sorted(set(wanted) - set(held))
    if lacking:
        raise InputError(f"{file} lacks {len(lacking)} of the adapter's weights ({some(lacking)})")
    # An adapter may bring whole layers of its base, such as a resized embedding.
    beyond = sorted(set(held) - set(wanted) - set(made.state_dict()))
    if beyond:
        raise InputError(f"{file} holds {len(beyond)} weights that adapter_config.json does not describe ({some(beyond)})")
    return made, tuple(n for n in fresh if f"base_model.model.{n}" not in held)


def multiplied_alone(model: nn.Module) -> nn.Module:
    """``model``, in which DoRA multiplies the matrices of its adapters without running their layers.

    PEFT forms the product by running both on the identity. To what looks at a layer's inputs, these are tokens of no text.
    """
    for layer in model.modules():
        if type(layer).__name__ == "DoraLinearLayer" and hasattr(layer, "get_lora_weight"):
            layer.get_lora_weight = _product  # type: ignore[assignment]  # a method of PEFT's
    return model


def _product(lora_A: nn.Linear, lora_B: nn.Linear, adapter_name: str | None = None) -> Tensor:
    return lora_B.weight @ lora_A.weight


def with_fresh_adapter(model: nn.Module, task: Task, adapter: Adapter | int, seed: int) -> nn.Module:
    """``model``; with a rank above 0 a copy with LoRA adapters, by default on its query and value layers.

    The adapters are initialised as in PEFT (matrix A random, drawn from ``seed``, B zero); a classifier's head is trained
    too. The copy is in evaluation mode: only ``victims.step`` enables the dropout of adapters. Needs the extra
    ``rasura[lora]``.
    """
    rank, targets, dropout = Adapter(adapter) if isinstance(adapter, int) else adapter
    if not rank:
        return model
    try:
        from peft import LoraConfig, TaskType, get_peft_model
    except ImportError:
        raise MissingExtra("updates of adapters need PEFT; run: pip install 'rasura[lora]'") from None
    known = parts(model)
    names = {lin.module.split(".")[-1] for lin in known.blocks[0].qkv}
    inside = [lin.module for lin in known.linears if any(lin.module.startswith(f"{b.module}.") for b in known.blocks)]
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM if task == "causal" else TaskType.SEQ_CLS,
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=dropout,
        target_modules=inside if targets == "all" else sorted(n for n in names if not n.startswith("k")),
    )
    with seeded(seed):
        out: nn.Module = get_peft_model(copied(model), config)  # type: ignore[arg-type]  # a Hugging Face model
    return out.eval()


def with_adapter_like(model: nn.Module, folder: Path, seed: int) -> nn.Module:
    """A copy of ``model`` with fresh adapters of the kind that ``folder`` holds, drawn from ``seed``, in evaluation mode."""
    from peft import PeftConfig, get_peft_model

    config = PeftConfig.from_pretrained(str(folder))
    config.inference_mode = False  # as it is stored
    with seeded(seed):
        out: nn.Module = get_peft_model(copied(model), config)  # type: ignore[arg-type]  # a Hugging Face model
    return multiplied_alone(out).eval()


def with_partial_adapter(model: nn.Module, task: Task, rank: int, alpha: int, seed: int) -> nn.Module:
    """``model`` with the first two blocks, the last one and a classifier's head trained whole, the other blocks by LoRA
    adapters of ``rank`` and ``alpha`` on every linear layer (ObfusLM, appendix C.3); the embeddings are frozen.

    Changes ``model`` itself. A model of three blocks or fewer gets no adapters. Needs the extra ``rasura[lora]``.
    """
    known = parts(model)
    modules = [block.module for block in known.blocks]
    whole = {*modules[:2], modules[-1]}
    inner = [m for m in modules if m not in whole]
    targets = [lin.module for lin in known.linears if any(lin.module.startswith(f"{m}.") for m in inner)]
    heads = [lin for lin in known.linears if task != "causal" and not any(lin.module.startswith(f"{m}.") for m in modules)]
    trained = tuple(f"{m}." for m in [*whole, *(lin.module for lin in heads)])
    names = [n for n, _ in model.named_parameters() if n.startswith(trained)]
    kept = [model.get_parameter(n) for n in names]
    model.requires_grad_(False)
    out = model
    if targets:
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError:
            raise MissingExtra("training by adapters needs PEFT; run: pip install 'rasura[lora]'") from None
        transposed = not isinstance(model.get_submodule(targets[0]), nn.Linear)
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, fan_in_fan_out=transposed)
        with seeded(seed):
            out = get_peft_model(model, config)  # type: ignore[arg-type]  # a Hugging Face model
    for parameter in kept:
        parameter.requires_grad_(True)
    return out.eval()
