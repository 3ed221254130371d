"""The kernels in Triton compile for GPUs, which the interpreter says nothing about."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILER = Path(__file__).parents[1] / "support" / "triton_compiler.py"
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}  # of one program


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_kernel_compiles_and_its_shared_memory_is_there(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, COMPILER], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["kernel"].split()[0] for kernel in compiled} == {
        "_attend_to_split",
        "_add_splits",
        "_reshape_and_cache",
        "_rms_norm",
    }
    assert [kernel for kernel in compiled if kernel["shared_bytes"] > SHARED_BYTES[kernel["capability"]]] == []
