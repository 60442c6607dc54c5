"""LangChain's client of text-embeddings-inference, in an environment of its own: by the address, and by its client."""

import asyncio
import json
import sys

from huggingface_hub import InferenceClient
from langchain_huggingface import HuggingFaceEndpointEmbeddings

TEXTS = ["Hello, world!", "the quick brown fox"]

address = HuggingFaceEndpointEmbeddings(model=sys.argv[1], model_kwargs={"truncate": True})
client = HuggingFaceEndpointEmbeddings(model="owner/name")  # versions from 1.2.2 on refuse an address here
client.client = InferenceClient(sys.argv[1])
found = {
    "texts": TEXTS,
    "batches": [
        address.embed_documents(TEXTS),
        [address.embed_query(text) for text in TEXTS],
        asyncio.run(address.aembed_documents(TEXTS)),
        client.embed_documents(TEXTS),
    ],
}
json.dump(found, sys.stdout)
