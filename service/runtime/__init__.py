"""onnxruntime sessions, kernels, loaded models and the model repository."""

import os

# onnxruntime reads this when it is imported. Otherwise its telemetry starts a thread and writes a file.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
