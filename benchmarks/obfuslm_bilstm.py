"""ObfusLM on a network that is no transformer: a BiLSTM on word vectors, as in table 12 of the paper.

python benchmarks/obfuslm_bilstm.py DATA FOLDER
python benchmarks/obfuslm_bilstm.py DATA FOLDER --vectors glove.6B.100d.txt
python benchmarks/obfuslm_bilstm.py DATA FOLDER --study obfuslm/calibrated

makes the network in FOLDER, registers its kind and runs the study ``obfuslm/table12`` (or another) on it: a model of any
kind does so.
Without a file of vectors (lines of a word and its figures, as GloVe's) a word's vector is the mean of its pieces' rows in
MiniLM's word embedding, projected on their first principal directions.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from rasura.cli import app
from rasura.data.text import load_examples
from rasura.victims.loading import load
from rasura.victims.models import Parts, register

PAD, UNKNOWN = "[PAD]", "[UNK]"
TRAIN = "sst2.train.parquet"


class BiLstmConfig(PretrainedConfig):  # type: ignore[misc]  # transformers has no types here
    """Sizes of a ``BiLstm``: words, entries of a vector, of a state."""

    model_type = "bilstm-on-words"

    def __init__(self, vocab_size: int = 2, width: int = 100, hidden: int = 128, **more: Any) -> None:
        super().__init__(**more)
        self.vocab_size, self.width, self.hidden = vocab_size, width, hidden


class BiLstm(PreTrainedModel):  # type: ignore[misc]  # untyped
    """Two layers of LSTM in both directions over word vectors, and a linear layer on their mean state."""

    config_class = BiLstmConfig

    def __init__(self, config: BiLstmConfig) -> None:
        super().__init__(config)
        self.vectors = nn.Embedding(config.vocab_size, config.width, padding_idx=0)
        self.lstm = nn.LSTM(config.width, config.hidden, 2, batch_first=True, bidirectional=True)
        self.score = nn.Linear(2 * config.hidden, config.num_labels)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The word vectors."""
        return self.vectors

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None, **_: Any
    ) -> SequenceClassifierOutput:
        """Logits, and the loss where ``labels`` are given."""
        states, _ = self.lstm(self.vectors(input_ids))
        mask = attention_mask[:, :, None].to(states.dtype)
        logits = self.score((states * mask).sum(1) / mask.sum(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def parts_of(model: nn.Module) -> Parts:
    """What is to be known of it: where the words' rows are, and that there are no blocks."""
    return Parts("vectors.weight", None, ("vectors.weight",), (), (), None, model.config.width, causal=False, tied=False)  # type: ignore[union-attr, arg-type]


def vectors_of(words: Sequence[str], file: str | None, width: int) -> Tensor:
    """A vector for each of ``words`` ``(words, width)``, zeros for one that ``file`` does not hold."""
    if file is not None:
        places = {word: n for n, word in enumerate(words)}
        found: dict[int, list[float]] = {}
        with Path(file).open(encoding="utf-8") as lines:
            for line in lines:
                word, *figures = line.rstrip().split(" ")
                if word in places:
                    found[places[word]] = [float(x) for x in figures]
        out = torch.zeros(len(words), len(next(iter(found.values()))))
        out[list(found)] = torch.tensor(list(found.values()))
        return out
    victim = load("minilm", "classification")
    table: Tensor = victim.model.get_input_embeddings().weight.detach()  # type: ignore[operator]  # a Hugging Face model
    pieces = [victim.vocabulary.encode(word) for word in words]
    whole = torch.stack([table[p].mean(0) if p else torch.zeros(table.shape[1]) for p in pieces])
    directions = torch.linalg.svd(whole, full_matrices=False).Vh[:width]
    return whole @ directions.T


def make(folder: Path, texts: Sequence[str], file: str | None, width: int, hidden: int) -> None:
    """A network on the words of ``texts``, the rest of its weights drawn, and its tokenizer."""
    words = [word for word, _ in Counter(word for text in texts for word in text.split()).most_common()]
    vectors = vectors_of(words, file, width)
    torch.manual_seed(0)
    model = BiLstm(BiLstmConfig(len(words) + 2, vectors.shape[1], hidden, pad_token_id=0, num_labels=2))
    with torch.no_grad():
        model.vectors.weight.zero_()[2:] = vectors
    model.save_pretrained(folder)
    places = {word: n for n, word in enumerate([PAD, UNKNOWN, *words])}
    backend = Tokenizer(WordLevel(places, unk_token=UNKNOWN))
    backend.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, unk_token=UNKNOWN, model_max_length=512,
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)  # fmt: skip
    print(f"{len(words)} words, vectors of {vectors.shape[1]}")


def main() -> None:
    """Make the network where it is not there yet, and run the study."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("data", type=Path, help="the folder that holds SST-2")
    parser.add_argument("folder", type=Path, help="where the network goes")
    parser.add_argument("--vectors", help="a file of word vectors")
    parser.add_argument("--width", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--study", default="obfuslm/table12")
    options, more = parser.parse_known_args()
    AutoConfig.register(BiLstmConfig.model_type, BiLstmConfig)
    AutoModelForSequenceClassification.register(BiLstmConfig, BiLstm)
    register(BiLstmConfig.model_type, parts_of)
    if not options.folder.exists():
        texts = [e.text for e in load_examples(options.data / TRAIN)]
        make(options.folder, texts, options.vectors, options.width, options.hidden)
    app(["study", options.study, "--data", str(options.data), "--model", str(options.folder), *more])


if __name__ == "__main__":
    main()
