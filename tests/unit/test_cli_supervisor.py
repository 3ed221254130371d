"""What `up` decides before it starts anything: cores, flags, ports, and when the cluster is whole."""

import socket
from dataclasses import replace

import pytest
import tyro

from kvrelay.cli.client import NodeView
from kvrelay.cli.config import UpConfig
from kvrelay.cli.supervisor import (
    Cluster,
    all_joined,
    claim_port,
    divide_cores,
    engine_flags,
    node_arguments,
    router_arguments,
)
from kvrelay.cli.up import ready_line
from kvrelay.decode_node.config import DecodeConfig
from kvrelay.engine.errors import ConfigError
from kvrelay.prefill_node.config import PrefillConfig
from kvrelay.router.config import RouterConfig

P = NodeView(role="prefill", epoch="p", name="prefill-0", address="127.0.0.1:1", sessions=("d", "e"))
D = NodeView(role="decode", epoch="d", name="decode-0", address="127.0.0.1:2", sessions=())
E = NodeView(role="decode", epoch="e", name="decode-1", address="127.0.0.1:3", sessions=())


@pytest.mark.parametrize(
    ("num_cores", "num_nodes", "shares"),
    [(2, 2, [1, 1]), (8, 2, [4, 4]), (3, 2, [2, 1]), (1, 3, [1, 1, 1]), (7, 3, [3, 2, 2]), (4, 1, [4]), (4, 0, [])],
)
def test_cores_are_divided_evenly_and_nobody_gets_none(num_cores: int, num_nodes: int, shares: list[int]) -> None:
    assert divide_cores(num_cores, num_nodes) == shares


def test_nodes_are_told_what_up_was_told() -> None:
    config = UpConfig(
        model="m", dtype="float32", block_size=8, prefix_caching=False, watermark=0.1, prefill=1, decode=2, num_blocks=9
    )
    (prefill, decode, other) = node_arguments(config, "127.0.0.1:7070", num_cores=4)
    shared = {"model": "m", "dtype": "float32", "block_size": 8, "prefix_caching": False, "watermark": 0.1}
    shared |= {"num_blocks": 9, "router": ("127.0.0.1:7070",), "drain_timeout_s": 5.0}
    assert [name for name, _ in (prefill, decode, other)] == ["prefill-0", "decode-0", "decode-1"]
    assert [arguments[0] for _, arguments in (prefill, decode, other)] == ["prefill", "decode", "decode"]
    assert tyro.cli(PrefillConfig, args=prefill[1][1:]) == PrefillConfig(name="prefill-0", threads=4, nice=19, **shared)
    assert tyro.cli(DecodeConfig, args=decode[1][1:]) == DecodeConfig(name="decode-0", threads=2, **shared)


def test_the_files_of_the_data_path_s_tls_are_passed_on_and_one_alone_is_refused() -> None:
    files = {"data_tls_cert": "c.pem", "data_tls_key": "k.pem", "data_tls_ca": "a.pem"}
    roles = node_arguments(UpConfig(**files), "127.0.0.1:7070", num_cores=2)
    for kind, (_, arguments) in zip((PrefillConfig, DecodeConfig), roles, strict=True):
        told = tyro.cli(kind, args=arguments[1:])
        assert {name: getattr(told, name) for name in files} == files
    with pytest.raises(ConfigError, match="all three or none"):
        UpConfig(data_tls_key="k.pem")


def test_threads_that_are_given_hold_for_each_node() -> None:
    prefill, decode = node_arguments(UpConfig(threads=3), "127.0.0.1:7070", num_cores=64)
    assert tyro.cli(DecodeConfig, args=decode[1][1:]).threads == 3
    told = tyro.cli(PrefillConfig, args=prefill[1][1:])
    assert (told.threads, told.nice) == (3, 0)


def test_a_niceness_that_is_given_is_every_node_s() -> None:
    for role, (_, arguments) in zip(
        (PrefillConfig, DecodeConfig), node_arguments(UpConfig(nice=5), "127.0.0.1:7070", num_cores=2), strict=True
    ):
        assert tyro.cli(role, args=arguments[1:]).nice == 5


def test_the_engine_s_defaults_are_not_repeated() -> None:
    assert engine_flags(UpConfig()) == []


def test_the_router_is_told_model_and_port() -> None:
    command, *flags = router_arguments(UpConfig(model="m"), 7071, 8001)
    assert command == "router"
    assert tyro.cli(RouterConfig, args=flags) == RouterConfig(model="m", port=7071, http_port=8001, drain_timeout_s=5.0)


@pytest.mark.parametrize(
    ("nodes", "num_prefill", "num_decode", "whole"),
    [
        ((P, D, E), 1, 2, True),
        ((P, D), 1, 1, True),
        ((D,), 0, 1, True),
        ((), 0, 1, False),
        ((P, D), 1, 2, False),
        ((D, E), 1, 2, False),
        ((replace(P, sessions=("d",)), D, E), 1, 2, False),
        ((replace(P, sessions=()), D), 1, 1, False),
    ],
)
def test_a_cluster_is_whole_when_every_prefill_node_can_push_to_every_decode_node(
    nodes: tuple[NodeView, ...], num_prefill: int, num_decode: int, whole: bool
) -> None:
    assert all_joined(nodes, num_prefill, num_decode) is whole


def test_a_port_that_is_taken_is_refused_when_asked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port = {port}: already in use"), claim_port("port", port, 7070):
            pass


def test_a_free_port_that_was_asked_for_is_given() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with claim_port("port", port, 7070) as claimed:
        assert claimed == port


def test_of_two_that_start_at_once_at_most_one_gets_the_default_port() -> None:
    with claim_port("port", 0, 7070) as first, claim_port("port", 0, 7070) as second:
        assert first in (0, 7070)
        assert second == 0


def test_what_is_ready_is_one_line_with_every_address() -> None:
    line = ready_line(UpConfig(), Cluster("127.0.0.1:7070", "127.0.0.1:8000", (D, P), {}))
    assert line == (
        "ready: smollm2 at 127.0.0.1:7070 and http://127.0.0.1:8000 "
        "(decode-0 127.0.0.1:2, prefill-0 127.0.0.1:1); Ctrl-C stops"
    )
