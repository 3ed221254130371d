"""Names of blocks: equal for equal prefixes under equal conditions, and for nothing else."""

import itertools

from kvrelay.engine.block_hash import block_hashes, extend_block_hashes, root_hash, short_name


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(block_hashes(range(n), 4)) for n in (0, 3, 4, 5, 8)] == [0, 0, 1, 1, 2]


def test_a_hash_names_every_token_before_it() -> None:
    first, second = block_hashes([1, 2, 3, 4, 5, 6, 7, 8], 4), block_hashes([9, 2, 3, 4, 5, 6, 7, 8], 4)
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_token_ids_that_collide_under_a_rolling_hash_have_distinct_names() -> None:
    """E07: t[j] + 31, t[j + 1] - 1 collides in a polynomial hash of base 31."""
    token_ids = [100, 200, 300, 400]
    names = {block_hashes(token_ids, 4)[0]}
    for j in range(3):
        other = list(token_ids)
        other[j] += 31
        other[j + 1] -= 1
        names.add(block_hashes(other, 4)[0])
    assert len(names) == 4


def test_all_small_blocks_have_distinct_names() -> None:
    """E07."""
    blocks = list(itertools.product([0, 1, 255, 256, 2**32 - 1], repeat=3))
    assert len({block_hashes(block, 3)[0] for block in blocks}) == len(blocks)


def test_the_salt_and_whatever_else_changes_kv_are_part_of_the_name() -> None:
    roots = [root_hash(""), root_hash("a"), root_hash("b"), root_hash("a", "b"), root_hash("ab"), root_hash("", "ab")]
    assert len(set(roots)) == len(roots)
    assert block_hashes([1, 2], 2, "a") != block_hashes([1, 2], 2, "b")


def test_the_names_are_the_same_in_every_process() -> None:
    """E07: nothing in them depends on hash(), whose seed and whose hash(None) differ between builds."""
    assert block_hashes([1, 2, 3, 4], 2, "salt")[1].hex() == (
        "ff3d1f04646a4100285fd7860aa759be4f0aac129632891f527a962225502ea4"
    )


def test_growing_by_one_token_gives_the_same_names_as_hashing_all() -> None:
    token_ids, hashes = list(range(40)), []
    for end in range(len(token_ids) + 1):
        extend_block_hashes(hashes, token_ids[:end], 4, root_hash("salt"))
        assert hashes == block_hashes(token_ids[:end], 4, "salt")


def test_a_short_name_is_the_same_in_every_process() -> None:
    assert short_name(bytes.fromhex("ff3d1f04646a4100285fd786")) == 0x00416A64041F3DFF
