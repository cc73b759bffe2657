"""What an honest-but-curious server could record of every message, in files for ``rasura read``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rasura.core.files import make_private
from rasura.core.interfaces import InputError
from rasura.core.local import Local
from rasura.core.values import Message


@dataclass(frozen=True)
class Capture:
    """Writes ``FOLDER/round-N/client-ID.safetensors``: of FedSGD the gradient, else the weights after minus before, as
    ``rasura read --update`` expects; ``.hidden.safetensors``, true where an entry was not visible; ``.json``, the header.

    ``local``: the clients' local training, which is public. Sealed entries are zeros in the file and hidden in the mask.
    ``save_model`` writes what the server knows of the model before a round to the folder it is given.
    """

    folder: Path
    local: Local
    save_model: Callable[[Mapping[str, Tensor], Path], None] | None = None

    def __call__(self, number: int, node: int, message: Message) -> None:
        """Keep one client's message."""
        from safetensors.torch import save_file

        place = self.folder / f"round-{number}"
        place.mkdir(parents=True, exist_ok=True)
        rate = self.local.learning_rate
        factor = 1 / rate if self.local.kind == "fedsgd" else -1.0
        update = {n: (g * factor).contiguous() for n, g in message.gradients.items()}
        make_private(place / f"client-{node}.safetensors", partial(save_file, update))
        hidden = {n: ~mask for n, mask in message.visible.items() if not bool(mask.all())}
        if hidden:
            make_private(place / f"client-{node}.hidden.safetensors", partial(save_file, hidden))
        visible = sum(
            int(message.visible[n].sum()) if n in message.visible else g.numel() for n, g in message.gradients.items()
        )
        told = {
            "header": dict(message.header), "visible": visible,
            "entries": sum(g.numel() for g in message.gradients.values()),
            "ciphertexts": len(message.sealed), "bytes_sealed": sum(map(len, message.sealed.values())),
        }  # fmt: skip
        (place / f"client-{node}.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")

    def model(self, number: int, weights: Mapping[str, Tensor]) -> None:
        """Save what the server knows about the model before a round."""
        if self.save_model is not None:
            place = self.folder / f"round-{number}" / "model"
            place.mkdir(parents=True, exist_ok=True)
            self.save_model(weights, place)


def check_folder(folder: Path) -> Path:
    """``folder`` if nothing was kept there before."""
    if folder.exists() and any(folder.glob("round-*")):
        raise InputError(f"{folder} holds the record of another run; choose an empty folder")
    return folder


def as_tensors(arrays: Mapping[str, object]) -> dict[str, Tensor]:
    """NumPy arrays as tensors of their own memory."""
    return {n: torch.tensor(a) for n, a in arrays.items()}
