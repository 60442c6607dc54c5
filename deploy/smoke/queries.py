"""Send Prometheus every query of the dashboard: `python queries.py http://HOST:PORT DASHBOARD PROCESSES`.

Within a minute, each query must have a result, and Prometheus must reach PROCESSES processes.
"""

import json
import sys
import time
from pathlib import Path
from urllib.parse import quote
from urllib.request import urlopen

SECONDS = 60


def main() -> None:
    """Query until every query has a result, and exit with the missing ones after a minute."""
    address, dashboard, processes = sys.argv[1:]
    panels = json.loads(Path(dashboard).read_text(encoding="utf-8"))["panels"]
    queries = [with_values(target["expr"]) for panel in panels for target in panel["targets"]]
    begin = time.monotonic()
    while True:
        empty = [query for query in queries if not ask(address, query)]
        up = reached(address)
        if not empty and len(up) == int(processes):
            print(f"{len(queries)} queries of the dashboard find something, {processes} processes are up")
            return
        if time.monotonic() - begin > SECONDS:
            sys.exit(f"processes that are up: {up}; queries that find nothing: {empty}")
        time.sleep(1)


def with_values(query: str) -> str:
    """Return a query with values for the variables of the dashboard."""
    return query.replace("$__rate_interval", "1m").replace("$instance", ".*")


def ask(address: str, query: str) -> list[dict[str, list[str]]]:
    """Return the current result of a query."""
    with urlopen(f"{address}/api/v1/query?query={quote(query)}", timeout=10) as answer:
        result: list[dict[str, list[str]]] = json.load(answer)["data"]["result"]
    return result


def reached(address: str) -> list[str]:
    """Return the addresses of the scraped processes in state "up". A query may still find stopped ones."""
    with urlopen(f"{address}/api/v1/targets?state=active", timeout=10) as answer:
        targets = json.load(answer)["data"]["activeTargets"]
    return [target["scrapeUrl"] for target in targets if target["health"] == "up"]


main()
