"""Where a request goes: pure, from what the registry holds and a few facts of the request."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrelay.engine.errors import InvalidArgument, TooLarge, Unavailable
from kvrelay.router.messages import Role
from kvrelay.router.prefix_index import PromptBlocks
from kvrelay.router.registry import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What placement asks of a request."""

    num_prompt_tokens: int
    max_tokens: int
    num_choices: int = 1
    blocks: PromptBlocks = field(default_factory=PromptBlocks)
    needs_every_output: bool = False  # log-probabilities of the prompt: what a cache holds has to be computed again

    @property
    def max_len(self) -> int:
        return self.num_prompt_tokens + self.max_tokens


@dataclass(frozen=True, slots=True)
class Placement:
    """The pair that runs a request; without a prefill node the decode node runs the whole of it."""

    prefill: Node | None
    decode: Node
    num_to_compute: int  # prompt tokens that the first of them is to compute: all, where its cache was not looked at


def place(nodes: Iterable[Node], request: RequestFacts) -> Placement:
    """Choose both nodes at once: a decode node by room and batch, and for it a prefill node by estimated time to the
    first token. Pairs with an open session come first; where there is none, a decode node does both. The nodes' caches
    are looked at only where there is a choice.

    Raises: Unavailable if no decode node takes requests; InvalidArgument if none of them takes one this long, or
    TooLarge, with the numbers, if none could ever run as many choices of it.
    """
    able = [node for node in nodes if not node.draining]
    decodes = [node for node in able if node.facts.role is Role.DECODE]
    if not decodes:
        raise Unavailable("no decode node is registered, or all are draining")
    fitting = [node for node in decodes if node.facts.max_model_len >= request.max_len]
    if not fitting:
        longest = max(node.facts.max_model_len for node in decodes)
        raise InvalidArgument("prompt and max_tokens", f"{request.max_len} tokens", f"at most {longest}")
    able_to_start = [node for node in fitting if node.could_start(request.num_prompt_tokens, request.num_choices)]
    if not able_to_start:
        raise _too_large(fitting, request)
    prefills = [
        node for node in able if node.facts.role is Role.PREFILL and node.facts.max_model_len >= request.max_len
    ]
    reachable = frozenset[str]().union(*(node.load.sessions for node in prefills))
    paired = [node for node in able_to_start if node.facts.epoch in reachable]
    decode = _least(paired or able_to_start, lambda node: _decode_cost(node, request))
    candidates = [node for node in prefills if decode.facts.epoch in node.load.sessions]
    if not candidates:
        return Placement(None, decode, request.num_prompt_tokens)
    fastest = max(node.load.tokens_per_s for node in candidates)
    prefill = _least(candidates, lambda node: _prefill_cost(node, request, fastest))
    looked_up = len(candidates) > 1
    return Placement(prefill, decode, _num_to_compute(prefill, request) if looked_up else request.num_prompt_tokens)


def _too_large(decodes: Sequence[Node], request: RequestFacts) -> TooLarge:
    num_blocks = max(node.num_blocks_for(request.num_prompt_tokens, request.num_choices) for node in decodes)
    return TooLarge(
        "n",
        request.num_choices,
        f"with {request.num_prompt_tokens} prompt tokens it takes {request.num_choices} sequences and {num_blocks} KV "
        f"blocks; a decode node runs {max(node.facts.max_num_seqs for node in decodes)} sequences at once, and has "
        f"{max(node.facts.num_blocks for node in decodes)} blocks",
    )


def _least(nodes: Sequence[Node], cost: Callable[[Node], Any]) -> Node:
    """The node of least cost; of one node alone the cost is not asked."""
    return nodes[0] if len(nodes) == 1 else min(nodes, key=cost)


def _decode_cost(node: Node, request: RequestFacts) -> tuple[bool, int, int, int, int, str]:
    """Room for the prompt and each choice's next token first, then the smaller batch, the more of the prompt that need
    not travel, more room, the one less used."""
    lacks_room = node.num_free_blocks < node.num_blocks_for(request.num_prompt_tokens, request.num_choices)
    num_cached_tokens = node.num_cached_tokens(request.blocks)
    return (
        lacks_room,
        node.num_choices,
        -num_cached_tokens,
        -node.num_free_blocks * node.facts.kv_layout.block_size,  # in tokens: blocks may be of several sizes
        node.num_placed,
        node.facts.epoch,
    )


def _prefill_cost(node: Node, request: RequestFacts, fastest: float) -> tuple[float, int, str]:
    """Estimated seconds to the first token; a node whose rate is not known yet is taken for as fast as the fastest."""
    rate = node.load.tokens_per_s or fastest or 1.0
    return ((node.num_waiting_tokens + _num_to_compute(node, request)) / rate, node.num_placed, node.facts.epoch)


def _num_to_compute(node: Node, request: RequestFacts) -> int:
    """Prompt tokens that a node's cache does not spare it: always the last, and all where every output is needed."""
    if request.needs_every_output:
        return request.num_prompt_tokens
    block_size = node.facts.kv_layout.block_size
    most = (request.num_prompt_tokens - 1) // block_size * block_size
    return request.num_prompt_tokens - min(node.num_cached_tokens(request.blocks), most)
