"""The command line. Wrong use exits with 2 and failure with 1, each with one line; `--debug` shows the traceback.

Commands import heavy packages inside their functions: `serve` must run without torch.
"""

import signal
import sys

import click

from preblock import __version__
from preblock.cli import artifacts, bench, convert, export, families, keys, plot, serve
from preblock.failures import describe_failure

COMMANDS = [
    *(export.export, export.verify, convert.convert, families.families),
    *(artifacts.list_models, artifacts.inspect, plot.plot, artifacts.check, artifacts.remove),
    *(keys.key, serve.show_settings, serve.serve, bench.bench),
]


@click.group(commands=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of a failure.")
@click.version_option(__version__)
def app(debug: bool) -> None:
    """Export the front-ends of transformers and serve them: token ids in, the vectors that enter block 0 out."""


def main() -> None:
    """Run the command line. Every failure becomes one line and an exit code."""
    debug = "--debug" in sys.argv[1:2]
    try:
        app(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(2)
    except click.UsageError as error:
        _fail(2, error.format_message())
    except click.Abort:
        _fail(130, "interrupted")
    except SystemExit as end:
        if end.code == 128 + signal.SIGTERM:
            _fail(end.code, "terminated")
        raise
    except Exception as error:
        if debug:
            raise
        _fail(1, _message(error))


def _message(error: Exception) -> str:
    if isinstance(error, click.ClickException):
        return str(error)
    return describe_failure(error) or f"{type(error).__name__}: {error} (preblock --debug … shows where)"


def _fail(code: int, message: str) -> None:
    click.echo(f"preblock: {' '.join(message.split())}", err=True)
    sys.exit(code)
