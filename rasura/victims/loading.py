"""Loading a victim from a folder or a hub id: safetensors only, eager attention, and no remote code unless allowed."""

from __future__ import annotations

import copy
import hashlib
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from rasura.core.interfaces import InputError
from rasura.core.options import known
from rasura.core.rng import seeded
from rasura.core.values import NO_TEXT, Task, Vocabulary
from rasura.core.word_rows import token_count
from rasura.victims.adapters import base_of, multiplied_alone, revision_of, with_adapter
from rasura.victims.embedded import embedded_path
from rasura.victims.hub import check_hub_id
from rasura.victims.models import one_class_each
from rasura.victims.on_disk import check_stored, needs_disk, stored_model
from rasura.victims.positions import longest_text
from rasura.victims.structure import verify_parts
from rasura.victims.tokenizers import has_tokenizer, load_tokenizer, vocabulary
from rasura.victims.weights import (
    check_config,
    check_files,
    check_finite,
    check_size,
    classes_of,
    first_line,
    fresh_weights,
    read_config,
    some,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Victim:
    """A loaded model with its tokenizer (None for images).

    ``max_length`` is in tokens, or in pixels a side for images; ``num_labels`` is 0 for a causal model. ``fresh`` names the
    weights of a classification head that the folder lacks and that were drawn at random.
    """

    model: nn.Module
    tokenizer: Any
    vocabulary: Vocabulary
    task: Task
    name: str
    max_length: int
    num_labels: int
    fresh: tuple[str, ...] = ()

    def longest(self, limit: int | None) -> int:
        """Tokens that a text may have: ``limit``, if that is given and not more than the model takes."""
        return min(self.max_length, limit or self.max_length)


def _weights(folder: Path, allow_pickle: bool) -> None:
    if list(folder.glob("*.safetensors")):
        return
    pickles = sorted(p.name for p in folder.glob("*.bin"))
    if pickles and not allow_pickle:
        raise InputError(
            f"{folder} holds only pickled weights ({pickles[0]}), which can run code when they are loaded; "
            "convert them to safetensors: where you trust the file, load it with transformers, and save_pretrained writes "
            "them so. Only rasura read takes pickled ones, with --allow-pickle (rasura.load: allow_pickle=True)"
        )
    if not pickles:
        raise InputError(f"{folder} holds no weights: expected model.safetensors")


def load(
    path_or_id: str | Path,
    task: Task,
    *,
    num_labels: int | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    seed: int = 0,
    device: str = "cpu",
    attacked: bool = True,
    adapter: str | Path | None = None,
    on_disk: bool | None = None,
    revision: str | None = None,
) -> Victim:
    """Load a classifier or causal model with its tokenizer, in eval mode, with eager attention, in float32.

    ``path_or_id`` is a folder, a hub id, ``"minilm"`` or ``"smollm2"``. A head that the folder lacks, or has with another
    number of classes than ``num_labels``, is drawn at random from ``seed``, with a log line; any other missing weight is
    refused. ``num_labels``: None for as many as the folder says, or two. A PEFT adapter folder is loaded on its base model
    (extra ``rasura[lora]``), or on ``path_or_id`` where it is given as ``adapter``; another base than it names is refused or
    said (``adapters.revision_of``). ``revision``: of a hub id, by default the one that an adapter names. For the task
    ``vision`` it is ``lenet``, ``cnn`` or a safetensors file with the weights of one of them. ``attacked``: check that the
    parts which attacks on updates need exist and work as expected; False for models that are only trained or queried.
    ``on_disk``: leave the weights on disk (``rasura.victims.on_disk``); None: only for an attacked model whose weights need
    more than half of the memory. Raises ``InputError`` if anything is wrong with the folder.
    """
    known("task", task, get_args(Task))
    name = str(path_or_id)
    if task == "vision":
        from rasura.victims.vision import build

        images = build(name, num_labels or 2, seed=seed).to(device)
        check_finite(images, name)
        return Victim(images, None, NO_TEXT, task, name, images.config.image_size, images.config.num_labels)
    path = embedded_path(name) or Path(name)
    source = str(path)
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file; expected a model folder with config.json")
    base = source
    if path.is_dir():
        if (path / "adapter_config.json").is_file():
            base = base_of(path)
        elif not (path / "config.json").is_file():
            raise InputError(f"{path} holds no config.json; expected a Hugging Face model folder")
    else:
        check_hub_id(name)
    if base != source and adapter is not None:
        raise InputError(f"{name} is an adapter itself; expected its base model beside the adapter {adapter}")
    tuned = path if base != source else None if adapter is None else Path(adapter)
    if tuned is not None:
        num_labels, revision = num_labels or classes_of(tuned), revision or revision_of(tuned, base)
    stays = on_disk if attacked else bool(on_disk)
    model, fresh = _model(base, name, task, num_labels, allow_pickle, trust_remote_code, seed, stays, revision)
    if tuned is not None:
        model, fresh = with_adapter(model, tuned, fresh)
    if not check_stored(model, name):
        check_finite(model, name)
    tokenizer = load_tokenizer(source if has_tokenizer(path) else base, trust_remote_code, revision)
    return _victim(model, tokenizer, task, name, device, attacked, fresh, seed)


def in_memory(model: nn.Module, tokenizer: Any, task: Task, *, device: str = "cpu", attacked: bool = True) -> Victim:
    """A Hugging Face model that is already in memory, with its tokenizer, in the form that ``load`` returns. ``model`` is
    copied.

    Its name is the class with a digest of the weights, so a run is never resumed with different weights. Raises
    ``InputError`` as ``load`` does, and for a model that is not a Hugging Face one.
    """
    if task == "vision":
        raise InputError("an image classifier in memory is not supported; pass a safetensors file with its weights")
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise InputError(f"{type(model).__name__} has no Hugging Face config; expected a classifier or a causal model")
    digest = hashlib.sha256()
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(f"{key}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    own: Any = copy.deepcopy(model).float()
    own.set_attn_implementation("eager")
    name = f"{type(model).__name__}-{digest.hexdigest()[:12]}"
    check_finite(own, name)
    return with_one_label(_victim(own, copy.deepcopy(tokenizer), task, name, device, attacked, (), 0))


def _victim(
    model: nn.Module, tokenizer: Any, task: Task, name: str, device: str, attacked: bool, fresh: tuple[str, ...], seed: int
) -> Victim:
    config: Any = model.config
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    # A decoder's head reads the last token that is not the config's padding: it must be the one that texts are padded with.
    config.get_text_config().pad_token_id = config.pad_token_id = tokenizer.pad_token_id or 0
    size = token_count(model)
    if len(tokenizer) > size:
        raise InputError(
            f"{name}: the tokenizer has {len(tokenizer)} tokens, but the model's embedding has only {size}; "
            "expected the tokenizer that the model was trained with"
        )
    labels = int(config.num_labels) if task == "classification" else 0
    multiplied_alone(model).to(device).eval()
    words = vocabulary(tokenizer, size)
    if attacked:
        verify_parts(model, words, task)
    longest = min(n for n in (longest_text(model), int(tokenizer.model_max_length)) if n > 0)
    if fresh:
        _tell(name, labels, some(fresh), seed)
    return Victim(model, tokenizer, words, task, name, longest, labels, fresh)


def with_own_head(victim: Victim) -> Victim:
    """``victim``, for what a trained model shows of its texts. Raises ``InputError`` if its head was drawn at random: its
    answers would say nothing of any training, and so that nothing leaks."""
    if victim.fresh:
        raise InputError(
            f"{victim.name} holds no head of {victim.num_labels} classes ({some(victim.fresh)}), so its answers say nothing "
            "of its training; expected the trained classifier, and the number of its classes"
        )
    return victim


def with_one_label(victim: Victim) -> Victim:
    """``victim``, for texts with one label each. Raises ``InputError`` for a model of numbers (regression) or of several
    labels a text: its loss is another one, and what is measured of it with classes would be of no model."""
    if victim.task == "classification" and not one_class_each(victim.model):
        kind = getattr(victim.model.config, "problem_type", None)
        raise InputError(
            f"{victim.name} is not a classifier with one label a text: its config says problem_type = {str(kind)[:40]}, "
            f"{victim.num_labels} outputs; expected single_label_classification, of two classes or more"
        )
    return victim


@cache
def _tell(name: str, labels: int, weights: str, seed: int) -> None:
    """Log, once in a process, that a head is new."""
    log.warning("%s holds no head of %d classes: %s were drawn at random (seed %d)", name, labels, weights, seed)


def _model(
    source: str,
    name: str,
    task: Task,
    num_labels: int | None,
    pickle: bool,
    remote: bool,
    seed: int,
    on_disk: bool | None,
    revision: str | None,
) -> tuple[nn.Module, tuple[str, ...]]:
    """The model in ``source``, and the weights of its head that were drawn from ``seed``."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    kind: Any = AutoModelForSequenceClassification if task == "classification" else AutoModelForCausalLM
    folder = Path(source)
    if folder.is_dir():
        check_config(read_config(folder / "config.json"), name)
        _weights(folder, pickle)
        check_files(folder)
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options: dict[str, Any] = {
        "attn_implementation": "eager",
        "use_safetensors": None if pickle else True,
        "trust_remote_code": remote,
        "revision": revision or "main",
        "dtype": torch.float32,
        # Refused below, where it is no head, with the name of the weight.
        "ignore_mismatched_sizes": True,
        "output_loading_info": True,
    }
    if task == "classification" and num_labels is not None:
        options["num_labels"] = num_labels
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=remote, revision=options["revision"])
        check_config(config.to_dict(), name)
        if folder.is_dir() and not remote:
            with torch.device("meta"), torch.random.fork_rng(devices=[]):
                entries = sum(p.numel() for p in kind.from_config(config).parameters())
            check_size(folder, entries)
            if on_disk or (on_disk is None and needs_disk(entries)):
                config.num_labels = options.get("num_labels", config.num_labels)
                return stored_model(lambda: kind.from_config(config, attn_implementation="eager"), folder), ()
        with seeded(seed):
            model, info = kind.from_pretrained(source, **options)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{source} cannot be loaded as a {task} model: {first_line(error)}") from None
    finally:
        transformers.logging.set_verbosity(level)
    return model, fresh_weights(model, info, name, head=task == "classification")
