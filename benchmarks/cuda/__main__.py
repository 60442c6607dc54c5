"""Everything that needs an NVIDIA GPU, in steps of a few minutes: `install` to `load`.

    python -m benchmarks.cuda.artifacts ARTIFACTS      # before, on a machine with transformers
    python -m benchmarks.cuda --wheels WHEELS --artifacts ARTIFACTS [--work WORK] [--minutes N] [STEP ...]

Needs a driver, and a Python with torch for CUDA and its libraries. Run it in a checkout with compiled kernels. WHEELS
holds wheels of preblock, onnxruntime-gpu and their other dependencies. A large wheel may arrive in parts:
`NAME.whl.1of2`, `NAME.whl.2of2`. `install` makes an environment in WORK, and each further step writes its figures to
`WORK/results/STEP.json`. A step with a result is not run again. Exits with 1 if a step failed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.cuda.install import install

STEPS = ("models", "transfer", "loopback", "shared_memory", "graph", "parity", "tests", "load")
"""Each is a module of this package; `main(work, artifacts, minutes)` returns its figures."""
RUN = (
    "import json, sys; from importlib import import_module; from pathlib import Path; "
    "step, work, artifacts, minutes = sys.argv[1:]; "
    "found = import_module(f'benchmarks.cuda.{step}').main(Path(work), Path(artifacts), float(minutes)); "
    "Path(work, 'results', f'{step}.json').write_text(json.dumps(found, indent=1))"
)


def main() -> None:
    """Install, and run the steps without a result."""
    parser = argparse.ArgumentParser(description="Check and measure Preblock on an NVIDIA GPU.")
    parser.add_argument("steps", nargs="*", choices=[*STEPS, []], help="default: all")
    parser.add_argument("--wheels", type=Path, required=True, help="folder of wheels, perhaps in parts")
    parser.add_argument("--artifacts", type=Path, required=True, help="folder written by benchmarks.cuda.artifacts")
    parser.add_argument("--work", type=Path, default=Path("build/cuda"), help="default: build/cuda")
    parser.add_argument("--minutes", type=float, default=5.0, help="length of the load; default 5")
    given = parser.parse_args()
    work = given.work.absolute()
    (work / "results").mkdir(parents=True, exist_ok=True)
    python = install(given.wheels, work / "environment")
    path = os.pathsep.join((str(python.parent), os.environ["PATH"]))
    environment = os.environ | {"PYTHONPATH": str(Path.cwd()), "PATH": path, "OMP_NUM_THREADS": "4"}
    failed = []
    for step in given.steps or STEPS:
        result, began = work / "results" / f"{step}.json", time.monotonic()
        if not result.exists():
            print(f"== {step}", flush=True)
            arguments = (python, "-c", RUN, step, work, given.artifacts.absolute(), str(given.minutes))
            if subprocess.run(arguments, env=environment, check=False).returncode:
                failed.append(step)
                continue
        print(f"{step}: {time.monotonic() - began:.0f} s, {len(json.loads(result.read_text()))} figures", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
