"""The table of outputs: the graph of each, and how it is written, compared and described.

Letters: B batch, L length.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preblock.export.bias_graph import build_bias
from preblock.export.external_data import ALIGNMENT_BYTES, DataFile
from preblock.export.further_outputs import write_layers, write_lookup, write_ngram_outputs, write_vectors
from preblock.export.graph_builder import GraphBuilder, Outputs, TensorStore, label, save_graph
from preblock.export.parity import ULP_OF_ONE, allowed_ulp, bias_ulp, judge, per_layer_ulp, run_case
from preblock.export.parity_cases import Call, bias_calls, grid_calls, id_calls, ngram_calls
from preblock.export.progress import Report, StepProgress
from preblock.export.reference import Described, Reference
from preblock.export.table_formats import TableFormat, table_names, transposed_names
from preblock.models.config import FrontEndConfig
from preblock.models.frontend_data import FrontEndData
from preblock.service.artifacts import names
from preblock.service.artifacts.parity import OutputParity
from preblock.service.runtime.session import Session

UNCHECKED = "It checks no index and no length: a negative index wraps, and a GPU may answer zeros to one too large."
Feeds = Mapping[str, NDArray[np.int64]]
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Output:
    """The first output of a graph.

    Args:
        title: description of the graph in its metadata.
        shape: returns the sizes of its axes after batch and length; None for a front-end without this graph.
        write: writes the graph; None for the graph of a bias.
        expect: returns the expected values.
        calls: yields the inputs to compare, for values of a shape; None if another proof includes the output.
        allowed_ulp: returns the allowed error; default 0.
        unit: an ULP, as in `difference`.
        name: name in the parity report; default that of the output.

    """

    title: str
    shape: Callable[[Described], Shape | None]
    write: Callable[[GraphBuilder, FrontEndConfig], Outputs] | None = None
    expect: Callable[[Reference, Feeds], NDArray[Any]]
    calls: Callable[[Described, Shape], Iterable[Call]] | None = id_calls
    allowed_ulp: Callable[[Described], float] = lambda _: 0.0
    unit: float | None = None
    name: str | None = None

    def prove(
        self, reference: Reference, session: Session, progress: StepProgress | None = None
    ) -> dict[str, OutputParity]:
        """Compare the graph opened in `session` with `reference`, and return the parity by name.

        Raises:
            ParityError: a case differs by more than allowed; the error names the worst.

        """
        assert self.calls is not None
        output, cases = session.outputs[0].name, []
        calls = list(self.calls(reference, self.shape(reference) or ()))
        for feeds, arguments, omitted in calls:
            given = {name: values for name, values in feeds.items() if name not in omitted}
            expected = self.expect(reference, given)
            cases.append(run_case(session, feeds, expected, arguments, output, self.unit))
            if progress:
                progress.cases(len(cases), len(calls), expected.nbytes)
        name = self.name or output
        return {name: judge(name, cases, self.allowed_ulp(reference))}


def _width(of: Described) -> Shape:
    return (of.signature.width,)


def _expect_ngrams(reference: Reference, feeds: Feeds, output: str) -> NDArray[Any]:
    return reference.ngram_outputs(feeds["input_ids"], feeds[names.CONTEXT])[output]


OUTPUTS: Mapping[str, Output] = {
    names.GRAPH: Output(
        title=f"The vectors that enter block 0 of a transformer, and what its attention is given. {UNCHECKED}",
        shape=_width,
        write=write_vectors,
        expect=lambda reference, feeds: reference.vectors(feeds),
        calls=grid_calls,
        allowed_ulp=allowed_ulp,
    ),
    names.EMBEDDINGS_GRAPH: Output(
        title=f"The vectors that enter block 0 of a transformer, alone. {UNCHECKED}",
        shape=lambda of: _width(of) if of.signature.rotary else None,
        write=partial(write_vectors, rotary=False),
        expect=lambda reference, feeds: reference.vectors(feeds),
        calls=None,
        allowed_ulp=allowed_ulp,
    ),
    names.TOKEN_GRAPH: Output(
        title=f"The vectors of a transformer's own lookup, before positions and norm. {UNCHECKED}",
        shape=lambda of: (of.signature.lookup_width,) if of.signature.lookup_width else None,
        write=lambda graph, config: write_lookup(graph, config, names.TOKEN_EMBEDDINGS, config.lookup),
        expect=lambda reference, feeds: reference.look_up(feeds["input_ids"]),
    ),
    names.UNSCALED_GRAPH: Output(
        title=f"The rows of a transformer's token table, without its embedding scale. {UNCHECKED}",
        shape=lambda of: (of.signature.unscaled_width,) if of.signature.unscaled_width else None,
        write=partial(write_lookup, output=names.UNSCALED, count=1),
        expect=lambda reference, feeds: reference.look_up(feeds["input_ids"], scaled=False),
    ),
    names.LAYER_TOKENS_GRAPH: Output(
        title=f"The token part of the inputs of all layers of a transformer. {UNCHECKED}",
        shape=lambda of: of.signature.per_layer,
        write=partial(write_layers, output=names.PER_LAYER_TOKENS),
        expect=lambda reference, feeds: reference.per_layer_outputs(feeds["input_ids"])[names.PER_LAYER_TOKENS],
    ),
    names.LAYER_INPUTS_GRAPH: Output(
        title=f"The inputs of all layers of a transformer, besides its hidden states. {UNCHECKED}",
        shape=lambda of: of.signature.per_layer and (math.prod(of.signature.per_layer),),
        write=partial(write_layers, output=names.PER_LAYER),
        expect=lambda reference, feeds: reference.per_layer_outputs(feeds["input_ids"])[names.PER_LAYER],
        allowed_ulp=per_layer_ulp,
    ),
    names.NGRAMS_GRAPH: Output(
        title=f"The n-gram embeddings of some layers of a transformer, from the last ids. {UNCHECKED}",
        shape=lambda of: of.signature.ngrams,
        write=partial(write_ngram_outputs, output=names.NGRAMS),
        expect=partial(_expect_ngrams, output=names.NGRAMS),
        calls=ngram_calls,
    ),
    names.NGRAM_IDS_GRAPH: Output(
        title=f"The rows of n-gram tables for some layers of a transformer, from the last ids. {UNCHECKED}",
        shape=lambda of: of.signature.row_ids,
        write=partial(write_ngram_outputs, output=names.NGRAM_ROW_IDS),
        expect=partial(_expect_ngrams, output=names.NGRAM_ROW_IDS),
        calls=ngram_calls,
    ),
    names.NGRAM_ROWS_GRAPH: Output(
        title=f"The n-gram embeddings of some layers of a transformer, from the rows. {UNCHECKED}",
        shape=lambda of: of.signature.ngrams,
        write=partial(write_ngram_outputs, output=names.NGRAMS, given=True),
        expect=partial(_expect_ngrams, output=names.NGRAMS),
        calls=ngram_calls,
        name=names.NGRAMS_OF_ROWS,
    ),
    names.BIAS_GRAPH: Output(
        title="What attention adds for the distance between a query and a key.",
        shape=lambda of: () if of.config and of.config.bias else None,
        expect=lambda reference, feeds: reference.bias({name: size.item() for name, size in feeds.items()}),
        calls=bias_calls,
        allowed_ulp=bias_ulp,
        unit=ULP_OF_ONE,
    ),
}
"""Every output by the file of its graph. `model.onnx` also has the rotary outputs of a front-end."""


def outputs_of(described: Described) -> dict[str, Output]:
    """Return the rows of a front-end."""
    return {graph: output for graph, output in OUTPUTS.items() if output.shape(described) is not None}


def write_graphs(
    data: FrontEndData, folder: Path, report: Report = lambda _: None, format_: TableFormat | None = None
) -> None:
    """Write the graphs of `data` into `folder`, over one data file: those of `OUTPUTS` that the front-end has.

    `model.onnx` holds every trained weight, also those of other graphs. `embeddings.onnx` omits the rotary outputs,
    because onnxruntime computes every output of a graph.

    Args:
        data: the front-end.
        folder: of the artifact, without a data file.
        report: receives the progress of a long step.
        format_: stored type of the tables; default float32.

    Raises:
        ExportError: ONNX rejects a graph.

    """
    transposed = transposed_names(data.config)
    trained = {
        name: values.T if name in transposed else values
        for name, values in data.tensors.items()
        if not name.startswith("bias.")
    }
    step = f"rounding the tables to {format_.dtype}" if format_ else "writing the graph"
    report(step)
    rounded = table_names(data.config) if format_ else []
    twice = rounded if format_ and format_.scale == "tensor" else []
    progress = StepProgress(report, step, sum(4 * trained[name].size for name in (*trained, *twice)))
    with (folder / names.DATA).open("xb") as stream:
        store = TensorStore(trained, DataFile(stream, progress, ALIGNMENT_BYTES if format_ else 1), rounded, format_)
        # The order of the graphs decides about the order of the tensors in the data file.
        written = {
            file: (graph := GraphBuilder(store), output.write(graph, data.config))
            for file, output in outputs_of(data).items()
            if output.write
        }
        for name in trained:
            written[names.GRAPH][0].weight(name)
    models = {file: graph.finish(outputs) for file, (graph, outputs) in written.items()}
    if data.config.bias is not None:
        models[names.BIAS_GRAPH] = build_bias(data)
    for file, model in models.items():
        label(model, file, OUTPUTS[file].title, data.signature)
        save_graph(model, folder / file)
