"""Give llama.cpp a prompt of vectors, with rows made by a running Preblock.

    preblock export hf:openai-community/gpt2 --name gpt2
    preblock serve --port 8000
    python examples/llama_cpp_rows.py http://127.0.0.1:8000 gpt2 464 2068 7586

writes `prompt.f32`: for each token a row of float32, as `llama_batch.embd` takes them. To decode them with
llama-cpp-python and print the most probable next token, name a GGUF file of the same model with --gguf.

Some models scale their token vectors, and llama.cpp scales the rows of some of these itself. The example requests the
output that the model names for llama.cpp.
"""

import argparse
import ctypes
from pathlib import Path
from typing import Any

try:
    import numpy as np
    from numpy.typing import NDArray

    import preblock
    from preblock.client import Model
    from preblock.client.errors import ClientError
    from preblock.failures import fails_in_one_line
except ModuleNotFoundError as missing:
    raise SystemExit(f"This example needs {missing.name}: pip install preblock") from None

ENGINE = "llama.cpp"


def find_output(model: Model) -> str:
    """Return the output with the embedding scale as llama.cpp takes it."""
    if not model.consumers:
        return "token_embeddings"
    outputs = [row["output"] for row in model.consumers if row["engine"] == ENGINE]
    if not outputs or outputs[0] is None:
        raise SystemExit(f"{model.name}: it is unknown whether {ENGINE} scales its vectors, or the artifact has none")
    return str(outputs[0])


def fill(batch: Any, rows: NDArray[np.float32]) -> None:
    """Fill a `llama_batch` from `llama_batch_init(len(rows), rows.shape[1], 1)`: one sequence, logits of its end."""
    batch.n_tokens = len(rows)
    ctypes.memmove(batch.embd, rows.ctypes.data, rows.nbytes)
    for token in range(len(rows)):
        batch.pos[token] = token
        batch.n_seq_id[token] = 1
        batch.seq_id[token][0] = 0
        batch.logits[token] = token == len(rows) - 1


def decode(gguf: str, rows: NDArray[np.float32]) -> str:
    """Return the most probable token after the rows, as text."""
    try:
        import llama_cpp
    except ModuleNotFoundError:
        raise SystemExit("--gguf needs llama-cpp-python: pip install llama-cpp-python") from None
    try:
        llama = llama_cpp.Llama(gguf, verbose=False)
    except ValueError as error:
        raise SystemExit(f"--gguf: {error}") from error
    batch = llama_cpp.llama_batch_init(len(rows), rows.shape[1], 1)
    fill(batch, rows)
    if llama_cpp.llama_decode(llama.ctx, batch):
        raise SystemExit(f"{ENGINE} could not decode the rows")
    logits = llama_cpp.llama_get_logits_ith(llama.ctx, len(rows) - 1)
    token = int(np.argmax(np.ctypeslib.as_array(logits, (llama.n_vocab(),))))
    llama_cpp.llama_batch_free(batch)
    return str(llama.detokenize([token]).decode(errors="replace"))


@fails_in_one_line
def main() -> None:
    """Write `prompt.f32`, or print the next token of llama.cpp."""
    parser = argparse.ArgumentParser(description="Give llama.cpp a prompt of vectors of a running Preblock.")
    parser.add_argument("service", help="address of Preblock")
    parser.add_argument("model", help="name of the model in Preblock")
    parser.add_argument("ids", type=int, nargs="+", help="token ids of the prompt")
    parser.add_argument("--gguf", help="file of the same model for llama-cpp-python (default: write prompt.f32)")
    given = parser.parse_args()
    if given.gguf is not None and not Path(given.gguf).is_file():
        raise SystemExit(f"--gguf: {given.gguf} is no file")
    try:
        with preblock.connect(given.service) as client:
            output = find_output(client.model(given.model))
            (rows,) = client.embed([given.ids], model=given.model, output=output).rows()
    except ClientError as error:
        raise SystemExit(f"Preblock: {error}") from error
    rows = np.ascontiguousarray(rows, np.float32)
    if given.gguf is not None:
        print(repr(decode(given.gguf, rows)))
        return
    Path("prompt.f32").write_bytes(rows.tobytes())
    print(f"prompt.f32: {len(rows)} rows of {rows.shape[1]} values, {output}")


if __name__ == "__main__":
    main()
