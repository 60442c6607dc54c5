"""The methods of the Open Inference Protocol over gRPC, named as in its specification."""

import logging
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from typing import Any

from preblock.service.api.grpc.handlers import GRPC, GRPC_STREAM, MESSAGE_EXPANSION, Receive, Send
from preblock.service.api.grpc.prepared import MESSAGE_COPIES, PreparedCalls
from preblock.service.api.shared_memory import list_extensions, register_device, register_file, write_shared
from preblock.service.api.streams import StreamEnd, StreamLifetime
from preblock.service.codecs.chunks import body_chunks
from preblock.service.codecs.v2 import metadata, protobuf
from preblock.service.codecs.v2 import open_inference_pb2 as pb
from preblock.service.codecs.v2.parameters import REGION, read_cost, region_document
from preblock.service.codecs.v2.protobuf import RequestMessage, read_request
from preblock.service.codecs.v2.requests import InferMessage
from preblock.service.core.auth import caller
from preblock.service.core.errors import INTERNAL_ERROR_MESSAGE, NotFound, PreblockError, Unavailable
from preblock.service.core.types import EmbedOptions, Result, TokenRequest
from preblock.service.engine.engine import Engine
from preblock.service.engine.sequences import Sequences, SequenceStore
from preblock.service.runtime.cuda_memory import DeviceMemory
from preblock.service.runtime.model import TokenModel
from preblock.service.runtime.shared_memory import SharedFile

LOG = logging.getLogger(__name__)


