"""`kvrelay bench transfer`: its flags, its table, and the parts that need no second process."""

import socket
import threading

import numpy as np
import pytest

from kvrelay.cli.bench_transfer import prefill_table, spread, table, tail
from kvrelay.cli.config import TransferBenchConfig
from kvrelay.connector.bench import Figures, Remote, _pass
from kvrelay.connector.bench_blocks import Case, check, fill, make_cases, new_pool
from kvrelay.connector.bench_peer import Peer, serve
from kvrelay.connector.bench_sides import Received
from kvrelay.connector.bench_sockets import KINDS, SocketReceiver, SocketSender, copy_blocks
from kvrelay.engine.errors import ConfigError, Internal

SCATTERED = Case("1 KiB", 1024, 700, is_scattered=True)  # more blocks than one call takes


def figures(contender, kind, case, gb_per_s, **more):
    return Figures(contender=contender, kind=kind, case=case, gb_per_s=gb_per_s, cpu_s_per_gb=[0.5], **more)


def test_the_table_has_medians_ranges_and_shares_of_both_limits():
    found = [
        figures(name, kind, case, [rate, rate * 2, rate * 1.5], one_block_us=[1000.0, 3000.0], zero_block_us=zero)
        for name, kind, rate, zero in (
            ("memcpy", "limit", 8.0, []),
            ("tcp socket", "limit", 4.0, []),
            ("zmq", "transport", 2.0, [90.0, 110.0]),
            ("nixl", "peer", 6.0, []),
        )
        for case in ("contiguous", "64 KiB")
    ]
    lines = table(found)
    assert lines[2].split() == ["memcpy", "12.00", "(8.00-16.00)", "12.00", "(8.00-16.00)"]
    parts = {line.split("  ")[0]: i for i, line in enumerate(lines)}
    assert lines[parts["of memcpy"] + 1].split() == ["zmq", "0.25", "0.25"]
    assert lines[parts["of tcp socket"] + 2].split() == ["nixl", "1.50", "1.50"]
    assert lines[parts["one block, us, p50/p99"] + 3].split() == ["zmq", *["2,000", "/", "2,980"] * 2]
    assert lines[parts["no block, us, p50/p99"] + 1 :] == [lines[-1]]
    assert lines[-1].split() == ["zmq", *["100", "/", "110"] * 2]


def test_nothing_measured_is_shown_as_such():
    assert (spread([]), tail([])) == ("-", "-")
    assert prefill_table([("zmq", [1.0, 3.0], [10.0], [20.0])])[1].split("  ")[0] == "zmq"


def test_both_sides_accounts_become_one():
    both = _pass({"begun_ns": [10**9, 3 * 10**9], "cpu_s": 0.5}, Received([2 * 10**9, 3 * 10**9 + 5], 0.25))
    assert both.seconds == [1.0, 5e-9]
    assert both.cpu_s == 0.75
    assert _pass({"begun_ns": [], "cpu_s": 0.5}, Received([], 0.75), is_one_process=True).cpu_s == 0.75


@pytest.mark.parametrize("size", [512, 16384, 368640, 2**20])
def test_each_case_has_a_layout_of_its_block_size_and_an_order_of_all_blocks(size):
    buffer, case = make_cases(8 * 2**20, (size,))
    assert case.layout.block_bytes == case.block_bytes == size
    assert buffer.order(0) == buffer.order(1) == list(range(8))
    for side in (0, 1):
        assert sorted(case.order(side)) == list(range(case.num_blocks))
    assert case.num_blocks < 3 or case.order(0) != case.order(1)


def test_what_did_not_arrive_is_noticed():
    source, target = new_pool(SCATTERED.size_bytes), new_pool(SCATTERED.size_bytes)
    fill(source)
    copy_blocks(SCATTERED.region(source), SCATTERED.region(target), SCATTERED, 1)
    check(SCATTERED.region(target), SCATTERED, 700)
    target[SCATTERED.order(1)[699] * 1024 + 1023] ^= 1
    check(SCATTERED.region(target), SCATTERED, 699)
    with pytest.raises(Internal, match="did not arrive"):
        check(SCATTERED.region(target), SCATTERED, 700)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bare_socket_moves_every_block_into_its_place(kind):
    source, target = new_pool(SCATTERED.size_bytes), new_pool(SCATTERED.size_bytes)
    fill(source)
    receiver = SocketReceiver(kind)
    sender = SocketSender(receiver.address)
    thread = threading.Thread(target=lambda: sender.send(SCATTERED.region(source), SCATTERED.order(0), 2))
    thread.start()
    received = receiver.receive(SCATTERED.region(target), SCATTERED.order(1), 2)
    thread.join()
    sender.close()
    receiver.close()
    assert len(received.landed_ns) == 2
    check(SCATTERED.region(target), SCATTERED, 700)


def test_a_socket_whose_sender_is_gone_says_so():
    receiver = SocketReceiver("tcp socket")
    host, _, port = receiver.address.rpartition(":")
    socket.create_connection((host, int(port))).close()
    with pytest.raises(ConnectionError):
        receiver.receive(np.zeros((1, 8), np.uint8), [0], 1)
    receiver.close()


def test_a_process_that_ends_or_answers_an_error_ends_the_benchmark():
    gone = Remote(["true"])
    with pytest.raises(Internal, match="has ended"):
        gone.answer()
    gone.close()
    failing = Remote(["echo", '{"error": "no memory"}'])
    with pytest.raises(Internal, match="no memory"):
        failing.answer()
    failing.close()


def test_p_refuses_what_it_does_not_know():
    with pytest.raises(Internal, match="cannot dance"):
        serve(Peer(1024), '{"do": "dance"}')


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"blocks": ("1000",)}, "multiple of 512"),
        ({"size": "0"}, "multiple of 512"),
        ({"transports": ("carrier pigeon",)}, "there are .*zmq"),
        ({"peer": ("nixl",)}, "NAME=COMMAND"),
        ({"repeats": 0}, "at least 1"),
        ({"prefill": -1}, "negative"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags, says):
    with pytest.raises(ConfigError, match=says):
        TransferBenchConfig(**flags)


def test_without_names_all_transports_are_measured():
    config = TransferBenchConfig(peer=("a=b --c=d",))
    assert {"zmq", "inproc"} <= set(config.named_transports())
    assert "auto" not in config.named_transports()
    assert config.named_peers() == (("a", "b --c=d"),)
