"""The HTTP API over an asker: predictions, health, budgets, and rows as JSON.

A feature that may be missing may be left out. Columns that the model does not know are left out of
account, as they are in a file of new rows; in a row that lacks a feature they are refused, since a
misspelt name would otherwise be a missing value.

Rows are counted before they are read, each is checked for the model's own columns alone, and the
check ends soon after :data:`MOST_LINES` problems: what a body costs follows from its size, whatever
it holds.
"""

import asyncio
import json
import math
import queue
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Annotated, Any, Final, Literal

import numpy as np
import pandas as pd
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, create_model
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from securevfl.core import checks
from securevfl.core.errors import BudgetExceededError, DataError, ProtocolError
from securevfl.data.cells import dates_of, with_sign
from securevfl.data.columns import NumberColumn
from securevfl.data.schema import TableSchema
from securevfl.federation.run_plan import PredictionBudget
from securevfl.models.alone.choice import Used
from securevfl.runtime.prediction_session import NotFiniteError
from securevfl.runtime.predictions import Predictions
from securevfl.serving.asking import Asker
from securevfl.serving.guard import CUT_OFF, PREDICT, Rate, error_response
from securevfl.version import __version__

Kind = Literal["number", "boolean", "words", "date", "text"]

MOST_LINES: Final = 20
"""Problems that are listed; the check ends soon after."""

