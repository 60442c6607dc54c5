"""The client: `connect` makes a synchronous client, `connect_async` an asynchronous one. It needs no service code."""

from preblock.client.errors import needed

with needed("preblock.client", "httpx"):
    from preblock.client.clients import AsyncClient, Client

from preblock.client.results import Embeddings, Model

__all__ = ["AsyncClient", "Client", "Embeddings", "Model", "connect", "connect_async"]

connect = Client
connect_async = AsyncClient
