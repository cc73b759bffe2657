"""ObfusLM: the algorithms against their plain reading, the laws of an obfuscated model, the key, the tokenizer."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import rasura_command, rasura_process, refused
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor, nn

import rasura
from rasura.core.interfaces import InputError
from rasura.core.rng import generator
from rasura.service_protections.obfuslm.folder import obfuscate_model
from rasura.service_protections.obfuslm.key import Key
from rasura.service_protections.obfuslm.model import obfuscate, obfuscate_embedding
from rasura.service_protections.obfuslm.named import IDS, named_ids
from rasura.service_protections.obfuslm.settings import ObfuscationSettings
from rasura.service_protections.obfuslm.synthesis import max_success
from rasura.service_protections.obfuslm.tokenizer import describe, fixed_ids
from rasura.testing.tiny import ALL, DECODERS, FAMILIES, PAD, VOCABULARY, WORDS, batch_for, tiny, tokenizer_folder

SPECIAL = VOCABULARY.special_ids
PERMUTED = ObfuscationSettings(k=1)
PERMUTED_PLUS = ObfuscationSettings(k=1, plus=True, hidden_k=1, hidden_epsilon=1e9)
PAIRS = [(f, "classification") for f in FAMILIES] + [("gpt2", "causal"), ("llama", "causal")]


def precise(model: nn.Module) -> nn.Module:
    """``model`` in float64, its RMS norms too, which Llama computes in float32 whatever the weights are."""
    for name, module in list(model.double().named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            norm = nn.RMSNorm(len(module.weight), eps=module.variance_epsilon, dtype=torch.float64)
            norm.weight = module.weight
            model.set_submodule(name, norm)
    return model


def loss_of(model: nn.Module, inputs: dict[str, Tensor]) -> float:
    with torch.no_grad():
        return float(model(**inputs).loss)


@pytest.mark.parametrize("settings", [PERMUTED, PERMUTED_PLUS], ids=["", "+"])
@pytest.mark.parametrize(("family", "task"), PAIRS)
def test_a_permuted_model_has_the_loss_of_the_plain_one(family: str, task: str, settings: ObfuscationSettings) -> None:
    model, batch = precise(tiny(family, task)), batch_for(task, 4).inputs()
    made = obfuscate(model, settings, SPECIAL, generator(3))
    hidden = {**batch, "input_ids": made.tokens[batch["input_ids"]]}
    if task == "causal":
        hidden["labels"] = torch.where(batch["labels"] < 0, batch["labels"], made.tokens[batch["labels"].clamp_min(0)])
    assert loss_of(made.model, hidden) == pytest.approx(loss_of(model, batch), abs=1e-9)
    assert all(int(made.tokens[i]) == i for i in SPECIAL) and sorted(made.tokens.tolist()) == list(range(WORDS))
    for name, parameter in made.model.named_parameters():
        if name.endswith(("query.weight", "q_proj.weight")):
            assert torch.equal(parameter, model.get_parameter(name)) is not settings.plus


PLUS_KNOWS = [f for f in ALL if f not in ("electra", "albert", "mixtral", "deberta-v2", "xlnet", "t5")]


@pytest.mark.parametrize("family", ALL)
def test_plus_knows_every_weight_on_the_stream_or_refuses_the_model(family: str) -> None:
    """Mixtral's experts are bare parameters: left out, they would keep the public order of the dimensions."""
    rng = generator(5)
    for task in ("classification", "causal") if family in DECODERS else ("classification",):
        model, batch = tiny(family, task), batch_for(task, 4).inputs()
        with torch.no_grad():
            for parameter in model.parameters():  # ones and zeros tell nothing of their order
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=rng))
        if family not in PLUS_KNOWS:
            with pytest.raises(InputError, match=r"leave out --plus|no transformer blocks found"):
                obfuscate(model, PERMUTED_PLUS, SPECIAL, generator(3))
            continue
        made = obfuscate(model.train(), PERMUTED_PLUS, SPECIAL, generator(3))
        assert made.model.training
        hidden = {**batch, "input_ids": made.tokens[batch["input_ids"]]}
        if task == "causal":
            hidden["labels"] = torch.where(batch["labels"] < 0, batch["labels"], made.tokens[batch["labels"].clamp_min(0)])
        assert loss_of(made.model.eval(), hidden) == pytest.approx(loss_of(model.eval(), batch), rel=1e-5)


