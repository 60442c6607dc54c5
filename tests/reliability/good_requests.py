"""Valid requests of every protocol, to be changed at random."""

from tritonclient.grpc import service_pb2

BODIES = {
    "json": ("/models/gpt/embed", "application/json"),
    "npy": ("/models/gpt/embed", "application/x-npy"),
    "raw": ("/models/gpt/embed?shape=1,3", "application/octet-stream"),
    "safetensors": ("/models/bert/embed", "application/x-safetensors"),
    "v2": ("/v2/models/bert/infer", "application/octet-stream"),
    "stem": ("/v2/models/vit/infer", "application/octet-stream"),
}
MORE: tuple[tuple[str, dict[str, object]], ...] = (
    ("/v1/embeddings", {"model": "bert", "input": ["a b", "c"], "encoding_format": "float", "pooling": "mean"}),
    ("/models/bert/embed", {"text": ["a b"], "return_tokens": True, "truncate": "right", "max_length": 3}),
    ("/models/bert/embed", {"input_ids": [[1, 2], [3]], "token_type_ids": [[0, 1], [0]], "dtype": "bfloat16"}),
    ("/models/gpt/embed", {"input_ids": [[1], [2]], "offset": [0, 3], "encoding": "float", "dtype": "float16"}),
    ("/models/spare/embed", {"input_ids": [1, 2, 3]}),
    (
        "/models/gpt/embed",
        {
            "parts": [[{"input_ids": [1, 9]}, {"vectors": "AACAPwAAgD8AAIA/AACAPw=="}], [{"input_ids": [2]}]],
            "placeholder": {"token_id": 9, "vectors": "AACAPwAAgD8AAIA/AACAPw=="},
        },
    ),
    ("/models/alibi/bias", {"query_length": 1, "key_length": 2}),
    ("/v2/models/gpt/infer", {"inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1, 1], "data": [1]}]}),
    ("/v2/repository/index", {"ready": True}),
    ("/v2/repository/models/spare/load", {"parameters": {}}),
    ("/v2/repository/models/spare/unload", {"parameters": {"unload_dependents": True}}),
)
PATHS = {path.partition("?")[0] for path, _ in (*BODIES.values(), *MORE)}
STEPS = (
    b'{"input_ids": [1, 2]}',
    b'{"input_ids": [[1], [2]], "offset": [1, 2]}',
    b'{"parts": [{"input_ids": [1]}, {"vectors": "AACAPwAAgD8AAIA/AACAPw=="}]}',
    b'{"append": [1]}',
    b'{"reorder": [0, 0]}',
    b'{"drop": [1]}',
    b'{"rewind": 0}',
    b'{"ping": true}',
)
LISTS = (
    {"input_ids": [1, 2, 3, 4, 5], "chunk": 2},
    {"input_ids": [[1, 2], [3]], "offset": [0, 3], "encoding": "float", "dtype": "bfloat16"},
    {"parts": [[{"input_ids": [1]}, {"vectors": "AACAPwAAgD8AAIA/AACAPw=="}], [{"input_ids": [2]}]], "chunk": 1},
    {"input_ids": [1, 2, 3], "offset": 4},  # one more than there are positions
)
"""Lists of ids, answered as events."""
METHODS = {
    "ServerLive": service_pb2.ServerLiveRequest(),
    "ServerReady": service_pb2.ServerReadyRequest(),
    "ServerMetadata": service_pb2.ServerMetadataRequest(),
    "ModelReady": service_pb2.ModelReadyRequest(name="bert", version="1"),
    "ModelMetadata": service_pb2.ModelMetadataRequest(name="vit"),
    "ModelConfig": service_pb2.ModelConfigRequest(name="gpt", version="1"),
    "ModelStatistics": service_pb2.ModelStatisticsRequest(name="bert", version="2"),
    "RepositoryIndex": service_pb2.RepositoryIndexRequest(ready=True),
    "RepositoryModelLoad": service_pb2.RepositoryModelLoadRequest(model_name="spare"),
    "RepositoryModelUnload": service_pb2.RepositoryModelUnloadRequest(model_name="spare"),
}
"""Methods of gRPC except those for inference, each with a good request."""
