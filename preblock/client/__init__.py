"""The client: `connect` makes a synchronous client, `connect_async` an asynchronous one. It needs no service code."""

from preblock.client.async_client import AsyncClient
from preblock.client.results import Embeddings, Model
from preblock.client.sync_client import Client

connect, connect_async = Client, AsyncClient

__all__ = ["AsyncClient", "Client", "Embeddings", "Model", "connect", "connect_async"]
