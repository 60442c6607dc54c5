"""Check the English of docstrings, comments, Markdown and commit subjects; `make check` runs this.

Long sentences and relative clauses make a text hard to read. For comparison, 1,000 words of docstrings hold 13 relative
pronouns in starlette, and 11 in httpx.
"""

import ast
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_PYTHON_DENSITY = 14.0
MAX_MARKDOWN_DENSITY = 12.0
MAX_FILE_DENSITY = 15.0
"""Relative pronouns in 1,000 words: of all Python files, of all Markdown files, and of one file or folder."""
MIN_FILE_WORDS = 300
"""A shorter file is counted with its folder."""
MAX_HEADLESS_SENTENCES = 10
MAX_MEDIAN_WORDS = 16
MAX_SENTENCE_WORDS = 35
MAX_SUBJECT_CHARS = 72
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
PRONOUN = re.compile(r"\b(?:that|which|who|whose|whom|what)\b", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z']+")
HEADLESS = re.compile(r"(?:^|[.!?]\s+)((?:What|Who|Whoever|Whatever|Those (?:that|who|of)|That of)\b[^.!?\n]*)")


def git(*arguments: str) -> list[str]:
    """Return the output lines of a git command in the repository."""
    return subprocess.run(
        ["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True
    ).stdout.splitlines()


def python_prose(text: str) -> str:
    """Return the docstrings and comments of Python source."""
    found = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED)]
    found += [
        node.value.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found += [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    return "\n".join(dict.fromkeys(found))


def markdown_prose(text: str) -> str:
    """Return Markdown without code."""
    return re.sub(r"`[^`]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def markdown_sentences(text: str) -> Iterator[str]:
    """Yield the sentences of Markdown; headings, list items and table cells end sentences too."""
    text = re.sub(r"```.*?```", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", text))
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\.)\s?)|\|", text):
        for sentence in re.split(r"(?<=[.!?:;])\s+", " ".join(block.split())):
            if WORD.search(sentence):
                yield sentence


def density(words: int, pronouns: int) -> float:
    """Return pronouns in 1,000 words."""
    return 1000 * pronouns / max(words, 1)


def problems() -> Iterator[str]:
    """Yield each broken limit as a line."""
    headless: list[str] = []
    lengths: list[int] = []
    for suffix, limit in ((".py", MAX_PYTHON_DENSITY), (".md", MAX_MARKDOWN_DENSITY)):
        counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for name in git("ls-files", f"*{suffix}"):
            path = ROOT / name
            if path.is_symlink() or not path.is_file() or "_pb2" in name:
                continue
            text = path.read_text()
            prose = python_prose(text) if suffix == ".py" else markdown_prose(text)
            words, pronouns = len(WORD.findall(prose)), len(PRONOUN.findall(prose))
            for group in {"", name if words >= MIN_FILE_WORDS else f"{path.parent.relative_to(ROOT)}/"}:
                counts[group][0] += words
                counts[group][1] += pronouns
            headless += [f"{name}: {sentence}" for sentence in HEADLESS.findall(prose)]
            if suffix == ".md":
                for sentence in markdown_sentences(text):
                    lengths.append(len(WORD.findall(sentence)))
                    if lengths[-1] > MAX_SENTENCE_WORDS:
                        yield f"{name}: a sentence of {lengths[-1]} words, expected {MAX_SENTENCE_WORDS}: {sentence}"
        for group, (words, pronouns) in sorted(counts.items()):
            most = MAX_FILE_DENSITY if group else limit
            if words >= MIN_FILE_WORDS and (found := density(words, pronouns)) > most:
                place = group or f"all {suffix} files"
                yield f"{place}: {found:.1f} relative pronouns in 1,000 words, expected at most {most:g}"
    if len(headless) > MAX_HEADLESS_SENTENCES:
        yield f"{len(headless)} headless sentences, expected {MAX_HEADLESS_SENTENCES}:\n  " + "\n  ".join(headless)
    if (median := statistics.median(lengths)) > MAX_MEDIAN_WORDS:
        yield f"Markdown: a median of {median:g} words in a sentence, expected {MAX_MEDIAN_WORDS}"
    # Older commits have other rules.
    (first,) = git("log", "--diff-filter=A", "--format=%H", "--", "tests/prose.py") or ["HEAD"]
    for subject in git("log", "--no-merges", "--format=%s", f"{first}..HEAD"):
        if len(subject) > MAX_SUBJECT_CHARS:
            yield f"commit of {len(subject)} characters, expected {MAX_SUBJECT_CHARS}: {subject}"


def main() -> int:
    """Print the broken limits; return the exit status."""
    found = list(problems())
    for problem in found:
        print(problem)  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
