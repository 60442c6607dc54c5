"""Small faults of a source file: changed operators, conditions, numbers and statements."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Mutant:
    """One change of a file: the characters from `begin` to `end` become `text`."""

    file: str
    line: int
    begin: int
    end: int
    text: str

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
        return self._place(node.end_lineno or 0, node.end_col_offset or 0)

    def _replace(self, node: ast.expr | ast.stmt, text: str) -> Mutant:
        return Mutant(self._file, node.lineno, self._begin(node), self._end(node), text)

    def _operator(self, left: ast.expr, right: ast.expr, change: tuple[str, str]) -> Iterator[Mutant]:
        """Yield the change of the operator between two operands; none where its text is ambiguous."""
        begin, end = self._end(left), self._begin(right)
        old, new = change
        found = list(re.finditer(re.escape(old).replace(r"\ ", r"\s+"), self._source[begin:end]))
        if len(found) == 1:
            first, last = (begin + place for place in found[0].span())
            yield Mutant(self._file, left.lineno, first, last, new)

    def _of(self, node: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                yield from self._operator(left, right, COMPARISONS[type(operator)])
            case ast.BoolOp(op=operator, values=[left, right, *_]):
                change = ("and", "or") if isinstance(operator, ast.And) else ("or", "and")
                yield from self._operator(left, right, change)
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in SUMS and not _is_text(left, right):
                yield from self._operator(left, right, SUMS[type(operator)])
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self._replace(node, self._source[self._begin(operand) : self._end(operand)])
            case ast.Constant(value=bool() as value):
                yield self._replace(node, str(not value))
            case ast.Constant(value=int() as value):
                yield self._replace(node, str(value + 1))
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                condition = self._source[self._begin(test) : self._end(test)]
                yield self._replace(test, f"(not ({condition}))")
            case ast.Raise():
                yield self._replace(node, "pass")
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                yield self._replace(value, "None")
            case ast.Expr(value=ast.Call(func=called)) if not ast.unparse(called).startswith("LOG."):
                yield self._replace(node, "pass")


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
