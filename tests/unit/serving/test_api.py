"""The HTTP API over a run in one process: what goes in, what comes out, what is refused."""

import json
import logging
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fastapi.testclient import TestClient
from helpers.patience import PATIENCE_S
from helpers.shown_token import HEADERS, SHOWN, TOKEN

from securevfl import read_federation
from securevfl.core.errors import PartyFailedError
from securevfl.ledger.ledger_file import summary_of
from securevfl.runtime.entry import simulate
from securevfl.runtime.prediction_session import PredictionSession
from securevfl.runtime.trained_run import predict, trained_run
from securevfl.serving.server import (
    OpenedModel,
    ServerSettings,
    application,
    in_process,
    listening_socket,
)
from securevfl.testing import write_federation

BUDGET = 8.0
PROMISED = {
    "model": {"release": "pooled", "top": "additive", "hidden": 6},
    "privacy": {"epsilon": BUDGET, "delta": 1e-5, "encoder": "frozen", "links_per_record": 1},
    "linkage": {"choose": "records"},
}
ROW = {"lon": 5.0, "lat": 5.0, "x0": 0.5, "x1": -0.5, "x2": 0.0}
CHARGED = {name: value for name, value in PROMISED.items() if name != "linkage"}
"""Where rows choose, every request costs."""
LAST_OF_LEDGER = "parties/agency/ledger.jsonl"


def trained(folder: Path, **sections: Any) -> Path:
    """Simulate a small federation; return its run folder, beside the tables."""
    path = write_federation(folder, rows=80, training={"epochs": 1}, **sections)
    if "privacy" in sections:
        bounds = 'role = "secondary"\nscaling = "bounds"\nbounds = [-5, 5]'
        text = path.read_text(encoding="utf-8").replace('role = "secondary"', bounds)
        path.write_text(text, encoding="utf-8")
    run = folder / "run"
    simulate(path, out=run)
    return run


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def promised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("promised"), **PROMISED)


@pytest.fixture(scope="module")
def charged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("charged"), **CHARGED)


def opened(run: Path, **prediction: Any) -> OpenedModel:
    """Open a run, with other settings of what predictions may spend."""
    config = read_federation(run / "federation.toml")
    config = replace(config, prediction=replace(config.prediction, **prediction))
    return in_process(trained_run(run, federation=config, data_root=run.parent))


@contextmanager
def client_of(
    model: OpenedModel, *, headers: dict[str, str] = HEADERS, **settings: Any
) -> Iterator[TestClient]:
    """Serve a model to a client of this process, which shows the token."""
    app = application(model, TOKEN, ServerSettings(**settings))
    with TestClient(app, headers=headers) as client:
        wait_until_ready(client)
        yield client


def wait_until_ready(client: TestClient) -> None:
    waited, late = threading.Event(), time.monotonic() + PATIENCE_S
    while client.get("/ready").status_code != 200:
        assert time.monotonic() < late
        waited.wait(0.01)


