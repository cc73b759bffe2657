"""Tiny random models of the families, a small vocabulary and batches: what several tests build on. No files, no network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from rasura.core.batches import Batch
from rasura.core.values import Task, Vocabulary

WORDS = 300
PAD, CLS, SEP = 0, 1, 2
FAMILIES = ("bert", "roberta", "distilbert", "gpt2", "llama")
ENCODERS = FAMILIES[:3]
LIKE_LLAMA = ("mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi", "phi3", "mixtral", "smollm3")
MORE = (
    "electra", "mpnet", "albert", "modernbert", "opt", "gpt-neox", "bloom", "falcon", "mpt", *LIKE_LLAMA,
    "deberta-v2", "deberta-v3", "roformer", "xlnet", "t5",
)  # fmt: skip
ALL = FAMILIES + MORE
"""All families. ELECTRA and ALBERT have embeddings narrower than the model, with a projection."""

DECODERS = ("gpt2", "llama", "opt", "gpt-neox", "bloom", "falcon", "mpt", *LIKE_LLAMA)
UNSUPPORTED = ("xlnet",)
"""Families whose attention has no linear layers (its weights are bare parameters): ``load`` refuses them."""

UNORDERED = ("modernbert", "deberta-v2", "deberta-v3", "roformer", "t5")
"""Encoders whose attention alone knows positions: block 0 tells the words of a text; their order has to be searched for."""

_NAMES = ["the", "of", "and", "to", "a", "in", ".", ","]


def _word(i: int) -> str:
    return _NAMES[i - 3] if 3 <= i < 3 + len(_NAMES) else f"w{i}"


_IDS = {_word(i): i for i in range(3, WORDS)}

VOCABULARY = Vocabulary(
    size=WORDS,
    decode=lambda ids: " ".join(_word(i) for i in ids),
    encode=lambda text: [_IDS[w] for w in text.split() if w in _IDS],
    prefix=(CLS,),
    suffix=(SEP,),
    pad_id=PAD,
    special_ids=frozenset({PAD, CLS, SEP}),
)
"""Words ``w11 w12 ...`` and a few real ones; id 0 pads, 1 and 2 stand around every text."""

CAUSAL_VOCABULARY = Vocabulary(
    VOCABULARY.size, VOCABULARY.decode, VOCABULARY.encode, (CLS,), (), PAD, VOCABULARY.special_ids
)
"""The same without an end token."""


def tiny(
    family: str,
    task: str,
    *,
    num_labels: int = 3,
    hidden: int = 64,
    blocks: int = 2,
    tied: bool | None = None,
    seed: int = 0,
    words: int = WORDS,
) -> nn.Module:
    """A random model in eval mode, eager attention, with the given number of blocks. ``tied`` as the family does if None."""
    torch.manual_seed(seed)
    common = {"vocab_size": words, "pad_token_id": PAD, "num_labels": num_labels, "attn_implementation": "eager"}
    names = {
        "hidden_size": hidden, "num_hidden_layers": blocks, "num_attention_heads": 4, "intermediate_size": 2 * hidden,
        "max_position_embeddings": 64,
    }  # fmt: skip
    tie = {} if tied is None else {"tie_word_embeddings": tied}
    if family == "bert":
        return _quiet(transformers.BertForSequenceClassification(transformers.BertConfig(**common, **names)))
    if family == "roberta":
        return _quiet(transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**common, **names)))
    if family == "distilbert":
        own = {"dim": hidden, "n_layers": blocks, "n_heads": 4, "hidden_dim": 2 * hidden, "max_position_embeddings": 64}
        return _quiet(transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig(**common, **own)))
    if family == "gpt2":
        config = transformers.GPT2Config(
            **common, **tie, n_embd=hidden, n_layer=blocks, n_head=4, n_positions=64, bos_token_id=CLS, eos_token_id=SEP
        )
        causal, classifier = transformers.GPT2LMHeadModel, transformers.GPT2ForSequenceClassification
        return _quiet((causal if task == "causal" else classifier)(config))
    if family == "llama":
        config = transformers.LlamaConfig(**common, **names, **tie, bos_token_id=CLS, eos_token_id=SEP)
        causal, classifier = transformers.LlamaForCausalLM, transformers.LlamaForSequenceClassification
        return _quiet((causal if task == "causal" else classifier)(config))
    return _of_another_family(family, task, common, names)


def _quiet(model: Any) -> nn.Module:
    """A Hugging Face model in eval mode."""
    quiet: nn.Module = model.eval()
    return quiet


def _of_another_family(family: str, task: str, common: dict[str, object], names: dict[str, int]) -> nn.Module:
    """A model of one of ``MORE``, in eval mode."""
    hidden, blocks = names["hidden_size"], names["num_hidden_layers"]
    frame = {"bos_token_id": CLS, "eos_token_id": SEP}
    groups = {"head_dim": hidden // 4, "num_key_value_heads": 2}
    distances = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
    made: dict[str, Callable[[], object]] = {
        "electra": lambda: transformers.ElectraConfig(**common, **names, embedding_size=hidden // 2),
        # MPNet counts positions from a padding id of 1, whatever its config says.
        "mpnet": lambda: transformers.MPNetConfig(**{**common, "pad_token_id": 1}, **names),
        "albert": lambda: transformers.AlbertConfig(**common, **names, embedding_size=hidden // 2),
        "modernbert": lambda: transformers.ModernBertConfig(**common, **names, **frame, cls_token_id=CLS, sep_token_id=SEP),
        "opt": lambda: transformers.OPTConfig(
            **common, **frame, hidden_size=hidden, num_hidden_layers=blocks, num_attention_heads=4, ffn_dim=2 * hidden,
            max_position_embeddings=64, word_embed_proj_dim=hidden,
        ),
        "mistral": lambda: transformers.MistralConfig(**common, **names, **groups, **frame),
        "qwen2": lambda: transformers.Qwen2Config(**common, **names, **frame, num_key_value_heads=2),
        "qwen3": lambda: transformers.Qwen3Config(**common, **names, **groups, **frame),
        "gemma": lambda: transformers.GemmaConfig(**common, **names, **groups, **frame),
        "gemma2": lambda: transformers.Gemma2Config(**common, **names, **groups, **frame),
        "gemma3": lambda: transformers.Gemma3TextConfig(**common, **names, **groups, **frame),
        "phi": lambda: transformers.PhiConfig(**common, **names, **frame),
        "phi3": lambda: transformers.Phi3Config(**common, **names, **frame),
        "mixtral": lambda: transformers.MixtralConfig(
            **common, **names, **frame, num_key_value_heads=2, num_local_experts=4
        ),
        "smollm3": lambda: transformers.SmolLM3Config(**common, **names, **frame, num_key_value_heads=2),
        "gpt-neox": lambda: transformers.GPTNeoXConfig(**common, **names, **frame),
        "bloom": lambda: transformers.BloomConfig(**common, **frame, hidden_size=hidden, n_layer=blocks, n_head=4),
        "falcon": lambda: transformers.FalconConfig(
            **common, **frame, hidden_size=hidden, num_hidden_layers=blocks, num_attention_heads=4,
            ffn_hidden_size=2 * hidden,
        ),
        "mpt": lambda: transformers.MptConfig(
            **common, **frame, d_model=hidden, n_layers=blocks, n_heads=4, expansion_ratio=2, max_seq_len=64
        ),
        "deberta-v2": lambda: transformers.DebertaV2Config(**common, **names, **distances),
        "deberta-v3": lambda: transformers.DebertaV2Config(  # as published: shared keys, distances in buckets
            **common, **names, **distances, share_att_key=True, position_buckets=32, norm_rel_ebd="layer_norm"
        ),
        "roformer": lambda: transformers.RoFormerConfig(**common, **names),
        "xlnet": lambda: transformers.XLNetConfig(
            **common, **frame, d_model=hidden, n_layer=blocks, n_head=4, d_inner=2 * hidden
        ),
        "t5": lambda: transformers.T5Config(
            **common, d_model=hidden, d_kv=hidden // 4, d_ff=2 * hidden, num_layers=blocks, num_heads=4, eos_token_id=SEP,
            decoder_start_token_id=PAD,
        ),
    }  # fmt: skip
    causal, classifier = transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification
    kind = causal if task == "causal" else classifier
    model: nn.Module = kind.from_config(made[family](), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # A trained projection keeps the embeddings' scale; one drawn with BERT's deviation makes all tokens alike.
            if name.endswith(("embeddings_project.weight", "embedding_hidden_mapping_in.weight")):
                parameter.mul_(10.0)
    return model


def batch_of(rows: list[list[int]], task: Task | str, labels: list[int] | None = None) -> Batch:
    """A batch of id rows (special tokens included), padded on the right."""
    longest = max(map(len, rows))
    ids = torch.tensor([r + [PAD] * (longest - len(r)) for r in rows])
    mask = torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in rows])
    target: Tensor = torch.where(mask.bool(), ids, -100) if task == "causal" else torch.tensor(labels or [0] * len(rows))
    texts = tuple(VOCABULARY.text(r) for r in rows)
    return Batch(ids, mask, target, texts, texts, special_ids=VOCABULARY.special_ids)


def batch_for(task: Task | str, rows: int = 2) -> Batch:
    """Texts of different lengths with repeated words."""
    texts = [
        [CLS, 40, 3, 41, 9, 3, 42, SEP], [CLS, 50, 51, 4, 52, SEP], [CLS, 3, 60, 61, 62, 4, 60, 9, SEP], [CLS, 70, 9, SEP],
    ]  # fmt: skip
    return batch_of(texts[:rows], task, [1, 0, 2, 1][:rows])


def tokenizer_folder(model: nn.Module, folder: Path) -> Path:
    """A Hugging Face folder of ``model`` with a fast tokenizer whose words are those of ``VOCABULARY``.

    Where the model pads with id 1 (MPNet), ids 0 and 1 change places.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing

    config: Any = model.config
    pad = config.pad_token_id
    words = {"[PAD]": pad, "[CLS]": {PAD: CLS, CLS: PAD}[pad], "[SEP]": SEP, **_IDS}
    backend = Tokenizer(WordLevel(words, unk_token="[PAD]"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", words["[CLS]"]), ("[SEP]", SEP)],
    )  # fmt: skip
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "eos_token": "[SEP]"}
    options = {"model_max_length": 60, "model_input_names": ["input_ids", "attention_mask"]}
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special, **options).save_pretrained(folder)
    model.save_pretrained(folder)  # type: ignore[operator]  # a Hugging Face model
    return folder
