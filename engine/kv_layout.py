"""How KV lies in a pool.

A pool is [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], block-major: one block of all layers, keys
and values, is one contiguous run of `block_bytes` bytes.
"""

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The shape of one block, without the number of blocks."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens a block
    dtype: str

    @property
    def block_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.block_size

    def tokens_in(self, size_bytes: int) -> int:
        """Tokens of the whole blocks that a pool of this size has."""
        return size_bytes // self.block_bytes * self.block_size
