"""OpenVINO, in an environment of its own: runs a model of one input. The arguments are its file and the integers."""

import json
import sys
from pathlib import Path

import numpy as np
import openvino

file, ids = Path(sys.argv[1]), np.array(json.loads(sys.argv[2]))
model = openvino.Core().read_model(file)
compiled = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
vectors = compiled({model.inputs[0].any_name: ids})[0]
found = {
    "inputs": [[port.any_name, port.element_type.get_type_name()] for port in model.inputs],
    "outputs": [[port.any_name, port.element_type.get_type_name()] for port in model.outputs],
    "shape": vectors.shape,
    "bytes": vectors.tobytes().hex(),
}
json.dump(found, sys.stdout)