@pytest.mark.parametrize(("labels", "blind"), [(1, False), (3, True)])
def test_plus_refuses_what_the_answers_cannot_show(labels: int, blind: bool) -> None:
    """A single answer has no mean to differ from, and a head of zeros gives the same answers to everything."""
    model = tiny("mixtral", "classification", num_labels=labels)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator(5)))
        if blind:
            model.get_parameter("score.weight").zero_()
    with pytest.raises(InputError, match="leave out --plus"):
        obfuscate(model, PERMUTED_PLUS, SPECIAL, generator(3))


def test_plus_tries_no_model_in_half_precision() -> None:
    with pytest.raises(InputError, match="load them as float32"):
        obfuscate(tiny("llama", "causal").bfloat16(), PERMUTED_PLUS, SPECIAL, generator(3))


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_stays_tied_and_another_is_mixed_alike(tied: bool) -> None:
    model = tiny("llama", "causal", tied=tied)
    made = obfuscate(model, ObfuscationSettings(k=5, plus=True), SPECIAL, generator(4))
    table, head = made.model.get_input_embeddings().weight, made.model.get_output_embeddings().weight  # type: ignore[operator]
    assert (table is head) is tied
    if not tied:
        with torch.no_grad():
            model.get_output_embeddings().weight.copy_(model.get_input_embeddings().weight)  # type: ignore[operator]
        same = obfuscate(model, ObfuscationSettings(k=5, plus=True), SPECIAL, generator(4)).model
        assert torch.equal(same.get_input_embeddings().weight, same.get_output_embeddings().weight)  # type: ignore[operator]


def test_a_model_with_a_second_table_of_tokens_is_refused() -> None:
    """Gemma 3n has one: its rows would stay in the public order, and the answers would be those to other tokens."""

    class Twice(nn.Embedding):
        def __init__(self, words: nn.Embedding) -> None:
            super().__init__(*words.weight.shape)
            self.second = nn.Embedding(*words.weight.shape)

        def forward(self, input: Tensor) -> Tensor:
            out: Tensor = super().forward(input) + self.second(input)
            return out

    model = tiny("llama", "causal", tied=False)
    words = model.get_input_embeddings()  # type: ignore[operator]  # a Hugging Face model
    model.set_input_embeddings(Twice(words))  # type: ignore[operator]
    with pytest.raises(InputError, match="second as well"):
        obfuscate(model, ObfuscationSettings(k=5), SPECIAL, generator(4))


@pytest.mark.parametrize("kind", ["BartForCausalLM", "BartForSequenceClassification"])
def test_tables_that_are_shared_or_count_tokens_alone_are_no_second_table(kind: str) -> None:
    """BART's encoder and decoder share one table, and its position embedding is given the tokens to count them."""
    size = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in
            (("layers", 2), ("attention_heads", 2), ("ffn_dim", 64))}  # fmt: skip
    config = transformers.BartConfig(vocab_size=300, d_model=32, max_position_embeddings=64, **size)
    made = obfuscate(getattr(transformers, kind)(config), ObfuscationSettings(k=5), SPECIAL, generator(4))
    assert sorted(made.tokens.tolist()) == list(range(300))


