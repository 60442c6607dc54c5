"""The tests of the matrix on all other rows: only `make test-all` runs this folder."""

from tests.service.matrix.test_answers import *  # noqa: F403
from tests.service.matrix.test_limits import *  # noqa: F403
from tests.service.matrix.test_queue import *  # noqa: F403
from tests.service.matrix.test_records import *  # noqa: F403
