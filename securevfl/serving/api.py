"""The HTTP API over an asker: predictions, health, budgets, figures and the schema of a row."""

import asyncio
import queue
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from securevfl.core.errors import BudgetExceededError, DataError, ProtocolError
from securevfl.federation.prediction_budget import PredictionBudget
from securevfl.models.alone.rule import Used
from securevfl.runtime.predictions import Predictions
from securevfl.serving.asking import Asker
from securevfl.serving.figures import Figures
from securevfl.serving.guard import refused
from securevfl.serving.rows import BadRowsError, RowFormat, shortened
from securevfl.version import __version__

RETRY_S: Final = 5
"""After which a client may ask again when a party is gone."""

_PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
_SPENT: Final = (
    "the budget for predictions of this model is spent, at this party or at another; nothing was "
    "released. GET /budget says what is left"
)
_GONE: Final = "a party is not connected; the request may be sent again"
_MISFIT: Final = "the rows do not fit the model's columns; GET /schema says what they hold"


class Predicted(BaseModel):
    """What the model says of one row."""

    prediction: str | bool | int | float
    """The most probable class, or a regression's number in the label's unit."""
    probabilities: dict[str, float] | None = None
    """Of each class; null for a regression."""
    note: str | None = None
    """What there is to know of the row, such as that its key is empty."""


class Answer(BaseModel):
    """Predictions, in the order of the rows."""

    predictions: list[Predicted]
    epsilon: float | None = Field(
        description="What the request to the parties cost, which others may have shared; null: no "
        "bound, or no promise"
    )
    used: Used = Field(
        description="Who answered: the joint model, or the primary alone, which asks nobody and "
        "costs nothing"
    )
    without: list[str] = Field(
        description="Secondaries that were lost, and without which the others have answered"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Served:
    """What is served."""

    federation: str
    run: str
    task: str
    classes: Sequence[Any] | None
    rows: RowFormat
    max_rows: int


def make_app(served: Served, asker: Asker, figures: Figures) -> FastAPI:
    """Return the application; its life starts and ends the asker.

    Args:
        served: What is served.
        asker: Asks the parties.
        figures: For Prometheus.
    """

    @asynccontextmanager
    async def life(_app: FastAPI) -> AsyncIterator[None]:
        asker.start()
        try:
            yield
        finally:
            await asyncio.to_thread(asker.close)

    app = FastAPI(
        title=f"securevfl: {served.federation}",
        version=__version__,
        lifespan=life,
        docs_url=None,  # pages that fetch scripts from elsewhere
        redoc_url=None,
    )
    app.add_exception_handler(RequestValidationError, _bad_rows(served.rows))
    app.add_exception_handler(HTTPException, _plain)
    question = served.rows.question

    @app.post("/predict", response_model=Answer)
    async def predict(body: question) -> Any:  # type: ignore[valid-type]
        """Predict rows; every row is charged to every party's ledger."""
        return await _predicted(served, asker, body)

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
        """Say what predictions of the model have spent, and what is left, as far as is known."""
        return {"run": served.run, "parties": [_told(one) for one in asker.budgets]}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Give figures to Prometheus."""
        text = figures.text(ready=asker.ready, budgets=asker.budgets)
        return Response(text, media_type=_PROMETHEUS)

    @app.get("/schema")
    async def schema() -> dict[str, Any]:
        """Say what a row holds, and what is predicted."""
        return {
            "federation": served.federation,
            "task": served.task,
            "classes": None if served.classes is None else list(served.classes),
            "columns": [asdict(column) for column in served.rows.columns],
            "max_rows": served.max_rows,
            "body": question.model_json_schema(),
        }

    return app


async def _predicted(served: Served, asker: Asker, body: BaseModel) -> Response | Answer:
    try:
        rows = served.rows.rows_of(body)
        if len(rows) > served.max_rows:
            return refused(413, "too_large", f"a request may have {served.max_rows} rows")
        frame = served.rows.frame(rows)
    except BadRowsError as error:
        return refused(422, "bad_rows", *shortened(error.lines))
    except DataError as error:
        return refused(422, "bad_rows", str(error))
    try:
        return _answer(await asyncio.wrap_future(asker.ask(frame)))
    except queue.Full:
        return refused(429, "too_many_requests", "too many wait already", {"Retry-After": "1"})
    except BudgetExceededError:
        return _spent(asker)
    except DataError:
        # Its text may quote a cell.
        return refused(422, "bad_rows", _MISFIT)
    except ProtocolError as error:
        if BudgetExceededError.__name__ in str(error):
            return _spent(asker)
        return refused(503, "party_gone", _GONE, {"Retry-After": str(RETRY_S)})
    except Exception as error:  # noqa: BLE001 - its text may quote a row: it goes nowhere
        return refused(500, "failed", f"{type(error).__name__}; nothing more is told")


def _spent(asker: Asker) -> Response:
    return refused(403, "budget_spent", _SPENT, parties=[_told(one) for one in asker.budgets])


def _told(budget: PredictionBudget) -> dict[str, Any]:
    return {**asdict(budget), "left": budget.left}


def _answer(predictions: Predictions) -> Answer:
    values = [
        value.item() if isinstance(value, np.generic) else value for value in predictions.values
    ]
    shares: Sequence[Any] = [None] * len(values)
    if predictions.probabilities is not None and predictions.classes is not None:
        names = [str(name) for name in predictions.classes]
        shares = [dict(zip(names, row, strict=True)) for row in predictions.probabilities.tolist()]
    notes = predictions.notes or [""] * len(values)
    return Answer(
        predictions=[
            Predicted(prediction=value, probabilities=share, note=note or None)
            for value, share, note in zip(values, shares, notes, strict=True)
        ],
        epsilon=predictions.epsilon,
        used=predictions.used,
        without=list(predictions.without),
    )


def _bad_rows(rows: RowFormat) -> Any:
    async def answer(_request: Request, error: RequestValidationError) -> Response:
        return refused(422, "bad_rows", *shortened(rows.problems(error.errors())))

    return answer


async def _plain(_request: Request, error: Exception) -> Response:
    """Answer Starlette's own refusals in the form of all others."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    words = {400: "bad_request", 404: "not_found", 405: "not_allowed"}
    return refused(status, words.get(status, "refused"))
