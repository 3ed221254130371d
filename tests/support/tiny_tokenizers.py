"""Tiny tokenizers of every kind in use, and model folders around them that a router can read. No weights."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from kvrelay.engine.model_info import ModelInfo, read_model_info

CORPUS = [
    "Paris is the capital of France. Where is Rome? In Italy, on the Tiber.",
    "The quick brown fox jumps over the lazy dog; the dog sleeps. 0123456789",
    "naïve café, größer, Ελλάδα, ไทย, 日本語, 😀👍🏽, e\u0301",
]
BOS, EOS = "<s>", "</s>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ('system', 'user', 'assistant') %}{{ raise_exception('unknown role ' ~ m.role) }}{% endif %}"
    "{{ '[' ~ m.role ~ ']' ~ m.content ~ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@cache
def byte_level(*, adds_bos: bool = False) -> tokenizers.Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM have it. Ids 0 and 1 are BOS and EOS."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("    ", normalized=False)])  # an added token that is text, not a mark
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return tokenizer


@cache
def byte_fallback() -> tokenizers.Tokenizer:
    """Sentencepiece-like BPE with byte fallback, as Llama 2 and Mistral have it. Ids 1 and 2 are BOS and EOS."""
    vocabulary = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    vocabulary += sorted(set("".join(CORPUS[:2]) + "äé語") - {" "})
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("i", "s"), ("▁", "is"), ("▁", "▁"), ("▁▁", "▁▁"), ("▁", "P")]
    vocabulary += ["".join(pair) for pair in merges]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate(vocabulary)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", BOS, EOS])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    return tokenizer


@cache
def byte_level_with_added() -> tokenizers.Tokenizer:
    """Byte-level BPE with tokens added in every way, some with letters that the vocabulary's alphabet has too."""
    tokenizer = byte_level().from_str(byte_level().to_str())
    tokenizer.add_tokens(
        [
            AddedToken("café", normalized=True),
            AddedToken("đem", normalized=False),
            AddedToken("ñ語", single_word=True),
            AddedToken("<left>", lstrip=True),
            AddedToken("<right>", rstrip=True),
        ]
    )
    tokenizer.add_special_tokens(["<|im_end|>", "<\uff5cfin▁de▁fête\uff5c>"])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    return tokenizer


@cache
def gemma_like() -> tokenizers.Tokenizer:
    """Sentencepiece-like BPE with byte fallback whose texts begin without a space, as Gemma has it; no BOS."""
    tokenizer = byte_fallback().from_str(byte_fallback().to_str())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A")
    tokenizer.add_tokens([AddedToken("▁▁", normalized=False), AddedToken("<unused0>", normalized=False)])
    return tokenizer


@cache
def unigram() -> tokenizers.Tokenizer:
    """Sentencepiece-like unigram without byte fallback, as XGLM has it. Ids 1 and 2 are BOS and EOS."""
    characters = sorted(set("".join(CORPUS)) - {" "})
    words = ["▁", "▁the", "▁Paris", "▁is", "is", "▁▁", "a▁", "é語"]
    scores = [("<unk>", 0.0), (BOS, 0.0), (EOS, 0.0), *((text, -2.0) for text in words)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(scores + [(text, -5.0) for text in characters], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens(["<unk>", BOS, EOS])
    tokenizer.add_tokens([AddedToken("new▁word", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    return tokenizer


@cache
def word_piece() -> tokenizers.Tokenizer:
    """WordPiece with its clean-up, as the GPT-2s with BERT's vocabulary have it."""
    words = [
        "the",
        "Paris",
        "isn",
        "'",
        "t",
        "s",
        "语",
        "é",
        "##é",
        "##s",
        "##is",
        "##",
        ".",
        ",",
        "?",
        "!",
        "n't",
        "'s",
    ]
    tokens = ["[UNK]", BOS, EOS, *words, "##'re", "##n't"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.add_special_tokens(["[UNK]", BOS, EOS])
    tokenizer.add_tokens(["do not", "it ' s", "a ##b ."])
    return tokenizer


@cache
def word_level() -> tokenizers.Tokenizer:
    """Words and no decoder: the text is the tokens with spaces between them."""
    words = ["[UNK]", BOS, EOS, "the", "Paris", "é", "😀", "."]
    tokenizer = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["[UNK]", BOS, EOS])
    return tokenizer


def write_model_folder(
    folder: Path,
    tokenizer: tokenizers.Tokenizer | None = None,
    *,
    max_model_len: int = 128,
    tokenizer_config: dict[str, Any] | None = None,
) -> ModelInfo:
    """What a router reads of a model: config.json, tokenizer.json and tokenizer_config.json."""
    tokenizer = tokenizer or byte_level()
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": max_model_len,
        "eos_token_id": tokenizer.token_to_id(EOS),
        "bos_token_id": tokenizer.token_to_id(BOS),
    }
    defaults = {"bos_token": BOS, "eos_token": {"content": EOS}, "chat_template": CHAT_TEMPLATE}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(defaults | (tokenizer_config or {})))
    return read_model_info(folder, "tiny")
