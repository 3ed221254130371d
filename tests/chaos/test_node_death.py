"""A node killed under load ends its own requests with one typed error, and no others; its next life serves."""

import random
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from support.oracle import Oracle
from support.roles import Client, Outcome, RoleProcess, Roles, under_load

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

NUM_CLIENTS, PROMPT_LEN, MAX_TOKENS = 6, 40, 80
FLAGS = ("--dtype", "float32", "--threads", "1", "--num-blocks", "64", "--max-num-batched-tokens", "32")


@pytest.fixture
def roles(tiny_model: Path, tmp_path: Path) -> Iterator[Roles]:
    roles = Roles(tiny_model, tmp_path)
    yield roles
    roles.close()


@pytest.fixture
def router(roles: Roles) -> RoleProcess:
    return roles.start("router", "--port", "0")


@pytest.fixture
def client(router: RoleProcess) -> Iterator[Client]:
    client = Client(router.grpc)
    yield client
    client.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [[random.Random(i).randrange(256) for _ in range(PROMPT_LEN)] for i in range(NUM_CLIENTS)]


@pytest.fixture(scope="module")
def expected(tiny_oracle: Oracle, prompts: list[list[int]]) -> list[list[int]]:
    return [tiny_oracle.generate(prompt, max_tokens=MAX_TOKENS, ignore_eos=True) for prompt in prompts]


def check(outcomes: list[tuple[int, Outcome]], expected: list[list[int]]) -> None:
    """Every answer is right as far as it goes, whole or ended by UNAVAILABLE."""
    for index, outcome in outcomes:
        assert outcome.tokens == expected[index][: len(outcome.tokens)]
        if outcome.code is grpc.StatusCode.OK:
            assert len(outcome.tokens) == MAX_TOKENS
        else:
            assert outcome.code is grpc.StatusCode.UNAVAILABLE, outcome


def start_node(roles: Roles, role: str, router: RoleProcess, *flags: str) -> RoleProcess:
    return roles.start(role, "--router", router.grpc, *FLAGS, *flags)


def same_ports(node: RoleProcess) -> tuple[str, ...]:
    """Flags that put a decode node's next life on the same addresses."""
    return ("--port", node.grpc.split(":")[1], "--control-port", node.connector.split(":")[1])


def test_a_killed_decode_node_ends_its_requests_and_its_next_life_serves(
    roles: Roles, router: RoleProcess, client: Client, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """B06: the same host and ports, another epoch."""
    prefill = start_node(roles, "prefill", router)
    decode = start_node(roles, "decode", router)
    client.wait_until_paired()
    for _ in range(2):
        with under_load(client, prompts, MAX_TOKENS) as outcomes:
            decode.kill()
            client.wait_until_paired(decode=0)
        check(outcomes, expected)
        assert any(outcome.code is grpc.StatusCode.UNAVAILABLE for _, outcome in outcomes)
        prefill.wait_until_idle()
        decode = start_node(roles, "decode", router, *same_ports(decode))
        client.wait_until_paired()
        after = client.generate(prompts[0], MAX_TOKENS)
        assert (after.code, after.tokens, after.handoff) == (grpc.StatusCode.OK, expected[0], True)
    decode.wait_until_idle()


def test_a_killed_prefill_node_costs_only_what_it_had_in_hand(
    roles: Roles, router: RoleProcess, client: Client, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    decode = start_node(roles, "decode", router)
    prefill = start_node(roles, "prefill", router)
    client.wait_until_paired()
    for _ in range(2):
        with under_load(client, prompts, MAX_TOKENS) as outcomes:
            prefill.kill()
            client.wait_until_paired(prefill=0)
            whole = client.generate(prompts[0], MAX_TOKENS)
        assert (whole.code, whole.tokens, whole.handoff) == (grpc.StatusCode.OK, expected[0], False)
        check(outcomes, expected)
        decode.wait_until_idle()
        prefill = start_node(roles, "prefill", router)
        client.wait_until_paired()
        after = client.generate(prompts[0], MAX_TOKENS)
        assert (after.code, after.tokens, after.handoff) == (grpc.StatusCode.OK, expected[0], True)
    prefill.wait_until_idle()


def test_a_killed_router_leaves_its_nodes_empty_and_ready_for_the_next(
    roles: Roles, router: RoleProcess, client: Client, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """B07: whatever the router had asked for is given back when it is gone."""
    prefill = start_node(roles, "prefill", router)
    decode = start_node(roles, "decode", router)
    client.wait_until_paired()
    with under_load(client, prompts, MAX_TOKENS) as outcomes:
        router.kill()
        prefill.wait_until_idle()
        decode.wait_until_idle()
        again = roles.start("router", "--port", router.grpc.split(":")[1])
        next_client = Client(again.grpc)
        next_client.wait_until_paired()
    check(outcomes, expected)
    after = next_client.generate(prompts[0], MAX_TOKENS)
    assert (after.code, after.tokens, after.handoff) == (grpc.StatusCode.OK, expected[0], True)
    next_client.close()


def test_a_node_told_to_stop_finishes_what_it_has(
    roles: Roles, router: RoleProcess, client: Client, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    prefill = start_node(roles, "prefill", router)
    decode = start_node(roles, "decode", router)
    start_node(roles, "decode", router)
    client.wait_until_paired(decode=2)
    with under_load(client, prompts, MAX_TOKENS) as outcomes:
        assert decode.terminate() == 0
        client.wait_until_paired(decode=1)
    assert all(outcome.code is grpc.StatusCode.OK for _, outcome in outcomes)
    check(outcomes, expected)
    prefill.wait_until_idle()
