"""The router stays light: it starts in no time beside engines that take seconds."""

import json
import subprocess
import sys
from pathlib import Path

from support.tiny_tokenizers import write_model_folder

SERVE_ONE_CALL = """
import asyncio, json, sys
import grpc
import kvrelay.router.main
from kvrelay.engine.clock import MonotonicClock
from kvrelay.engine.model_info import read_model_info
from kvrelay.proto import inference_pb2, inference_pb2_grpc
from kvrelay.router.config import RouterConfig
from kvrelay.router.server import RouterServer
from pathlib import Path

async def main():
    info = read_model_info(Path(sys.argv[1]), "tiny")
    server = RouterServer(RouterConfig(model="tiny", port=0, http_port=0), info, "", MonotonicClock())
    port, _ = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        response = await stub.Tokenize(inference_pb2.TokenizeRequest(text="Where is Rome?"))
    await server.stop(0.1)
    print(json.dumps({"tokens": len(response.token_ids), "modules": sorted(sys.modules)}))

asyncio.run(main())
"""


def test_serving_a_call_loads_neither_torch_nor_transformers_nor_numpy(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    command = [sys.executable, "-c", SERVE_ONE_CALL, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    outcome = json.loads(said.stdout)
    assert outcome["tokens"] > 0
    heavy = {"torch", "transformers", "numpy", "huggingface_hub", "zmq", "tyro"}
    assert heavy.isdisjoint(outcome["modules"])
    ours = {name.split(".")[1] for name in outcome["modules"] if name.startswith("kvrelay.")}
    assert ours == {"engine", "proto", "router"}
