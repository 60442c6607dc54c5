"""llama-index's client of text-embeddings-inference, in an environment of its own."""

import asyncio
import json
import sys

from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

TEXTS = ["Hello, world!", "the quick brown fox"]

model = TextEmbeddingsInference(model_name="wordllama", base_url=sys.argv[1])
try:  # it ignores the status, so the body must be no list
    refused = str(model.get_text_embedding_batch(["a", ""]))
except ValueError as error:
    refused = str(error)
found = {
    "texts": TEXTS,
    "batches": [
        model.get_text_embedding_batch(TEXTS),
        [model.get_query_embedding(text) for text in TEXTS],
        asyncio.run(model.aget_text_embedding_batch(TEXTS)),
    ],
    "refused": refused,
}
json.dump(found, sys.stdout)
