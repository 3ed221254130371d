"""Who may import what: every import statement of every folder, inside functions too."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "kvrelay"

# engine's modules that every process may import: they import the standard library and each other, nothing else.
LIGHT = frozenset(
    f"kvrelay.engine.{name}"
    for name in (
        "block_hash",
        "clock",
        "config",
        "errors",
        "json_file",
        "kv_layout",
        "legs",
        "log",
        "metrics",
        "model_cache",
        "model_info",
        "model_store",
        "models.config",
        "models.families",
        "models.hf_config",
        "models.llama_like",
        "models.options",
        "models.rope_config",
        "pieces",
        "process",
        "request",
        "secret",
        "structured_output",
        "traces",
        "weight_files",
    )
)
# What a light module may import where it is needed, and not before.
LAZY = {
    "kvrelay.engine.model_store": {"huggingface_hub"},
    "kvrelay.engine.pieces": {"tokenizers"},
    "kvrelay.engine.structured_output": {"llguidance"},
    "kvrelay.engine.traces": {"opentelemetry"},
}

# folder -> folders of ours that it may import; "light": engine's light modules alone.
ALLOWED = {
    "proto": {"proto"},
    "kernels": {"kernels"},
    "engine": {"engine", "kernels"},
    "connector": {"connector", "engine"},
    "node": {"node", "connector", "engine"},
    "prefill_node": {"prefill_node", "node", "connector", "engine"},
    "decode_node": {"decode_node", "node", "connector", "engine"},
    "router": {"router", "light"},
    "cli": {"cli", "light"},
    "llm": {"llm", "router", "decode_node", "node", "connector", "engine"},  # a router and a node in one process
}
# cli starts roles and benchmarks: their configs, and their mains when one runs.
CONFIGS = {f"kvrelay.{role}.config" for role in ("router", "node", "prefill_node", "decode_node")}
MAINS = {f"kvrelay.{role}.main" for role in ("router", "prefill_node", "decode_node")}
MAINS |= {f"kvrelay.{folder}.bench" for folder in ("engine", "connector", "prefill_node")}

# The edges, where generated protobuf classes stop.
EDGES = {"router/nodes.py", "router/node_wire.py", "router/cluster_wire.py", "node/link.py", "cli/client.py"}
EDGE_NAMES = {"server.py", "wire.py"}

# library -> where it may be imported.
ONLY_IN = {
    "torch": ("kernels/", "engine/"),
    "transformers": ("engine/",),
    "safetensors": ("engine/",),
    "gguf": ("engine/",),
    "numpy": ("kernels/", "engine/", "connector/"),
    "triton": ("kernels/triton/",),
    "zmq": ("connector/",),
    "tyro": ("cli/", *(f"{role}/main.py" for role in ("router", "prefill_node", "decode_node"))),
}


def imported(source: str, file: str) -> Iterator[tuple[str, bool]]:
    """Each module that `source`, the text of top-level file `file`, imports, and whether at the module's top."""
    tree = ast.parse(source)
    top = set(ast.iter_child_nodes(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node in top
        elif isinstance(node, ast.ImportFrom):
            parents = ["kvrelay", *Path(file).parts][: -node.level] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                yield _submodule(module, alias.name), node in top


def _submodule(module: str, name: str) -> str:
    """What `from module import name` loads: the submodule, where there is one."""
    if module.split(".")[0] != "kvrelay":
        return module
    folder = PACKAGE.joinpath(*module.split(".")[1:])
    is_module = (folder / f"{name}.py").exists() or (folder / name).is_dir()
    return f"{module}.{name}" if is_module else module


def violations(source: str, file: str) -> list[str]:
    """What `source` imports as `file` (path from the repository's root) though it may not."""
    found = []
    for module, at_top in imported(source, file):
        allowed = _may_import_ours if module.split(".")[0] == "kvrelay" else _may_import_theirs
        if not allowed(file, module, at_top):
            found.append(f"{file} imports {module}")
    return found


def _may_import_ours(file: str, module: str, at_top: bool) -> bool:
    folder = Path(file).parts[0]
    target = module.split(".")[1] if "." in module else ""
    if not target:  # kvrelay itself: its version
        return _name(file) not in LIGHT
    if target == "proto":
        return folder == "proto" or file in EDGES or Path(file).name in EDGE_NAMES
    if _name(file) in LIGHT:
        return module in LIGHT
    if folder == "cli" and module in MAINS:
        return not at_top
    if folder == "cli" and target != "cli" and target != "engine":
        return module in CONFIGS
    if target == "engine" and "light" in ALLOWED[folder]:
        return module in LIGHT
    return target in ALLOWED[folder]


def _may_import_theirs(file: str, module: str, at_top: bool) -> bool:
    library = module.split(".")[0]
    if library in sys.stdlib_module_names:
        return True
    if _name(file) in LIGHT:
        return library in LAZY.get(_name(file), ()) and not at_top
    return any(file.startswith(place) for place in ONLY_IN.get(library, ("",)))


def _name(file: str) -> str:
    return ".".join(("kvrelay", *Path(file).with_suffix("").parts))


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_every_import_of_a_folder_is_allowed(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert any(file.stat().st_size for file in files), f"{folder}/ has no code: the rules would hold for nothing"
    relative = [str(file.relative_to(ROOT)) for file in files]
    assert [wrong for file in relative for wrong in violations((ROOT / file).read_text(), file)] == []


def test_the_rules_cover_every_folder_of_the_package() -> None:
    assert set(ALLOWED) == {link.name for link in PACKAGE.iterdir() if link.is_symlink()}


def test_every_light_module_that_is_named_here_exists_or_is_metrics() -> None:
    missing = {name for name in LIGHT if not PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py").exists()}
    assert missing <= {"kvrelay.engine.metrics"}


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("router/dispatch.py", "import torch"),
        ("router/dispatch.py", "def f():\n    import numpy as np"),
        ("router/dispatch.py", "from kvrelay.engine import scheduler"),
        ("router/dispatch.py", "from ..engine.scheduler import Scheduler"),
        ("router/dispatch.py", "from kvrelay.proto import node_pb2"),
        ("router/dispatch.py", "from .. import proto"),
        ("router/server.py", "from kvrelay.connector.base import KVSender"),
        ("prefill_node/node.py", "from kvrelay.decode_node.config import DecodeConfig"),
        ("decode_node/node.py", "import kvrelay.prefill_node.config"),
        ("decode_node/node.py", "import torch.nn"),
        ("node/main.py", "from kvrelay.prefill_node import config"),
        ("node/main.py", "from kvrelay.proto import node_pb2"),
        ("connector/sender.py", "from kvrelay.node.core import NodeCore"),
        ("connector/sender.py", "if True:\n    from kvrelay import proto"),
        ("engine/engine.py", "from kvrelay.connector import base"),
        ("engine/errors.py", "import numpy"),
        ("engine/request.py", "from kvrelay.engine import step"),
        ("engine/model_store.py", "import huggingface_hub"),
        ("engine/model_store.py", "def f():\n    import transformers"),
        ("kernels/reference.py", "from kvrelay.engine.errors import KvrelayError"),
        ("kernels/reference.py", "import triton"),
        ("cli/generate.py", "from kvrelay.proto import inference_pb2"),
        ("cli/main.py", "from kvrelay.router.main import run"),
        ("cli/main.py", "def f():\n    from kvrelay.router.dispatch import Dispatch"),
        ("cli/up.py", "from kvrelay.engine.model_runner import ModelRunner"),
        ("cli/bench_engine.py", "from kvrelay.engine import bench"),
        ("cli/bench_transfer.py", "from kvrelay.connector import bench"),
        ("cli/bench_transfer.py", "def f():\n    from kvrelay.connector import bench_sides"),
        ("router/dispatch.py", "def f():\n    from kvrelay.engine import bench"),
        ("llm/llm.py", "import torch"),
        ("llm/llm.py", "from kvrelay.kernels import dispatch"),
        ("llm/llm.py", "from kvrelay.proto import inference_pb2"),
        ("cli/generate.py", "from kvrelay.llm.llm import LLM"),
        ("router/service.py", "from kvrelay.llm.outputs import RequestOutput"),
        ("decode_node/node.py", "from kvrelay.llm.colocated import Colocated"),
    ],
)
def test_a_forbidden_import_is_seen(file: str, source: str) -> None:
    assert len(violations(source, file)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("router/dispatch.py", "from kvrelay.engine.errors import Unavailable\nimport asyncio"),
        ("router/server.py", "from kvrelay.proto import inference_pb2, inference_pb2_grpc"),
        ("prefill_node/node.py", "from kvrelay.node.core import NodeCore\nfrom kvrelay.connector.base import KVSender"),
        ("connector/wire.py", "from kvrelay.proto import transfer_pb2"),
        ("engine/model_runner.py", "import torch\nfrom kvrelay.kernels import dispatch"),
        ("engine/model_store.py", "def f():\n    from huggingface_hub import snapshot_download"),
        ("kernels/triton/attention.py", "import triton"),
        ("cli/main.py", "def f():\n    from kvrelay.router.main import run"),
        ("cli/bench_engine.py", "def f():\n    from kvrelay.engine import bench"),
        ("cli/config.py", "from kvrelay.engine.config import EngineConfig\nimport tyro"),
    ],
)
def test_an_allowed_import_passes(file: str, source: str) -> None:
    assert violations(source, file) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("kvrelay.router.main", {"torch", "transformers", "numpy"}),
        ("kvrelay.cli.main", {"torch", "transformers", "numpy", "grpc", "tyro"}),
        ("kvrelay.cli.up, kvrelay.cli.generate, kvrelay.cli.demo", {"torch", "transformers", "numpy"}),
        ("kvrelay.cli.chat, kvrelay.cli.top", {"torch", "transformers", "numpy", "matplotlib"}),
        (
            "kvrelay.cli.bench_serve, kvrelay.cli.bench_engine, kvrelay.cli.bench_transfer",
            {"torch", "transformers", "numpy"},
        ),
        ("kvrelay", {"importlib.metadata", "kvrelay.llm.llm", "torch", "numpy"}),
        ("kvrelay.llm.llm", {"torch", "transformers", "numpy", "grpc", "zmq", "tyro"}),
        ("kvrelay.kernels.dispatch", {"triton"}),
        (", ".join(sorted(LIGHT - {"kvrelay.engine.metrics"})), {"torch", "numpy", "grpc", "zmq", "huggingface_hub"}),
    ],
)
def test_importing_a_module_loads_nothing_that_it_has_no_use_for(modules: str, absent: set[str]) -> None:
    program = f"import sys, {modules}; print(*sorted(set(sys.modules) & {absent!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_the_package_s_front_loads_what_is_asked_of_it_and_names_what_it_has() -> None:
    import kvrelay

    assert {"LLM", "SamplingParams", "__version__"} <= set(dir(kvrelay))
    for name in kvrelay.__all__:
        assert getattr(kvrelay, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        kvrelay.LLMs  # noqa: B018
