"""kvrelay: disaggregated LLM serving. Prefill on one node, decode on another, the KV cache handed over between them."""

from importlib.metadata import version

__version__ = version("kvrelay")