@pytest.mark.parametrize(("family", "task"), PAIRS)
def test_an_obfuscated_model_still_runs_and_no_row_is_left(family: str, task: str) -> None:
    model, batch = tiny(family, task), batch_for(task).inputs()
    made = obfuscate(model, ObfuscationSettings(k=6, plus=True, hidden_k=4), SPECIAL, generator(5))
    assert loss_of(made.model, batch) == pytest.approx(loss_of(made.model, batch)) and loss_of(made.model, batch) < 1e3
    whole, own = (m.get_input_embeddings().weight.detach() for m in (model, made.model))  # type: ignore[operator]
    assert float(torch.cdist(own[3:], whole[3:]).min()) > 1e-3


def test_an_embedding_alone_is_obfuscated_like_that_of_a_model() -> None:
    model = tiny("bert", "classification")
    whole = obfuscate(model, ObfuscationSettings(k=4), SPECIAL, generator(1))
    words = model.get_input_embeddings()  # type: ignore[operator]  # a Hugging Face model
    alone = obfuscate_embedding(words, ObfuscationSettings(k=4), SPECIAL, generator(1))
    assert torch.equal(alone.tokens, whole.tokens) and alone.clusters == whole.clusters
    assert torch.equal(alone.model.get_parameter("weight"), whole.model.get_input_embeddings().weight)  # type: ignore[operator]
    assert alone.model is not words and alone.model.padding_idx == PAD
    with pytest.raises(InputError, match="plus=False"):
        obfuscate_embedding(words, ObfuscationSettings(plus=True))
    with pytest.raises(InputError, match="pass a smaller k"):
        obfuscate_embedding(nn.Embedding(5, 3), ObfuscationSettings(k=10))
    with torch.no_grad(), pytest.raises(InputError, match="NaN or infinite values"):
        words.weight[3, 0] = torch.nan
        obfuscate_embedding(words, ObfuscationSettings(k=4))


def test_a_permuted_embedding_leaves_an_lstm_as_it_was() -> None:
    torch.manual_seed(0)
    words, lstm = nn.Embedding(50, 8, padding_idx=0), nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True)
    made = obfuscate_embedding(words, PERMUTED, {0, 1}, generator(2))
    ids = torch.tensor([[3, 9, 40, 1, 0], [7, 7, 22, 30, 49]])
    assert made.tokens[:2].tolist() == [0, 1] and not torch.equal(made.tokens[ids], ids)
    assert torch.equal(lstm(words(ids))[0], lstm(made.model(made.tokens[ids]))[0])


def test_the_same_seed_gives_the_same_model_and_none_gives_another() -> None:
    model, settings = tiny("bert", "classification"), ObfuscationSettings(k=4)
    first, second = (obfuscate(model, settings, SPECIAL, generator(1)) for _ in range(2))
    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(*(m.model.get_input_embeddings().weight for m in (first, second)))  # type: ignore[operator]
    assert not torch.equal(*(obfuscate(model, settings, SPECIAL).tokens for _ in range(2)))


@pytest.fixture
def public(tmp_path: Path) -> Path:
    return tokenizer_folder(tiny("llama", "causal"), tmp_path / "public")


TEXT = "the w20 of w21 and w22 to w23 ."


def test_a_served_classifier_keeps_its_head(tmp_path: Path) -> None:
    """Without --num-labels a trained head of five classes was replaced by a random one of two."""
    model = tiny("bert", "classification", num_labels=5)
    path = tokenizer_folder(model, tmp_path / "public")
    made = obfuscate_model(path, tmp_path / "served", tmp_path / "my.key", PERMUTED)
    served = transformers.AutoModelForSequenceClassification.from_pretrained(made.folder)
    assert torch.equal(served.classifier.weight, model.get_parameter("classifier.weight"))


