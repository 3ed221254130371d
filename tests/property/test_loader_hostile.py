"""Whatever stands in a checkpoint's files, the outcome is a load or a ModelError in one line: no other exception.

Seen to catch: no check that tensors lie end to end; a shape's numbers, a dtype or a size that is compared before its
type is known; nesting that is not looked for; names that cannot be printed; a value that is shown whole; token ids that
are not compared with the vocabulary.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from hypothesis import example, given, settings, strategies as st
from safetensors import SafetensorError, safe_open

from kvrelay.engine.errors import ModelError
from kvrelay.engine.model_info import ModelInfo, attention_shape, has_chat_template, read_model_info
from kvrelay.engine.models.loader import Checkpoint
from kvrelay.engine.weight_files import DTYPE_BITS, read_tensors

CPU = torch.device("cpu")
FILE = "model.safetensors"

numbers = st.integers(-2, 40) | st.sampled_from([2**31, 2**62, 2**63, 2**64, -(2**63), 10**4000]) | st.floats()
scalars = st.none() | st.booleans() | numbers | st.text(max_size=4)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3)
)
sizes = st.integers(0, 3)


@st.composite
def checkpoints(draw: st.DrawFn) -> bytes:
    """A file that is right, but for what one or two strokes have made of it."""
    header: dict[str, Any] = {}
    end = 0
    for name in draw(st.lists(st.text("abc", min_size=1, max_size=3), max_size=4, unique=True)):
        dtype, shape = draw(st.sampled_from(sorted(DTYPE_BITS))), draw(st.lists(sizes, max_size=3))
        num_bytes = int(torch.tensor(shape, dtype=torch.int64).prod()) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    if header and draw(st.booleans()):
        entry = header[draw(st.sampled_from(sorted(header)))]
        entry[draw(st.sampled_from(sorted(entry)))] = draw(values | st.lists(st.integers(0, 40), max_size=3))
    if len(header) > 1 and draw(st.booleans()):
        one, other = draw(st.permutations(sorted(header)))[:2]
        header[one] = header[other]
    if draw(st.booleans()):
        header[draw(st.text(max_size=3) | st.just("__metadata__"))] = draw(values)
    text = json.dumps(header).encode()
    content = bytearray(len(text).to_bytes(8, "little") + text + bytes(end))
    if draw(st.booleans()):
        place = draw(st.integers(0, len(content) - 1))
        content[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(content)


@contextmanager
def folder_with(**files: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        for file, content in files.items():
            (Path(name) / file.replace("__", ".")).write_bytes(content)
        yield Path(name)


def check_refusal(error: ModelError) -> None:
    assert error.message.isprintable()
    assert len(error.message) < 1000


@settings(max_examples=400, deadline=None)
@given(checkpoints() | st.binary(max_size=64))
@example(b"\x02\0\0\0\0\0\0\0{}")
def test_any_file_is_a_checkpoint_that_others_read_alike_or_an_error_in_one_line(content: bytes) -> None:
    with folder_with(model__safetensors=content) as folder:
        try:
            found = read_tensors(folder)
        except ModelError as error:
            check_refusal(error)
            return
        end = 8 + int.from_bytes(content[:8], "little")
        for stored in found.values():
            assert stored.offset == end
            end += stored.size_bytes
        assert end == len(content)
        with safe_open(folder / FILE, framework="pt") as theirs:
            assert set(theirs.keys()) == set(found)
            checkpoint = Checkpoint(folder, torch.float32, CPU)
            for name, stored in found.items():
                try:
                    ours = checkpoint.take(name, *stored.shape)
                except ModelError as error:
                    check_refusal(error)
                    assert stored.dtype not in ("F32", "BF16", "F16")
                    continue
                assert torch.equal(ours, theirs.get_tensor(name).float())


@settings(max_examples=200, deadline=None)
@given(checkpoints())
def test_a_file_that_others_refuse_is_refused(content: bytes) -> None:
    with folder_with(model__safetensors=content) as folder:
        try:
            with safe_open(folder / FILE, framework="pt"):
                return
        except (SafetensorError, OSError):
            pass
        try:
            read_tensors(folder)
        except ModelError:
            return
        raise AssertionError("taken, though safetensors' own reader refuses it")


FIELDS = st.sampled_from(
    """architectures model_type vocab_size max_position_embeddings n_positions num_hidden_layers num_attention_heads
    num_key_value_heads head_dim hidden_size eos_token_id bos_token_id eos_token bos_token text_config chat_template
    added_tokens multi_query""".split()  # noqa: SIM905 - as a list it would fill the page
)
objects = st.dictionaries(FIELDS, values | st.just(["LlamaForCausalLM"]) | st.integers(1, 1000), max_size=8)
ids = st.integers(-2, 120)
right = st.fixed_dictionaries(
    {
        "architectures": st.just(["LlamaForCausalLM"]),
        "vocab_size": st.integers(1, 100),
        "max_position_embeddings": st.just(64),
    },
    optional={"eos_token_id": ids | st.lists(ids, max_size=3), "bos_token_id": ids},
)


def as_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


configs = st.builds(lambda base, change: as_bytes(base | change), right | st.just({}), objects)
anything = configs | values.map(as_bytes) | st.binary(max_size=20)


@settings(max_examples=400, deadline=None)
@given(configs | anything, anything, anything, anything)
@example(b"[" * 100_000, b"{}", b"{}", b"{}")
@example(b'{"vocab_size": 1e400, "max_position_embeddings": 4}', b"{}", b"{}", b"{}")
@example(b'{"vocab_size": 9, "max_position_embeddings": 4}', b"{}", b'{"eos_token": "x"}', b'{"added_tokens": 1}')
@example(b'{"vocab_size": 9, "max_position_embeddings": 4}', b"{}", b'{"eos_token": "x"}', b'{"added_tokens": [[]]}')
@example(
    b'{"vocab_size": 9, "max_position_embeddings": 4}', b"{}", b'{"eos_token": "x"}', b'{"added_tokens":' + b"[" * 9**5
)
def test_any_small_files_are_a_models_facts_or_an_error_in_one_line(
    config: bytes, generation: bytes, tokenizer_config: bytes, tokenizer: bytes
) -> None:
    with folder_with(
        config__json=config,
        generation_config__json=generation,
        tokenizer_config__json=tokenizer_config,
        tokenizer__json=tokenizer,
    ) as folder:
        try:
            info = read_model_info(folder)
        except ModelError as error:
            check_refusal(error)
            return
        check_facts(info)
        has_chat_template(folder)
        try:
            shape = attention_shape(info.config)
        except ModelError as error:
            check_refusal(error)
        else:
            assert min(shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim) > 0


def check_facts(info: ModelInfo) -> None:
    assert info.architecture.isidentifier()
    assert 0 < info.vocab_size < 2**31
    assert 0 < info.max_model_len < 2**31
    assert all(type(token_id) is int and 0 <= token_id < info.vocab_size for token_id in info.eos_token_ids)
    assert info.bos_token_id is None or 0 <= info.bos_token_id < info.vocab_size