_LONGEST_NAME: Final = 60
_LONGEST_TEXT: Final = 1000
_LARGEST_CODE: Final = 2**63 - 1
# One that is not closed runs to the end: a failed match would be tried again at each quote.
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_STRICT: Final = ConfigDict(extra="forbid")
_KEY: Final = "key; a row without one is predicted by the primary's columns alone"
_FLOAT32: Final = float(np.finfo(np.float32).max)
_NUMBER: Final = Annotated[
    float, Field(strict=True, allow_inf_nan=False, ge=-_FLOAT32, le=_FLOAT32)
]
_TEXT: Final = Annotated[str, Field(strict=True, max_length=_LONGEST_TEXT)]
_CODE: Final = Annotated[int, Field(strict=True, ge=-_LARGEST_CODE, le=_LARGEST_CODE)]
_TYPES: Final[Mapping[Kind, Any]] = {
    "number": _NUMBER,
    "boolean": StrictBool,
    "words": _TEXT | _CODE,
    "date": _TEXT,
    "text": _TEXT | _CODE,
}
_NO_NUMBER: Final = "must be a number as JSON writes it, such as 1.5: no text, true or false"
_EXPECTED: Final[Mapping[Kind, str]] = {
    "number": "must be a number within float32",
    "boolean": "must be true or false",
    "words": f"must be a text of at most {_LONGEST_TEXT:,} characters",
    "date": "must be a date such as 2020-12-31",
    "text": f"must be a text of at most {_LONGEST_TEXT:,} characters",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RowColumn:
    """One column of a row."""

    name: str
    kind: Kind
    required: bool
    """True if the column must be there."""
    nullable: bool
    """True if the column may be null."""
    note: str
    """Purpose of the column."""
    sign: str = ""
    """Sign of the column's numbers in tables; a JSON row has the number alone."""


class BadRowsError(DataError):
    """Error of a body without valid rows.

    Its lines name rows and columns, and never quote a cell.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        more = ["and more"] if len(lines) > MOST_LINES else []
        self.lines = (*lines[:MOST_LINES], *more)
        """Problems, a line for each cell."""
        super().__init__("; ".join(self.lines))


class TooManyRowsError(DataError):
    """Error of a body with more rows than a request may have."""


class RowFormat:
    """The rows that a model takes."""

    def __init__(self, columns: Sequence[RowColumn]) -> None:
        self.columns = tuple(columns)
        self._by_name = {column.name: column for column in columns}
        fields: dict[str, Any] = {
            f"column_{number}": _field(column) for number, column in enumerate(columns)
        }
        self._row = create_model("Row", __config__=_STRICT, **fields)

    def question(self, *, most_rows: int) -> type[BaseModel]:
        """Return the schema of a body, for clients: ``rows``, or one ``row``.

        Args:
            most_rows: Most rows of one request.
        """
        rows = Field(default=None, max_length=most_rows, description="Rows to predict.")
        return create_model(
            "Question",
            __config__=_STRICT,
            rows=(list[self._row] | None, rows),  # type: ignore[name-defined,arg-type]
            row=(self._row | None, Field(default=None, description="One row, instead of rows.")),
        )

    @classmethod
    def of(
        cls, schema: TableSchema, text_keys: Mapping[str, Literal["text", "number"]]
    ) -> "RowFormat":
        """Return the format of a model's rows.

        Args:
            schema: The model's.
            text_keys: Key columns that are compared as they are, by the table's own names; none
                where keys are numbers that the schema has.
        """
        keys = [
            RowColumn(name=key.name, kind=key.kind, required=True, nullable=True, note=_KEY)
            for key in schema.keys
        ]
        texts = [
            RowColumn(name=name, kind=kind, required=True, nullable=True, note=_KEY)
            for name, kind in text_keys.items()
        ]
        features = []
        for column in schema.columns:
            fills = schema.missing == "fill" and column.fills is not None
            features.append(
                RowColumn(
                    name=column.name,
                    kind=column.kind,
                    required=not fills,
                    nullable=fills,
                    note=f"feature: {column.encoding}",
                    sign=column.sign if isinstance(column, NumberColumn) else "",
                )
            )
        return cls([*keys, *texts, *features])

    def read(self, body: bytes, *, most_rows: int) -> pd.DataFrame:
        """Return the rows of a body as a table, numbers as float64 and all else as it came.

        Args:
            body: JSON: ``{"rows": [{...}, ...]}`` or ``{"row": {...}}``.
            most_rows: Most rows of one request.

        Raises:
            TooManyRowsError: Before any row is checked.
            BadRowsError: Naming the first rows and columns that are wrong.
        """
        rows: list[BaseModel] = []
        lines: list[str] = []
        for number, cells in enumerate(_rows_of(body, most_rows)):
            try:
                rows.append(self._check_row(number, cells))
            except BadRowsError as error:
                lines += error.lines
            if len(lines) > MOST_LINES:
                break
        if lines:
            raise BadRowsError(lines)
        return self._frame(rows)

    def _check_row(self, number: int, cells: Any) -> BaseModel:
        if not isinstance(cells, dict):
            raise BadRowsError([f"row {number + 1}: must be an object, one value a column"])
        known = {name: cells[name] for name in self._by_name if name in cells}
        lines = self._misspelt(number, cells) if len(known) < len(self._by_name) else []
        try:
            row: BaseModel = self._row.model_validate(known)
        except ValidationError as error:
            lines = [*dict.fromkeys(self._problems(number, error)), *lines]
            raise BadRowsError(lines) from None
        if lines:
            raise BadRowsError(lines)
        return row

    def _misspelt(self, number: int, cells: Mapping[str, Any]) -> list[str]:
        """Return a line for each unknown column of a row that lacks some column."""
        absent = [name for name in self._by_name if name not in cells]
        unknown = (name for name in cells if name not in self._by_name)
        first = repr(absent[0][:_LONGEST_NAME])
        lines = []
        for name in islice(unknown, MOST_LINES + 1):
            meant = checks.did_you_mean(name[:_LONGEST_NAME], absent)
            todo = meant or f", and {first} is not there; write null for it if it is missing"
            lines.append(_line(number, name, f"is no column of the model{todo}"))
        return lines

    def _problems(self, number: int, error: ValidationError) -> Iterator[str]:
        """Yield the problems of a row, a line for each cell; some come twice."""
        for detail in error.errors(include_url=False, include_context=False):
            name = str(detail["loc"][0])
            what = _EXPECTED[self._by_name[name].kind]
            if detail["type"] == "missing" or detail["input"] is None:
                what = "is missing"
            elif detail["type"] == "float_type":
                what = _NO_NUMBER
            yield _line(number, name, what)

    def _frame(self, rows: Sequence[BaseModel]) -> pd.DataFrame:
        cells: dict[str, Any] = {}
        wrong: list[tuple[int, str]] = []
        for number, column in enumerate(self.columns):
            values = [getattr(row, f"column_{number}") for row in rows]
            if column.kind == "number" and column.sign:
                signed = [v if v is None else with_sign(v, column.sign) for v in values]
                cells[column.name] = pd.Series(signed, dtype=object)
                continue
            if column.kind == "number":
                cells[column.name] = np.array(values, dtype=np.float64)
                continue
            spelled = column.kind in ("words", "text", "date")
            texts = [str(value) if spelled and value is not None else value for value in values]
            series = pd.Series(texts, dtype=object)
            cells[column.name] = series
            if column.kind == "date":
                bad = np.isnat(dates_of(series)) & series.notna().to_numpy(dtype=bool)
                wrong += [(int(row), column.name) for row in np.flatnonzero(bad)]
        if wrong:
            lines = [_line(row, name, _EXPECTED["date"]) for row, name in sorted(wrong)]
            raise BadRowsError(lines)
        return pd.DataFrame(cells)


def _rows_of(body: bytes, most_rows: int) -> list[Any]:
    """Return the rows of a body, not checked yet.

    Objects and lists are counted before JSON makes them: a million of them cost seconds of garbage
    collection, in which nothing else of the process runs.
    """
    too_many = TooManyRowsError(f"a request may have {most_rows} rows, of single values")
    nested = most_rows + 2  # the body, "rows" and each row
    if _count_brackets(body) > nested and _count_brackets(_STRING.sub(b"", body)) > nested:
        raise too_many
    try:
        asked = from_json(body, allow_inf_nan=False)
        # Of two values of one name, the reader above keeps the last.
        json.loads(body, object_pairs_hook=_require_different)
    except BadRowsError:  # it is a ValueError, too
        raise
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict):
        raise BadRowsError(['the body must be JSON: {"rows": [{...}, ...]} or {"row": {...}}'])
    for name in asked:
        if name not in ("rows", "row"):
            shown = name[:_LONGEST_NAME]
            raise BadRowsError([f'the body has {shown!r}; it has "rows" or "row" alone'])
    rows, row = asked.get("rows"), asked.get("row")
    if (rows is None) == (row is None):
        raise BadRowsError(['the body has either "rows", a list, or "row", one of them'])
    if rows is None:
        return [row]
    if not isinstance(rows, list):
        raise BadRowsError(['"rows" must be a list of objects, and "row" one object'])
    if not rows:
        raise BadRowsError(['"rows" is empty'])
    if len(rows) > most_rows:
        raise too_many
    return rows


def _require_different(pairs: list[tuple[str, Any]]) -> None:
    """Refuse an object with a repeated name.

    Raises:
        BadRowsError: Naming it.
    """
    seen = set[str]()
    for name, _ in pairs:
        if name in seen:
            raise BadRowsError([f"{name[:_LONGEST_NAME]!r} is there twice in one object"])
        seen.add(name)


def _count_brackets(body: bytes) -> int:
    return body.count(b"{") + body.count(b"[")


def _field(column: RowColumn) -> tuple[Any, Any]:
    of = _TYPES[column.kind] | None if column.nullable else _TYPES[column.kind]
    if column.required:
        return (of, Field(alias=column.name, description=column.note))
    return (of, Field(default=None, alias=column.name, description=column.note))


def _line(row: int, column: str, what: str) -> str:
    return f"row {row + 1}, column {column[:_LONGEST_NAME]!r}: {what}"


RETRY_S: Final = 5
"""Seconds after which a client may try again if a party is missing."""

_SPENT: Final = (
    "the budget for predictions of this model is spent, at this party or at another; nothing was "
    "released. GET /budget says what is left"
)
_GONE: Final = "a party is not connected; the request may be sent again"
_JSON: Final = "application/json"
"""Content type of a body. Another site's page cannot send it without the browser's asking first."""

_NO_JSON: Final = f"send the header 'Content-Type: {_JSON}'"
_NO_PATH: Final = (
    "there is no such path; there are POST /predict, and GET /health, /ready, /budget, /schema, "
    "/openapi.json"
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Served:
    """Description of the served model."""

    federation: str
    run: str
    task: str
    classes: Sequence[Any] | None
    rows: RowFormat


def make_app(served: Served, asker: Asker, rate: Rate, *, max_rows: int) -> FastAPI:
    """Return the application, which starts and stops the asker.

    Args:
        served: Description of the model.
        asker: Thread that requests predictions from the parties.
        rate: Limit on predicted rows.
        max_rows: Most rows of one request, whatever the rate.
    """
    # One body is read at a time: what the largest one needs in memory is needed once.
    reader = ThreadPoolExecutor(1, thread_name_prefix="securevfl-rows")
    most_rows = rate.most_rows(max_rows)

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
