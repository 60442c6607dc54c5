"""What the process has imported that workers are forked from; they share its pages.

It does nothing else. None of this has a thread that outlives a fork, opens a model, or draws by chance for all of them:
`service/observability/context.py` draws again. gRPC and what traces have threads only once there is a server or an
exporter, and are imported before this where they are wanted.
"""

import gc
import signal

import uvloop  # noqa: F401 - which uvicorn imports when it runs
from fastapi import FastAPI

import preblock.service.server.run  # noqa: F401

FastAPI().get("/")(lambda: None)  # the first route imports more
# A signal to the whole group is obeyed by the parent, which tells the workers; this process ends after them.
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
gc.collect()
gc.freeze()  # a search for garbage writes into every object that it looks at
