"""A tiny random Llama with a tokenizer, as a model folder that kvrelay and transformers both load."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = "<bos>", "<eos>"
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_MERGES = ["h e", "l l", "he ll", "hell o", "Ġ t", "Ġt he", "i n", "a n", "r e", "e r", "o n", "a t", "Ġ a", "o u"]


def make_tiny_model(folder: Path, *, seed: int = 0, **config_overrides: Any) -> Path:
    """Write a float32 checkpoint with a context limit of 128 and sizes that no two roles share. Returns the folder."""
    tokenizer = _tokenizer()
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 331,  # more than the tokenizer has, as models do; odd
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,  # unlike hidden_size / num_attention_heads
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
        "torch_dtype": "float32",
    } | config_overrides
    folder.mkdir(parents=True, exist_ok=True)
    save_file(random_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {name: config[name] for name in ("bos_token_id", "eos_token_id")})
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    _write(folder / "tokenizer_config.json", tokenizer_config | {"chat_template": _CHAT_TEMPLATE})
    return folder


def random_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, scaled so that activations keep their size and greedy output varies."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * gain / columns**0.5

    def vector(size: int, centre: float) -> torch.Tensor:
        return centre + 0.2 * torch.randn(size, generator=generator)

    qwen2 = config["architectures"] == ["Qwen2ForCausalLM"]
    weights = {"model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        weights[f"{layer}.input_layernorm.weight"] = vector(hidden, 1)
        weights[f"{layer}.post_attention_layernorm.weight"] = vector(hidden, 1)
        attention = {"q": (query, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, query)}
        for name, (rows, columns) in attention.items():
            weights[f"{layer}.self_attn.{name}_proj.weight"] = matrix(rows, columns, gain=2.0)
            if config["attention_bias"] or (qwen2 and name != "o"):
                weights[f"{layer}.self_attn.{name}_proj.bias"] = vector(rows, 0)
        for name, (rows, columns) in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            weights[f"{layer}.mlp.{name}_proj.weight"] = matrix(rows, columns, gain=1.5)
            if config["mlp_bias"]:
                weights[f"{layer}.mlp.{name}_proj.bias"] = vector(rows, 0)
    weights["model.norm.weight"] = vector(hidden, 1)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(vocab, hidden, gain=3.0)
    return weights


def _tokenizer() -> Tokenizer:
    """Byte-level BPE: 256 bytes, a few merges, two special tokens."""
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [tuple(merge.split(" ")) for merge in _MERGES]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    return tokenizer


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2))
