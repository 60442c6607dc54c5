"""The native API for the tables of a model: `GET /models/{name}/positions` and `GET /models/{name}/neighbours`."""

import numpy as np
from fastapi import APIRouter
from fastapi.responses import Response

from preblock.service.api.http.answer import TYPES, respond
from preblock.service.api.http.negotiation import JSON, answer_type
from preblock.service.api.http.request import RawRequest, single_values
from preblock.service.api.http.response import write_body
from preblock.service.api.http.routes.model_routes import add_model_routes
from preblock.service.api.http.schemas import native_api as schemas
from preblock.service.codecs.native_json import read_neighbour_query, read_position_query
from preblock.service.core.auth import caller
from preblock.service.engine.engine import Engine
from preblock.service.engine.tables import TableReader


def router(engine: Engine) -> APIRouter:
    """Return the router of this API."""
    routes = APIRouter(tags=["tables"])
    reader = TableReader(engine)

    async def positions(request: RawRequest, name: str, version: str | None) -> Response:
        """Return the vectors that a model adds for its positions."""
        with engine.admission.request("positions") as record:
            model = engine.repository.get(name, version, caller=caller())
            record.model = model.name
            media = answer_type(request.list_header(b"accept"), TYPES)
            first, count, encoding = read_position_query(single_values(request.query))
            answer = await reader.positions(model, first, count, record)
            text = media == JSON and encoding == "float"
            response = await engine.scheduler.run(answer.size, lambda: respond(answer, media, encoding), text)
            return await write_body(response, request, engine, text)

    async def neighbours(request: RawRequest, name: str, version: str | None) -> schemas.NeighboursAnswer:
        """Return the nearest tokens of a token by cosine."""
        with engine.admission.request("neighbours") as record:
            model = engine.repository.get(name, version, caller=caller())
            record.model = model.name
            answer_type(request.list_header(b"accept"), (JSON,))
            token_id, count = read_neighbour_query(single_values(request.query))
            ids, cosines = await reader.neighbours(model, token_id, count, record)
            first, *tokens = await reader.spell(model, np.array([token_id, *ids]), record)
            found = zip(ids.tolist(), tokens, cosines.tolist(), strict=True)
            return schemas.NeighboursAnswer(
                model=model.name,
                version=model.version,
                id=token_id,
                token=first,
                neighbours=[schemas.Neighbour(id=id_, token=token, cosine=cosine) for id_, token, cosine in found],
            )

    add_model_routes(routes, "GET", "/positions", positions, **schemas.POSITIONS)
    add_model_routes(routes, "GET", "/neighbours", neighbours, schemas.NeighboursAnswer, **schemas.NEIGHBOURS)
    return routes
