"""`python -m kvrelay.engine.convert_gguf GGUF FOLDER`: a GGUF model as a Hugging Face folder.

Writes config.json, generation_config.json, model.safetensors (or numbered files and their index), tokenizer.json and
tokenizer_config.json with the chat template. Nothing is guessed: an architecture, a setting, a tensor, a quantisation
or a splitting of text that is not known here is refused by name.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kvrelay.engine import process
from kvrelay.engine.errors import ModelError
from kvrelay.engine.gguf_architectures import find_architecture, read_config
from kvrelay.engine.gguf_file import Gguf
from kvrelay.engine.gguf_safetensors import dtype_of, write_safetensors
from kvrelay.engine.gguf_tensors import plan_tensors
from kvrelay.engine.gguf_tokenizer import read_tokenizer


def convert(gguf: Path, folder: Path, *, progress: bool) -> None:
    """Convert a GGUF file, or one whose parts `gguf` is the first of, into `folder`, which exists.

    Raises: ModelError, one line that says what is broken or not supported; OSError.
    """
    with Gguf(gguf) as source:
        architecture = find_architecture(source)
        config = read_config(source, architecture)
        plans = plan_tensors(source, architecture, config)
        tokenizer = read_tokenizer(source, config["vocab_size"])
        ends = tokenizer.end_token_ids
        generation = tokenizer.token_ids | ({"eos_token_id": ends} if len(ends) > 1 else {})
        _write(
            folder / "config.json", config | tokenizer.token_ids | {"dtype": dtype_of(list(source.tensors.values()))}
        )
        _write(folder / "generation_config.json", {name: ids for name, ids in generation.items() if ids is not None})
        limit = {"model_max_length": config["max_position_embeddings"]}
        _write(folder / "tokenizer_config.json", tokenizer.config | limit)
        tokenizer.backend.save(str(folder / "tokenizer.json"), pretty=False)
        write_safetensors(folder, plans, progress=progress)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


def main() -> int:
    process.end_with_parent()
    parser = argparse.ArgumentParser(prog="python -m kvrelay.engine.convert_gguf", description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--progress", action="store_true", help="show progress bars on standard error")
    arguments = parser.parse_args()
    try:
        convert(arguments.gguf, arguments.folder, progress=arguments.progress)
    except (ModelError, OSError) as error:
        print(f"ERROR: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201 (the caller reads this line)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
