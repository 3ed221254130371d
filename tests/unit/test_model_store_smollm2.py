"""The embedded models as converted: smollm2 answers, stops, and splits text as the original does (C09)."""

import json
from pathlib import Path

import pytest

from kvrelay.engine.model_info import read_model_info
from kvrelay.engine.model_store import resolve
from kvrelay.engine.weight_files import read_tensors

pytestmark = [pytest.mark.model, pytest.mark.slow]

END_OF_TEXT, IM_START, IM_END = 0, 1, 2


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve("smollm2")


def test_every_file_names_the_end_of_a_turn(folder: Path) -> None:
    """C09: the end of a turn is an EOS in config, generation_config and tokenizer alike."""
    assert json.loads((folder / "config.json").read_bytes())["eos_token_id"] == IM_END
    assert IM_END in json.loads((folder / "generation_config.json").read_bytes())["eos_token_id"]
    assert json.loads((folder / "tokenizer_config.json").read_bytes())["eos_token"] == "<|im_end|>"
    info = read_model_info(folder, "smollm2")
    assert info.eos_token_ids == (END_OF_TEXT, IM_END)
    assert info.bos_token_id == IM_START
    assert (info.architecture, info.vocab_size, info.max_model_len) == ("LlamaForCausalLM", 49152, 8192)


def test_its_weights_are_all_there(folder: Path) -> None:
    found = read_tensors(folder)
    assert sum(stored.num_elements for stored in found.values()) == 134_515_008
    assert "lm_head.weight" not in found  # the embeddings are the head


def test_the_second_embedded_model_comes_from_its_parts() -> None:
    folder = resolve("gemma3-270m")
    info = read_model_info(folder, "gemma3-270m")
    assert (info.architecture, info.vocab_size, info.max_model_len) == ("Gemma3ForCausalLM", 262_144, 32_768)
    assert (info.bos_token_id, info.eos_token_ids) == (2, (1, 106))
    assert sum(stored.num_elements for stored in read_tensors(folder).values()) == 268_098_176


def test_the_tokenizer_splits_digits_and_loses_nothing(folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # Spaces before a number stay one token: digits are split off before GPT-2's rule sees the text.
    assert tokenizer.encode("a  12\n\n34").tokens == ["a", "ĠĠ", "1", "2", "ĊĊ", "3", "4"]
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>").ids[0] == IM_START
    for text in ("Hello, world!", " 3.14 = π\t\r\n", "ภาษาไทย 😀 é e\u0301", "def f(x):\n    return x ** 2", "²³ ½"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_it_answers_and_stops(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer[:-1]) == "The capital of France is Paris."
    assert answer[-1] == IM_END
