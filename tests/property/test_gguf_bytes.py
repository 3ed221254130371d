"""Whatever bytes of a GGUF file are changed: it is read, or refused with one ModelError, within bounded memory."""

import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings, strategies as st
from support.gguf_models import byte_level_vocabulary, finish

from kvrelay.engine.convert_gguf import convert
from kvrelay.engine.errors import ModelError

MEMORY_BYTES = 64 * 2**20  # a piece of a tensor and what dequantising it takes


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole model of one layer."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in (("block_count", 1), ("context_length", 64), ("embedding_length", 32)):
        writer.add_uint32(f"llama.{name}", value)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    byte_level_vocabulary(merges=["a b"]).add_to(writer)
    row = gguf.quants.quantize(np.ones((32, 32), np.float32), Kind.Q8_0)
    for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{part}.weight", row, raw_dtype=Kind.Q8_0)
    writer.add_tensor("token_embd.weight", np.ones((259, 32), np.float32))
    writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))
    finish(writer)
    return path.read_bytes()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_changed_bytes_are_read_or_refused(
    data: st.DataObject, content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder: Path = tmp_path_factory.mktemp("out")
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 9000) | st.integers(0, len(content) - 1))
        new = data.draw(st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, bytes(8)]))
        changed[at : at + len(new)] = new
    end = data.draw(st.none() | st.integers(0, len(content)))
    (folder / "m.gguf").write_bytes(bytes(changed[:end]))
    said = "m.gguf: "
    tracemalloc.start()
    try:
        convert(folder / "m.gguf", folder, progress=False)
    except ModelError as error:
        said = error.message
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert said.startswith("m.gguf: ")
    assert peak < MEMORY_BYTES
