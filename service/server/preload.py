"""Imports of the process from which workers are forked; workers share its memory pages.

It does nothing else. None of this has a thread that outlives a fork, opens a model, or draws by chance for all of them:
`service/observability/context.py` draws again. gRPC and what traces have threads only once there is a server or an
exporter, and are imported before this where they are wanted.
"""

import gc
import signal

import uvloop  # noqa: F401 - uvicorn imports it when it runs
from fastapi import FastAPI

import preblock.service.server.run  # noqa: F401

FastAPI().get("/")(lambda: None)  # the first route imports more
# The parent obeys a signal to the whole group and tells the workers; this process ends after them.
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
gc.collect()
gc.freeze()  # a garbage collection writes into every object
