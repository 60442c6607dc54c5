"""Imports of the forkserver. Workers are forked from it, and share its memory pages.

No import may start a thread, open a model, or draw a random value for all workers;
`service/observability/context.py` draws its prefix again after a fork. gRPC and tracing start no thread on import. If
enabled, they are imported before this module.
"""

import gc
import signal

import uvloop  # noqa: F401 - uvicorn imports it when it runs
from fastapi import FastAPI

import preblock.service.server.run  # noqa: F401

FastAPI().get("/")(lambda: None)  # the first route imports more
# The parent handles signals to the process group and stops the workers; this process ends after them.
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
gc.collect()
gc.freeze()  # a garbage collection would write to the shared pages
