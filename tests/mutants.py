"""Measure how many small faults in the sources the tests notice: `make mutants`.

A mutant is the source with one changed operator, condition, number or statement. A seeded sample of all of them is
tested in copies of the tree, in three passes. One run of all tests records first which tests run each line. A mutant
meets the tests of its mirrored folder that run its line, a survivor some of the other tests that do so. The survivors
of both meet all tests, in one run with all their changes at once: each test that fails there is tried with each of
them whose line it runs. The tests kill a mutant if one of them fails, and passes without the change.
"""

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import count, islice
from pathlib import Path
from queue import Queue
from typing import Any, ClassVar

from coverage import Coverage

from tests.support.contexts import VARIABLE
from tests.support.mutations import Mutant, Mutator
from tests.support.paths import ROOT

PACKAGES = ("service/engine", "service/codecs", "service/core", "service/server", "service/api", "models", "export")
TEST_SECONDS = 120
RUN_SECONDS = 1800
"""Longest run of the tests for one mutant. A mutant without end counts as killed."""
SLOW = tuple(f"tests/{folder}/" for folder in ("clients", "data", "deploy", "e2e", "families", "reliability"))
"""Folders of `make test-long`."""
MAX_FAST_TESTS, MAX_SLOW_TESTS = 200, 20
"""Most tests of one line outside the mirrored folder. Names with the name of the module come first."""
CONTEXTS = ROOT / "build/contexts"
COVERAGE = f"""[run]
data_file = {CONTEXTS}/.coverage
source_pkgs = preblock.service, preblock.models, preblock.export
parallel = true
concurrency = multiprocessing, thread
context = ${{{VARIABLE}-}}
patch = _exit
sigterm = true
disable_warnings = module-not-imported, module-not-measured, no-data-collected, couldnt-parse
"""


def find_mutants() -> list[Mutant]:
    """Return every mutant of the packages."""
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    names = [str(file.relative_to(ROOT)) for file in files if not file.name.endswith("_pb2.py")]
    return [mutant for name in names for mutant in Mutator(name, read(name)).mutants()]


def draw(mutants: list[Mutant], number: int, seed: int) -> dict[str, Mutant]:
    """Return a sample of the mutants that compile, by name. A change of the sources draws few others."""
    named, times = {}, Counter[str]()
    for mutant in mutants:
        source = read(mutant.file)
        begin = source.rfind("\n", 0, mutant.begin) + 1
        code = " ".join(source[begin : source.find("\n", mutant.end)].split())
        name = f"{mutant.file}: {code} -> {mutant.text}"
        times[name] += 1
        named[f"{name} #{times[name]}"] = mutant
    shuffled = sorted(named.items(), key=lambda pair: rank(pair[0], seed))
    return dict(islice((pair for pair in shuffled if compiles(pair[1])), number))


def rank(name: str, seed: int = 0) -> str:
    """Return the place of a name in a random order."""
    return hashlib.sha256(f"{seed} {name}".encode()).hexdigest()


def read(file: str) -> str:
    """Return a source file."""
    return (ROOT / file).read_text(encoding="utf-8")


def compiles(mutant: Mutant) -> bool:
    """Return whether the changed file is valid Python."""
    try:
        compile(mutant.apply(read(mutant.file)), mutant.file, "exec")
    except SyntaxError:
        return False
    return True


def mirrored_folder(mutant: Mutant) -> Path:
    """Return the folder of the tests of a source file."""
    folder = ROOT / "tests" / Path(mutant.file).parent
    while not folder.exists():
        folder = folder.parent
    return folder


