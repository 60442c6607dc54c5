"""Fuzzes a parser with atheris, which keeps inputs that reach new lines.

python -m tests.reliability.guided_fuzzing npy
"""

import argparse
import sys
import tempfile
import tracemalloc
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["preblock.service"]):
    from tests.reliability.parsers import parsers


def main() -> None:
    """Fuzz until the time is over, or an input is found that fails; it is written where this runs."""
    command = argparse.ArgumentParser(description="Look for bytes that a parser fails at.")
    command.add_argument("name", help="of the parser")
    command.add_argument("--seconds", type=int, default=60, help="default: 60")
    given = command.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        parser = parsers(Path(folder))[given.name]
        corpus, words = Path(folder) / "corpus", Path(folder) / "words"
        corpus.mkdir()
        for index, seed in enumerate(parser.seeds):
            (corpus / str(index)).write_bytes(seed)
        words.write_text("".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in parser.words))
        options = [f"-max_total_time={given.seconds}", "-timeout=10", "-rss_limit_mb=2048", "-max_len=4096"]
        options += ["-print_final_stats=1", "-verbosity=0", *([f"-dict={words}"] if parser.words else [])]
        atheris.Setup([sys.argv[0], *options, str(corpus)], parser.hold)
        tracemalloc.start()
        atheris.Fuzz()


if __name__ == "__main__":
    main()
