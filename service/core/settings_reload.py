"""The live settings of a serving process: their file is read again when it changes."""

import asyncio
import logging

from preblock.service.core.errors import Invalid
from preblock.service.core.file_watch import POLL_INTERVAL_SECONDS, FileWatcher
from preblock.service.core.settings import RELOADABLE, Settings

LOG = logging.getLogger(__name__)


class LiveSettings:
    """The current settings. Readers keep this object, and read `current` when they need a value.

    Args:
        settings: at the start; a setting without reload keeps this value.
        log_changes: whether to log each change; default: where the process is the only one.

    Attributes:
        current: the settings now; a new object after each change.

    """

    def __init__(self, settings: Settings, log_changes: bool | None = None) -> None:
        self.current = settings
        self._log_changes = settings.workers == 1 if log_changes is None else log_changes
        self._watch = None if settings.config_file is None else FileWatcher(settings.config_file)
        self._first = True

    async def follow(self) -> None:
        """Read the file whenever it changes, until cancelled."""
        while self._watch is not None:
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
            self.reload()

    def reload(self) -> bool:
        """Read the file if it has changed, and return whether other settings hold now.

        A broken file changes nothing.
        """
        # The file may have changed between the start and the first call.
        if self._watch is None or (not self._watch.changed() and not self._first):
            return False
        self._first = False
        before = self.current
        try:
            after = before.again()
        except Invalid as error:
            self._log(logging.WARNING, "the settings stay as they were: %s", error)
            return False
        changed = {name: value for name, value in after if value != getattr(before, name)}
        if late := [name for name in changed if name not in RELOADABLE]:
            text = "%s: another value in %s, which takes effect after a restart"
            self._log(logging.WARNING, text, ", ".join(late), before.config_file)
        reloaded = {name: value for name, value in changed.items() if name in RELOADABLE}
        if reloaded:
            self.current = before.model_copy(update=reloaded)
            logging.getLogger().setLevel(self.current.log_level.upper())
            self._log(logging.INFO, "settings: %s", ", ".join(f"{name} = {value}" for name, value in reloaded.items()))
        return bool(reloaded)

    def _log(self, level: int, text: str, *values: object) -> None:
        if self._log_changes:
            LOG.log(level, text, *values)
