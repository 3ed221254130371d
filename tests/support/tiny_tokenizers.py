"""Tiny tokenizers of both kinds in use, and model folders around them that a router can read. No weights."""

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
