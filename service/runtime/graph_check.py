"""Checks the opened graphs of an artifact against its manifest. Each check raises ArtifactError if they differ."""

from collections.abc import Mapping

import numpy as np

from preblock.service.artifacts.manifest import Manifest, StemManifest, Tensor
from preblock.service.artifacts.names import (
    CONTEXT,
    EMBEDDINGS,
    GRAPH,
    MANIFEST,
    NGRAM_IDS_GRAPH,
    NGRAMS_GRAPH,
    OUTPUT_GRAPHS,
    TOKEN_EMBEDDINGS,
    TOKEN_GRAPHS,
)
from preblock.service.core.errors import ArtifactError, Unavailable
from preblock.service.runtime.runner import Runner
from preblock.service.runtime.session import Session


def check_widths(manifest: Manifest | StemManifest) -> None:
    """Compare the widths of outputs with the manifest."""
    graphs = [manifest.graphs[graph] for graph in TOKEN_GRAPHS if graph in manifest.graphs]
    widths = {tensor.name: (None, *tensor.shape)[-1] for graph in graphs for tensor in graph.outputs}
    for name, width in widths.items():
        if not isinstance(width, int):
            raise ArtifactError(f"{MANIFEST} graphs {name}", width, "an output with a number as its last dimension")
    declared = {"width": (manifest.width, EMBEDDINGS)}
    if isinstance(manifest, Manifest) and manifest.token_embeddings:
        lookup = manifest.token_embeddings
        declared[f"{TOKEN_EMBEDDINGS}.width"] = (lookup.width, lookup.output)
    for field, (width, output) in declared.items():
        if width != widths.get(output):
            raise ArtifactError(f"{MANIFEST} {field}", width, f"{widths.get(output)}, the width of {output}")


def check_inputs(manifest: Manifest) -> None:
    """Compare the inputs of the token graphs with the manifest."""
    if missing := {"input_ids", *manifest.indices} - {tensor.name for tensor in manifest.graphs[GRAPH].inputs}:
        raise ArtifactError(f"{MANIFEST} indices", ", ".join(sorted(missing)), f"inputs of {GRAPH}")
    known = {"input_ids", "offset", "attention_mask", *([CONTEXT] if manifest.history else []), *manifest.indices}
    for graph in filter(manifest.graphs.__contains__, TOKEN_GRAPHS):
        if unknown := {tensor.name for tensor in manifest.graphs[graph].inputs} - known:
            raise ArtifactError(f"{graph} inputs", ", ".join(sorted(unknown)), ", ".join(sorted(known)))


def check_history(manifest: Manifest) -> None:
    """Compare the history with the input `context` of the graphs."""
    history = manifest.history
    graphs = {name: graph for name, graph in manifest.graphs.items() if name in OUTPUT_GRAPHS}
    found = {
        name: tensor.shape[-1] for name, graph in graphs.items() for tensor in graph.inputs if tensor.name == CONTEXT
    }
    names = [name for name in graphs if name in (NGRAMS_GRAPH, NGRAM_IDS_GRAPH)] or [NGRAMS_GRAPH]
    expected = {} if history is None else dict.fromkeys(names, history.tokens)
    if found != expected:
        raise ArtifactError(f"{MANIFEST} history.tokens", expected or "nothing", f"{found or 'nothing'}, by its graphs")
    if history is not None and history.reset_id >= manifest.vocab_size:
        raise ArtifactError(f"{MANIFEST} history.reset_id", history.reset_id, f"0 to {manifest.vocab_size - 1}")


def check_kernel(manifest: Manifest, sessions: Mapping[str, Session], kernel: Runner) -> None:
    """Compare the fused kernel with the plain graph."""
    session = sessions[manifest.plain]
    if manifest.counts != "slots" or {tensor.name for tensor in session.inputs} != {"input_ids", "offset"}:
        message = f"{MANIFEST} kernel: expected none, since {manifest.plain} depends on more than ids and offset"
        raise ArtifactError(f"{MANIFEST} kernel", manifest.kernel, "none", message=message)
    try:
        same = _same_vectors(manifest, kernel, session)
    except Unavailable as error:
        raise ArtifactError(
            f"{MANIFEST} kernel", error.got, error.expected, message=f"{MANIFEST} kernel: {error}"
        ) from error
    if not same:
        message = f"{MANIFEST} kernel: the tables give other vectors than {manifest.plain}"
        raise ArtifactError(f"{MANIFEST} kernel", manifest.kernel, f"the tables of {manifest.plain}", message=message)


def _same_vectors(manifest: Manifest, runner: Runner, plain: Session) -> bool:
    """Return whether `runner` has the bits of the plain graph at the first and last position and id."""
    for offset, id_ in ((0, 0), (manifest.limit - 1, manifest.vocab_size - 1)):
        feeds = {tensor.name: np.zeros((1, 1), np.int64) for tensor in plain.inputs}
        feeds |= {"input_ids": np.array([[id_]]), "offset": np.array([offset])}
        twice = {name: values.repeat(2, 0) for name, values in feeds.items()}  # as in a micro-batch
        expected = plain.run(feeds, [EMBEDDINGS])[EMBEDDINGS].tobytes()
        # A repeated call may reuse a buffer.
        found = [runner.run(call, [EMBEDDINGS])[EMBEDDINGS].tobytes() for call in (feeds, feeds, twice)]
        if found != [expected, expected, 2 * expected]:
            return False
    return True


def check_table_rows(graph: str, manifest: Manifest, session: Session) -> None:
    """Look up the last legal index of each input: a table with too few rows fails here."""
    # Padding has no position.
    feeds = dict.fromkeys(manifest.indices, 0) | {"input_ids": int(manifest.padding_id == 0), "attention_mask": 1}
    feeds |= {CONTEXT: 0}
    last = {"input_ids": manifest.vocab_size, **manifest.indices, "offset": manifest.max_len or 1}
    names = {"input_ids": "vocab_size", "offset": "max_len"}
    shapes = {tensor.name: (1, 1)[-len(tensor.shape) :] for tensor in session.inputs}
    if manifest.history and CONTEXT in shapes:
        shapes[CONTEXT] = (1, manifest.history.tokens)
    for name in filter(shapes.__contains__, last):
        values = {"offset": 0, **feeds, name: last[name] - 1}
        given = {input_: np.full(shape, values[input_], np.int64) for input_, shape in shapes.items()}
        if why := session.refusal(given):
            field = f"{MANIFEST} {names.get(name, f'indices.{name}')}"
            raise ArtifactError(field, last[name], f"at most the rows of {graph} ({why})")


def compare_tensors(graph: str, side: str, declared: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> None:
    """Compare the declared inputs or outputs of a graph, by `side`, with those found."""
    if declared != found:
        got, allowed = (", ".join(f"{t.name} {t.dtype} {list(t.shape)}" for t in given) for given in (declared, found))
        raise ArtifactError(f"{MANIFEST} graphs.{graph}.{side}", got, f"the {side} of the graph: {allowed}")