def test_a_served_folder_generates_what_the_plain_model_does(public: Path, tmp_path: Path) -> None:
    made = obfuscate_model(public, tmp_path / "served", tmp_path / "my.key", PERMUTED)
    assert made.tokens == WORDS - len(SPECIAL)
    assert {p.name for p in made.folder.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    served = transformers.AutoModelForCausalLM.from_pretrained(made.folder)
    plain = transformers.AutoModelForCausalLM.from_pretrained(public)
    client, own = rasura.ObfuscatedTokenizer(made.key, model=made.folder), transformers.AutoTokenizer.from_pretrained(public)
    coded, known = (t([TEXT, "w30 w31"], padding=True, return_tensors="pt") for t in (client, own))
    assert not torch.equal(coded["input_ids"], known["input_ids"]) and client.pad_token_id == own.pad_token_id
    assert torch.equal(coded["attention_mask"], known["attention_mask"])
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    answers = served.generate(**client(TEXT, return_tensors="pt"), **options)
    expected = plain.generate(**own(TEXT, return_tensors="pt"), **options)
    assert client.batch_decode(answers) == own.batch_decode(expected)


def test_ids_that_the_configurations_name_stay_what_they_are(tmp_path: Path) -> None:
    """A text that ends with an ordinary token, too, went on: the public id stood for another token."""
    model: Any = tiny("llama", "causal")
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": PAD}
    own = transformers.AutoTokenizer.from_pretrained(tokenizer_folder(model, tmp_path / "first"))
    free = model.generate(**own(TEXT, return_tensors="pt"), **options, eos_token_id=None)[0, -10:].tolist()
    end = next(i for i in free[2:] if i not in SPECIAL)
    forbidden = next(i for i in free if i not in SPECIAL and i != end)
    model.config.eos_token_id = [2, end]
    model.generation_config = transformers.GenerationConfig.from_model_config(model.config)
    model.generation_config.bad_words_ids = [[forbidden]]
    made = obfuscate_model(tokenizer_folder(model, tmp_path / "public"), tmp_path / "served", tmp_path / "my.key", PERMUTED)
    served = transformers.AutoModelForCausalLM.from_pretrained(made.folder)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "public")
    client = rasura.ObfuscatedTokenizer(made.key, model=made.folder)
    answers = served.generate(**client(TEXT, return_tensors="pt"), **options)
    expected = plain.generate(**own(TEXT, return_tensors="pt"), **options)
    assert client.batch_decode(answers) == own.batch_decode(expected) and forbidden not in expected[0]
    tokens = Key.load(made.key).tokens
    assert tokens[[end, forbidden]].tolist() == [end, forbidden]
    assert made.tokens == WORDS - len({*SPECIAL, end, forbidden})


def test_every_kind_of_id_in_a_configuration_is_named() -> None:
    model: Any = tiny("llama", "causal")
    model.config.text = {"image_token_index": 20, "max_tokens": 99, "task": {"forced_bos_token_id": 21}}
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[2, 22], suppress_tokens=[23], begin_suppress_tokens=[24], bad_words_ids=[[25, 26]],
        force_words_ids=[[[27], [28]]], sequence_bias={(29, 30): -9.0}, forced_decoder_ids=[[90, 31]],
        decoder_start_token_id=32, forced_eos_token_id=[33], max_new_tokens=91, num_beams=2,
    )  # fmt: skip
    assert named_ids(model) - SPECIAL == set(range(20, 34))
    model.generation_config.sequence_bias = [[[29], 92.0]]
    assert named_ids(model) - SPECIAL == set(range(20, 34)) - {30}
    model.generation_config.watermarking_config = {"bias": 2.0}
    with pytest.raises(InputError, match="watermarking_config, which chooses words by their ids"):
        obfuscate(model, PERMUTED, SPECIAL)


def test_the_library_has_no_other_entry_that_names_ids() -> None:
    """A new one must be looked at: what it names may have to stay."""
    counts = {
        "max_new_tokens", "min_new_tokens", "token_healing", "num_assistant_tokens", "num_assistant_tokens_schedule",
        "prompt_lookup_num_tokens", "sequence_bias",
    }  # fmt: skip
    told = transformers.GenerationConfig().to_dict()
    assert {n for n in told if re.search("token|_id|bias|word", n) and not IDS.search(n)} <= counts


