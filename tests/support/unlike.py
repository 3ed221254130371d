"""What D's blocks must hold when its pool is not like P's: by positions, in torch."""

import numpy as np
import torch

from kvrelay.engine.kv_layout import KVLayout


def unlike_layouts(p_block_size: int, d_block_size: int, p_dtype: str = "float32", d_dtype: str = "float32"):
    """P's and D's: small, of two heads and three layers."""
    return tuple(
        KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=size, dtype=dtype)
        for size, dtype in ((p_block_size, p_dtype), (d_block_size, d_dtype))
    )


def pool_of(region: np.ndarray, layout: KVLayout) -> torch.Tensor:
    """[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], the same memory."""
    shape = (len(region), layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    return torch.from_numpy(region.reshape(-1)).view(getattr(torch, layout.dtype)).view(shape)


def fill(region: np.ndarray, layout: KVLayout, seed: int = 3) -> None:
    """With numbers as they stand in KV, each another."""
    pool = pool_of(region, layout)
    values = torch.randn(pool.shape, generator=torch.Generator().manual_seed(seed)) * 3
    pool.copy_(values)


def expected_blocks(pair, key, num_tokens: int, transit_dtype: str) -> torch.Tensor:
    """What D's blocks of a whole prompt hold."""
    contents = pair.p.region[list(pair.offered[key])]
    return _blocks(contents, pair.layout, pair.d_layout, num_tokens, transit_dtype)


def unlike_blocks(contents: np.ndarray, p: KVLayout, d: KVLayout, num_tokens: int, transit_dtype: str) -> np.ndarray:
    """As bytes, uint8 [D's blocks, block_bytes]; `contents`: P's blocks as bytes."""
    blocks = _blocks(contents, p, d, num_tokens, transit_dtype).contiguous()
    return blocks.view(torch.uint8).reshape(len(blocks), -1).numpy()


def _blocks(contents: np.ndarray, p: KVLayout, d: KVLayout, num_tokens: int, transit_dtype: str) -> torch.Tensor:
    """P's tokens, rounded as they travel, zeros behind the last."""
    tokens = pool_of(contents, p).movedim(4, 1).flatten(0, 1)[:num_tokens]  # [tokens, layers, 2, heads, head_dim]
    num_blocks = -(-num_tokens // d.block_size)
    padded = torch.zeros((num_blocks * d.block_size, *tokens.shape[1:]))
    padded[:num_tokens] = rounded(tokens.float(), transit_dtype)
    return padded.unflatten(0, (num_blocks, d.block_size)).movedim(1, 4).to(getattr(torch, d.dtype))


def rounded(values: torch.Tensor, transit_dtype: str) -> torch.Tensor:
    """There and back."""
    if transit_dtype in ("int8", "fp8"):
        magnitudes = values.abs().amax(-1, keepdim=True)
        largest = torch.full_like(magnitudes, 127.0 if transit_dtype == "int8" else 448.0)  # no reciprocals
        scaled = values * (largest / magnitudes)
        codes = scaled.round() + 0.0 if transit_dtype == "int8" else scaled.to(torch.float8_e4m3fn).float()
        return codes * (magnitudes / largest)
    return values.to(getattr(torch, transit_dtype)).float()
