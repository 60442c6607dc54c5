"""A cache of prepared requests that counts its uses."""

from collections.abc import Hashable

from preblock.service.api.http.dispatcher import Dispatcher
from preblock.service.api.http.response import KnownHttpRequest
from preblock.service.api.prepared import PreparedRequests
from preblock.service.engine.engine import Engine


class CountedRequests(PreparedRequests[KnownHttpRequest]):
    """The prepared requests of an application.

    Args:
        engine: of the application.
        app: uses this cache from now on.

    Attributes:
        hits: number of requests that were prepared.

    """

    def __init__(self, engine: Engine, app: Dispatcher) -> None:
        super().__init__(engine.repository)
        self.hits = 0
        app.prepared = self

    def find(self, key: Hashable) -> KnownHttpRequest | None:
        """Count the found requests."""
        known = super().find(key)
        self.hits += known is not None
        return known