@pytest.fixture(scope="module")
def client(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    # A run of its own: a server holds its ledgers.
    copy = shutil.copytree(plain.parent, tmp_path_factory.mktemp("served") / "copy")
    with client_of(opened(copy / "run")) as served:
        yield served


def charges(run: Path) -> list[int]:
    lines = [json.loads(line) for line in (run / LAST_OF_LEDGER).read_text().splitlines()]
    requests = {line["run"] for line in lines if line["kind"] == "open" and line.get("model")}
    current, rows = "", []
    for line in lines:
        current = line.get("run", current)
        if line["kind"] == "charge" and current in requests:
            rows.append(line["rows"])
    return rows


def test_it_predicts_what_the_command_predicts(plain: Path, tmp_path: Path) -> None:
    run = shutil.copytree(plain.parent, tmp_path / "copy") / "run"
    rows = pd.read_csv(run.parent / "agency.csv").iloc[:7].drop(columns="y")
    rows.to_csv(tmp_path / "new.csv", index=False)
    config = read_federation(run / "federation.toml")
    said = predict(
        run,
        tmp_path / "new.csv",
        federation=config,
        out=tmp_path / "out.csv",
        data_root=run.parent,
    )
    with client_of(opened(run)) as client:
        answer = client.post("/predict", json={"rows": rows.to_dict("records")})
        one = client.post("/predict", json={"row": rows.iloc[0].to_dict()})
    assert answer.status_code == one.status_code == 200
    told = answer.json()["predictions"]
    assert [row["prediction"] for row in told] == list(said.values)
    assert said.probabilities is not None
    shares = [[row["probabilities"][name] for name in ("0", "1", "2")] for row in told]
    np.testing.assert_array_equal(shares, said.probabilities)
    assert len(one.json()["predictions"]) == 1
    # Each row of each request is booked, the command's too.
    assert charges(run) == [7, 7, 1]


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ({"rows": [ROW, {**ROW, "x0": "hidden"}]}, ["row 2, column 'x0': must be a number"]),
        ({"rows": [{**ROW, "x1": True}]}, ["'x1': must be a number as JSON writes it, such as"]),
        ({"rows": [{**ROW, "x1": "1"}]}, ["'x1': must be a number as JSON writes it, such as"]),
        ({"row": {**ROW, "x1": 1e39}}, ["row 1, column 'x1': must be a number within float32"]),
        (
            {"rows": [{"lon": 5.0, "lat": 5.0, "x0": 1, "x1": 1, "X_2": 1}]},
            ["row 1, column 'X_2': is no column of the model; did you mean 'x2'?"],
        ),
        (
            {"rows": [{"lon": 5.0, "lat": 5.0, "x0": 1, "x1": 1, "spam": 1}]},
            ["is no column of the model, and 'x2' is not there; write null for it"],
        ),
        ({"rows": [{"lat": 1.0}]}, ["row 1, column 'lon': is missing"]),
        (
            {"rows": [{"lon": 5.0, "lat": "hidden", "z": 1}, 3]},
            ["row 1, column 'lat'", "row 1, column 'z'", "row 2: must be an object"],
        ),
        ({"rows": []}, ['"rows" is empty']),
        ({"rows": ROW}, ['"rows" must be a list']),
        ({}, ['either "rows"']),
        ({"rows": [ROW], "row": ROW}, ['either "rows"']),
        ({"rows": [ROW], "more": 1}, ["the body has 'more'"]),
        ([ROW], ["the body must be JSON"]),
    ],
)
def test_bad_rows_are_named_without_what_they_hold(
    client: TestClient, body: Any, lines: list[str]
) -> None:
    answer = client.post("/predict", json=body)
    assert answer.status_code == 422
    told = answer.json()
    assert told["error"] == "bad_rows"
    assert len(told["details"]) == len(lines)
    for line, start in zip(told["details"], lines, strict=True):
        assert start in line
    assert "hidden" not in answer.text


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[" * 100_000,
        b"\xff",
        b"",
        b'{"row": {"lon": NaN}}',
        b'{"row": {"lon": 1%s}}' % (b"0" * 5000),
    ],
)
def test_what_is_no_json_is_refused_in_the_same_form(client: TestClient, body: bytes) -> None:
    as_json = {"Content-Type": "application/json"}
    answer = client.post("/predict", content=body, headers=as_json)
    assert answer.status_code in (400, 413, 422)
    assert set(answer.json()) == {"error", "details"}


def test_a_body_is_sent_as_json_by_name(client: TestClient) -> None:
    """A page of another site may send text unasked, and would spend the budget without a token."""
    body = json.dumps({"row": ROW})
    plain = client.post("/predict", content=body, headers={"Content-Type": "text/plain"})
    assert plain.status_code == 422
    assert "Content-Type" in plain.json()["details"][0]


def test_a_row_s_problems_are_shortened_and_counted(client: TestClient) -> None:
    answer = client.post("/predict", json={"rows": [{**ROW, "x0": "no"}] * 30})
    assert answer.json()["details"][20:] == ["and more"]


def test_columns_that_the_model_does_not_use_are_left_out_of_account(client: TestClient) -> None:
    """As in a file of new rows."""
    answer = client.post("/predict", json={"rows": [ROW, {**ROW, "y": 1, "note": "none"}]})
    first, second = answer.json()["predictions"]
    # A row's last digits depend on its place among the rows that are computed together.
    assert first.pop("probabilities") == pytest.approx(second.pop("probabilities"), abs=1e-6)
    assert first == second


