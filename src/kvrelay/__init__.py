"""kvrelay: disaggregated LLM serving. Prefill on one node, decode on another, the KV cache handed over between them.

    from kvrelay import LLM, SamplingParams

    with LLM("smollm2") as llm:
        (output,) = llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0))
        print(output.outputs[0].text)

Importing this loads nothing: each name below comes with its module when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrelay.engine.errors import InvalidPrompt, KvrelayError
    from kvrelay.engine.request import Logprobs, StructuredOutput
    from kvrelay.llm.llm import LLM
    from kvrelay.llm.outputs import CompletionOutput, RequestOutput
    from kvrelay.llm.sampling import SamplingParams
    from kvrelay.router.api import Output

    __version__: str

__all__ = [
    "LLM",
    "CompletionOutput",
    "InvalidPrompt",
    "KvrelayError",
    "Logprobs",
    "Output",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "__version__",
]

_MODULES = {
    "LLM": "llm.llm",
    "CompletionOutput": "llm.outputs",
    "InvalidPrompt": "engine.errors",
    "KvrelayError": "engine.errors",
    "Logprobs": "engine.request",
    "Output": "router.api",
    "RequestOutput": "llm.outputs",
    "SamplingParams": "llm.sampling",
    "StructuredOutput": "engine.request",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # 15 ms

        value: Any = version("kvrelay")
    elif name in _MODULES:
        value = getattr(import_module(f"kvrelay.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module 'kvrelay' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
