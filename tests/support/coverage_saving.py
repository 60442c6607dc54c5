"""Plugin of coverage.py: a process that ends by a signal to itself saves its data first.

Workers end so: uvicorn raises again the signal that stopped it, and its handler is then the default one.
"""

import signal

from coverage import Coverage
from coverage.plugin_support import Plugins

_raise_signal = signal.raise_signal


def coverage_init(_plugins: Plugins, _options: dict[str, str]) -> None:
    """Begin to save data before signals. Coverage.py calls this in each measured process."""
    signal.raise_signal = _save_and_raise


def _save_and_raise(number: int, /) -> None:
    if (coverage := Coverage.current()) is not None:
        coverage.save()
    _raise_signal(number)