def test_a_name_that_is_there_twice_is_refused(client: TestClient) -> None:
    for body in (
        json.dumps({"row": ROW})[:-2] + ', "x1": 1.0}}',
        f'{{"row": {json.dumps(ROW)}, "row": null}}',
    ):
        answer = client.post("/predict", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 422
        assert "is there twice in one object" in answer.json()["details"][0]


def test_no_such_path_and_method_are_said(client: TestClient) -> None:
    absent = client.get("/predictions")
    assert (absent.status_code, absent.json()["error"]) == (404, "not_found")
    assert "POST /predict" in absent.json()["details"][0]
    wrong = client.get("/predict")
    assert (wrong.status_code, wrong.json()["details"]) == (405, ["this path takes POST"])


def test_missing_features_may_be_left_out(client: TestClient) -> None:
    answer = client.post("/predict", json={"rows": [{"lon": 5.0, "lat": 5.0}, {**ROW, "x0": None}]})
    assert answer.status_code == 200
    assert len(answer.json()["predictions"]) == 2


def test_a_row_without_a_key_is_predicted_alone_and_costs_nothing(
    plain: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(plain.parent, tmp_path / "copy") / "run"
    before = sum(charges(run))
    with client_of(opened(run)) as client:
        answer = client.post("/predict", json={"rows": [ROW, {**ROW, "lon": None}]})
    assert [row["note"] for row in answer.json()["predictions"]] == [None, "no key"]
    assert sum(charges(run)) == before + 1


def test_it_says_what_it_takes(client: TestClient) -> None:
    told = client.get("/schema").json()
    assert told["task"] == "multiclass"
    assert told["classes"] == [0, 1, 2]
    assert {column["name"]: column["required"] for column in told["columns"]} == {
        **dict.fromkeys(("lon", "lat"), True),
        **dict.fromkeys(("x0", "x1", "x2"), False),
    }
    described = client.get("/openapi.json").json()
    row = described["components"]["schemas"]["Row"]
    assert set(row["properties"]) == {"lon", "lat", "x0", "x1", "x2"}
    assert row["additionalProperties"] is False
    assert client.get("/docs").status_code == 404


def test_only_the_token_s_holder_is_answered(plain: Path) -> None:
    with client_of(opened(plain), headers={}) as client:
        for path in ("/budget", "/schema", "/openapi.json"):
            assert client.get(path).status_code == 401
        for shown in ("", "Bearer", "Bearer wrong", f"Basic {SHOWN}", f"bearer {SHOWN}x"):
            refused = client.post("/predict", json={"row": ROW}, headers={"Authorization": shown})
            assert refused.status_code == 401
            assert refused.headers["WWW-Authenticate"] == "Bearer"
        # Whoever may not ask spends nothing of the rate either, and is not read.
        assert client.post("/predict", content=b"{" * 10).status_code == 401
        assert client.get("/health").json() == {"live": True, "ready": True}
        answer = client.post("/predict", json={"row": ROW}, headers=HEADERS)
        assert answer.status_code == 200


def test_too_much_is_refused_before_it_is_charged(plain: Path) -> None:
    before = charges(plain)
    with client_of(opened(plain), max_rows=2, max_bytes=400) as client:
        assert client.post("/predict", json={"rows": [ROW] * 3}).status_code == 413
        large = client.post("/predict", content=b"x" * 401)
        assert large.status_code == 413
        assert large.json()["error"] == "too_large"
        # A body whose length nobody said is cut off all the same.
        unsaid = client.post("/predict", content=(b"x" * 100 for _ in range(5)))
        assert unsaid.status_code == 413
    assert charges(plain) == before


def test_no_more_predictions_than_the_rate_are_taken(plain: Path) -> None:
    with client_of(opened(plain), rate=0.001) as client:
        assert client.post("/predict", json={"row": ROW}).status_code == 200
        late = client.post("/predict", json={"row": ROW})
        assert late.status_code == 429
        assert 900 <= int(late.headers["Retry-After"]) <= 1000
        assert client.get("/budget").status_code == 200


def test_a_service_answers_customer_after_customer_at_one_promise(
    promised: Path, tmp_path: Path
) -> None:
    """200 of them, one by one and over two starts: epsilon is that of the first answer."""
    run = shutil.copytree(promised.parent, tmp_path / "copy") / "run"
    customers = pd.read_csv(run.parent / "agency.csv").drop(columns="y").to_dict("records")
    cost, told = set(), []
    for part in (range(100), range(100, 200)):
        with client_of(opened(run), gather_s=0.0) as client:
            for number in part:
                row = customers[number % len(customers)]
                answer = client.post("/predict", json={"row": row})
                assert answer.status_code == 200
                cost.add(answer.json()["epsilon"])
            told += client.get("/budget").json()["parties"]
    assert len(cost) == 1
    assert 0 < cost.pop() <= BUDGET
    assert len({one["spent"] for one in told}) == 1
    assert {one["releases_per_record"] for one in told} == {1}
    assert sum(charges(run)) == 200
    summary = summary_of(run / LAST_OF_LEDGER)
    assert len([one for one in summary.runs if one.row_releases == 100]) == 2


def test_a_spent_budget_is_said_and_nothing_more_is_booked(charged: Path, tmp_path: Path) -> None:
    run = shutil.copytree(charged.parent, tmp_path / "copy") / "run"
    with client_of(opened(run)) as client:
        first = client.post("/predict", json={"row": ROW})
        assert first.status_code == 200
        cost = first.json()["epsilon"]
        assert 0 < cost < BUDGET
    with client_of(opened(run, epsilon=1.5 * cost)) as client:
        left = {one["party"]: one for one in client.get("/budget").json()["parties"]}
        assert set(left) == {"agency", "bank-1", "bank-2"}
        assert left["agency"]["spent"] == pytest.approx(cost)
        assert left["agency"]["left"] == pytest.approx(0.5 * cost)
        answers = [client.post("/predict", json={"row": ROW}) for _ in range(6)]
        codes = [answer.status_code for answer in answers]
        # Epsilon grows less than linearly, so that some more fit; then none does.
        assert codes == sorted(codes)
        assert codes[-3:] == [403] * 3
        assert answers[-1].json()["error"] == "budget_spent"
        before = (run / LAST_OF_LEDGER).read_bytes()
        assert client.post("/predict", json={"row": ROW}).status_code == 403
        assert (run / LAST_OF_LEDGER).read_bytes() == before
        assert client.get("/ready").status_code == 200


def test_rows_that_the_file_limits_are_counted(plain: Path, tmp_path: Path) -> None:
    run = shutil.copytree(plain.parent, tmp_path / "copy") / "run"
    asked = sum(charges(run))
    with client_of(opened(run, rows=asked + 3)) as client:
        assert client.post("/predict", json={"rows": [ROW] * 2}).status_code == 200
        assert client.post("/predict", json={"rows": [ROW] * 2}).status_code == 403
        assert client.post("/predict", json={"row": ROW}).status_code == 200
        told = client.get("/budget").json()["parties"][0]
        assert (told["rows"], told["most_rows"]) == (asked + 3, asked + 3)


def test_who_waits_together_is_asked_for_together(plain: Path, tmp_path: Path) -> None:
    """One request to the parties books all rows at once; everybody gets the own ones."""
    run = shutil.copytree(plain.parent, tmp_path / "copy") / "run"
    rows = pd.read_csv(run.parent / "agency.csv").iloc[:6].drop(columns="y").to_dict("records")
    with client_of(opened(run)) as client:
        alone = [client.post("/predict", json={"row": row}).json() for row in rows]
    before = len(charges(run))
    # It goes as soon as six are there, long before the time is over.
    with (
        client_of(opened(run), gather_s=PATIENCE_S, max_rows=6) as client,
        ThreadPoolExecutor(6) as pool,
    ):
        together = list(
            pool.map(lambda row: client.post("/predict", json={"row": row}).json(), rows)
        )
    assert charges(run)[before:] == [6]
    for one, other in zip(alone, together, strict=True):
        assert one["predictions"][0]["prediction"] == other["predictions"][0]["prediction"]
        shares = [answer["predictions"][0]["probabilities"]["0"] for answer in (one, other)]
        assert shares[0] == pytest.approx(shares[1], abs=1e-5)


def lost(model: OpenedModel, after: int) -> OpenedModel:
    """Return a model whose first session loses a party at a request."""
    sessions = iter(range(100))

    @contextmanager
    def again() -> Iterator[Any]:
        number = next(sessions)
        with model.model.open() as session:
            yield session if number else _Losing(session, after)

    return replace(model, model=replace(model.model, open=again))


class _Losing(PredictionSession):
    """A session in which a party is lost once so many requests are answered."""

    broken = True

    def __init__(self, session: Any, after: int) -> None:
        self._session, self._left = session, after
        self.budgets = session.budgets

    def ask(self, new: Any, **more: Any) -> Any:
        if self._left == 0:
            raise PartyFailedError("bank-1: its connection closed")
        self._left -= 1
        return self._session.ask(new, **more)


def test_a_party_that_is_gone_is_said_and_taken_back(plain: Path) -> None:
    with client_of(lost(opened(plain), after=1)) as client:
        assert client.post("/predict", json={"row": ROW}).status_code == 200
        gone = client.post("/predict", json={"row": ROW})
        assert gone.status_code == 503
        assert int(gone.headers["Retry-After"]) > 0
        assert gone.json()["error"] == "party_gone"
        wait_until_ready(client)
        assert client.post("/predict", json={"row": ROW}).status_code == 200


def test_the_log_has_no_row_no_query_and_no_token(
    plain: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), client_of(opened(plain)) as client:
        row = {**ROW, "x0": 0.98765}
        assert client.post("/predict?q=whispered", json={"row": row}).is_success
        client.get("/whispered")
        client.post("/predict", json={"row": {**row, "x1": "whispered"}})
    said = "\n".join(
        record.getMessage() for record in caplog.records if record.name == "securevfl.serving"
    )
    assert "POST /predict 200" in said
    assert "GET (other) 404" in said
    assert not any(secret in said for secret in ("whispered", "0.98765", SHOWN))


def test_answers_leave_at_once() -> None:
    """Python switches Nagle's algorithm off for sockets alone that name their protocol."""
    with listening_socket("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP
