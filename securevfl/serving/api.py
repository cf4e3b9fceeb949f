"""The HTTP API over an asker: predictions, health, budgets, figures and the schema of a row."""

import asyncio
import math
import queue
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from securevfl.core.errors import BudgetExceededError, DataError, ProtocolError
from securevfl.federation.run_plan import PredictionBudget
from securevfl.models.alone.choice import Used
from securevfl.runtime.prediction_session import NotFiniteError
from securevfl.runtime.predictions import Predictions
from securevfl.serving.asking import Asker
from securevfl.serving.guard import CUT_OFF, PREDICT, Rate, error_response
from securevfl.serving.json_rows import BadRowsError, RowFormat, TooManyRowsError
from securevfl.serving.prometheus import ServiceMetrics
from securevfl.version import __version__

RETRY_S: Final = 5
"""Seconds after which a client may try again if a party is missing."""

_PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
_SPENT: Final = (
    "the budget for predictions of this model is spent, at this party or at another; nothing was "
    "released. GET /budget says what is left"
)
_GONE: Final = "a party is not connected; the request may be sent again"
_JSON: Final = "application/json"
"""Content type of a body. Another site's page cannot send it without the browser's asking first."""

_NO_JSON: Final = f"send the header 'Content-Type: {_JSON}'"
_NO_PATH: Final = (
    "there is no such path; there are POST /predict, and GET /health, /ready, /budget, /metrics, "
    "/schema, /openapi.json"
)
_TOO_FAST: Final = "more predictions a second than this server takes"
_NOT_FINITE: Final = "the model's output is not finite"
_MISFIT: Final = "the rows do not fit the model's columns; GET /schema says what they hold"


class Predicted(BaseModel):
    """Prediction of one row."""

    prediction: str | bool | int | float | None
    """The most probable class, or a regression's number in the label's unit; null with a note."""
    probabilities: dict[str, float] | None = None
    """Probability of each class; null for a regression."""
    note: str | None = None
    """Remark on the row, such as that its key is empty."""


