"""Requests by the Python client, as protocols."""

from collections.abc import Callable

from preblock.client import Embeddings
from preblock.client.errors import ServiceError
from tests.support.protocols import Clients, Fields, Protocol, RequestRefused, Vectors, named


def own_client(clients: Clients, model: str, fields: Fields) -> Vectors:
    """Ask with our own blocking client."""
    return _vectors_of(lambda: clients.own.embed(**_arguments(model, fields)))


def own_async_client(clients: Clients, model: str, fields: Fields) -> Vectors:
    """Ask with our own asynchronous client."""
    return _vectors_of(lambda: clients.runner.run(clients.own_async.embed(**_arguments(model, fields))))


def _arguments(model: str, fields: Fields) -> Fields:
    name, version = named(model)
    return {"ids": fields["input_ids"], "model": name, "version": int(version) if version else None} | {
        name: value for name, value in fields.items() if name != "input_ids"
    }


def _vectors_of(embed: Callable[[], Embeddings]) -> Vectors:
    try:
        vectors = embed().vectors
    except ServiceError as error:
        raise RequestRefused(error.status or 0, error.problem["detail"]) from error
    return vectors.reshape(-1, vectors.shape[-1])


OWN: tuple[Protocol, ...] = (own_client, own_async_client)
"""Our own clients, for every request."""
