"""A model of MLServer, as its documentation writes one."""

from graph import OnnxGraph
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class MlserverPeer(MLModel):
    """Ids in, vectors out."""

    async def load(self) -> bool:
        """Open the graph."""
        self._graph = OnnxGraph()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Run it."""
        vectors = self._graph(NumpyCodec.decode_input(payload.inputs[0]))
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("embeddings", vectors)])
