"""Statistics of each model since the start of the service, read from its counters."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric

from preblock.service.observability.instruments import LARGER_BATCH


@dataclass
class Duration:
    """A number of events, and the sum of their seconds."""

    count: int = 0
    seconds: float = 0.0


@dataclass
class InferenceStatistics:
    """Statistics of one version of a model since the start of the service.

    Args:
        last: time of the last request, in seconds since 1970; 0 before the first.
        rows: embedded rows.
        outcomes: requests by outcome, "success" or "fail".
        stages: runs by rows of the batch and stage; rows are None over `MAX_BATCH_LABEL`.
        batched: requests by stage, if `stages` counts their run for another request.

    """

    last: float = 0.0
    rows: int = 0
    outcomes: defaultdict[str, Duration] = field(default_factory=lambda: defaultdict(Duration))
    stages: defaultdict[tuple[int | None, str], Duration] = field(default_factory=lambda: defaultdict(Duration))
    batched: defaultdict[str, Duration] = field(default_factory=lambda: defaultdict(Duration))


def read_statistics(families: Iterable[Metric]) -> defaultdict[tuple[str, int], InferenceStatistics]:
    """Return the statistics of each model, by name and version."""
    found: defaultdict[tuple[str, int], InferenceStatistics] = defaultdict(InferenceStatistics)
    for sample in (sample for family in families for sample in family.samples):
        if not sample.name.startswith("preblock_model_"):
            continue
        labels = sample.labels
        model = found[labels["model"], int(labels["version"])]
        match sample.name.removeprefix("preblock_model_"):
            case "requests_total":
                model.outcomes[labels["outcome"]].count = int(sample.value)
            case "request_seconds_total":
                model.outcomes[labels["outcome"]].seconds = sample.value
            case "stages_total":
                model.stages[_rows(labels), labels["stage"]].count = int(sample.value)
            case "stage_seconds_total":
                model.stages[_rows(labels), labels["stage"]].seconds = sample.value
            case "batched_stages_total":
                model.batched[labels["stage"]].count = int(sample.value)
            case "batched_stage_seconds_total":
                model.batched[labels["stage"]].seconds = sample.value
            case "rows_total":
                model.rows = int(sample.value)
            case "last_request_timestamp_seconds":
                model.last = sample.value
    return found


def _rows(labels: dict[str, str]) -> int | None:
    return None if labels["rows"] == LARGER_BATCH else int(labels["rows"])
