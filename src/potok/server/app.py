"""The routes. FastAPI finds the route and writes the page /docs; what a route does stands elsewhere."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from potok import __version__
from potok.errors import ClientError, PotokError
from potok.server.answer import Answer
from potok.server.body import Disconnected, read_json
from potok.server.cache_view import CacheView
from potok.server.dialects import openai
from potok.server.dialects.openai_fields import PAGES
from potok.server.keys import ApiKeys, KeyCheck
from potok.server.replies import Json, error_response, send_error
from potok.server.request_id import RequestId
from potok.server.service import Phase, Service

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_app(service: Service, keys: ApiKeys) -> FastAPI:
    """The ASGI application over one engine."""
    app = FastAPI(title="potok", version=__version__, redoc_url=None)
    if keys:
        app.add_middleware(KeyCheck, keys=keys)
    app.add_middleware(RequestId)  # added last, so it comes first
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(PotokError, _on_error)
    app.add_exception_handler(Exception, _on_error)
    _add_generation(app, service)
    _add_tokens(app, service)
    _add_models(app, service)
    _add_health(app, service)
    _add_admin(app, CacheView(service, guarded=bool(keys)))
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        message, code = f"{request.url.path} does not take {request.method}.", "method_not_allowed"
    else:
        message, code = f"there is no {request.url.path[:100]} here.", "not_found"
    response = error_response(ClientError(message, None, code))
    response.headers.update(error.headers or {})
    return response


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", openapi_extra=PAGES["completion"])
    async def completions() -> Response:
        return Answer(service, openai.open_completion)

    @app.post("/v1/chat/completions", openapi_extra=PAGES["chat"])
    async def chat_completions() -> Response:
        return Answer(service, openai.open_chat)


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", openapi_extra=PAGES["tokenize"])
    async def tokenize() -> Response:
        return _Quick(lambda body: openai.tokenize(service.frontend(), body))

    @app.post("/detokenize", openapi_extra=PAGES["detokenize"])
    async def detokenize() -> Response:
        return _Quick(lambda body: openai.detokenize(service.frontend(), body))


def _add_models(app: FastAPI, service: Service) -> None:
    created = int(time.time())

    @app.get("/v1/models")
    async def models() -> Response:
        return Json({"object": "list", "data": [openai.model_card(service.frontend(), created)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        openai.check_model(service.frontend(), name)
        return Json(openai.model_card(service.frontend(), created))


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/health/live")
    async def live() -> Response:
        """503: only a restart helps."""
        return Response(status_code=200 if service.live else 503)

    @app.get("/health/ready")
    async def ready() -> Response:
        """503: send new calls elsewhere."""
        return Response(status_code=200 if service.live and service.phase is Phase.READY else 503)

    @app.get("/health")
    async def health() -> Response:
        """503 before the model is loaded, and when only a restart helps."""
        return Response(status_code=200 if service.live and service.loaded else 503)

    app.get("/ping")(health)
    app.post("/ping")(health)

    @app.get("/version")
    async def version() -> Response:
        return Json({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=METRICS_TYPE)


def _add_admin(app: FastAPI, cache_view: CacheView) -> None:
    @app.get("/admin/cache")
    async def cache(request: Request) -> Response:
        """What the prefix cache holds. top: how many prefixes; text: 1 shows how they begin."""
        return Json(await cache_view.answer(request))


class _Quick(Response):
    """A call that the engine takes no part in: JSON in, JSON out."""

    def __init__(self, work: Callable[[Any], Awaitable[Any]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            result = await self._work(await read_json(scope, receive))
        except Disconnected:
            return
        except PotokError as error:
            await send_error(scope, receive, send, error)
            return
        await Json(result)(scope, receive, send)
