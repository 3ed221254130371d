"""How long `kvrelay up` takes to be ready, and what its three processes cost when nothing happens.

    .venv/bin/python bench/start_and_idle.py [--starts 5] [--idle-s 60] [--kv-transport NAME]

Run it with nothing beside it. The model must be in the cache: a first `kvrelay demo` puts it there. Beside the start
stands what nobody can avoid who uses torch: a process that imports it and ends.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time

import psutil


def start(port: str, kv_transport: str) -> tuple[subprocess.Popen[str], float]:
    """A `kvrelay up` that is ready, and the seconds it took."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvrelay.cli", "up", "--port", port, "--kv-transport", kv_transport],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("ready:"):
        raise SystemExit(f"kvrelay up did not start: {line}")
    return process, time.perf_counter() - began


def stop(process: subprocess.Popen[str]) -> float:
    began = time.perf_counter()
    process.terminate()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    return time.perf_counter() - began


def import_torch() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - began


def cpu_seconds(processes: dict[str, psutil.Process]) -> dict[str, float]:
    return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}


def idle_cost(up: subprocess.Popen[str], idle_s: float) -> dict[str, float]:
    """Share of a core that each role uses, in percent, with its connections open and no request."""
    roles = {}
    for child in psutil.Process(up.pid).children(recursive=True):
        command = child.cmdline()
        roles[next(role for role in ("router", "prefill", "decode") if role in command)] = child
    time.sleep(5)  # the KV pool's pages are fetched in the background at first
    before = cpu_seconds(roles)
    time.sleep(idle_s)
    after = cpu_seconds(roles)
    return {name: 100 * (after[name] - before[name]) / idle_s for name in roles}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5, help="number of starts (default: 5)")
    parser.add_argument("--idle-s", type=float, default=60.0, help="seconds of idling (default: 60)")
    parser.add_argument("--port", default="0", help="the router's port (default: any free one)")
    parser.add_argument("--kv-transport", default="auto", help="what moves KV between the nodes (default: auto)")
    options = parser.parse_args()
    ready, stopped, imports, idle = [], [], [], {}
    for i in range(options.starts):
        imports.append(import_torch())
        up, seconds = start(options.port, options.kv_transport)
        ready.append(seconds)
        if i == options.starts - 1:
            idle = idle_cost(up, options.idle_s)
        stopped.append(stop(up))
    print(
        json.dumps(
            {
                "kv_transport": options.kv_transport,
                "cores": len(os.sched_getaffinity(0)),
                "python": platform.python_version(),
                "ready_s": {"median": statistics.median(ready), "all": ready},
                "import_torch_s": {"median": statistics.median(imports)},
                "stop_s": {"median": statistics.median(stopped)},
                "idle_percent_of_a_core": idle | {"all": sum(idle.values())},
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
