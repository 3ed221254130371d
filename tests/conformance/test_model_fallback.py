"""Models in transformers' own modules: the logits of transformers, with every promise that our own decoder keeps."""

import functools
import json
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.oracle import Oracle, make_request, random_prompt
from support.pair import BLOCK, MakePair, making_pairs
from support.transformers_models import (
    FAMILIES,
    LIMIT,
    VOCAB,
    TransformersTeacher,
    make_transformers_model,
    reference_logits,
)

from kvrelay.engine.errors import ModelError
from kvrelay.engine.model_info import read_model_info
from kvrelay.engine.models.compiled import CompiledDecoder
from kvrelay.engine.models.decoder import Decoder
from kvrelay.engine.models.registry import ModelImpl, load_model
from kvrelay.kernels.dispatch import get_kernels

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's checkpoint, made once."""
    root = tmp_path_factory.mktemp("families")

    def folder_of(family: str) -> Path:
        folder = root / family
        return folder if folder.exists() else make_transformers_model(folder, family)

    return folder_of


def tokens(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


def load(folder: Path, impl: ModelImpl = "transformers", dtype: torch.dtype = torch.float32) -> Any:
    return load_model(read_model_info(folder), dtype, get_kernels(CPU), CPU, impl)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_up_to_the_context_limit_in_any_chunks(
    family: str, folder_of: Callable[[str], Path]
) -> None:
    folder, token_ids = folder_of(family), tokens(LIMIT)
    teacher = TransformersTeacher(folder)
    whole = teacher.logits(token_ids)
    torch.testing.assert_close(whole, reference_logits(folder, token_ids), rtol=1e-3, atol=1e-3)
    for cuts in ([1], [16, 32, 33, 100], [17, 127]):
        assert torch.equal(teacher.logits(token_ids, cuts), whole)
    small_blocks = TransformersTeacher(folder, block_size=5, num_blocks=40)
    assert torch.equal(small_blocks.logits(token_ids, [3, 64]), whole)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, torch.float32) for family in FAMILIES), *((f, torch.bfloat16) for f in ("gpt2", "mixtral", "gemma2"))],
)
def test_a_row_has_the_same_bits_alone_and_among_others(
    family: str, dtype: torch.dtype, folder_of: Callable[[str], Path]
) -> None:
    """Matrix products, activations, norms and experts: none may see who else is in the batch."""
    teacher = TransformersTeacher(folder_of(family), dtype=dtype)
    token_ids = tokens(45)
    alone = teacher.logits(token_ids, list(range(1, 45)))
    others = [tokens(length, seed=length) for length in (3, 70, 21, 100)]
    for cut in (1, 20, 44):
        assert torch.equal(teacher.logits_among(token_ids, others, cut), alone)


THROUGH_A_PAIR = ["gpt2", "gpt_neox", "mixtral"]
SAMPLED = {"temperature": 0.9, "top_k": 40, "ignore_eos": True, "max_tokens": 20}


