"""The decoder against transformers, in float32: logits at every position, and greedy tokens."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forward import Teacher, make_sequence
from support.tiny_model import make_tiny_model

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.model_info import read_model_info
from kvrelay.engine.model_runner import ModelRunner
from kvrelay.engine.step import Row, Scheduled

os.environ.setdefault("HF_HUB_OFFLINE", "1")
LIMIT = 128

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "one_kv_head": {"num_key_value_heads": 1, "num_attention_heads": 4},
    "tied_with_biases": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "theta_in_rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rope_theta": None},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    },
}


def load_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, utils

    utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def random_tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 331, (count,), generator=generator).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers_up_to_the_context_limit_in_any_chunks(variant: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", **VARIANTS[variant])
    token_ids = random_tokens(LIMIT)
    with torch.inference_mode():
        expected = load_transformers(folder)(torch.tensor([token_ids])).logits[0]
    teacher = Teacher(folder)
    whole = teacher.logits(token_ids)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=2e-4)
    for cuts in ([1], [16, 32, 33, 100], [17, 127], list(range(5, 128, 5))):
        assert torch.equal(teacher.logits(token_ids, cuts), whole)
    assert torch.equal(Teacher(folder, block_size=5).logits(token_ids, [3, 64]), whole)


@pytest.mark.parametrize("prompt_length", [1, 15, 16, 17, 90])
def test_greedy_tokens_are_those_of_transformers(prompt_length: int, tmp_path: Path) -> None:
    """Up to the first position whose two largest logits are too close to call."""
    folder = make_tiny_model(tmp_path / "model", seed=prompt_length)
    prompt = random_tokens(prompt_length, seed=prompt_length)
    runner = ModelRunner.load(read_model_info(folder), EngineConfig(num_blocks=16, threads=1))
    sequence = make_sequence(prompt, range(3, 11))
    while sequence.num_tokens < min(LIMIT, prompt_length + 40):
        (row,) = runner.execute([Scheduled(sequence, sequence.num_computed_tokens, sequence.num_tokens)])
        assert isinstance(row, Row)
        sequence.num_computed_tokens = sequence.num_tokens
        sequence.token_ids.append(row.sampled[0].token_id)
    runner.close()
    with torch.inference_mode():
        logits = load_transformers(folder)(torch.tensor([sequence.token_ids])).logits[0, prompt_length - 1 : -1]
    largest = logits.topk(2).values
    clear = int((largest[:, 0] - largest[:, 1] > 1e-3).cumprod(0).sum())
    assert clear >= 10
    assert sequence.token_ids[prompt_length:][:clear] == logits.argmax(-1).tolist()[:clear]
