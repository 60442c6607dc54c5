"""Request fields of engines that take vectors in place of token ids. Nothing here needs a network or torch.

Engines add positions themselves, so the vectors are `token_embeddings`.

Letters: T tokens of a row, n vectors of a table, D width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from preblock.client.errors import invalid
from preblock.client.results import Embeddings, Int64, Vectors
from preblock.client.token_ids import Row, read_integers


class PromptTable(NamedTuple):
    """A prompt of ids and vectors for TensorRT-LLM.

    Args:
        input_ids: int32 (T,); an id from the size of the vocabulary on is a row of `table`.
        table: float32 (1, n, D), for `prompt_table`. TensorRT-LLM casts it to the dtype of its weights.

    """

    input_ids: NDArray[np.int32]
    table: NDArray[np.float32]


def chat_part(prompt: str) -> dict[str, str]:
    """Return a part of the content of a chat message for vLLM.

    Args:
        prompt: a value of `prompt_embeds`. vLLM puts the chat template around it, so embed the text of the message
            alone, with `special_tokens=False`.

    """
    return {"type": "prompt_embeds", "data": prompt}


def input_embeds(embeddings: Embeddings) -> list[list[list[float]]]:
    """Return the field `input_embeds` of SGLang's `/generate`: for each row T lists of D numbers.

    Every number is a float, also a whole one: SGLang counts the dimensions by the type of the first number.
    """
    return [row.astype(np.float32).tolist() for row in embeddings.rows()]


def prompt_table(parts: Sequence[Row | Vectors], vocab_size: int) -> PromptTable:
    """Return a prompt of ids and vectors, in order, for the prompt table of TensorRT-LLM.

    Args:
        parts: token ids (T,), and vectors, floats (n, D).
        vocab_size: size of the vocabulary of the engine.

    Raises:
        RequestError: an id is outside the vocabulary, a part is neither ids nor vectors, the widths differ, or no part
            has vectors.

    """
    ids: list[Int64] = []
    vectors: list[NDArray[np.float32]] = []
    count = 0
    for index, part in enumerate(parts):
        if isinstance(part, np.ndarray) and part.dtype.kind not in "iu":
            if part.ndim != 2 or (vectors and part.shape[1] != vectors[0].shape[1]):
                width = vectors[0].shape[1] if vectors else "width"
                raise invalid(f"parts[{index}]", f"an array {part.shape}", f"token ids, or vectors (n, {width})")
            vectors.append(part.astype(np.float32))
            ids.append(np.arange(vocab_size + count, vocab_size + count + len(part)))
            count += len(part)
        else:
            ids.append(read_integers(f"parts[{index}]", part))
            for wrong in ids[-1][(ids[-1] < 0) | (ids[-1] >= vocab_size)][:1]:
                raise invalid(f"parts[{index}]", int(wrong), f"ids from 0 to {vocab_size - 1}")
    if not vectors:
        raise invalid("parts", "token ids alone", "a part with vectors")
    return PromptTable(np.concatenate(ids).astype(np.int32), np.concatenate(vectors)[None])