@pytest.fixture(params=THROUGH_A_PAIR)
def served(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Any:
    """A family that our decoder does not know: its folder, pairs that serve it, and what one engine makes of it."""
    folder = folder_of(request.param)
    oracle = Oracle(folder)
    with making_pairs(folder) as make_pair:
        yield make_pair, oracle
    oracle.close()


def test_a_pair_gives_the_tokens_of_one_engine_with_cold_and_warm_caches(served: tuple[MakePair, Oracle]) -> None:
    make_pair, oracle = served
    prompt = random_prompt(3 * BLOCK + 5)
    expected = oracle.generate(prompt, seed=7, **SAMPLED)
    assert len(set(expected)) > 5
    pair = make_pair()
    assert pair.run(make_request(prompt, "cold", seed=7, **SAMPLED)).tokens == expected
    again = pair.run(make_request(prompt, "warm", seed=7, **SAMPLED))
    assert again.tokens == expected
    assert again.reports["prefill"].num_cached_tokens == 3 * BLOCK
    assert pair.run(make_request(prompt, "whole", seed=7, **SAMPLED), whole=True).tokens == expected
    beside = [make_request(random_prompt(20 + 9 * i, seed=i), f"r{i}", seed=i, **SAMPLED) for i in range(4)]
    for request, answer in zip(beside, pair.run_all(beside), strict=True):
        assert answer.tokens == oracle.answer(request).token_ids()


def test_preempted_requests_give_the_same_tokens(served: tuple[MakePair, Oracle]) -> None:
    make_pair, oracle = served
    sampling = SAMPLED | {"max_tokens": 34}
    prompts = [random_prompt(30, seed=i) for i in range(4)]
    pair = make_pair(decode={"num_blocks": 11, "swap_space": "0"})
    answers = pair.run_all([make_request(p, f"r{i}", seed=i, **sampling) for i, p in enumerate(prompts)])
    for i, answer in enumerate(answers):
        assert not answer.errors
        assert answer.tokens == oracle.generate(prompts[i], seed=i, **sampling)
    assert pair.decode.wait(lambda s: s.num_live == 0).num_preemptions > 0


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_greedy_tokens_are_those_of_transformers(family: str, folder_of: Callable[[str], Path]) -> None:
    """Up to the first position whose two largest logits are too close to call."""
    folder, prompt = folder_of(family), random_prompt(37)
    oracle = Oracle(folder)
    found = oracle.generate(prompt, ignore_eos=True, max_tokens=40)
    oracle.close()
    logits = reference_logits(folder, prompt + found)[len(prompt) - 1 : -1]
    largest = logits.topk(2).values
    clear = int((largest[:, 0] - largest[:, 1] > 1e-2).cumprod(0).sum())
    assert clear >= 10
    assert found[:clear] == logits.argmax(-1).tolist()[:clear]


def test_one_line_of_the_log_says_how_the_model_runs(
    folder_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvrelay")
    load(folder_of("gpt2"))
    (record,) = [r for r in caplog.records if r.getMessage() == "model_runs_in_transformers"]
    assert record.kvrelay_fields == {
        "model": "gpt2",
        "architecture": "GPT2LMHeadModel",
        "batch_invariant": True,
        "inexact_operations": "none",
        "difference_in_pieces": 0.0,
    }


def test_a_model_with_an_operation_that_is_not_exact_says_so_and_is_close(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvrelay")
    folder = make_transformers_model(tmp_path / "model", "gpt2", activation_function="mish")
    teacher, token_ids = TransformersTeacher(folder), tokens(45)
    (record,) = [r for r in caplog.records if r.getMessage() == "model_runs_in_transformers"]
    assert record.kvrelay_fields["batch_invariant"] is False
    assert record.kvrelay_fields["inexact_operations"] == "mish"
    alone = teacher.logits(token_ids, list(range(1, 45)))
    among = teacher.logits_among(token_ids, [tokens(7), tokens(60)], 20)
    torch.testing.assert_close(among, alone, rtol=1e-4, atol=1e-4)


def test_a_family_of_ours_runs_in_transformers_only_where_that_is_asked_for(folder_of: Callable[[str], Path]) -> None:
    folder, token_ids = folder_of("llama"), tokens(60)
    assert type(load(folder, "transformers")).__name__ == "FallbackModel"
    for impl in ("auto", "kvrelay"):
        assert isinstance(load(folder, impl), Decoder | CompiledDecoder)
    oracle, other = Oracle(folder), Oracle(folder, model_impl="transformers")
    greedy = [o.generate(token_ids, ignore_eos=True, max_tokens=8) for o in (oracle, other)]
    assert greedy[0] == greedy[1]
    for o in (oracle, other):
        o.close()


def test_what_our_decoder_refuses_it_refuses_with_a_hint(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel is not supported.*--model-impl transformers may run it"):
        load(folder_of("gpt2"), "kvrelay")
    folder = make_transformers_model(tmp_path / "model", "llama")
    edit_config(folder, some_new_feature=1)
    with pytest.raises(ModelError, match=r"some_new_feature.*--model-impl transformers may run it"):
        load(folder, "auto")


@pytest.mark.slow
def test_a_model_of_ours_is_loaded_without_transformers(folder_of: Callable[[str], Path]) -> None:
    program = f"""if True:
        import sys, torch
        from pathlib import Path
        from kvrelay.engine.model_info import read_model_info
        from kvrelay.engine.models.registry import load_model
        from kvrelay.kernels.dispatch import get_kernels
        cpu = torch.device("cpu")
        load_model(read_model_info(Path({str(folder_of("llama"))!r})), torch.float32, get_kernels(cpu), cpu, "auto")
        print("transformers" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


# --- what is refused ---------------------------------------------------------------------------------------------

LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPED = {"num_key_value_heads": 2}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a state space": ("mamba", {}, "it keeps a state that is not the keys and values of attention"),
    "rwkv": ("rwkv", {"attention_hidden_size": 48}, "it keeps a state that is not the keys and values"),
    "linear attention in some layers": ("minimax", GROUPED, r"its layers \[1\] have no attention"),
    "convolutions in some layers": (
        "lfm2",
        GROUPED | {"layer_types": ["conv", "full_attention", "conv"]},
        r"its layers \[0, 2\] have no attention",
    ),
    "latent keys": (
        "deepseek_v3",
        LATENT | {"first_k_dense_replace": 3},
        "keeps keys of 6 x 16 .* and values of 6 x 8",
    ),
    "two attentions in a layer": ("diffllama", GROUPED, "DiffLlamaAttention is not the attention of one layer"),
    "an encoder beside it": ("gpt2", {"add_cross_attention": True}, "it attends to an encoder"),
    "ALiBi: bloom": ("bloom", {"n_layer": 3, "n_head": 6}, "transformers has no replaceable attention for it"),
    "ALiBi: mpt": ("mpt", {"d_model": 48, "n_heads": 6, "n_layers": 3}, "transformers has no replaceable attention"),
    "ALiBi: falcon": ("falcon", {"alibi": True}, "transformers has no replaceable attention for it"),
    "a mask of its own": ("doge", GROUPED, "layer 0 adds a mask or position bias of its own"),
    "attention in chunks": (
        "llama4_text",
        GROUPED | {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 88, "attention_chunk_size": 16},
        "neither causal nor in a causal sliding window",
    ),
    "both directions": ("bert", {"is_decoder": False}, "neither causal nor in a causal sliding window"),
    "attention sinks": ("gpt_oss", GROUPED | {"head_dim": 8, "num_local_experts": 2}, "layer 0 uses s_aux"),
    "positions that start elsewhere": ("roberta", {"is_decoder": True}, "its positions do not count from zero"),
    "dynamic rope": (
        "mixtral",
        GROUPED | {"head_dim": 8, "rope_parameters": DYNAMIC},
        "rope type 'dynamic' depends on the other sequences",
    ),
    "long rope": (
        "mixtral",
        GROUPED | {"head_dim": 8, "rope_parameters": LONG},
        "rope type 'longrope' depends on the other sequences",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_a_paged_pool_does_not_hold_is_refused_by_name(case: str, tmp_path: Path) -> None:
    model_type, settings, says = REFUSED[case]
    folder = make_transformers_model(tmp_path / "model", model_type, **settings)
    architecture = read_model_info(folder).architecture
    with pytest.raises(ModelError, match=f"^architecture {architecture} is not supported: .*{says}") as error:
        load(folder, "auto")
    assert "\n" not in error.value.message


def edit_config(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_transformers_model(tmp_path / "model", "gpt_neox")


def test_layers_that_look_at_their_neighbours_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution or a token shift would work on a whole prompt and be wrong in pieces."""
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP

    forward = GPTNeoXMLP.forward
    monkeypatch.setattr(GPTNeoXMLP, "forward", lambda self, x: forward(self, x + x.roll(1, dims=1)))
    with pytest.raises(ModelError, match="not supported: computed in pieces, its hidden states differ by"):
        load(folder)


def test_logits_that_are_not_made_of_the_last_hidden_states_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GPTNeoXForCausalLM

    original = GPTNeoXForCausalLM.forward

    @functools.wraps(original)
    def forward(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        out = original(self, input_ids, **kwargs)
        out.logits = out.logits + input_ids[..., None]
        return out

    monkeypatch.setattr(GPTNeoXForCausalLM, "forward", forward)
    with pytest.raises(ModelError, match="its logits are not made of its last hidden states alone"):
        load(folder)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"architectures": ["GPTNeoXForSequenceClassification"]},
            "not a causal language model that transformers knows",
        ),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "not a causal language model"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "its weights are quantised"),
        ({"model_type": "never_heard_of"}, "cannot be read"),
        ({"hidden_act": "never_heard_of"}, "cannot be loaded"),
        ({"num_attention_heads": 7}, "cannot be read: .*not divisible by the number of attention heads"),
    ],
)
def test_a_config_that_is_no_causal_lm_is_one_clear_error(folder: Path, settings: dict[str, Any], says: str) -> None:
    edit_config(folder, **settings)
    with pytest.raises(ModelError, match=says) as error:
        load(folder)
    assert "\n" not in error.value.message