@pytest.mark.parametrize("key", ["served.part/my.key", "my.key"])
def test_the_servers_folder_holds_nothing_else(public: Path, tmp_path: Path, key: str) -> None:
    """A folder of the temporary name became the server's, with all that lay in it: the key, too."""
    (tmp_path / "served.part").mkdir()
    (tmp_path / "served.part" / "mine.txt").write_text("mine")
    made = obfuscate_model(public, tmp_path / "served", tmp_path / key, PERMUTED)
    assert {p.name for p in made.folder.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    assert Key.load(tmp_path / key).pair == made.pair and (tmp_path / "served.part" / "mine.txt").read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {"public", "served", "served.part", key.partition("/")[0]}


def test_a_key_in_the_place_of_the_folder_is_refused_and_nothing_is_left(public: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="server's folder"):
        obfuscate_model(public, tmp_path / "x", tmp_path / "x", PERMUTED)
    with pytest.raises(InputError, match="the passphrase is empty"):
        obfuscate_model(public, tmp_path / "x", tmp_path / "y", PERMUTED, passphrase="")
    assert {p.name for p in tmp_path.iterdir()} == {"public"}


def test_the_tokenizer_goes_there_and_back_and_writes_nothing(public: Path, tmp_path: Path) -> None:
    made = obfuscate_model(public, tmp_path / "served", tmp_path / "my.key", ObfuscationSettings(k=3))
    client = rasura.ObfuscatedTokenizer(made.key)
    key = Key.load(made.key)
    ids = client(TEXT)["input_ids"]
    plain = [*VOCABULARY.prefix, *VOCABULARY.encode(TEXT), *VOCABULARY.suffix]
    assert ids == key.tokens[plain].tolist() and client.decode(ids, skip_special_tokens=True) == TEXT
    assert client.convert_tokens_to_ids("w20") == int(key.tokens[VOCABULARY.encode("w20")[0]])
    assert client.save_pretrained(tmp_path / "model") == () and not (tmp_path / "model").exists()
    padded = transformers.DataCollatorWithPadding(client)([client(TEXT), client("w40")])
    assert padded["input_ids"].shape == (2, len(ids)) and int(padded["input_ids"][1, -1]) == PAD
    for wrong in ([WORDS], [-100]):
        with pytest.raises(InputError, match="outside the vocabulary"):
            client.decode(wrong)


def tokenizer_of(kind: str) -> Any:
    """A tokenizer of ``kind`` for lower-case words: the letters, three words, and four special tokens."""
    special, letters, words = ["<unk>", "<pad>", "<s>", "</s>"], "abcdefghijklmnopqrstuvwxyz", ["the", "has", "since"]
    parts = {
        "unigram": lambda: models.Unigram(
            [(t, 0.0) for t in special] + [("\u2581", -4.0)] + [(t, -8.0) for t in letters]
            + [("\u2581" + w, -3.0) for w in words], unk_id=0),
        "wordpiece": lambda: models.WordPiece(
            {t: i for i, t in enumerate([*special, *letters, *("##" + c for c in letters), *words])}, unk_token="<unk>"),
        "bpe": lambda: models.BPE({t: i for i, t in enumerate(letters)}, []),
    }  # fmt: skip
    made = Tokenizer(parts[kind]())
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Metaspace() if kind == "unigram" else pre_tokenizers.Whitespace()
    made.decoder = decoders.Metaspace() if kind == "unigram" else decoders.Fuse()
    if kind == "bpe":  # as in Qwen's: no added token is in the model's vocabulary, and special ones come first
        made.add_special_tokens(special)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


ADDED = {
    "plain": {}, "single word": {"single_word": True}, "as written": {"normalized": False}, "stripped": {"lstrip": True},
}  # fmt: skip
SENTENCES = (
    "The lena has chlamydia", "LENA lena lenas xlena", "the lena since", "", " chlamydia.lena ", "<s> lena", "q\u00e9lena",
)  # fmt: skip


@pytest.mark.parametrize("options", ADDED.values(), ids=ADDED)
@pytest.mark.parametrize("kind", ["unigram", "wordpiece", "bpe"])
def test_words_that_the_owner_added_are_hidden_and_split_texts_as_before(kind: str, options: dict[str, bool]) -> None:
    """Under a list of pieces they kept their public ids; a vocabulary that knew them found them inside other words."""
    own = tokenizer_of(kind)
    own.add_tokens([AddedToken(w, **options) for w in ("lena", "chlamydia", "Brandt")])
    fixed = fixed_ids(own, len(own) + 2)
    assert fixed == {*own.convert_tokens_to_ids(["<unk>", "<pad>", "<s>", "</s>"]), len(own), len(own) + 1}
    tokens = obfuscate_embedding(nn.Embedding(len(own) + 2, 8), PERMUTED, fixed, generator(2)).tokens
    client = rasura.ObfuscatedTokenizer(Key(tokens, *describe(own), "pair", "base"))
    assert len(client) == len(own) and client.get_vocab() == {t: int(tokens[i]) for t, i in own.get_vocab().items()}
    assert not any(w in f"{client!r} {client}" for w in ("lena", "chlamydia", "Brandt"))
    for text in SENTENCES:
        plain = own(text)["input_ids"]
        sent = tokens[torch.tensor(plain, dtype=torch.long)].tolist()
        for mine in (client, copy.deepcopy(client), pickle.loads(pickle.dumps(client))):
            assert mine(text)["input_ids"] == sent and mine.decode(sent) == own.decode(plain)


def test_an_old_key_that_leaves_added_words_open_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = tokenizer_of("unigram")
    own.add_tokens(["lena", "chlamydia"])
    size, added = len(own), own.convert_tokens_to_ids(["lena", "chlamydia"])
    for fixed, told in ((fixed_ids(own, size), False), ({*fixed_ids(own, size), *added}, True)):
        tokens = obfuscate_embedding(nn.Embedding(size, 8), PERMUTED, fixed, generator(2)).tokens
        Key(tokens, *describe(own), "pair", "base").save(tmp_path / f"{told}.key")
        caplog.clear()
        Key.load(tmp_path / f"{told}.key")
        assert ("leaves 2 words" in caplog.text) == told and "lena" not in caplog.text


def test_the_tokenizer_drops_into_a_trainer(public: Path, tmp_path: Path) -> None:
    made = obfuscate_model(public, tmp_path / "served", tmp_path / "my.key", ObfuscationSettings(k=3))
    client = rasura.ObfuscatedTokenizer(made.key)
    rows = [dict(client(t)) for t in (TEXT, "w40 w41 w42", "w50 of w51", "the w60")]
    arguments = transformers.TrainingArguments(
        str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    trainer = transformers.Trainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(made.folder), args=arguments, train_dataset=rows,
        processing_class=client, data_collator=transformers.DataCollatorForLanguageModeling(client, mlm=False),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(tmp_path / "trained"))
    assert json.loads((tmp_path / "trained" / "config.json").read_text())["obfuslm_pair"] == made.pair
    assert not [p for p in (tmp_path / "trained").iterdir() if "token" in p.name]


def test_a_key_is_its_owners_alone_and_tells_nothing_when_printed(public: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = obfuscate_model(public, tmp_path / "served", tmp_path / "my.key", PERMUTED)
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.key.stat().st_mode) == 0o600
    key = Key.load(made.key)
    assert "tensor" not in repr(key) and "w42" not in repr(key) + repr(rasura.ObfuscatedTokenizer(key))
    served = b"".join(p.read_bytes() for p in made.folder.iterdir())
    assert b"w42" not in served and str(public).encode() not in served
    made.key.chmod(0o640)
    with pytest.raises(InputError, match="chmod 600"):
        Key.load(made.key)


def test_a_passphrase_seals_the_key(public: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    made = obfuscate_model(public, tmp_path / "served", tmp_path / "my.key", PERMUTED, passphrase="open sesame")
    assert b"w42" not in made.key.read_bytes()
    known = Key.load(made.key, "open sesame")
    assert rasura.ObfuscatedTokenizer(made.key, "open sesame").decode(known.tokens[[20]]) == "w20"
    for wrong, told in ((None, "has a passphrase"), ("open", "is wrong")):
        with pytest.raises(InputError, match=told):
            Key.load(made.key, wrong)


def test_what_cannot_be_is_told_in_one_line(public: Path, tmp_path: Path) -> None:
    made = obfuscate_model(public, tmp_path / "served", tmp_path / "my.key", PERMUTED)
    other = obfuscate_model(public, tmp_path / "other", tmp_path / "other.key", PERMUTED)
    cases = [
        (lambda: rasura.ObfuscatedTokenizer(made.key, model=other.folder), "the key belongs to the obfuscated model"),
        (lambda: rasura.ObfuscatedTokenizer(made.key, model=public), "not obfuscated"),
        (lambda: rasura.ObfuscatedTokenizer(tmp_path / "none.key"), "cannot be read"),
        (lambda: obfuscate_model(public, tmp_path / "served", tmp_path / "new.key", PERMUTED), "already exists"),
        (lambda: obfuscate_model(public, tmp_path / "new", made.key, PERMUTED), "already exists"),
        (lambda: obfuscate_model(public, tmp_path / "new", tmp_path / "new" / "my.key", PERMUTED), "server's folder"),
        (lambda: obfuscate_model(public, tmp_path / "new", tmp_path / "n.key", ObfuscationSettings(k=WORDS)), "smaller k"),
        (lambda: ObfuscationSettings(k=0), "k is 0"),
        (lambda: ObfuscationSettings(epsilon=0.0), "epsilon is 0"),
        (lambda: ObfuscationSettings(beta=1.5), "beta is 1.5"),
    ]
    for call, told in cases:
        with pytest.raises(InputError, match=told) as found:
            call()
        assert "\n" not in str(found.value)
    junk = tmp_path / "junk.key"
    junk.touch(0o600)
    junk.write_bytes(b"\x80\x04 not a key")
    with pytest.raises(InputError, match="does not hold a complete key"):
        Key.load(junk)
    assert not (tmp_path / "new").exists() and not (tmp_path / "new.key").exists()


@pytest.mark.slow
def test_the_command_writes_folder_and_key(public: Path, tmp_path: Path) -> None:
    words = ["protect", "obfuslm", public, tmp_path / "served", "--key", tmp_path / "my.key", "--k", "5", "--plus", "--json"]
    done = rasura_process(*words)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["tokens"] == WORDS - len(SPECIAL) and Key.load(told["key"]).settings["plus"] is True
    assert refused(*words).startswith("rasura: ")


def test_the_bound_of_the_command_is_rounded_up(public: Path, tmp_path: Path) -> None:
    bound = 100 * max_success(0.1, 10)
    words = ["protect", "obfuslm", public, tmp_path / "s", "--key", tmp_path / "k", "--epsilon", 0.1, "--calibrated"]
    done = rasura_command(*words)
    found = re.search(r"at most ([\d.]+) % of cases", done.stdout)
    assert found is not None and bound <= float(found[1]) < bound + 0.1, done.stdout


@pytest.mark.parametrize(("extra", "open_"), [([], True), (["--plus", "--hidden-k", "2"], False)])
def test_rows_that_are_only_permuted_are_said_to_be_open(
    public: Path, tmp_path: Path, extra: list[str], open_: bool
) -> None:
    done = rasura_command("protect", "obfuslm", public, tmp_path / "s", "--key", tmp_path / "k", "--k", 1, *extra)
    assert ("who has the public model can read every text" in " ".join(done.stdout.split())) is open_, done.stdout
