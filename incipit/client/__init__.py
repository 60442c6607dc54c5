"""The client: `connect` returns one that waits, `connect_async` one that awaits. It imports nothing of the service."""

from incipit.client.errors import needed

with needed("incipit.client", "httpx"):
    from incipit.client.aio import AsyncClient
    from incipit.client.sync import Client

from incipit.client.results import Embeddings, Model

__all__ = ["AsyncClient", "Client", "Embeddings", "Model", "connect", "connect_async"]

connect = Client
connect_async = AsyncClient
