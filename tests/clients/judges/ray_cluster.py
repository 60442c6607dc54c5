"""A cluster of Ray with three nodes on one machine; run in an environment of its own.

    python ray_cluster.py PORT REPOSITORY

Serves the application of `deploy/ray` on PORT. It answers each line of the standard input with the number of running
replicas: `replicas` at once, `remove` after a node is killed. `end` ends it. A node has room for one replica, so with
three replicas the killed node has one.
"""

import json
import os
import sys

import ray
from preblock_ray import deployment
from ray import serve
from ray.cluster_utils import Cluster

NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
SCALING = {
    "min_replicas": 1,
    "max_replicas": 3,
    "target_ongoing_requests": 2,
    "metrics_interval_s": 0.5,
    "look_back_period_s": 2,
    "upscale_delay_s": 1,
    "downscale_delay_s": 3,
}


DRAIN_SECONDS = 3
"""Shorter than in `deploy/ray`, because streams of the test stay open."""


def running() -> int:
    """Return the number of running replicas."""
    status = serve.status().applications["preblock"].deployments["preblock"]
    return int(status.replica_states.get("RUNNING", 0))


# Ray writes to the standard output too: redirect it to the standard error.
REPORTS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def report(value: object) -> None:
    """Write a line of JSON."""
    REPORTS.write(json.dumps(value) + "\n")
    REPORTS.flush()


def main() -> None:
    """Serve, and obey the lines of the standard input."""
    port, repository = sys.argv[1:]
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    workers = [cluster.add_node(**NODE) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": int(port)})
        options = {"autoscaling_config": SCALING, "graceful_shutdown_timeout_s": DRAIN_SECONDS}
        serve.run(deployment({"repository": repository}).options(**options).bind(), name="preblock", route_prefix="/")
        report(running())
        for line in sys.stdin:
            command = line.strip()
            if command == "end":
                break
            if command == "remove":
                cluster.remove_node(workers.pop(), allow_graceful=False)
            report(running())
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


main()
