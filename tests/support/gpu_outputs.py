"""Write vectors of a model on a GPU into memory there, and compare them with the vectors in memory of the server.

The driver of the tests and sessions on the CPU stand for a GPU.
"""

import asyncio
import base64
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from preblock.service.api.shared_outputs import write_shared
from preblock.service.codecs.v2.infer import InferMessage
from preblock.service.codecs.v2.parameters import read_options
from preblock.service.core.errors import PreblockError
from preblock.service.core.results import ChunkedTensor
from preblock.service.core.shared_region import OpenRange, Region
from preblock.service.core.types import TokenRequest, TokenRows
from preblock.service.engine.engine import Engine
from preblock.service.runtime.cuda_embedding import CudaLookup
from preblock.service.runtime.cuda_memory import open_memory
from preblock.service.runtime.model import TokenModel
from preblock.service.runtime.providers import CPU, CUDA
from preblock.service.runtime.session import CudaSession, Session
from tests.support.engines import ask_engine, open_engine
from tests.support.gpu_memory import StandInMemory

OFFSET = 4


async def write(engine: Engine, model: TokenModel, on_gpu: TokenModel, lengths: list[int], device_id: int) -> str:
    """Return "same" or "different", or the error of the driver."""
    ids = np.random.default_rng(0).integers(8, 300, sum(lengths))
    request = TokenRequest(input_ids=TokenRows(ids, np.array(lengths)), in_pieces=True)
    tensor = (await ask_engine(engine, model, request)).tensors["embeddings"]
    assert isinstance(tensor, ChunkedTensor)
    expected = b"".join(chunk.tobytes() for chunk in tensor)
    parameters = {"shared_memory_region": "vectors", "shared_memory_offset": OFFSET}
    parameters |= {"shared_memory_byte_size": len(expected)}
    options = read_options({}, [("embeddings", parameters)], model.manifest)
    target = StandInMemory(OFFSET + len(expected))
    try:
        memory = open_memory(base64.b64decode(target.handle), device_id, OFFSET + len(expected))
        region = Region("vectors", memory, 0, memory.size)
        ranges = {name: OpenRange(wanted, region) for name, wanted in options.regions.items()}
        answer = await ask_engine(engine, on_gpu, request)
        await write_shared(answer, InferMessage(request, None, options), ranges)
        return "same" if target.content() == bytes(OFFSET) + expected else "different"
    except PreblockError as error:
        return str(error)
    finally:
        target.free()


def main(root: Path, name: str, device_id: int, rows: list[str]) -> None:
    """Write a line for each of `rows`, the lengths of a request."""
    with open_engine(root) as engine:
        model = engine.repository.get(name)
        assert isinstance(model, TokenModel)
        folder = root / name / "1"
        sessions: dict[str, Session] = {graph: CudaSession(folder, CPU, graph=graph) for graph in model.sessions}
        lookup = CudaLookup(model.tables) if model.tables else None
        on_gpu = replace(model, sessions=sessions, tables=None, gpu_lookup=lookup, positions=None, provider=CUDA)
        for lengths in rows:
            found = asyncio.run(write(engine, model, on_gpu, [int(length) for length in lengths.split(",")], device_id))
            sys.stdout.write(f"{found}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
