"""`kvrelay top` as a process: once for scripts, and live at a pseudo-terminal, with a real router and fake nodes."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.fake_node import DECODE
from support.router_harness import Harness, running_router
from support.terminal import CTRL_C, Terminal, at_terminal
from support.tiny_tokenizers import write_model_folder

from kvrelay.cli.main import ExitCode

pytestmark = pytest.mark.slow

OTHER_SCREEN, BACK = "\x1b[?1049h", "\x1b[?1049l"


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running_router(write_model_folder(tmp_path / "model")) as harness:
        yield harness


async def top(*flags: str) -> tuple[str, str, int | None]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrelay.cli", "top", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        output, errors = await process.communicate()
    return output.decode(), errors.decode(), process.returncode


async def test_once_is_one_look_for_a_person_or_a_script(router: Harness) -> None:
    prefill, _ = await router.pair()
    await prefill.say_load(num_running=3, num_waiting=7)
    output, errors, code = await top("--router", router.address, "--once", "--json")
    assert (errors, code) == ("", ExitCode.OK)
    found = json.loads(output)
    assert {(node["name"], node["role"]) for node in found["nodes"]} == {("P", "prefill"), ("D", "decode")}
    assert found["router"]["num_running"] == 0
    output, errors, code = await top("--router", router.address, "--once")
    assert (errors, code) == ("", ExitCode.OK)
    assert "\x1b" not in output
    assert "P prefill" in output
    assert router.address in output


async def test_once_without_a_router_is_one_line_and_exit_code_4(unused_address: str) -> None:
    output, errors, code = await top("--router", unused_address, "--once")
    assert (output, code) == ("", ExitCode.UNAVAILABLE)
    assert errors.startswith(f"kvrelay top: nobody answers at {unused_address}")
    assert errors.count("\n") == 1


@pytest.fixture
def unused_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


async def leaves(terminal: Terminal, keys: str) -> str:
    """Returns: what was shown on the way out."""
    modes = terminal.modes()
    terminal.press(keys)
    assert await terminal.ended() == ExitCode.OK
    assert modes[3] != terminal.modes()[3]  # keys are shown, and lines are edited, again
    return await terminal.expect(BACK)


@pytest.mark.parametrize("keys", ["q", CTRL_C])
async def test_a_new_size_and_a_key_are_seen_at_once_and_the_terminal_is_left_as_it_was(
    router: Harness, tmp_path: Path, keys: str
) -> None:
    await router.pair()
    flags = ("--router", router.address, "--interval-s", "600")
    async with at_terminal("top", *flags, home=tmp_path, columns=120) as terminal:
        await terminal.expect(OTHER_SCREEN)
        await terminal.expect("preempted")
        await terminal.expect("free")  # a screen's last word
        terminal.resize(60, 20)
        while "preempted" in await terminal.expect("free"):
            pass
        await leaves(terminal, keys)


async def test_nodes_that_come_are_shown(router: Harness, tmp_path: Path) -> None:
    flags = ("--router", router.address, "--interval-s", "0.05")
    async with at_terminal("top", *flags, home=tmp_path) as terminal:
        await terminal.expect("no node has registered")
        await router.node(DECODE, "late-comer")
        await terminal.expect("late-comer")
        await leaves(terminal, "q")


async def test_it_says_that_the_router_is_gone_and_goes_on_when_it_is_back(tmp_path: Path) -> None:
    info = write_model_folder(tmp_path / "model")
    async with running_router(info) as router:
        port = int(router.address.rpartition(":")[2])
        await router.node(DECODE, "first-life")
        flags = ("--router", router.address, "--interval-s", "0.05", "--timeout-s", "1")
        async with at_terminal("top", *flags, home=tmp_path, columns=120) as terminal:
            await terminal.expect("first-life")
            await router.server.stop(drain_timeout_s=0)
            await terminal.expect("no answer from the router")
            assert "first-life" in await terminal.expect("free")  # the last look stays
            async with running_router(info, port=port) as second:
                await second.node(DECODE, "second-life")
                await terminal.expect("second-life")
                await leaves(terminal, "q")
