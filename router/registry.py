"""The nodes that are there: what they said of themselves, how busy they are, what was placed on them since.

Holds state and no connection: `nodes.py` adds, reports and removes; `policy.py` reads.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvrelay.engine.errors import PreconditionFailed, ResourceExhausted
from kvrelay.engine.legs import CacheChange, Load, Peer
from kvrelay.router.messages import NodeFacts, Role
from kvrelay.router.node_statistics import NodeStatistics
from kvrelay.router.prefix_index import PrefixIndex, PromptBlocks


@dataclass(slots=True)
class Placed:
    """What was placed on a node and its load report may not show yet."""

    num_choices: int = 0
    num_tokens: int = 0
    num_blocks: int = 0


@dataclass(slots=True)
class Node:
    """One registered node. The registry alone changes it."""

    facts: NodeFacts
    load: Load
    draining: bool = False
    statistics: NodeStatistics | None = None  # its last report, and when it came
    reported_at: float = 0.0
    num_placed: int = 0  # since it registered
    # A report that crosses a start on its way, or that ends a step which the start waited for, does not show it: what
    # was placed is counted until the second report after it.
    placed_now: Placed = field(default_factory=Placed)
    placed_before: Placed = field(default_factory=Placed)
    prefixes: PrefixIndex = field(init=False)

    def __post_init__(self) -> None:
        self.prefixes = PrefixIndex(self.facts.num_blocks)

    @property
    def num_choices(self) -> int:
        """Choices of requests here, running or waiting."""
        unseen = self.placed_now.num_choices + self.placed_before.num_choices
        return self.load.num_running + self.load.num_waiting + unseen

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens to be computed before a new request's."""
        return self.load.num_waiting_tokens + self.placed_now.num_tokens + self.placed_before.num_tokens

    @property
    def num_free_blocks(self) -> int:
        """Blocks left for a new request behind those that wait; below zero if these want more than there is."""
        unseen = self.placed_now.num_blocks + self.placed_before.num_blocks
        return self.load.num_free_blocks - self.load.num_wanted_blocks - unseen

    def num_blocks_for(self, num_prompt_tokens: int, num_choices: int) -> int:
        """What a request holds when its output begins: its choices share full blocks, and each has one beside."""
        return num_prompt_tokens // self.facts.kv_layout.block_size + num_choices

    def could_start(self, num_prompt_tokens: int, num_choices: int) -> bool:
        """Whether a decode node, if it were empty, could run so many choices of such a prompt. (Of one choice alone
        `max_model_len` tells: no node says more than its blocks hold.)"""
        has_seats = num_choices <= self.facts.max_num_seqs
        return has_seats and self.num_blocks_for(num_prompt_tokens, num_choices) <= self.facts.num_blocks

    def num_cached_tokens(self, blocks: PromptBlocks) -> int:
        """How much of a prompt's beginning its prefix cache holds, as far as the node has said."""
        block_size = self.facts.kv_layout.block_size
        return self.prefixes.num_cached_blocks(blocks.names(block_size)) * block_size


class Registry:
    """Nodes by epoch. A node is one life of a process: (role, name) come back under a new epoch after a restart."""

    def __init__(self, max_nodes: int) -> None:
        self._max_nodes = max_nodes
        self._nodes: dict[str, Node] = {}

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def check_fits(self, facts: NodeFacts) -> None:
        """Whether a node may stand beside those that it does not replace: any of them may go on where another left off.

        Raises: PreconditionFailed, naming what differs.
        """
        for node in self:
            theirs = node.facts
            if (theirs.role, theirs.name) == (facts.role, facts.name) or theirs.epoch == facts.epoch:
                continue
            if theirs.quantization != facts.quantization:
                raise PreconditionFailed(
                    f"quantization differs: {theirs.quantization!r} on {theirs.role} node {theirs.name}, "
                    f"{facts.quantization!r} on the node"
                )

    def add(self, facts: NodeFacts) -> str | None:
        """Take a node in, idle until its first report.

        Returns: the epoch of the node that it replaces (an earlier life under the same role and name, or the same life
        on an older stream), which is gone from here.
        Raises: ResourceExhausted, PreconditionFailed.
        """
        self.check_fits(facts)
        same_name = (
            node.facts.epoch for node in self if (node.facts.role, node.facts.name) == (facts.role, facts.name)
        )
        replaced = facts.epoch if facts.epoch in self._nodes else next(same_name, None)
        if replaced is not None:
            del self._nodes[replaced]
        elif len(self._nodes) >= self._max_nodes:
            raise ResourceExhausted(f"{self._max_nodes} nodes are registered already")
        self._nodes[facts.epoch] = Node(facts, Load(num_free_blocks=facts.num_blocks))
        return replaced

    def remove(self, epoch: str) -> None:
        self._nodes.pop(epoch, None)

    def report(self, epoch: str, load: Load) -> None:
        """A node's own count replaces what was counted for it before its last report. Unknown nodes are ignored."""
        if epoch in self._nodes:
            node = self._nodes[epoch]
            node.load = load
            node.placed_before, node.placed_now = node.placed_now, Placed()

    def keep_statistics(self, epoch: str, statistics: NodeStatistics, now: float) -> None:
        """What a node says of itself, for others to see: placement does not read it. Unknown nodes are ignored."""
        if epoch in self._nodes:
            node = self._nodes[epoch]
            node.statistics, node.reported_at = statistics, now

    def change_cache(self, epoch: str, change: CacheChange) -> None:
        """What a node's prefix cache holds has changed. Unknown nodes are ignored.

        Raises: InvalidArgument for more than the node can hold.
        """
        if epoch in self._nodes:
            self._nodes[epoch].prefixes.apply(change)

    def drain(self, epoch: str) -> None:
        """Place nothing more on this node. Unknown nodes are ignored: a stream that was replaced may still be read."""
        if epoch in self._nodes:
            self._nodes[epoch].draining = True

    def note_placed(self, node: Node, *, to_compute: int, num_prompt_tokens: int, num_choices: int) -> None:
        """Count a leg until the node's reports show it: prompt tokens that it is to compute, and what it will hold."""
        node.num_placed += 1
        node.placed_now.num_choices += num_choices
        node.placed_now.num_tokens += to_compute
        node.placed_now.num_blocks += node.num_blocks_for(num_prompt_tokens, num_choices)

    def peers(self) -> tuple[Peer, ...]:
        """Every decode node, draining ones too: transfers to them still run."""
        return tuple(
            Peer(node.facts.epoch, node.facts.connector_address) for node in self if node.facts.role is Role.DECODE
        )

    def num_serving(self) -> int:
        """Decode nodes to place requests on."""
        return sum(node.facts.role is Role.DECODE and not node.draining for node in self)

    def max_model_len(self) -> int | None:
        """The longest context that a decode node takes; None while there is none."""
        return max(
            (node.facts.max_model_len for node in self if node.facts.role is Role.DECODE and not node.draining),
            default=None,
        )
