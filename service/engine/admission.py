"""Admission of a request: limits, metrics and the access log around its work."""

from types import TracebackType

from preblock.service.core.errors import PreblockError
from preblock.service.core.limits import Limits
from preblock.service.observability.context import CURRENT_REQUEST
from preblock.service.observability.logs import AccessLog
from preblock.service.observability.timing import RequestTimer


class Admission:
    """A request that is answered while the block runs, counted, timed and within the limits.

    Raises:
        RateLimited: its caller asks too often.
        Unavailable: too many are answered now.

    """

    __slots__ = ("_limits", "_log", "_observation")

    def __init__(self, observation: RequestTimer, limits: Limits, log: AccessLog) -> None:
        self._observation, self._limits, self._log = observation, limits, log

    def __enter__(self) -> RequestTimer:
        """Begin the request, or refuse it."""
        self._observation.__enter__()
        try:
            self._limits.__enter__()
        except PreblockError as error:
            self._end(type(error), error)
            raise
        return self._observation

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the request."""
        self._limits.__exit__(kind, error, trace)
        self._end(kind, error)

    def _end(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        seen = self._observation
        seen.__exit__(kind, error, None)
        if self._log.share:
            self._log.write(CURRENT_REQUEST.get(), seen.protocol, seen.model, seen.outcome, seen.seconds)
