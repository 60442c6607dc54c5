"""The live settings of a serving process, reloaded when their file changes."""

import logging
from dataclasses import dataclass

from preblock.service.core.errors import Invalid
from preblock.service.core.file_watch import FileWatcher, check_regular, poll
from preblock.service.core.settings import RELOADABLE, Settings

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of requests, by the current settings.

    Args:
        tokens: most tokens of all rows.
        rows: most rows.
        body_bytes: most bytes of its body or message.
        buffered_bytes: most bytes of vectors, as float32, in memory at once.
        concurrent: most requests at a time.
        rate: most requests of a caller per second; None for any number.

    """

    tokens: int
    rows: int
    body_bytes: int
    buffered_bytes: int
    concurrent: int = 2**63
    rate: float | None = None

    @classmethod
    def of(cls, settings: Settings) -> "RequestLimits":
        """Return the limits that settings have."""
        return cls(
            settings.max_request_tokens,
            settings.max_request_rows,
            settings.max_body_bytes,
            settings.max_buffered_response_bytes,
            settings.max_concurrent_requests,
            settings.rate_limit_per_second,
        )


class LiveSettings:
    """The current settings. Readers keep this object, and read `current` when they need a value.

    Args:
        settings: at the start; a setting without reload keeps this value.
        log_changes: whether to log each change; default: only in a service with one worker.

    Attributes:
        current: the settings now; a new object after each change.
        requests: its limits of requests; reading an attribute of settings takes three times as long.

    """

    def __init__(self, settings: Settings, log_changes: bool | None = None) -> None:
        self.use(settings)
        self._log_changes = settings.workers == 1 if log_changes is None else log_changes
        self._watcher = None if settings.config_file is None else FileWatcher(settings.config_file)
        # A pipe, such as <(…) of a shell, can be read only once.
        self._first = settings.config_file is not None and settings.config_file.is_file()

    def use(self, settings: Settings) -> None:
        """Make `settings` the current ones."""
        self.current, self.requests = settings, RequestLimits.of(settings)

    async def watch(self) -> None:
        """Poll the file and reload it after each change, until cancelled."""
        while self._watcher is not None:
            await poll(self._load, self._change)

    def reload(self) -> bool:
        """Read the file if it has changed, and return whether a setting has changed; this may block.

        An invalid file changes nothing.
        """
        after = self._load()
        return after is not None and self._change(after)

    def _load(self) -> Settings | None:
        """Return the settings of a changed and valid file, else None."""
        file = self.current.config_file
        # The file may have changed between the start and the first call.
        if self._watcher is None or file is None or (not self._watcher.changed() and not self._first):
            return None
        self._first = False
        try:
            check_regular(file)
            return self.current.reload()
        except (Invalid, OSError) as error:
            if self._watcher.reject(error):
                self._log(logging.WARNING, "settings file rejected, keeping the previous settings: %s", error)
            return None

    def _change(self, after: Settings) -> bool:
        before = self.current
        changed = {name: value for name, value in after if value != getattr(before, name)}
        reloaded = {name: value for name, value in changed.items() if name in RELOADABLE}
        if late := [name for name in changed if name not in RELOADABLE]:
            text = "%s changed in %s: takes effect after a restart"
            self._log(logging.WARNING, text, ", ".join(late), before.config_file)
        if reloaded:
            self.use(before.model_copy(update=reloaded))
            logging.getLogger().setLevel(self.current.log_level.upper())
            text = ", ".join(f"{name} = {value}" for name, value in reloaded.items())
            self._log(logging.INFO, "settings reloaded: %s", text)
        return bool(reloaded)

    def _log(self, level: int, text: str, *values: object) -> None:
        if self._log_changes:
            LOG.log(level, text, *values)
