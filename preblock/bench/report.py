"""The report of measurements: a progress line during each, and a table at the end."""

import time
from collections.abc import Sequence

from preblock.bench.stats import QUANTILES, LoadCounters, LoadResult

HEAD = ("protocol", "shape", "requests/s", "tokens/s", "MB/s", *(f"{name} ms" for name in QUANTILES), "errors")


def line(counters: LoadCounters, protocol: str, shape: tuple[int, int]) -> str:
    """Return the progress line of a running measurement."""
    seconds, requests = time.perf_counter() - counters.begin, len(counters.latencies)
    recent = sorted(counters.latencies[-1000:])
    middle = f", p50 {1e3 * recent[len(recent) // 2]:.3g} ms" if recent else ""
    wrong = f", {counters.errors.total()} errors" if counters.errors else ""
    return f"{protocol} {_text(shape)}: {seconds:.0f} s, {requests / seconds:,.0f} requests/s{middle}{wrong}"


def table(results: Sequence[LoadResult]) -> str:
    """Return a table of the results, and below it the first error of each kind."""
    rows = [HEAD, *(_row(result) for result in results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    for result in results:
        for kind, count in result.errors.items():
            lines.append(f"{result.protocol} {_text(result.shape)}: {count} times {kind}: {result.messages[kind]}")
    return "\n".join(lines)


def _text(shape: tuple[int, int]) -> str:
    return f"{shape[0]},{shape[1]}"


def _row(result: LoadResult) -> tuple[str, ...]:
    return (
        result.protocol,
        _text(result.shape),
        f"{result.rates['requests']:,.1f}",
        f"{result.rates['tokens']:,.0f}",
        f"{result.rates['bytes'] / 1e6:,.1f}",
        *(f"{result.milliseconds[name]:.3f}" if result.milliseconds else "-" for name in QUANTILES),
        str(sum(result.errors.values())),
    )
