"""`python -m kvrelay.engine.convert_gguf GGUF FOLDER`: a GGUF file as a Hugging Face folder in bfloat16.

A process of its own, because it needs transformers, seconds and twice the model's memory. Writes config.json,
generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json with the chat template.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from kvrelay.engine import process
from kvrelay.engine.errors import ModelError

_PRE_TOKENIZER = "tokenizer.ggml.pre"


def convert(gguf: Path, folder: Path, *, progress: bool) -> None:
    """Convert `gguf` into `folder`, which exists.

    Raises: ModelError for a tokenizer whose splitting is not known here; transformers' errors for a broken file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, utils

    if not progress:
        utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    source: dict[str, Any] = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    tokenizer.backend_tokenizer.pre_tokenizer = _pre_tokenizer(gguf)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)


def _pre_tokenizer(gguf: Path) -> Any:
    """How text is split before merges: GGUF has a name for it, and transformers takes GPT-2's whatever it says.

    Raises: ModelError.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers as pre

    field = GGUFReader(gguf).get_field(_PRE_TOKENIZER)
    name = field.contents() if field else None
    byte_level = pre.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    known = {"gpt-2": byte_level, "smollm": pre.Sequence([pre.Digits(individual_digits=True), byte_level])}
    if name not in known:
        raise ModelError(f"{gguf.name}: {_PRE_TOKENIZER} = {name!r}: not one of {', '.join(known)}")
    return known[name]


def main() -> int:
    process.end_with_parent()
    parser = argparse.ArgumentParser(prog="python -m kvrelay.engine.convert_gguf", description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--progress", action="store_true", help="show progress bars on standard error")
    arguments = parser.parse_args()
    try:
        convert(arguments.gguf, arguments.folder, progress=arguments.progress)
    except (ModelError, OSError, ValueError, RuntimeError) as error:
        print(f"ERROR: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201 (the caller reads this line)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
