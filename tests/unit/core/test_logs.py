"""What programs that use ``logging`` learn of a run, and the file of ``--log-json``."""

import json
import logging
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.command_line import securevfl
from opentelemetry._logs import set_logger_provider
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor

from securevfl import SecureVflError
from securevfl.core import logs, progress
from securevfl.core.errors import DataError
from securevfl.testing import write_federation


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before, level = list(logs.LOGGER.handlers), logs.LOGGER.level
    yield
    for handler in set(logs.LOGGER.handlers) - set(before):
        handler.close()
    logs.LOGGER.handlers[:] = before
    logs.LOGGER.setLevel(level)


def test_a_program_receives_events_with_their_figures(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="securevfl"):
        logs.log_event(progress.Stage(text="training", of=3))
        logs.log_event(progress.RoundDone(epoch=1, done=1, of=3, loss=0.5))
        logs.log_event(progress.SessionLost(why="bank is gone", wait_s=60))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert caplog.records[0].message == "stage text=training of=3"
    assert caplog.records[1].__dict__["figures"] == {"why": "bank is gone", "wait_s": 60}


def test_opentelemetry_receives_events_by_its_own_handler() -> None:
    """By the lines of the page on Python; figures are an attribute of the record."""
    page = (Path(__file__).parents[3] / "docs/python.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```python\n(import logging\n.*?)```", page, re.DOTALL)
    kept, provider = InMemoryLogRecordExporter(), LoggerProvider()
    provider.add_log_record_processor(SimpleLogRecordProcessor(kept))
    set_logger_provider(provider)
    exec(lines, {})
    logs.log_event(progress.SessionLost(why="bank is gone", wait_s=60))
    (record,) = [one.log_record for one in kept.get_finished_logs()]
    assert record.attributes is not None
    assert record.attributes["event"] == progress.SessionLost.EVENT
    assert record.attributes["figures"] == {"why": "bank is gone", "wait_s": 60}
    assert record.severity_text == "WARN"


def test_data_is_no_figure(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="securevfl"):
        with pytest.raises(SecureVflError, match="may not be logged"):
            logs.log("stage", {"rows": np.zeros(3)})
        logs.log_refusal(DataError("table a.csv, row 3: must be a number, got 'Smith'"))
    assert "Smith" not in caplog.text
    assert "DataError" in caplog.text


def test_a_command_writes_json_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """From its start to its end, each line for itself; a refusal has its class and exit code."""
    fed = write_federation(
        tmp_path,
        rows=60,
        training={"epochs": 1, "batch_size": 16},
    )
    path = tmp_path / "log.jsonl"
    root = ("--data-root", tmp_path)
    ended = securevfl(capfd, "--log-json", path, "simulate", fed, "--out", tmp_path / "run", *root)
    assert ended.code == 0, ended.err
    (tmp_path / "bank-1.csv").unlink()
    assert securevfl(capfd, "--log-json", path, "check", fed, *root).code == 2
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    events = [line["event"] for line in lines]
    assert events[0] == "command"
    assert lines[0]["name"] == "simulate"
    assert {"stage", "links-counted", "round", "epoch", "ended"} <= set(events)
    assert next(line for line in lines if line["event"] == "round")["level"] == "debug"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_log_is_appended_to_no_other_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By its own name or a link to it: a table that a command reads stays as it is."""
    table = tmp_path / "bank.csv"
    table.write_text("id,y\n1,0\n")
    (tmp_path / "link.csv").hardlink_to(table)
    for path in (table, tmp_path / "link.csv"):
        ended = securevfl(capfd, "--log-json", path, "ledger", "show", table)
        assert ended.code == 2
        assert "is no log of securevfl" in ended.complaint
    assert table.read_text() == "id,y\n1,0\n"
