"""A cache of request templates that counts its uses."""

from collections.abc import Hashable

from preblock.service.api.http.dispatcher import Dispatcher
from preblock.service.api.request_cache import Template, TemplateCache
from preblock.service.engine.engine import Engine


class CountedTemplates(TemplateCache):
    """The template cache of an application.

    Args:
        engine: of the application.
        app: uses this cache from now on.

    Attributes:
        hits: number of requests with a template.

    """

    def __init__(self, engine: Engine, app: Dispatcher) -> None:
        super().__init__(engine)
        self.hits = 0
        app.templates = self

    def find(self, key: Hashable) -> Template | None:
        """Count the found templates."""
        template = super().find(key)
        self.hits += template is not None
        return template
