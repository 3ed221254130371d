"""Digests: of a block's bytes, so that P and D can compare what they hold, and of a prompt's tokens."""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

DIGEST_BYTES = 16


def block_digest(block: Any) -> bytes:
    """Of one block's bytes (uint8 [block_bytes], contiguous)."""
    return hashlib.blake2b(block, digest_size=DIGEST_BYTES).digest()


def token_digest(token_ids: Sequence[int]) -> bytes:
    """Of a prompt: equal on P and D if and only if they mean the same tokens."""
    return hashlib.blake2b(array("Q", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()
