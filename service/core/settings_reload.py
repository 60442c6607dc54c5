"""The settings of a process that serves: its file is read again when it changes."""

import logging

from preblock.service.core.errors import Invalid
from preblock.service.core.file_watch import FileWatcher
from preblock.service.core.settings import RELOADABLE, Settings

LOG = logging.getLogger(__name__)


class SettingsReloader:
    """The settings that hold now; the log follows their `log_level`.

    Args:
        settings: those of the start; what needs a restart stays as it is there.
        told: whether the log tells of changes; of several processes one does.

    """

    def __init__(self, settings: Settings, told: bool) -> None:
        self.settings = settings
        self._log = LOG.log if told else _nothing
        self._watch = None if settings.config_file is None else FileWatcher(settings.config_file)
        self._begun = False

    def changed(self) -> bool:
        """Return whether other settings hold since the last time; a file that cannot be used changes nothing."""
        # The file may have changed between its reading and the first look at it.
        if self._watch is None or (not self._watch.changed() and self._begun):
            return False
        self._begun = True
        before = self.settings
        try:
            wanted = before.again()
        except Invalid as error:
            self._log(logging.WARNING, "the settings stay as they were: %s", error)
            return False
        others = {name: value for name, value in wanted if value != getattr(before, name)}
        if late := [name for name in others if name not in RELOADABLE]:
            text = "%s: another value in %s, which takes effect after a restart"
            self._log(logging.WARNING, text, ", ".join(late), before.config_file)
        followed = {name: value for name, value in others.items() if name in RELOADABLE}
        if followed:
            self.settings = before.model_copy(update=followed)
            logging.getLogger().setLevel(self.settings.log_level.upper())
            self._log(logging.INFO, "settings: %s", ", ".join(f"{name} = {value}" for name, value in followed.items()))
        return bool(followed)


def _nothing(*_: object) -> None:
    """Say nothing."""
