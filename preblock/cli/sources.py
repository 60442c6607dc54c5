"""The sources of `preblock serve`: each is exported unless the repository has it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from preblock.cli.export import print_warnings, resolve_source
from preblock.cli.progress import ProgressLine

if TYPE_CHECKING:
    from preblock.export.options import ResolvedSource


def export_missing(sources: Sequence[str], name: str | None, settings: Any) -> None:
    """Export each source that the repository does not have yet, with default options.

    Args:
        sources: as in `preblock export`.
        name: of the model of the only source; None for names from the sources.
        settings: name the repository, and the cache of hashes.

    Raises:
        UsageError: a source or its name is wrong, or two sources have one name; nothing was exported.
        ExportError: an export failed, as `exporter.export` says.

    """
    models: dict[str, ResolvedSource] = {}
    for given in sources:
        source = resolve_source(given, name, settings.repository)
        if source.name in models:
            raise click.UsageError(
                f"SOURCE: got {models[source.name].text} and {given}, both for a model {source.name!r}, expected "
                "different names; `preblock export SOURCE --name NAME` gives another name"
            )
        models[source.name] = source
    for source in models.values():
        _export_if_missing(source, settings)


def _export_if_missing(source: "ResolvedSource", settings: Any) -> None:
    from preblock.export.origin import find_same

    name, repository = source.name, settings.repository
    with ProgressLine(name) as progress:
        same, exported = find_same(source, repository, progress, settings.cache_dir), None
        if same is None:
            with _turn(repository, progress):  # another process may export it right now
                same = find_same(source, repository, progress, settings.cache_dir)
                if same is None:
                    from preblock.export.exporter import export_source

                    exported = export_source(source, repository, progress)
    if exported is not None:
        click.echo(f"{name}: exported {source.text} as version {exported.folder.name}", err=True)
        print_warnings(name, exported.warnings)
    elif same is not None:
        click.echo(f"{name}: version {same.version} is the export of {source.text} already", err=True)
        if same.warning:
            click.echo(f"{name}: warning: {same.warning}", err=True)


@contextmanager
def _turn(repository: Path, progress: ProgressLine) -> Iterator[None]:
    """Wait until no other process exports its sources into `repository`, which is created if missing."""
    from preblock.export.publication import locked, make_folder

    make_folder(repository)
    with ExitStack() as lock:
        try:
            lock.enter_context(locked(repository))
        except BlockingIOError:
            progress("waiting for another process that exports into the repository")
            lock.enter_context(locked(repository, wait=True))
        yield
