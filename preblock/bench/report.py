"""The report of measurements: a progress line during each, and a table at the end."""

import time
from collections.abc import Sequence

from preblock.bench.stats import QUANTILES, LoadResult

HEAD = ("protocol", "shape", "requests/s", "tokens/s", "MB/s", *(f"{name} ms" for name in QUANTILES), "errors")


def line(result: LoadResult) -> str:
    """Return the progress line of a running measurement."""
    seconds = time.perf_counter() - result.begin
    recent = sorted(result.latencies[-1000:])
    middle = f", p50 {1e3 * recent[len(recent) // 2]:.3g} ms" if recent else ""
    errors = f", {result.errors.total()} errors" if result.errors else ""
    return f"{_title(result)}: {seconds:.0f} s, {result.requests / seconds:,.0f} requests/s{middle}{errors}"


def table(results: Sequence[LoadResult]) -> str:
    """Return a table of the results, and below it the first error of each kind."""
    rows = [HEAD, *(_row(result) for result in results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    for result in results:
        for kind, count in result.errors.items():
            lines.append(f"{_title(result)}: {count} times {kind}: {result.messages[kind]}")
    return "\n".join(lines)


def _title(result: LoadResult) -> str:
    return f"{result.protocol} {result.shape[0]},{result.shape[1]}"


def _row(result: LoadResult) -> tuple[str, ...]:
    rates, milliseconds = result.rates, result.milliseconds
    return (
        *_title(result).split(),
        f"{rates['requests']:,.1f}",
        f"{rates['tokens']:,.0f}",
        f"{rates['bytes'] / 1e6:,.1f}",
        *(f"{milliseconds[name]:.3f}" if milliseconds else "-" for name in QUANTILES),
        str(result.errors.total()),
    )
