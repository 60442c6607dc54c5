"""The methods of the Open Inference Protocol over gRPC, named as in its specification."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from preblock.service.api.grpc.handlers import GRPC, GRPC_STREAM, MESSAGE_EXPANSION, Document, Receive, Send
from preblock.service.api.grpc.prepared import MESSAGE_COPIES, PreparedCalls
from preblock.service.api.shared_memory import list_extensions, register_device, register_file, write_shared
from preblock.service.api.streams import StreamEnd, StreamLifetime
from preblock.service.codecs.chunks import body_chunks
from preblock.service.codecs.v2 import metadata, protobuf
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
from preblock.service.runtime.shared_memory import Memory, SharedFile

LOG = logging.getLogger(__name__)
Message = Any
"""A message of the class that the specification names for the method."""


class InferenceService:
    """The methods of the service. They return documents as over HTTP, except inference, which returns bytes.

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

    async def ServerLive(self, _: Message) -> Document:
        """Return that the process is alive."""
        return {"live": True}

    async def ServerReady(self, _: Message) -> Document:
        """Return whether a model is served. gRPC starts only after every model of the repository is open."""
        return {"ready": self._engine.repository.is_ready}

    async def ModelReady(self, request: Message) -> Document:
        """Return whether a version of a model is served. Clients poll this method until it is."""
        try:
            self._engine.repository.find(request.name, request.version, caller=caller())
        except (NotFound, Unavailable):
            return {"ready": False}
        return {"ready": True}

    async def ServerMetadata(self, _: Message) -> Document:
        """Return name, version and extensions of the server."""
        return metadata.server_metadata(self._version, await list_extensions(self._engine))

    async def ModelMetadata(self, request: Message) -> Document:
        """Return inputs and outputs of a model."""
        model = self._engine.repository.find(request.name, request.version, caller=caller())
        versions = [model.version] if request.version else self._engine.repository.versions(model.name)
        return metadata.model_metadata(request.name, versions, model.manifest)

    async def ModelConfig(self, request: Message) -> Document:
        """Return the configuration of a model in Triton's form."""
        model = self._engine.repository.find(request.name, request.version, caller=caller())
        return {"config": metadata.model_config(request.name, model.manifest, model.provider)}

    async def ModelStatistics(self, request: Message) -> Document:
        """Return the statistics of one version of a model, of all its versions, or of every model."""
        models = self._engine.repository.select(request.name, request.version, caller=caller())
        return metadata.statistics_of(models, request.name, self._engine.metrics.statistics())

    async def RepositoryIndex(self, request: Message) -> Document:
        """Return every version of every model."""
        _check_repository(request.repository_name)
        return {"models": metadata.repository_index(self._engine.repository.index(caller()), request.ready)}

    async def RepositoryModelLoad(self, request: Message) -> None:
        """Load the new versions of a model, or an unloaded model."""
        _check_repository(request.repository_name)
        metadata.check_change("load", protobuf.read_parameters(request.parameters))
        await self._engine.control.load(request.model_name, caller())

    async def RepositoryModelUnload(self, request: Message) -> None:
        """Unload every version of a model, each after its last request."""
        _check_repository(request.repository_name)
        metadata.check_change("unload", protobuf.read_parameters(request.parameters))
        await self._engine.control.unload(request.model_name, caller())

    async def SystemSharedMemoryStatus(self, request: Message) -> Document:
        """Return a region of the caller, or all of them."""
        return self._describe_regions(SharedFile, request.name)

    async def SystemSharedMemoryRegister(self, request: Message) -> None:
        """Register a region of POSIX shared memory."""
        register_file(self._engine, request.name, request.key, request.offset, request.byte_size)

    async def SystemSharedMemoryUnregister(self, request: Message) -> None:
        """Unregister a region of the caller, or all of them."""
        self._engine.shared_memory.unregister(SharedFile, request.name)

    async def CudaSharedMemoryStatus(self, request: Message) -> Document:
        """Return the regions of the caller in memory of GPUs, or one of them."""
        return self._describe_regions(DeviceMemory, request.name)

    async def CudaSharedMemoryRegister(self, request: Message) -> None:
        """Register a region in memory of a GPU."""
        await register_device(self._engine, request.name, request.raw_handle, request.device_id, request.byte_size)

    async def CudaSharedMemoryUnregister(self, request: Message) -> None:
        """Unregister a region of the caller in memory of a GPU, or all of them."""
        self._engine.shared_memory.unregister(DeviceMemory, request.name)

    def _describe_regions(self, kind: type[Memory], name: str) -> Document:
        regions = map(region_document, self._engine.shared_memory.status(kind, name))
        return {"regions": {region["name"]: region for region in regions}}

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
