"""The methods of the Open Inference Protocol over gRPC, named as published. They only translate."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import astuple
from typing import Any

from preblock.service.api.grpc.request_cache import CallTemplates
from preblock.service.api.request_cache import TemplateCache
from preblock.service.api.streams import StreamEnd, StreamLifetime
from preblock.service.codecs.v2 import open_inference_pb2 as pb
from preblock.service.codecs.v2.metadata import (
    check_change,
    model_config,
    model_metadata,
    model_statistics,
    repository_index,
    server_metadata,
)
from preblock.service.codecs.v2.protobuf import (
    Writing,
    compute,
    read,
    read_infer,
    values,
    write,
    write_closing,
    write_infer,
    write_stream,
    write_stream_error,
    written,
)
from preblock.service.core.auth import caller
from preblock.service.core.errors import INTERNAL_ERROR_MESSAGE, NotFound, PreblockError
from preblock.service.core.results import Result
from preblock.service.core.types import TokenRequest
from preblock.service.engine.engine import Engine
from preblock.service.engine.sequences import Sequences, SequenceStore
from preblock.service.runtime.model import TokenModel

Receive = Callable[[], Awaitable[bytes | None]]
Send = Callable[[bytes], Awaitable[None]]
LOG = logging.getLogger(__name__)


class InferenceService:
    """The methods of the service."""

    def __init__(self, engine: Engine, sequences: Sequences, templates: TemplateCache, version: str) -> None:
        self._engine = engine
        self._sequences = sequences
        self._version = version
        self._alike = CallTemplates(engine, templates)

    async def ServerLive(self, _: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        """Answer as long as the process does."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, _: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        """Say that every model has run: gRPC begins after that."""
        return pb.ServerReadyResponse(ready=True)

    async def ModelReady(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        """Say whether a model is served."""
        self._engine.repository.find(request.name, request.version, caller=caller())
        return pb.ModelReadyResponse(ready=True)

    async def ServerMetadata(self, _: pb.ServerMetadataRequest) -> Any:
        """Return name, version and extensions of the server."""
        return write(pb.ServerMetadataResponse, server_metadata(self._version))

    async def ModelMetadata(self, request: pb.ModelMetadataRequest) -> Any:
        """Return inputs and outputs of a model."""
        model = self._engine.repository.find(request.name, request.version, caller=caller())
        versions = [model.version] if request.version else self._engine.repository.versions(model.name)
        return write(pb.ModelMetadataResponse, model_metadata(model.name, versions, model.manifest))

    async def ModelConfig(self, request: pb.ModelConfigRequest) -> Any:
        """Return the configuration of a model, as Triton has it."""
        model = self._engine.repository.find(request.name, request.version, caller=caller())
        return write(pb.ModelConfigResponse, {"config": model_config(model.name, model.manifest, model.provider)})

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest) -> Any:
        """Return the statistics of one version of a model, of all its versions, or of every model."""
        models = self._engine.repository.select(request.name, request.version, caller=caller())
        found = self._engine.metrics.statistics()
        stats = [model_statistics(m.name, m.version, found[m.name, m.version]) for m in models]
        return write(pb.ModelStatisticsResponse, {"model_stats": stats})

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest) -> Any:
        """Return every version of every model."""
        _check_repository(request.repository_name)
        versions = (astuple(state) for state in self._engine.repository.index(caller()))
        return write(pb.RepositoryIndexResponse, {"models": repository_index(versions, request.ready)})

    async def RepositoryModelLoad(self, request: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        """Load the new versions of a model, also of an unloaded one."""
        _check_repository(request.repository_name)
        check_change("load", values(request.parameters))
        await self._engine.control.load(request.model_name, caller())
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
        """Let go of every version of a model, each after its last request."""
        _check_repository(request.repository_name)
        check_change("unload", values(request.parameters))
        await self._engine.control.unload(request.model_name, caller())
        return pb.RepositoryModelUnloadResponse()

    async def ModelInfer(self, message: bytes) -> bytes:
        """Return the outputs asked for, `embeddings` by default; inputs other than `input_ids` may be left out."""
        if (answer := await self._alike.answer("grpc", message)) is not None:
            return answer
        request = await self._engine.scheduler.run(len(message), lambda: read(pb.ModelInferRequest, message))
        return await self._infer("grpc", message, request, self._sequences.shared_store, write_infer)

    async def ModelStreamInfer(self, receive: Receive, send: Send, lifetime: StreamLifetime) -> None:
        """Answer each request of a stream in turn; an error is an answer, and ends nothing.

        Raises:
            Closing: the service ends the stream; its client was told where its sequences are.

        """
        with self._sequences.stream() as room:
            try:
                while (message := await lifetime.wait(receive)) is not None:
                    # Without a time limit: gRPC ends no stream before the client has taken the messages.
                    await send(await self._answer(message, room))
            except StreamEnd as closing:
                places = [(key.model, key.version, key.id, offset) for key, offset in room.offsets().items()]
                if places:
                    await send(write_closing(closing.reason, places).SerializeToString())
                raise

    async def _answer(self, message: bytes, room: SequenceStore) -> bytes:
        """Answer one request of a stream with the sequences of `room`."""
        id_ = ""
        try:
            if (answer := await self._alike.answer("grpc-stream", message)) is not None:
                return answer
            request = await self._engine.scheduler.run(len(message), lambda: read(pb.ModelInferRequest, message))
            id_ = request.id
            return await self._infer("grpc-stream", message, request, room, write_stream)
        except PreblockError as error:
            failure = str(error)
        except Exception:
            LOG.exception("a request of a gRPC stream failed in an unforeseen way")
            failure = INTERNAL_ERROR_MESSAGE
        return write_stream_error(failure, id_).SerializeToString()

    async def _infer(
        self,
        protocol: str,
        message: bytes,
        sent: pb.ModelInferRequest,
        room: SequenceStore,
        write_answer: Callable[[Result, str], Writing],
    ) -> bytes:
        with self._engine.admission.request(protocol) as record:
            model = self._engine.repository.find(sent.model_name, sent.model_version, caller=caller())
            record.model = model.name
            schedule = self._engine.scheduler.run
            request = await schedule(len(message), lambda: read_infer(sent, model.manifest))
            if isinstance(request, TokenRequest):  # a narrower type would run twice
                request.in_pieces = request.sequence is None and request.dtype == "float32"
                request.whole = True
            async with room.answer(model, request, record) as answer:
                writing = write_answer(answer, sent.id)
                if answer.arrays:
                    made = await schedule(answer.size, lambda: written(writing))
                else:
                    made = await compute(writing)
        if isinstance(request, TokenRequest) and isinstance(model, TokenModel):
            self._alike.keep(protocol, message, sent, request, model, made)
        return made


def _check_repository(name: str) -> None:
    if name:
        raise NotFound("repository_name", name, "no name, since there is one repository")
