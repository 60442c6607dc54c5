"""The client: `connect` returns one that waits, `connect_async` one that awaits. It imports nothing of the service."""

from preblock.client.errors import needed

with needed("preblock.client", "httpx"):
    from preblock.client.aio import AsyncClient
    from preblock.client.sync import Client

from preblock.client.results import Embeddings, Model

__all__ = ["AsyncClient", "Client", "Embeddings", "Model", "connect", "connect_async"]

connect = Client
connect_async = AsyncClient
