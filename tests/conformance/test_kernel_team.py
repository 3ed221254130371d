"""The team of threads below the CPU's kernels: asleep when idle, gone when freed, unmoved by forks and signals."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernel_sets import cpu_kernels
from torch import Tensor

from kvrelay.kernels.cpu.kernels import CpuKernels

TASKS = Path("/proc/self/task")


@pytest.fixture(autouse=True)
def _compiled() -> None:
    cpu_kernels(1)  # or the test is skipped


def threads_of_process() -> set[str]:
    return {task.name for task in TASKS.iterdir()}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()


def is_asleep(thread: str) -> bool:
    return (TASKS / thread / "stat").read_text().rsplit(")", 1)[1].split()[0] == "S"


def cpu_ticks(thread: str) -> int:
    """CPU time a thread has taken, in hundredths of a second."""
    fields = (TASKS / thread / "stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def product(kernels: CpuKernels, seed: int = 0, size: int = 200) -> Callable[[], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(33, size, generator=generator), torch.randn(size, size, generator=generator)
    packed = kernels.pack(weight)
    return lambda: kernels.linear(x, packed)


def test_one_thread_is_the_caller_s() -> None:
    before = threads_of_process()
    kernels = CpuKernels(1)
    assert product(kernels)().isfinite().all()
    assert threads_of_process() == before


def test_threads_are_there_while_their_machine_is() -> None:
    before = threads_of_process()
    kernels = CpuKernels(4)
    assert len(threads_of_process() - before) == 3
    product(kernels)()
    assert len(threads_of_process() - before) == 3
    del kernels
    wait_until(lambda: threads_of_process() == before)


def test_a_machine_that_never_ran_ends_too() -> None:
    before = threads_of_process()
    for _ in range(20):
        CpuKernels(3)
    wait_until(lambda: threads_of_process() == before)


def test_an_idle_team_uses_no_cpu() -> None:
    before = threads_of_process()
    kernels = CpuKernels(4)
    product(kernels)()
    team = threads_of_process() - before
    wait_until(lambda: all(map(is_asleep, team)))
    ticks = sum(map(cpu_ticks, team))
    ends_at = time.thread_time() + 0.5
    while time.thread_time() < ends_at:
        pass
    assert sum(map(cpu_ticks, team)) <= ticks + 2  # three that spun would have taken some 50 each


def test_two_machines_work_side_by_side() -> None:
    expected = [product(cpu_kernels(1), seed)() for seed in (1, 2)]
    same: list[bool] = []

    def work(seed: int) -> None:
        compute = product(CpuKernels(3), seed)
        same.extend(torch.equal(compute(), expected[seed - 1]) for _ in range(300))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert same == [True] * 600


FORKS = """
import os, subprocess, sys
import torch
from kvrelay.kernels.cpu.kernels import CpuKernels

kernels = CpuKernels(4)
x, packed = torch.randn(20, 50), kernels.pack(torch.randn(40, 50))
expected = kernels.linear(x, packed)
subprocess.run(["true"], check=True)
assert torch.equal(kernels.linear(x, packed), expected)
for works in (True, False):
    child = os.fork()
    if not child:
        assert not works or torch.equal(kernels.linear(x, packed), expected)
        del kernels  # nobody is there to be waited for
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert torch.equal(kernels.linear(x, packed), expected)
"""


def test_a_fork_harms_neither_side() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], check=True, timeout=100)


@contextmanager
def signals_while_computing(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """A signal for each millisecond of CPU time."""
    before = signal.signal(signal.SIGVTALRM, handler)
    signal.setitimer(signal.ITIMER_VIRTUAL, 1e-3, 1e-3)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def run_forever(compute: Callable[[], Tensor]) -> None:
    while True:
        compute()


def test_signals_change_nothing() -> None:
    compute, count = product(CpuKernels(3), size=700), 0
    expected = compute()

    def handle(number: int, frame: Any) -> None:
        nonlocal count
        count += 1

    with signals_while_computing(handle):
        deadline = time.monotonic() + 60
        while count < 50 and time.monotonic() < deadline:
            assert torch.equal(compute(), expected)
    assert count >= 50


def test_after_an_interrupt_a_machine_works_on() -> None:
    compute = product(CpuKernels(3), size=700)
    expected = compute()

    def interrupt(number: int, frame: Any) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        raise KeyboardInterrupt

    for _ in range(10):
        with signals_while_computing(interrupt), pytest.raises(KeyboardInterrupt):
            run_forever(compute)
        assert torch.equal(compute(), expected)


# Its thread calls nothing of torch, which lets go of the interpreter in frames that must not be unwound: where the
# process ends just then, it aborts, whatever our kernels do.
ENDS = """
import threading, torch
from kvrelay.kernels.cpu.kernels import CpuKernels

kernels, started, calls = CpuKernels(3), threading.Event(), []
run = kernels.machine.run
kernels.machine.run = lambda *call: (calls.append(call), run(*call))
x, packed = torch.randn(320, 1024), kernels.pack(torch.randn(900, 1024))
out = kernels.linear(x, packed)

def work():
    while True:
        run(*calls[0])
        started.set()

threading.Thread(target=work, daemon=True).start()
assert started.wait(60)
"""


def test_a_process_may_end_in_the_middle_of_a_run() -> None:
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    subprocess.run([sys.executable, "-c", ENDS], check=True, timeout=100, env=environment)


SHARES_TILES = """
import torch
from kvrelay.kernels.cpu.kernels import CpuKernels

kernels = CpuKernels(1)
x, packed = torch.randn(40, 130).bfloat16(), kernels.pack(torch.randn(70, 130).bfloat16())
first, second = torch.randn(3, 1, 256).bfloat16(), torch.randn(3, 256, 1024).bfloat16()
theirs, ours = torch.bmm(first, second), kernels.linear(x, packed)
for num_rows in (40, 40, 1, 1, 17, 17):
    assert torch.equal(torch.bmm(first, second), theirs)
    assert torch.equal(kernels.linear(x[:num_rows], packed), ours[:num_rows])
"""


def test_torch_s_products_and_ours_take_turns_with_the_cpu_s_matrix_tiles() -> None:
    """A process of its own: tiles that another has configured or released are an illegal instruction."""
    subprocess.run([sys.executable, "-c", SHARES_TILES], check=True, timeout=100)
