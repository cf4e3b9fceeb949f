"""What ``securevfl serve`` does: a kept model behind HTTP, until it is told to stop."""

import importlib.util
import json
import logging
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from securevfl.cli.options import DataRoot, Device, Federation, Identity, Listen, RunFolder
from securevfl.core import checks
from securevfl.core.errors import ConfigError

_NEEDED: Final = ("fastapi", "uvicorn", "prometheus_client")
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


def serve(
    run: RunFolder,
    host: Annotated[str, typer.Option(help="Where HTTP is spoken.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 lets the system choose one.")] = 8080,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            help="File with the clients' token; default: SECUREVFL_TOKEN, or RUN/serve.token.",
        ),
    ] = None,
    with_token: Annotated[
        bool, typer.Option("--token/--no-token", help="Whether clients must show a token.")
    ] = True,
    max_rows: Annotated[int, typer.Option(help="Most rows of a request.")] = 1000,
    max_bytes: Annotated[int, typer.Option(help="Most bytes of a body.")] = 4 * 2**20,
    rate: Annotated[
        float | None, typer.Option(help="Most predicted rows a second, over all clients.")
    ] = None,
    gather: Annotated[
        float, typer.Option(help="Seconds that a request waits for others to go with it.")
    ] = 0.005,
    without_lost: Annotated[
        bool,
        typer.Option(
            "--without-lost", help="Go on without a secondary that is lost; answers name it."
        ),
    ] = False,
    federation: Federation = None,
    identity: Identity = None,
    listen: Listen = None,
    data_root: DataRoot = None,
    device: Device = "cpu",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print where it serves as a JSON object.")
    ] = False,
) -> None:
    """Answer requests for predictions over HTTP; every party's ledger is charged."""
    _run(
        run,
        federation=federation,
        identity=identity,
        listen=listen,
        data_root=data_root,
        device=device,
        host=host,
        port=port,
        token_file=token_file,
        with_token=with_token,
        max_rows=max_rows,
        max_bytes=max_bytes,
        rate=rate,
        gather=gather,
        without_lost=without_lost,
        as_json=as_json,
    )


def _run(
    run: Path,
    *,
    federation: Path | None,
    identity: Path | None,
    listen: str | None,
    data_root: Path | None,
    device: str,
    host: str,
    port: int,
    token_file: Path | None,
    with_token: bool,
    max_rows: int,
    max_bytes: int,
    rate: float | None,
    gather: float,
    without_lost: bool,
    as_json: bool,
) -> None:
    """Serve the model that a run has kept."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"securevfl serve needs {', '.join(missing)}; install securevfl with its extra serve: "
            f"pip install 'securevfl[serve]'"
        )
    from securevfl.config.reading import read_federation
    from securevfl.models.task_metrics import metrics_of
    from securevfl.runtime.shown_progress import RunProgress
    from securevfl.serving.guard import token_of
    from securevfl.serving.opening import opened
    from securevfl.serving.server import LOG, ServerSettings, application, bound, run_server

    checks.at_least(1, max_rows=max_rows, max_bytes=max_bytes)
    checks.non_negative(gather=gather)
    if rate is not None:
        checks.positive(rate=rate)
    if token_file is not None and not with_token:
        raise ConfigError("--no-token: goes without --token-file")
    path = run / "federation.toml" if federation is None else federation
    if not path.exists():
        raise ConfigError(
            f"run folder {run}: has no federation.toml; is it the folder of a finished run?"
        )
    config = read_federation(path)
    token = token_of(token_file, folder=run) if with_token else None
    logging.basicConfig(format="securevfl: %(asctime)s %(message)s", stream=sys.stderr)
    LOG.setLevel(logging.INFO)
    metric = metrics_of(config.federation.task, config.training.metric)[0].name
    with (
        bound(host, port) as listener,
        RunProgress(metric=metric) as progress,
        opened(
            config,
            run,
            identity=identity,
            listen=listen,
            data_root=(data_root or Path()).resolve(),
            device=device,
            observe=progress,
            without_lost=without_lost,
        ) as model,
    ):
        shown, taken = f"[{host}]" if ":" in host else host, listener.getsockname()[1]
        url = f"http://{shown}:{taken}"
        if host not in _LOOPBACK:
            _say("warning: HTTP is not encrypted; put a server that speaks TLS before it")
        if token is None:
            _say("warning: no token is asked for; whoever reaches the port spends the budget")
        else:
            _say(f"clients show the token of {token.source}")
        print(json.dumps({"url": url}) if as_json else f"securevfl: serving {url}", flush=True)
        settings = ServerSettings(
            max_rows=max_rows, max_bytes=max_bytes, rate=rate, gather_s=gather
        )
        run_server(application(model, token, settings), listener)


def _say(text: str) -> None:
    print(f"securevfl: {text}", file=sys.stderr, flush=True)
