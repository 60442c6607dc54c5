"""OpenVINO, in an environment of its own: embeds rows of n-gram tables. The arguments are the graph and the row ids."""

import json
import sys

import numpy as np
import openvino

graph, row_ids = sys.argv[1], np.array(json.loads(sys.argv[2]))
compiled = openvino.compile_model(openvino.Core().read_model(graph), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
vectors = compiled({"ngram_row_ids": row_ids})["ngram_embeddings"]
json.dump({"shape": vectors.shape, "bytes": vectors.tobytes().hex()}, sys.stdout)
