"""Write vectors of a model on a GPU into memory there, and compare them with the vectors in memory of the server.

The driver of the tests and a provider without kernels of its own stand for a GPU: onnxruntime computes on the CPU.
"""

import asyncio
import base64
import sys
from pathlib import Path

import numpy as np

from preblock.service.api.shared_memory import write_shared
from preblock.service.codecs.v2.parameters import read_options
from preblock.service.codecs.v2.requests import InferMessage
from preblock.service.core.errors import PreblockError
from preblock.service.core.types import ChunkedTensor, TokenRequest, TokenRows
from preblock.service.engine.chunking import GPU_CHUNKS, max_gpu_tokens
from preblock.service.engine.engine import Engine
from preblock.service.engine.planning import max_batched_values
from preblock.service.runtime.cuda_memory import open_memory
from preblock.service.runtime.loader import ModelLoader
from preblock.service.runtime.model import CHUNK_VALUES, TokenModel
from preblock.service.runtime.providers import ProviderChoice
from preblock.service.runtime.repository import Repository
from preblock.service.runtime.shared_memory import OpenRange, Region
from tests.support.engines import ask_engine, open_engine
from tests.support.gpu_memory import StandInMemory

STAND_IN = "AzureExecutionProvider"
"""A provider of onnxruntime's package for the CPU."""


async def write(
    engine: Engine, model: TokenModel, on_gpu: TokenModel, lengths: list[int], device_id: int, offset: int
) -> str:
    """Return "same" or "different", or the error of the driver."""
    ids = np.random.default_rng(0).integers(8, 300, sum(lengths))
    request = TokenRequest(input_ids=TokenRows(ids, np.array(lengths)), chunks="sent")
    tensor = (await ask_engine(engine, model, request)).tensors["embeddings"]
    assert isinstance(tensor, ChunkedTensor)
    expected = b"".join(chunk.tobytes() for chunk in tensor)
    parameters = {"shared_memory_region": "vectors", "shared_memory_offset": offset}
    parameters |= {"shared_memory_byte_size": len(expected)}
    options = read_options({}, [("embeddings", parameters)], model.manifest)
    target = StandInMemory(offset + len(expected))
    try:
        memory = open_memory(base64.b64decode(target.handle), device_id, offset + len(expected))
        region = Region("vectors", memory, 0, memory.size)
        ranges = {name: OpenRange(wanted, region) for name, wanted in options.regions.items()}
        answer = await ask_engine(engine, on_gpu, request)
        await write_shared(answer, InferMessage(request, None, options), ranges)
        return "same" if target.content() == bytes(offset) + expected else "different"
    except PreblockError as error:
        return str(error)
    finally:
        target.free()


def compare(model: TokenModel, on_gpu: TokenModel) -> None:
    """Compare the models: lookups, all token outputs at once, and batches and chunks, which a norm keeps small."""
    assert max_batched_values(model) > 0
    exact = model.name != "bert"
    assert (max_batched_values(on_gpu) > 0) == exact
    assert max_gpu_tokens(on_gpu, "embeddings") == CHUNK_VALUES // 64 * (GPU_CHUNKS if exact else 1)
    ids = np.arange(8, 24).reshape(2, 8)
    assert on_gpu.provider == STAND_IN
    assert on_gpu.look_up(ids[0]).tobytes() == model.look_up(ids[0]).tobytes()
    feeds = {"input_ids": ids, "offset": np.array([3, 0])} | dict.fromkeys(model.manifest.indices, ids * 0)
    feeds |= {"attention_mask": np.ones_like(ids)} if model.manifest.needs_mask else {}
    outputs = tuple(model.manifest.widths)
    found, expected = on_gpu.run(feeds, outputs), model.run(feeds, outputs)
    assert {name: vectors.tobytes() for name, vectors in found.items()} == {
        name: vectors.tobytes() for name, vectors in expected.items()
    }


def main(root: Path, name: str, device_id: int, offset: int, rows: list[str]) -> None:
    """Write a line for each of `rows`, the lengths of a request, or the error of the model."""
    with open_engine(root) as engine:
        model = engine.repository.get(name)
        try:
            on_gpu = Repository(root, ModelLoader(choice=ProviderChoice("cuda", STAND_IN, STAND_IN, None))).get(name)
        except PreblockError as error:
            sys.stdout.write(f"{error}\n")
            return
        assert isinstance(model, TokenModel)
        assert isinstance(on_gpu, TokenModel)
        compare(model, on_gpu)
        for lengths in rows:
            numbers = [int(length) for length in lengths.split(",")]
            found = asyncio.run(write(engine, model, on_gpu, numbers, device_id, offset))
            sys.stdout.write(f"{found}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
