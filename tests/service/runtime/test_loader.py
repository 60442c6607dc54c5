"""Threads that open graphs, at the end of the process."""

import subprocess
import sys

INTERRUPTED_START = """
import signal, sys, threading, time
from preblock.service.runtime.loader import OPENING

class LateThread(threading.Thread):
    def _bootstrap(self):
        time.sleep(0.3)  # the system runs the thread already, and Python does not list it as started
        super()._bootstrap()

signal.signal(signal.SIGALRM, lambda *_: sys.exit())
signal.setitimer(signal.ITIMER_REAL, 0.1)
LateThread(target=lambda: (time.sleep(0.3), print("opened", flush=True)), name=f"{OPENING}gpt/1", daemon=True).start()
"""


def test_end_waits_for_a_thread_whose_start_was_interrupted() -> None:
    command = [sys.executable, "-c", INTERRUPTED_START]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("opened\n", "")