class InferenceService:
    """The methods of the service.

    Args:
        engine: answers the requests.
        sequences: running offsets of the clients' sequences.
        version: of the service.

    """

    def __init__(self, engine: Engine, sequences: Sequences, version: str) -> None:
        self._engine = engine
        self._sequences = sequences
        self._version = version
        self._prepared = PreparedCalls(engine)

    async def ServerLive(self, _: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        """Return that the process is alive."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, _: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        """Return whether a model is served. gRPC starts only after every model of the repository is open."""
        return pb.ServerReadyResponse(ready=self._engine.repository.is_ready)

    async def ModelReady(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        """Return whether a version of a model is served. Clients poll this method until it is."""
        try:
            self._engine.repository.find(request.name, request.version, caller=caller())
        except (NotFound, Unavailable):
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=True)

    async def ServerMetadata(self, _: pb.ServerMetadataRequest) -> Any:
        """Return name, version and extensions of the server."""
        document = metadata.server_metadata(self._version, await list_extensions(self._engine))
        return protobuf.write(pb.ServerMetadataResponse, document)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest) -> Any:
        """Return inputs and outputs of a model."""
        model = self._engine.repository.find(request.name, request.version, caller=caller())
        versions = [model.version] if request.version else self._engine.repository.versions(model.name)
        return protobuf.write(pb.ModelMetadataResponse, metadata.model_metadata(request.name, versions, model.manifest))

    async def ModelConfig(self, request: pb.ModelConfigRequest) -> Any:
        """Return the configuration of a model in Triton's form."""
        model = self._engine.repository.find(request.name, request.version, caller=caller())
        config = metadata.model_config(request.name, model.manifest, model.provider)
        return protobuf.write(pb.ModelConfigResponse, {"config": config})

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest) -> Any:
        """Return the statistics of one version of a model, of all its versions, or of every model."""
        models = self._engine.repository.select(request.name, request.version, caller=caller())
        found = self._engine.metrics.statistics()
        stats = [metadata.model_statistics(request.name or m.name, m.version, found[m.name, m.version]) for m in models]
        return protobuf.write(pb.ModelStatisticsResponse, {"model_stats": stats})

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest) -> Any:
        """Return every version of every model."""
        _check_repository(request.repository_name)
        versions = (astuple(state) for state in self._engine.repository.index(caller()))
        models = metadata.repository_index(versions, request.ready)
        return protobuf.write(pb.RepositoryIndexResponse, {"models": models})

    async def RepositoryModelLoad(self, request: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        """Load the new versions of a model, or an unloaded model."""
        _check_repository(request.repository_name)
        metadata.check_change("load", protobuf.read_parameters(request.parameters))
        await self._engine.control.load(request.model_name, caller())
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
        """Unload every version of a model, each after its last request."""
        _check_repository(request.repository_name)
        metadata.check_change("unload", protobuf.read_parameters(request.parameters))
        await self._engine.control.unload(request.model_name, caller())
        return pb.RepositoryModelUnloadResponse()

    async def SystemSharedMemoryStatus(self, request: pb.SystemSharedMemoryStatusRequest) -> Any:
        """Return a region of the caller, or all of them."""
        regions = map(region_document, self._engine.shared_memory.status(SharedFile, request.name))
        return protobuf.write(
            pb.SystemSharedMemoryStatusResponse, {"regions": {item["name"]: item for item in regions}}
        )

    async def SystemSharedMemoryRegister(
        self, request: pb.SystemSharedMemoryRegisterRequest
    ) -> pb.SystemSharedMemoryRegisterResponse:
        """Register a region of POSIX shared memory."""
        register_file(self._engine, request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        """Unregister a region of the caller, or all of them."""
        self._engine.shared_memory.unregister(SharedFile, request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def CudaSharedMemoryStatus(self, request: pb.CudaSharedMemoryStatusRequest) -> Any:
        """Return the regions of the caller in memory of GPUs, or one of them."""
        regions = map(region_document, self._engine.shared_memory.status(DeviceMemory, request.name))
        return protobuf.write(pb.CudaSharedMemoryStatusResponse, {"regions": {item["name"]: item for item in regions}})

    async def CudaSharedMemoryRegister(
        self, request: pb.CudaSharedMemoryRegisterRequest
    ) -> pb.CudaSharedMemoryRegisterResponse:
        """Register a region in memory of a GPU."""
        await register_device(self._engine, request.name, request.raw_handle, request.device_id, request.byte_size)
        return pb.CudaSharedMemoryRegisterResponse()

    async def CudaSharedMemoryUnregister(
        self, request: pb.CudaSharedMemoryUnregisterRequest
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        """Unregister a region of the caller in memory of a GPU, or all of them."""
        self._engine.shared_memory.unregister(DeviceMemory, request.name)
        return pb.CudaSharedMemoryUnregisterResponse()

    async def ModelInfer(self, message: bytes) -> bytes:
        """Return the requested outputs, by default all outputs of tokens."""
        if (answer := await self._prepared.answer(GRPC, message)) is not None:
            return answer
        request = await self._read(GRPC, message)
        return await self._infer(GRPC, message, request, self._sequences.shared_store, protobuf.write_infer)

    async def ModelStreamInfer(self, receive: Receive, send: Send, lifetime: StreamLifetime) -> None:
        """Answer the requests of a stream in order. A rejected request gets an error message, and the stream goes on.

        Raises:
            StreamEnd: the service ends the stream; its client has got the offsets of its sequences.

        """
        with self._sequences.stream() as store:
            try:
                while (message := await lifetime.wait(receive)) is not None:
                    # Without a time limit: gRPC ends no stream before the client has received the messages.
                    await send(await self._answer(message, store))
            except StreamEnd as end:
                rows = [(key.model, key.version, key.id, running) for key, running in store.running().items()]
                if rows:
                    await send(protobuf.write_closing(end.reason, rows).SerializeToString())
                raise

    async def _answer(self, message: bytes, store: SequenceStore) -> bytes:
        """Answer one request of a stream with the sequences of `store`."""
        id_ = ""
        try:
            async with self._engine.limits.bodies.hold(MESSAGE_EXPANSION * len(message)):
                if (answer := await self._prepared.answer(GRPC_STREAM, message)) is not None:
                    return answer
                request = await self._read(GRPC_STREAM, message)
                id_ = request.fields.id
                return await self._infer(GRPC_STREAM, message, request, store, protobuf.write_stream)
        except PreblockError as error:
            failure = str(error)
        except Exception:
            LOG.exception("internal error in a request of a gRPC stream")
            failure = INTERNAL_ERROR_MESSAGE
        return protobuf.write_stream_error(failure, id_).SerializeToString()

    async def _read(self, protocol: str, message: bytes) -> RequestMessage:
        """Return the fields of a message. A malformed one counts as a request, too."""
        try:
            return await self._engine.scheduler.run(len(message), partial(read_request, message))
        except PreblockError:
            with self._engine.admission.request(protocol):
                raise

    async def _infer(
        self,
        protocol: str,
        message: bytes,
        parsed: RequestMessage,
        store: SequenceStore,
        write_answer: Callable[[Result, InferMessage], protobuf.Parts],
    ) -> bytes:
        fields = parsed.fields
        with self._engine.admission.request(protocol) as record:
            model = self._engine.repository.find(fields.model_name, fields.model_version, caller=caller())
            record.model, record.copies = model.name, MESSAGE_COPIES
            schedule = self._engine.scheduler.run
            most = self._engine.limits.max_parsed_values() if isinstance(model, TokenModel) else None
            shared = self._engine.shared_memory
            cost = read_cost(len(message), any(REGION in tensor.parameters for tensor in fields.inputs))
            as_json = any(tensor.name == metadata.PARTS for tensor in fields.inputs)
            read = partial(protobuf.read_infer, parsed, model.manifest, most, shared.read)
            infer = await schedule(cost, read, text=as_json)
            request, options = infer.request, infer.options
            ranges = shared.open_outputs(options.regions) if options.regions else {}
            if isinstance(request, EmbedOptions) and options.sequence is None:
                if options.all_shared:
                    request.chunks = "sent"
                elif request.dtype == "float32":  # a narrower dtype would run twice
                    request.chunks = "buffered"
            async with store.answer(model, request, record) as answer:
                if ranges:
                    await write_shared(answer, infer, ranges)
                parts = write_answer(answer, infer)
                if answer.arrays:
                    response = await schedule(answer.size, lambda: protobuf.join_message(parts))
                else:
                    response = await protobuf.compute_message(sum(map(len, parts)), body_chunks(parts))
        # A prepared request reads every input from the message.
        plain = not options.row_outputs and not options.regions
        plain = plain and len(parsed.raw_contents) == len(fields.inputs)
        if plain and isinstance(request, TokenRequest) and isinstance(model, TokenModel):
            self._prepared.keep(protocol, message, parsed, request, model, parts)
        return response


def _check_repository(name: str) -> None:
    if name:
        raise NotFound("repository_name", name, "no name: there is only one repository")
