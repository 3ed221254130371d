"""What a router knows of a node's prefix cache, and how it names a prompt's blocks."""

import pytest

from kvrelay.engine.block_hash import block_hashes, short_name
from kvrelay.engine.errors import InvalidArgument
from kvrelay.engine.legs import CacheChange
from kvrelay.router import prefix_index
from kvrelay.router.prefix_index import PrefixIndex, PromptBlocks

PROMPT = list(range(100, 118))


def names(salt: str = "", block_size: int = 4) -> list[int]:
    return list(PromptBlocks(PROMPT, salt).names(block_size))


def holding(*stored: int) -> PrefixIndex:
    index = PrefixIndex(100)
    index.apply(CacheChange(stored=frozenset(stored)))
    return index


@pytest.mark.parametrize(("salt", "block_size"), [("", 4), ("a", 4), ("", 5), ("", 18), ("", 19)])
def test_a_prompts_blocks_have_the_names_that_nodes_give_them(salt: str, block_size: int) -> None:
    assert names(salt, block_size) == [short_name(name) for name in block_hashes(PROMPT, block_size, salt)]


def test_a_prompt_is_found_up_to_the_first_gap() -> None:
    first, second, third, fourth = names()
    assert holding().num_cached_blocks(names()) == 0
    assert holding(first, second).num_cached_blocks(names()) == 2
    assert holding(first, third, fourth).num_cached_blocks(names()) == 1
    assert holding(second, third).num_cached_blocks(names()) == 0
    assert holding(first, second, third, fourth).num_cached_blocks(names()) == 4


def test_another_salt_finds_nothing() -> None:
    assert holding(*names("a")).num_cached_blocks(names("b")) == 0


def test_changes_add_up_and_from_nothing_forgets_all_before() -> None:
    index = holding(1, 2, 3)
    index.apply(CacheChange(evicted=frozenset([2, 9]), stored=frozenset([4])))
    assert index.names == {1, 3, 4}
    index.apply(CacheChange(from_nothing=True, stored=frozenset([5])))
    assert index.names == {5}


def test_a_node_has_no_more_blocks_than_it_said() -> None:
    index = PrefixIndex(2)
    index.apply(CacheChange(stored=frozenset([1, 2])))
    index.apply(CacheChange(evicted=frozenset([1]), stored=frozenset([3])))
    with pytest.raises(InvalidArgument, match=r"3 blocks.*has 2"):
        index.apply(CacheChange(stored=frozenset([4])))


def test_a_hash_is_computed_once_and_only_as_far_as_caches_go(monkeypatch) -> None:
    hashed: list[bytes] = []
    monkeypatch.setattr(prefix_index, "short_name", lambda name: hashed.append(name) or short_name(name))
    blocks = PromptBlocks(PROMPT)
    first, second, *_ = [short_name(name) for name in block_hashes(PROMPT, 4)]
    assert holding().num_cached_blocks(blocks.names(4)) == 0
    assert len(hashed) == 1
    assert holding(first).num_cached_blocks(blocks.names(4)) == 1
    assert holding(first, second).num_cached_blocks(blocks.names(4)) == 2
    assert len(hashed) == 3
    assert holding(first, second).num_cached_blocks(blocks.names(4)) == 2
    assert len(hashed) == 3


def test_two_readers_of_one_prompts_names_do_not_disturb_each_other() -> None:
    blocks = PromptBlocks(PROMPT)
    pairs = list(zip(blocks.names(4), blocks.names(4), strict=True))
    assert pairs == [(name, name) for name in names()]


def test_nodes_of_different_block_sizes_are_asked_in_their_own_blocks() -> None:
    """One prompt, two nodes that have computed its first 12 tokens: each is credited with what its own blocks hold."""
    blocks = PromptBlocks(PROMPT)
    found = {}
    for block_size in (3, 4, 8):
        stored = [short_name(name) for name in block_hashes(PROMPT[:12], block_size, "")]
        found[block_size] = holding(*stored).num_cached_blocks(blocks.names(block_size)) * block_size
        others = [size for size in (3, 4, 8) if size != block_size]
        assert [holding(*stored).num_cached_blocks(blocks.names(size)) for size in others] == [0, 0]
    assert found == {3: 12, 4: 12, 8: 8}
