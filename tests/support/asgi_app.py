"""The application for a server that is started from its own command line."""

from preblock.service.api.http.dispatcher import Dispatcher
from preblock.service.app import create_app
from preblock.service.core.settings import Settings


def create() -> Dispatcher:
    """Build the application from the variables of the environment."""
    return create_app(Settings())
