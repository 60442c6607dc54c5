"""What happened to each model since the service started, as its counters tell."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric

from preblock.service.observability.instruments import MORE


@dataclass
class Duration:
    """How often something happened, and how many seconds it took in all."""

    count: int = 0
    seconds: float = 0.0


@dataclass
class InferenceStatistics:
    """What happened to one version of a model since the service started.

    Args:
        last: when it was last asked, in seconds since 1970; 0 for never.
        rows: answered.
        outcomes: "success" and "fail".
        phases: by the rows of the execution, None for more than `LARGEST_BATCH`, and the phase.
        joined: by phase, of the requests that were answered by the execution of another.

    """

    last: float = 0.0
    rows: int = 0
    outcomes: defaultdict[str, Duration] = field(default_factory=lambda: defaultdict(Duration))
    phases: defaultdict[tuple[int | None, str], Duration] = field(default_factory=lambda: defaultdict(Duration))
    joined: defaultdict[str, Duration] = field(default_factory=lambda: defaultdict(Duration))


def history(families: Iterable[Metric]) -> defaultdict[tuple[str, int], InferenceStatistics]:
    """Return what happened to each model, by name and version."""
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
                model.phases[_rows(labels), labels["stage"]].count = int(sample.value)
            case "stage_seconds_total":
                model.phases[_rows(labels), labels["stage"]].seconds = sample.value
            case "batched_stages_total":
                model.joined[labels["stage"]].count = int(sample.value)
            case "batched_stage_seconds_total":
                model.joined[labels["stage"]].seconds = sample.value
            case "rows_total":
                model.rows = int(sample.value)
            case "last_request_timestamp_seconds":
                model.last = sample.value
    return found


def _rows(labels: dict[str, str]) -> int | None:
    return None if labels["rows"] == MORE else int(labels["rows"])
