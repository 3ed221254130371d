"""Every command and every program of the documents, run against one `kvrelay up`.

A block is run as it stands, with the addresses of the test in place of the usual ones. What is not run stands in
`support.documents.EXCEPTIONS` with its reason, and is checked as far as it can be.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.command import Up, up
from support.documents import ROOT, Block, blocks, commands, defaults_with, exception, named, says, steps
from support.roles import Client

from kvrelay import LLM, SamplingParams
from kvrelay.proto import inference_pb2 as pb

pytestmark = [pytest.mark.slow, pytest.mark.model]

GRPC, HTTP = "127.0.0.1:7070", "127.0.0.1:8000"
DEADLINE_S = 90.0
SHIM = """\
#!{python}
import os, sys
words, usual = sys.argv[1:], {usual!r}
name = next((name for name in (" ".join(words[:2]), " ".join(words[:1])) if name in usual), "")
for flag, value in usual.get(name, ()):
    if flag not in words:
        words += [flag, value]
os.execv({python!r}, [{python!r}, "-m", "kvrelay.cli", *words])
"""


@dataclass(frozen=True)
class Reader:
    """Somebody who follows the documents, on the test's ports."""

    running: Up
    http: str
    folder: Path

    def here(self, text: str) -> str:
        return text.replace(GRPC, self.running.router).replace(HTTP, self.http)

    def run(self, *arguments: str, text: str = "") -> str:
        """Returns: what it wrote to standard output. Raises: AssertionError unless it ended well."""
        done = subprocess.run(
            arguments,
            input=text,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            cwd=ROOT,
            env={**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}"},
            check=False,
        )
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def bash(self, script: str) -> str:
        return self.run("bash", "-euo", "pipefail", "-c", self.here(script))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        http_port = str(free.getsockname()[1])
    with up("--model", "smollm2", "--kv-cache-size", "128MiB", "--http-port", http_port) as running:
        reader = Reader(running, f"127.0.0.1:{http_port}", tmp_path_factory.mktemp("bin"))
        usual = defaults_with(GRPC)
        for name, flags in defaults_with(HTTP).items():
            usual.setdefault(name, []).extend(flags)
        here = {name: [(flag, reader.here(value)) for flag, value in flags] for name, flags in usual.items()}
        shim = reader.folder / "kvrelay"
        shim.write_text(SHIM.format(python=sys.executable, usual=here))
        shim.chmod(0o755)
        yield reader


def cases(language: str) -> list[object]:
    return [pytest.param(block, id=block.name) for block in blocks(language)]


def check_prints(block: Block, output: str) -> None:
    lines = iter(output.splitlines())
    missing = [wanted for wanted in block.prints if not any(wanted in line for line in lines)]
    assert missing == [], f"{missing} is not in what it printed, or not in this order:\n{output}"


@pytest.mark.parametrize("block", cases("bash"))
def test_the_commands_of_a_document_work(block: Block, reader: Reader) -> None:
    kept = []
    for command in commands(block.text):
        excepted = exception(command)
        if excepted is None:
            kept.append(command)
        else:
            excepted.check()
    with named(block):
        check_prints(block, reader.bash("\n".join(kept)) if kept else "")


@pytest.mark.parametrize("block", cases("console"))
def test_commands_print_what_a_document_says(block: Block, reader: Reader) -> None:
    with named(block):
        assert steps(block.text)
        for step in steps(block.text):
            output = reader.bash(step.command)
            assert says([reader.here(line) for line in step.expected], output), f"{step.command} printed:\n{output}"


@pytest.mark.parametrize("block", cases("python"))
def test_the_programs_of_a_document_work(block: Block, reader: Reader) -> None:
    with named(block):
        check_prints(block, reader.run(sys.executable, "-W", "error", "-", text=reader.here(block.text)))


def test_the_llm_class_answers_as_the_model_that_is_served(reader: Reader) -> None:
    prompts = ["The capital of France is", "def fibonacci(n):", "Once upon a time"]
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=11, logprobs=2, stop="\n\n")
    with LLM("smollm2", kv_cache_size="64MiB") as llm:
        outputs = llm.generate(prompts, params)
    client = Client(reader.running.router)
    for prompt, output in zip(prompts, outputs, strict=True):
        sampling = pb.SamplingParams(max_tokens=12, temperature=0.8, seed=11, logprobs=2, stop=["\n\n"])
        answer = client.stream(pb.GenerateRequest(text=prompt, sampling=sampling))
        (choice,) = output.outputs
        assert choice.text == "".join(part.text for part in answer)
        assert list(choice.token_ids) == [token_id for part in answer for token_id in part.token_ids]
        assert choice.logprobs is not None
        assert [entry.logprobs for entry in choice.logprobs] == [
            tuple(entry.logprobs) for part in answer for entry in part.logprobs
        ]
        assert choice.finish_reason.value == answer[-1].finish_reason
    client.close()