class Answer(BaseModel):
    """Predictions, in the order of the rows."""

    predictions: list[Predicted]
    epsilon: float | None = Field(
        description="What the request to the parties cost, which others may have shared, or what "
        "all predictions cost, where each record has a number of releases; null: no bound, or no "
        "promise"
    )
    used: Used = Field(
        description="What answered: the joint model, or the primary alone, which sends nothing and "
        "costs nothing"
    )
    without: list[str] = Field(
        description="Secondaries that were lost, and without which the others have answered"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Served:
    """Description of the served model."""

    federation: str
    run: str
    task: str
    classes: Sequence[Any] | None
    rows: RowFormat
    max_rows: int


def make_app(served: Served, asker: Asker, figures: ServiceMetrics, rate: Rate) -> FastAPI:
    """Return the application, which starts and stops the asker.

    Args:
        served: Description of the model.
        asker: Thread that requests predictions from the parties.
        figures: Figures for Prometheus.
        rate: Limit on predicted rows.
    """
    # One body is read at a time: what the largest one needs in memory is needed once.
    reader = ThreadPoolExecutor(1, thread_name_prefix="securevfl-rows")
    most_rows = rate.most_rows(served.max_rows)

    @asynccontextmanager
    async def life(_app: FastAPI) -> AsyncIterator[None]:
        asker.start()
        try:
            yield
        finally:
            await asyncio.to_thread(asker.close)
            reader.shutdown()

    app = FastAPI(
        title=f"securevfl: {served.federation}",
        version=__version__,
        lifespan=life,
        docs_url=None,  # pages that fetch scripts from elsewhere
        redoc_url=None,
    )
    app.add_exception_handler(HTTPException, _plain)
    question = served.rows.question(most_rows=most_rows)
    shown = question.model_json_schema()
    body = question.model_json_schema(ref_template="#/components/schemas/{model}")
    parts = body.pop("$defs")
    content = {"application/json": {"schema": body}}

    @app.post(
        PREDICT,
        response_model=Answer,
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )
    async def predict(request: Request) -> Response:
        """Predict rows; every row is charged to every party's ledger."""
        # Read by a thread, and not by FastAPI, which would do it in the event loop.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
            return error_response(422, "bad_rows", _NO_JSON)
        return await _answer_prediction(request, served.rows, most_rows, asker, rate, reader)

    @app.get("/health")
    async def health() -> dict[str, bool]:
        """Say that the server lives, and whether all parties are connected."""
        return {"live": True, "ready": asker.ready}

    @app.get("/ready")
    async def ready() -> Response:
        """Answer 200 while all parties are connected, else 503."""
        return JSONResponse({"ready": asker.ready}, 200 if asker.ready else 503)

    @app.get("/budget")
    async def budget() -> dict[str, Any]:
        """Return the spent and the remaining budget of the model's predictions, if known."""
        return {
            "run": served.run,
            "parties": [_budget_fields(party_budget) for party_budget in asker.budgets],
        }

    @app.get("/metrics")
    async def metrics() -> Response:
        """Give figures to Prometheus."""
        text = figures.text(ready=asker.ready, budgets=asker.budgets)
        return Response(text, media_type=_PROMETHEUS)

    @app.get("/schema")
    async def schema() -> dict[str, Any]:
        """Return the columns of a row, and the kind of prediction."""
        return {
            "federation": served.federation,
            "task": served.task,
            "classes": None if served.classes is None else list(served.classes),
            "columns": [asdict(column) for column in served.rows.columns],
            "max_rows": most_rows,
            "body": shown,
        }

    # Once, and in advance: it is kept.
    app.openapi()["components"]["schemas"].update(parts)
    return app


async def _answer_prediction(
    request: Request,
    rows: RowFormat,
    most_rows: int,
    asker: Asker,
    rate: Rate,
    reader: ThreadPoolExecutor,
) -> Response:
    try:
        body = b"".join([piece async for piece in request.stream()])
        frame = await asyncio.get_running_loop().run_in_executor(
            reader, partial(rows.read, body, most_rows=most_rows)
        )
        del body  # it may be large, and the wait long
        wait_s = rate.wait_s(len(frame))
        if wait_s > 0:
            later = {"Retry-After": str(math.ceil(wait_s))}
            return error_response(429, "too_many_requests", _TOO_FAST, later)
        predictions = await _unless_gone(request, asker.ask(frame))
        if predictions is None:
            return error_response(400, "cut_off", CUT_OFF)
        return await asyncio.to_thread(_answer, predictions)
    except TooManyRowsError as error:
        return error_response(413, "too_large", str(error))
    except BadRowsError as error:
        return error_response(422, "bad_rows", *error.lines)
    except queue.Full:
        return error_response(
            429, "too_many_requests", "too many wait already", {"Retry-After": "1"}
        )
    except BudgetExceededError:
        return _refuse_spent(asker)
    except NotFiniteError as error:
        return error_response(422, "bad_rows", str(error))
    except DataError:
        # Its text may quote a cell.
        return error_response(422, "bad_rows", _MISFIT)
    except ProtocolError as error:
        if BudgetExceededError.__name__ in str(error):
            return _refuse_spent(asker)
        return error_response(503, "party_gone", _GONE, {"Retry-After": str(RETRY_S)})
    except Exception as error:  # noqa: BLE001 - its text may quote a row: it goes nowhere
        return error_response(500, "failed", f"{type(error).__name__}; nothing more is told")


async def _unless_gone(request: Request, asked: "Future[Predictions]") -> Predictions | None:
    """Wait for predictions; withdraw the request if its client leaves before its turn.

    Returns:
        None if the client has left; nothing is charged then unless the parties were asked already.
    """
    answer: asyncio.Future[Any] = asyncio.wrap_future(asked)
    # The body has been read: all that can come is that the client leaves.
    gone: asyncio.Future[Any] = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await answer if answer.done() else None
    finally:
        answer.cancel()
        gone.cancel()


def _refuse_spent(asker: Asker) -> Response:
    return error_response(
        403,
        "budget_spent",
        _SPENT,
        parties=[_budget_fields(party_budget) for party_budget in asker.budgets],
    )


def _budget_fields(budget: PredictionBudget) -> dict[str, Any]:
    return {**asdict(budget), "left": budget.epsilon_left}


def _answer(predictions: Predictions) -> Response:
    values = [
        value.item() if isinstance(value, np.generic) else value for value in predictions.values
    ]
    shares: Sequence[Any] = [None] * len(values)
    if predictions.probabilities is not None and predictions.classes is not None:
        names = [str(name) for name in predictions.classes]
        shares = [dict(zip(names, row, strict=True)) for row in predictions.probabilities.tolist()]
    notes = predictions.notes or [""] * len(values)
    answer = Answer(
        predictions=[
            _row_answer(value, share, note)
            for value, share, note in zip(values, shares, notes, strict=True)
        ],
        epsilon=predictions.epsilon,
        used=predictions.used,
        without=list(predictions.without),
    )
    return Response(answer.model_dump_json(), media_type="application/json")


def _row_answer(value: Any, share: dict[str, float] | None, note: str) -> Predicted:
    numbers = [value] if share is None else list(share.values())
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        return Predicted(prediction=None, note=_NOT_FINITE)
    return Predicted(prediction=value, probabilities=share, note=note or None)


async def _plain(_request: Request, error: Exception) -> Response:
    """Return Starlette's own refusals in the form of all others."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    words = {400: "bad_request", 404: "not_found", 405: "not_allowed"}
    more = (getattr(error, "headers", None) or {}).get("Allow", "another method")
    details = {404: _NO_PATH, 405: f"this path takes {more}"}
    lines = [details[status]] if status in details else []
    return error_response(status, words.get(status, "refused"), *lines)
