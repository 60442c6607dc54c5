"""Measure how many small faults in the sources the tests notice: `make mutants`.

A mutant is the source with one changed operator, condition, number or statement. A seeded sample of all of them is
tested, each in a copy of the tree: first by the tests of the mirrored folder, files with the name of the module first;
then by all tests. The tests kill a mutant if one of them fails. docs/reliability.md states the shares.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path
from queue import Queue

from tests.support.paths import ROOT

PACKAGES = ("service/engine", "service/codecs", "service/core", "service/server", "service/api", "models", "export")
COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
SUMS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
}
RUN_SECONDS = 900
"""Longest run of the tests for one mutant. A mutant without end counts as killed."""


@dataclass(frozen=True)
class Mutant:
    """One change of a file: the characters from `begin` to `end` become `text`."""

    file: str
    line: int
    begin: int
    end: int
    text: str
    kind: str

    def apply(self, source: str) -> str:
        """Return the changed source."""
        return source[: self.begin] + self.text + source[self.end :]


class Mutator:
    """Finds the mutants of one file.

    Args:
        file: relative to the root.
        source: its content.

    """

    def __init__(self, file: str, source: str) -> None:
        self._file, self._source = file, source
        # Columns of ast count bytes.
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._lines = source.splitlines(keepends=True)

    def mutants(self) -> Iterator[Mutant]:
        """Yield every mutant, in the order of the tree. Annotations, decorators and type-checking blocks have none."""
        pending: list[ast.AST] = [ast.parse(self._source)]
        while pending:
            node = pending.pop()
            yield from self._of(node)
            pending += reversed(list(_children(node)))

    def _place(self, line: int, column: int) -> int:
        text = self._lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(text)

    def _begin(self, node: ast.expr | ast.stmt) -> int:
        return self._place(node.lineno, node.col_offset)

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._place(node.end_lineno, node.end_col_offset)

    def _replace(self, node: ast.expr | ast.stmt, text: str, kind: str) -> Mutant:
        return Mutant(self._file, node.lineno, self._begin(node), self._end(node), text, kind)

    def _operator(self, left: ast.expr, right: ast.expr, change: tuple[str, str], kind: str) -> Iterator[Mutant]:
        """Yield the change of the operator between two operands; none where its text is ambiguous."""
        begin, end = self._end(left), self._begin(right)
        old, new = change
        found = list(re.finditer(re.escape(old).replace(r"\ ", r"\s+"), self._source[begin:end]))
        if len(found) == 1:
            first, last = (begin + place for place in found[0].span())
            yield Mutant(self._file, left.lineno, first, last, new, kind)

    def _of(self, node: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                yield from self._operator(left, right, COMPARISONS[type(operator)], "comparison")
            case ast.BoolOp(op=operator, values=[left, right, *_]):
                change = ("and", "or") if isinstance(operator, ast.And) else ("or", "and")
                yield from self._operator(left, right, change, "boolean")
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in SUMS and not _is_text(left, right):
                yield from self._operator(left, right, SUMS[type(operator)], "arithmetic")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self._replace(node, self._source[self._begin(operand) : self._end(operand)], "not")
            case ast.Constant(value=bool() as value):
                yield self._replace(node, str(not value), "constant")
            case ast.Constant(value=int() as value):
                yield self._replace(node, str(value + 1), "constant")
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                condition = self._source[self._begin(test) : self._end(test)]
                yield self._replace(test, f"(not ({condition}))", "condition")
            case ast.Raise():
                yield self._replace(node, "pass", "raise")
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                yield self._replace(value, "None", "return")
            case ast.Expr(value=ast.Call(func=called)) if not ast.unparse(called).startswith("LOG."):
                yield self._replace(node, "pass", "call")


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node that run."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield part


def _is_text(*operands: ast.expr) -> bool:
    return any(
        isinstance(operand, ast.JoinedStr) or (isinstance(operand, ast.Constant) and isinstance(operand.value, str))
        for operand in operands
    )


def find_mutants() -> list[Mutant]:
    """Return every mutant of the packages."""
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    found: list[Mutant] = []
    for file in files:
        if not file.name.endswith("_pb2.py"):
            found += Mutator(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")).mutants()
    return found


def draw(mutants: list[Mutant], number: int, generator: random.Random) -> list[Mutant]:
    """Return a sample of the mutants that compile."""
    shuffled = generator.sample(mutants, len(mutants))
    return list(islice(filter(compiles, shuffled), number))


def compiles(mutant: Mutant) -> bool:
    """Return whether the changed file is valid Python."""
    try:
        compile(mutant.apply((ROOT / mutant.file).read_text(encoding="utf-8")), mutant.file, "exec")
    except SyntaxError:
        return False
    return True


def mirrored_tests(file: str) -> list[str]:
    """Return the test folder of a source file, behind the test files with the name of its module."""
    folder = ROOT / "tests" / Path(file).parent
    while not folder.exists():
        folder = folder.parent
    named = sorted(str(test.relative_to(ROOT)) for test in folder.rglob(f"test_{Path(file).stem}*.py"))
    return [*named, str(folder.relative_to(ROOT))]


class Tree:
    """A copy of the tree for one mutant at a time."""

    _times = count(int(time.time()) + 1000)
    """Each written file gets a time of its own, or Python would run the compiled file of the mutant before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tracked = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True, cwd=ROOT).stdout
        built = [str(file.relative_to(ROOT)) for file in (ROOT / "service/runtime").glob("*.so")]
        for name in [*tracked.decode().split("\0")[:-1], *built]:
            if (ROOT / name).is_symlink() or (ROOT / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
        (folder / "model_repository").symlink_to(ROOT / "model_repository")

    def write(self, file: str, source: str) -> None:
        """Write a source file."""
        (self.folder / file).write_text(source, encoding="utf-8")
        now = next(self._times)
        os.utime(self.folder / file, (now, now))

    def fails(self, tests: list[str]) -> bool:
        """Return whether a test fails, or does not end."""
        command = [sys.executable, "-m", "pytest", "-x", "-n0", "-p", "no:cacheprovider", "--timeout=120", *tests]
        environment = os.environ | {"PYTHONPATH": str(self.folder)}
        with subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                return process.wait(RUN_SECONDS) not in (0, 5)  # 5: there is no test
            except subprocess.TimeoutExpired:
                return True
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    """Test a sample of mutants, and write a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="mutants in the sample")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tested at once")
    parser.add_argument("--everything", type=int, default=20, help="survivors tested by all tests")
    parser.add_argument("--output", type=Path, default=ROOT / "build/mutants.jsonl", help="one line for each mutant")
    options = parser.parse_args()
    generator = random.Random(options.seed)
    sample = draw(find_mutants(), options.count, generator)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(options.jobs) as pool:
        trees: Queue[Tree] = Queue()
        for number in range(options.jobs):
            trees.put(Tree(Path(place) / str(number)))

        def survives(mutant: Mutant, everywhere: bool = False) -> bool:
            tree, source = trees.get(), (ROOT / mutant.file).read_text(encoding="utf-8")
            try:
                tree.write(mutant.file, mutant.apply(source))
                lives = not tree.fails(["tests"] if everywhere else mirrored_tests(mutant.file))
            finally:
                tree.write(mutant.file, source)
                trees.put(tree)
            with options.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(mutant) | {"everywhere": everywhere, "survives": lives}) + "\n")
            return lives

        lives = list(pool.map(survives, sample))
        survivors = [mutant for mutant, lived in zip(sample, lives, strict=True) if lived]
        drawn = generator.sample(survivors, min(options.everything, len(survivors)))
        left = sum(pool.map(lambda mutant: survives(mutant, True), drawn))
    killed = len(sample) - len(survivors)
    print(f"{killed} of {len(sample)} mutants killed by the tests of their folder")  # noqa: T201
    print(f"{len(drawn) - left} of {len(drawn)} drawn survivors killed by all tests")  # noqa: T201


if __name__ == "__main__":
    main()
