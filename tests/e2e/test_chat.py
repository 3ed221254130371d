"""`kvrelay chat` as a process, at a pseudo-terminal and over pipes, with a real router and a fake node behind it."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from support.fake_node import DECODE, FakeNode, delta
from support.router_harness import Harness, running_router, wait_until
from support.terminal import CTRL_C, CTRL_D, Terminal, at_terminal
from support.tiny_tokenizers import EOS as EOS_TEXT, byte_level, write_model_folder

from kvrelay.cli.main import ExitCode
from kvrelay.proto import node_pb2

pytestmark = pytest.mark.slow

EOS = byte_level().encode(EOS_TEXT).ids


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running_router(write_model_folder(tmp_path / "model")) as harness:
        yield harness


@pytest.fixture
async def node(router: Harness) -> FakeNode:
    return await router.node(DECODE, "D")


@contextlib.asynccontextmanager
async def chat(router: Harness, home: Path, *flags: str) -> AsyncIterator[Terminal]:
    async with at_terminal("chat", "--router", router.address, *flags, home=home) as terminal:
        await terminal.expect(">>> ")
        yield terminal


def ids(text: str) -> list[int]:
    return byte_level().encode(text).ids


def prompt_of(start: node_pb2.Start) -> str:
    return byte_level().decode(list(start.prompt_token_ids), skip_special_tokens=False)


async def say(node: FakeNode, start: node_pb2.Start, text: str) -> None:
    """A whole answer."""
    await node.say(delta(start, [*ids(text), *EOS], finish="stop", ended=True))


async def test_an_answer_streams_and_is_part_of_the_next_prompt(
    router: Harness, node: FakeNode, tmp_path: Path
) -> None:
    async with chat(router, tmp_path, "--system", "Be 世界") as terminal:
        terminal.press("Where is Rome?\r")
        start = await node.next_start()
        assert "Be 世界" in prompt_of(start)
        output = ids("In Italy, é 界")
        await node.say(delta(start, output[:4]))
        await terminal.expect(byte_level().decode(output[:3]))
        await node.say(delta(start, [*output[4:], *EOS], first=4, finish="stop", ended=True))
        await terminal.expect("界")
        assert "first after" in await terminal.expect(">>> ")
        terminal.press("And Bern?\r")
        start = await node.next_start()
        assert "In Italy, é 界" in prompt_of(start)
        await say(node, start, "There.")
        await terminal.expect(">>> ")
        terminal.press(CTRL_D)
        assert await terminal.ended() == ExitCode.OK


async def test_ctrl_c_stops_the_answer_only_and_what_was_said_stays(
    router: Harness, node: FakeNode, tmp_path: Path
) -> None:
    async with chat(router, tmp_path) as terminal:
        terminal.press("Tell me all\r")
        start = await node.next_start()
        await node.say(delta(start, ids("Once upon a time")))
        await terminal.expect("Once upon")
        terminal.press(CTRL_C)
        await terminal.expect("what was said stays")
        await node.next_cancel()
        await node.say(delta(start, ended=True))
        await wait_until(lambda: router.server.num_requests == 0)
        await terminal.expect(">>> ")
        terminal.press("Go on\r")
        start = await node.next_start()
        assert "Once upon" in prompt_of(start)
        await say(node, start, "there was")
        await terminal.expect("there was")
        await terminal.expect(">>> ")
        terminal.press("half a question")
        await terminal.expect("half a question")
        await terminal.at_rest()
        terminal.press(CTRL_C)  # gives up the line, not the chat
        await terminal.expect(">>> ")
        await terminal.at_rest()
        terminal.press(CTRL_C)
        assert await terminal.ended() == ExitCode.OK


async def test_an_answer_stopped_before_its_first_word_is_as_if_never_asked(
    router: Harness, node: FakeNode, tmp_path: Path
) -> None:
    async with chat(router, tmp_path) as terminal:
        terminal.press("first thing\r")
        start = await node.next_start()
        terminal.press(CTRL_C)
        await terminal.expect("/retry asks again")
        await node.next_cancel()
        await node.say(delta(start, ended=True))
        await terminal.expect(">>> ")
        terminal.press("second thing\r")
        start = await node.next_start()
        assert "first thing" not in prompt_of(start)
        await say(node, start, "yes")
        await terminal.expect(">>> ")
        terminal.press(CTRL_D)
        assert await terminal.ended() == ExitCode.OK


async def test_pasted_lines_are_one_message_and_typed_ones_come_back_next_time(
    router: Harness, node: FakeNode, tmp_path: Path
) -> None:
    async with chat(router, tmp_path) as terminal:
        terminal.press("\033[200~one\ntwo\033[201~\r")
        start = await node.next_start()
        assert "one\ntwo" in prompt_of(start)
        await say(node, start, "ok")
        await terminal.expect(">>> ")
        terminal.press(CTRL_D)
        assert await terminal.ended() == ExitCode.OK
    kept = tmp_path / "kvrelay" / "chat_history"
    assert kept.stat().st_mode & 0o777 == 0o600
    async with chat(router, tmp_path) as terminal:
        terminal.press("\033[A\r")  # up
        start = await node.next_start()
        assert "one\ntwo" in prompt_of(start)
        await say(node, start, "again")
        await terminal.expect(">>> ")


async def test_a_router_that_goes_away_in_mid_answer_is_one_line_and_the_chat_goes_on(
    tmp_path: Path,
) -> None:
    info = write_model_folder(tmp_path / "model")
    async with running_router(info) as router:
        port = int(router.address.rpartition(":")[2])
        node = await router.node(DECODE, "D")
        async with chat(router, tmp_path) as terminal:
            terminal.press("Tell me all\r")
            start = await node.next_start()
            await node.say(delta(start, ids("Once upon a time")))
            await terminal.expect("Once upon")
            await router.server.stop(drain_timeout_s=0)
            said = await terminal.expect(">>> ")
            assert said.count("kvrelay chat: ") == 1
            async with running_router(info, port=port) as second:
                node = await second.node(DECODE, "D")
                while True:  # gRPC waits a moment before it connects again, and says so until then
                    terminal.press("/retry\r")
                    asked = asyncio.create_task(node.next_start())
                    failed = asyncio.create_task(terminal.expect("kvrelay chat: "))
                    done, _ = await asyncio.wait({asked, failed}, return_when=asyncio.FIRST_COMPLETED)
                    if asked in done:
                        failed.cancel()
                        break
                    asked.cancel()
                    await terminal.expect(">>> ")
                assert "Once upon" not in prompt_of(asked.result())
                await say(node, asked.result(), "Here again")
                await terminal.expect("Here again")
                await terminal.expect(">>> ")
                terminal.press(CTRL_D)
                assert await terminal.ended() == ExitCode.OK


async def piped(router: Harness, home: Path, lines: str, *flags: str) -> tuple[str, str, int | None]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrelay.cli", "chat", "--router", router.address, *flags),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=home,
    )
    async with asyncio.timeout(30):
        output, errors = await process.communicate(lines.encode())
    return output.decode(), errors.decode(), process.returncode


async def beside(node: FakeNode, answers: Sequence[str]) -> list[str]:
    """Answer so many starts. Returns: their prompts."""
    prompts = []
    for answer in answers:
        start = await node.next_start()
        prompts.append(prompt_of(start))
        await say(node, start, answer)
    return prompts


async def test_over_pipes_each_line_is_a_turn_and_the_output_is_the_answers_alone(
    router: Harness, node: FakeNode, tmp_path: Path
) -> None:
    serving = asyncio.create_task(beside(node, ["A one", "A two\033[31m"]))
    output, errors, code = await piped(router, tmp_path, 'q one\n"""q\ntwo"""\n/save said.json\n')
    assert output == "A one\nA two\033[31m\n"
    assert (errors, code) == ("saved: said.json\n", ExitCode.OK)
    prompts = await serving
    assert "A one" in prompts[1]
    assert "q\ntwo" in prompts[1]
    assert '"content": "q\\ntwo"' in (tmp_path / "said.json").read_text()


async def test_a_full_context_leaves_out_the_oldest_turns_and_says_so(
    router: Harness, node: FakeNode, tmp_path: Path
) -> None:
    serving = asyncio.create_task(beside(node, ["A one", "A two", "A three"]))
    lines = ["oldest " + "a" * 10, "middle " + "b" * 10, "latest " + "c" * 40, "far too long " + "d" * 300]
    _, errors, code = await piped(router, tmp_path, "\n".join(lines) + "\n")
    prompts = await serving
    assert "oldest" in prompts[1]
    assert "oldest" not in prompts[2]
    assert "latest" in prompts[2]
    assert "(the context of 128 tokens is full: the " in errors
    assert "the context holds 128; say it in fewer words" in errors
    assert code == ExitCode.USAGE
