"""Digests of blocks and prompts."""

import numpy as np

from kvrelay.connector.checksum import DIGEST_BYTES, block_digest, token_digest


def test_equal_bytes_have_equal_digests_and_others_differ():
    region = np.arange(48, dtype=np.uint8).reshape(3, 16)
    region[2] = region[0]
    assert block_digest(region[0]) == block_digest(region[2]) == block_digest(region[0].tobytes())
    assert block_digest(region[0]) != block_digest(region[1])
    assert len(block_digest(region[0])) == DIGEST_BYTES


def test_prompts_differ_by_order_length_and_content():
    digests = {token_digest(ids) for ids in ([], [0], [0, 0], [1, 2], [2, 1], [258], [2, 1, 0])}
    assert len(digests) == 7
    assert token_digest([1, 2]) == token_digest((1, 2))