def test_code_in_the_folder_is_never_run(folder: Path) -> None:
    (folder / "modeling_evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    edit_config(folder, model_type="evil", architectures=["EvilLM"], auto_map={"AutoConfig": "modeling_evil.Config"})
    with pytest.raises(ModelError, match="EvilLM cannot be read"):
        load(folder)
    assert not (folder / "ran").exists()


def test_pickled_weights_are_never_opened(folder: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return open, (str(folder / "ran"), "w")

    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is not read: a pickled checkpoint can run code"):
        load(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("keep", [0, 100, 5000, -1])
def test_a_truncated_file_is_one_clear_error(folder: Path, keep: int) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: .*truncated") as error:
        load(folder)
    assert "\n" not in error.value.message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda w: w.pop("gpt_neox.layers.1.mlp.dense_h_to_4h.bias"),
            "missing: gpt_neox.layers.1.mlp.dense_h_to_4h.bias",
        ),
        (
            lambda w: w.update({"gpt_neox.layers.3.mlp.dense_h_to_4h.bias": torch.zeros(89)}),
            "does not use: gpt_neox.layers.3",
        ),
        (
            lambda w: w.update({"gpt_neox.final_layer_norm.bias": torch.zeros(49)}),
            "another shape than config.json asks for: gpt_neox.final_layer_norm.bias",
        ),
    ],
)
def test_a_tensor_too_few_too_many_or_of_another_shape_is_named(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object], says: str
) -> None:
    """F03."""
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ModelError) as error:
        load(folder)
    assert says in error.value.message
    assert "\n" not in error.value.message


def test_causal_masks_among_the_weights_may_remain(tmp_path: Path) -> None:
    folder = make_transformers_model(tmp_path / "model", "gpt_bigcode")
    weights = load_file(folder / WEIGHTS)
    weights |= {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4), "transformer.h.0.attn.masked_bias": torch.ones(())}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    load(folder)


def test_weights_take_the_dtype_asked_for_and_are_held_once(folder: Path) -> None:
    model = load(folder, dtype=torch.bfloat16)
    held = {
        tensor.untyped_storage().data_ptr(): tensor
        for module in (*model._trunk.modules(), *model._around.modules())
        for tensor in (*module.parameters(), getattr(getattr(module, "_weight", None), "data", torch.empty(0)))
        if tensor.numel()
    }
    assert {tensor.dtype for tensor in held.values()} <= {torch.bfloat16, torch.uint8}  # uint8: packed
    num_stored = sum(tensor.numel() for tensor in load_file(folder / WEIGHTS).values())
    assert sum(tensor.nbytes for tensor in held.values()) <= 1.5 * 2 * num_stored  # packed, small ones are padded
