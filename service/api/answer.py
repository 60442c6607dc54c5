"""Answers of the native door, in the format that was asked for."""

from fastapi.responses import Response

from incipit.service.api.media import JSON, NPY
from incipit.service.messages import Answer
from incipit.service.wire.native import answer_json, raw_bytes, sole_output, write_json, write_npy


def respond(answer: Answer, media: str, encoding: str) -> Response:
    """Return `answer` in the type `media`; `encoding` is how JSON holds values."""
    if media == JSON:
        return Response(write_json(answer_json(answer, encoding)), media_type=JSON)
    name, tensor = sole_output(answer)
    headers = {
        "Incipit-Model": answer.model,
        "Incipit-Version": str(answer.version),
        "Incipit-Output": name,
        "Incipit-Shape": ",".join(map(str, tensor.shape)),
        "Incipit-Dtype": answer.dtype,
    }
    content = write_npy(tensor) if media == NPY else raw_bytes(tensor)
    return Response(content, media_type=media, headers=headers)
