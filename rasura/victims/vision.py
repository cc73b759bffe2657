"""The two image classifiers of the selective-encryption paper, built from a name or a safetensors file.

They take ``pixel_values`` in ``[0, 1]`` and ``labels`` and return what Hugging Face image classifiers return, so
``victims.step`` works on them unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput

from rasura.core.interfaces import InputError
from rasura.core.rng import seeded
from rasura.victims.weights import IMAGE_MODELS


@dataclass(frozen=True)
class VisionConfig:
    """Public facts of an image classifier, named as in Hugging Face configs. ``image_size`` is in pixels, of a square."""

    model_type: str
    num_labels: int
    image_size: int = 32
    num_channels: int = 3


class ImageClassifier(nn.Module):
    """``body`` makes features, ``head`` (linear) scores the classes.

    ``forward``: ``pixel_values`` ``(batch, channels, height, width)`` and ``labels`` ``(batch,)`` or None give ``logits``
    ``(batch, classes)`` and ``loss`` (mean cross-entropy, None without labels).
    """

    def __init__(self, config: VisionConfig, body: nn.Sequential, features: int) -> None:
        super().__init__()
        self.config = config
        self.body = body
        self.head = nn.Linear(features, config.num_labels)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        logits = self.head(self.body(pixel_values))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


def lenet(num_labels: int, *, image_size: int = 32, seed: int = 0) -> ImageClassifier:
    """The LeNet variant of the image attack papers: four 5x5 convolutions of width 12 with sigmoids, then one linear layer.

    88,648 parameters with 100 classes (selective-encryption paper, sec. 5). All weights are drawn from U(-0.5, 0.5), since
    PyTorch's own initialisation leaves almost no gradient behind four sigmoids (Zhu et al. 2019, DLG).
    """
    config = VisionConfig("lenet", num_labels, image_size)
    with seeded(seed):
        steps: list[nn.Module] = []
        for inputs, stride in ((config.num_channels, 2), (12, 2), (12, 1), (12, 1)):
            steps += [nn.Conv2d(inputs, 12, 5, stride=stride, padding=2), nn.Sigmoid()]
        model = ImageClassifier(config, nn.Sequential(*steps, nn.Flatten()), 12 * (image_size // 4) ** 2)
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)
    return model.eval()


def cnn(num_labels: int, *, image_size: int = 32, seed: int = 0) -> ImageClassifier:
    """The CNN of McMahan et al. 2017: two 5x5 convolutions (32, 64), each with ReLU and 2x2 max pooling, and 512 units.

    2,202,660 parameters with 100 classes (selective-encryption paper, sec. 5).
    """
    config = VisionConfig("cnn", num_labels, image_size)
    with seeded(seed):
        body = nn.Sequential(
            nn.Conv2d(config.num_channels, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * (image_size // 4) ** 2, 512), nn.ReLU(),
        )  # fmt: skip
        return ImageClassifier(config, body, 512).eval()


MODELS = dict(zip(IMAGE_MODELS, (lenet, cnn)))


def build(name: str | Path, num_labels: int, *, seed: int = 0) -> ImageClassifier:
    """``lenet`` or ``cnn`` with new weights drawn from ``seed``, or the one whose weights a safetensors file holds.

    The tensors of a file show which of the two it is and how many classes it has. Raises ``InputError`` for an unknown name,
    a missing or unreadable file, and tensors of neither model.
    """
    if str(name) in MODELS:
        return MODELS[str(name)](num_labels, seed=seed)
    path = Path(name)
    if not path.is_file():
        raise InputError(f"model {name} is neither a known image model ({', '.join(MODELS)}) nor a safetensors file")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found: dict[str, Any] = load_file(str(path))
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is not a safetensors file ({str(error).splitlines()[0]})") from None
    shapes = {n: tuple(t.shape) for n, t in found.items()}
    head = shapes.get("head.weight", ())
    if len(head) == 2:
        for make in MODELS.values():
            model = make(head[0])
            if {n: tuple(p.shape) for n, p in model.named_parameters()} == shapes:
                model.load_state_dict(found)
                return model
    raise InputError(f"{path} holds the weights of neither {' nor '.join(MODELS)} at 32x32 pixels; expected one of them")