class LineTests:
    """The tests that run a line, from one run of all tests."""

    def __init__(self, jobs: int) -> None:
        settings = CONTEXTS / "coverage.ini"
        if not (CONTEXTS / ".coverage").exists():
            shutil.rmtree(CONTEXTS, ignore_errors=True)
            CONTEXTS.mkdir(parents=True)
            settings.write_text(COVERAGE, encoding="utf-8")
            with tempfile.TemporaryDirectory() as place:
                arguments = ["-n", str(jobs), "--dist", "worksteal", "-p", "tests.support.contexts", "tests"]
                Tree(Path(place)).run(arguments, None, COVERAGE_PROCESS_START=str(settings))
                Coverage(config_file=str(settings)).combine()
        measurement = Coverage(config_file=str(settings), data_suffix=False)
        measurement.load()
        self._data = measurement.get_data()
        self._users = json.loads((CONTEXTS / "fixtures.json").read_text(encoding="utf-8"))

    def inside(self, mutant: Mutant) -> list[str]:
        """Return the tests of the mirrored folder that run the mutant, files with the name of its module first."""
        folder, stem = mirrored_folder(mutant), Path(mutant.file).stem
        if self._lines(mutant) is None:
            files = (str(file.relative_to(ROOT)) for file in folder.rglob("test_*.py"))
            return sorted(files, key=lambda file: (f"/test_{stem}" not in file, file))
        prefix = f"{folder.relative_to(ROOT)}/"
        tests = (test for test in self._of(mutant) if test.startswith(prefix))
        return sorted(tests, key=lambda test: (f"/test_{stem}" not in test, test))

    def outside(self, mutant: Mutant) -> list[str]:
        """Return the other tests that run the mutant."""
        prefix, stem = f"{mirrored_folder(mutant).relative_to(ROOT)}/", Path(mutant.file).stem.rstrip("s")
        tests = {test for test in self._of(mutant) if not test.startswith(prefix)}
        ranked = sorted(tests, key=lambda test: (stem not in test, rank(test)))
        fast = [test for test in ranked if not test.startswith(SLOW)]
        slow = [test for test in ranked if test.startswith(SLOW)]
        return [*sorted(fast[:MAX_FAST_TESTS]), *sorted(slow[:MAX_SLOW_TESTS])]

    def among(self, tests: list[str], mutant: Mutant) -> list[str]:
        """Return those of `tests` that run the mutant."""
        own = self._of(mutant)
        return [test for test in tests if test in own]

    def _of(self, mutant: Mutant) -> set[str]:
        """Return the tests that run the statement of a mutant, or a line of its file if it runs at import."""
        lines, contexts = self._lines(mutant), set[str]()
        for file in self._data.measured_files():
            if file.endswith(f"/{mutant.file}"):
                by_line = self._data.contexts_by_lineno(file)
                contexts |= {name for line in by_line if lines is None or line in lines for name in by_line[line]}
        return {test for context in contexts for test in self._users.get(context, [context]) if test}

    @staticmethod
    def _lines(mutant: Mutant) -> range | None:
        """Return the lines of the statement that holds a mutant, None if it runs once, at import."""
        statements = [node for node in ast.walk(ast.parse(read(mutant.file))) if isinstance(node, ast.stmt)]
        around = [node for node in statements if node.lineno <= mutant.line <= (node.end_lineno or 0)]
        functions = [node for node in around if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        if not any(node.body[0].lineno <= mutant.line for node in functions):
            return None
        return range(max(node.lineno for node in around), mutant.line + 1)


class Tree:
    """A copy of the tree for one mutant at a time."""

    _times = count(int(time.time()) + 1000)
    """Each written file gets a time of its own, or Python would run the compiled file of the mutant before."""
    _sound: ClassVar[dict[str, bool]] = {}
    """Whether a test passes without a mutant, by its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tracked = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True, cwd=ROOT).stdout
        built = [str(file.relative_to(ROOT)) for file in (ROOT / "service/runtime").glob("*.so")]
        for name in [*tracked.decode().split("\0")[:-1], *built]:
            if (ROOT / name).is_symlink() or (ROOT / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
        (folder / "model_repository").symlink_to(ROOT / "model_repository")

    def kill(self, mutant: Mutant, tests: list[str]) -> dict[str, Any]:
        """Return the test that kills a mutant, None if it survives, and whether the test ran out of time."""
        ignored: list[str] = []
        while True:
            with self._changed([mutant]):
                failed, output = self.run(["-x", "-n0", *tests, *(f"--deselect={test}" for test in ignored)])
            killer = failed[0] if failed else None
            if killer is None or "::" not in killer or self._passes(killer):
                return {"killer": killer, "timeout": killer is not None and "from pytest-timeout" in output}
            ignored.append(killer)

    def notice(self, mutants: list[Mutant], jobs: int) -> list[str]:
        """Return the tests that fail with several mutants at once, of which two may not overlap.

        Raises:
            RuntimeError: the run named no tests; with its output.

        """
        with self._changed(mutants):
            failed, output = self.run(["-n", str(jobs), "--dist", "worksteal", "tests"], seconds=None)
        if not all(name.startswith("tests/") for name in failed):
            raise RuntimeError(output)
        return failed

    @contextmanager
    def _changed(self, mutants: list[Mutant]) -> Iterator[None]:
        sources = {mutant.file: read(mutant.file) for mutant in mutants}
        changed = dict(sources)
        for mutant in sorted(mutants, key=lambda mutant: -mutant.begin):
            changed[mutant.file] = mutant.apply(changed[mutant.file])
        for file in sources:
            self._write(file, changed[file])
        try:
            yield
        finally:
            for file in sources:
                self._write(file, sources[file])

    def _write(self, file: str, source: str) -> None:
        (self.folder / file).write_text(source, encoding="utf-8")
        now = next(self._times)
        os.utime(self.folder / file, (now, now))

    def _passes(self, test: str) -> bool:
        if test not in self._sound:
            self._sound[test] = not self.run(["-x", "-n0", test])[0]
        return self._sound[test]

    def run(self, arguments: list[str], seconds: float | None = RUN_SECONDS, **variables: str) -> tuple[list[str], str]:
        """Run tests, and return those that fail and the output. Without names there is a reason in their place."""
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--timeout={TEST_SECONDS}", "-rfE"]
        environment = os.environ | {"PYTHONPATH": str(self.folder)} | variables
        with (
            tempfile.TemporaryFile("w+") as output,  # a pipe ends after the last process that tests leave behind
            subprocess.Popen(
                [*command, *arguments],
                cwd=self.folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process,
        ):
            with suppress(subprocess.TimeoutExpired):  # tests may fail and leave threads that never end
                process.wait(seconds)
            status = process.poll()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            output.seek(0)
            text = output.read()
        if status in (0, 5):  # 5: there is no test
            return [], text
        if failed := re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", text, re.MULTILINE):
            return failed, text
        if status == 4 and "ImportError while loading conftest" not in text:  # there is no such test
            return [], text
        return [f"pytest ended with {status}"], text


class Measurement:
    """Tests mutants, and writes a line for each that the output does not hold yet."""

    def __init__(self, options: argparse.Namespace, place: Path) -> None:
        self._jobs, self._output = options.jobs, options.output
        if options.again:
            self._output.unlink(missing_ok=True)
            shutil.rmtree(CONTEXTS, ignore_errors=True)
        self._output.parent.mkdir(parents=True, exist_ok=True)
        self._output.touch()
        lines = [json.loads(line) for line in self._output.read_text(encoding="utf-8").splitlines()]
        self._done: dict[tuple[str, str], dict[str, Any]] = {(line["name"], line["pass"]): line for line in lines}
        self._trees: Queue[Tree] = Queue()
        for number in range(options.jobs):
            self._trees.put(Tree(place / str(number)))

    def survivors(
        self, mutants: dict[str, Mutant], stage: str, choose: Callable[[Mutant], list[str]]
    ) -> dict[str, Mutant]:
        """Return the mutants that the chosen tests do not kill."""
        with ThreadPoolExecutor(self._jobs) as pool:
            lines = list(pool.map(lambda name: self._test(name, mutants[name], stage, choose), mutants))
        left = {line["name"]: mutants[line["name"]] for line in lines if line["killer"] is None}
        late = sum(line["timeout"] for line in lines)
        print(f"{stage}: {len(lines) - len(left)} of {len(lines)} mutants killed, {late} by a timeout")  # noqa: T201
        return left

    def last(self, mutants: dict[str, Mutant], tests: LineTests) -> None:
        """Test mutants by all tests: by those of them that fail with all these mutants at once."""
        file = CONTEXTS / "failed.json"
        if not file.exists():
            tree = self._trees.get()
            file.write_text(json.dumps(tree.notice(list(mutants.values()), self._jobs)), encoding="utf-8")
            self._trees.put(tree)
        failed = json.loads(file.read_text(encoding="utf-8"))
        self.survivors(mutants, "all", lambda mutant: tests.among(failed, mutant))

    def _test(self, name: str, mutant: Mutant, stage: str, choose: Callable[[Mutant], list[str]]) -> dict[str, Any]:
        if (name, stage) in self._done:
            return self._done[name, stage]
        begin, tests, tree = time.monotonic(), choose(mutant), self._trees.get()
        try:
            result = tree.kill(mutant, tests) if tests else {"killer": None, "timeout": False}
        finally:
            self._trees.put(tree)
        line = {"name": name, "pass": stage, **result, "seconds": round(time.monotonic() - begin), **asdict(mutant)}
        with self._output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return line


def main() -> None:
    """Test a sample of mutants."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="mutants in the sample")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tested at once")
    parser.add_argument("--output", type=Path, default=ROOT / "build/mutants.jsonl", help="one line for each mutant")
    parser.add_argument("--again", action="store_true", help="forget the output; without this, an earlier run goes on")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        measurement = Measurement(options, Path(place))
        sample = draw(find_mutants(), options.count, options.seed)
        tests = LineTests(options.jobs)
        survivors = measurement.survivors(sample, "folder", tests.inside)
        survivors = measurement.survivors(survivors, "line", tests.outside)
        by_line = {(mutant.file, mutant.line): name for name, mutant in survivors.items()}  # so that none overlap
        measurement.last({name: survivors[name] for name in by_line.values()}, tests)


if __name__ == "__main__":
    main()
