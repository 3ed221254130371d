"""The cluster secret, with real roles: who does not prove it joins nothing, and who does serves as ever."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.oracle import Oracle
from support.roles import Client, Roles, wait_for

pytestmark = pytest.mark.slow

FLAGS = ("--dtype", "float32", "--threads", "1", "--num-blocks", "64")


@pytest.fixture
def roles(tiny_model: Path, tmp_path: Path) -> Iterator[Roles]:
    roles = Roles(tiny_model, tmp_path)
    yield roles
    roles.close()


def test_nodes_that_share_the_secret_serve_and_no_other_joins(
    roles: Roles, tiny_oracle: Oracle, tmp_path: Path
) -> None:
    """E02: beyond loopback only with a secret; here every address is bound, and the secret decides."""
    everywhere = ("--bind", "0.0.0.0", "--advertise", "127.0.0.1")
    router = roles.start("router", "--port", "0", *everywhere, cluster_secret="right")
    for role in ("prefill", "decode"):
        roles.start(role, "--router", router.grpc, *FLAGS, *everywhere, cluster_secret="right")
    client = Client(router.grpc)
    client.wait_until_paired()
    prompt = list(range(40))
    outcome = client.generate(prompt, 8)
    assert outcome.handoff
    assert outcome.tokens == tiny_oracle.generate(prompt, max_tokens=8, ignore_eos=True)
    stranger = roles.spawn("decode", "--router", router.grpc, *FLAGS, cluster_secret="wrong")
    wait_for(lambda: re.search("did not prove that it knows the cluster secret", stranger.log.read_text()) is not None)
    assert len(client.nodes()) == 2
    assert stranger.process.poll() is None  # it goes on trying: the router may be the one that is mended
    client.close()
