"""``securevfl serve``: answer requests for predictions over HTTP, until interrupted."""

import json
import logging
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import typer

from securevfl.core import checks
from securevfl.core.command_line import DataRoot, Device, Federation, Identity, Listen, RunFolder
from securevfl.core.errors import require_extra
from securevfl.core.memory import loading

app = typer.Typer()


@app.command(rich_help_panel="Run")
def serve(
    run: RunFolder,
    host: Annotated[str, typer.Option(help="Address of the HTTP server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 lets the system choose one.")] = 8080,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            help="File with the clients' token; default: SECUREVFL_TOKEN, or RUN/serve.token.",
        ),
    ] = None,
    max_rows: Annotated[int, typer.Option(help="Most rows of a request.")] = 1000,
    max_bytes: Annotated[int, typer.Option(help="Most bytes of a body.")] = 4 * 2**20,
    rate: Annotated[
        float | None, typer.Option(help="Most predicted rows a second, over all clients.")
    ] = None,
    gather: Annotated[
        float, typer.Option(help="Seconds that a request waits for others to go with it.")
    ] = 0.005,
    federation: Federation = None,
    identity: Identity = None,
    listen: Listen = None,
    data_root: DataRoot = None,
    device: Device = "cpu",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print where it serves as a JSON object.")
    ] = False,
) -> None:
    """Answer requests for predictions over HTTP, within what every party's ledger allows."""
    require_extra("fastapi", "uvicorn", use="securevfl serve")
    with loading():
        from securevfl.core.shown_progress import RunProgress
        from securevfl.runtime.run_folder import federation_of_run
        from securevfl.runtime.trained_run import trained_run
        from securevfl.serving.asking import LOG
        from securevfl.serving.guard import token_of
        from securevfl.serving.server import (
            ServerSettings,
            application,
            listening_socket,
            open_model,
            run_server,
        )

    checks.at_least(1, max_rows=max_rows, max_bytes=max_bytes)
    checks.non_negative(gather=gather)
    if rate is not None:
        checks.positive(rate=rate)
    trained = trained_run(
        run,
        federation=federation_of_run(run, federation),
        identity=identity,
        listen=listen,
        data_root=data_root,
        device=device,
    )
    token = token_of(token_file, folder=run)
    logging.basicConfig(format="securevfl: %(asctime)s %(message)s", stream=sys.stderr)
    LOG.setLevel(logging.INFO)
    with (
        listening_socket(host, port) as listener,
        RunProgress(metric=trained.config.metric) as progress,
        open_model(trained, observe=progress) as model,
    ):
        shown, (address, taken) = f"[{host}]" if ":" in host else host, listener.getsockname()[:2]
        url = f"http://{shown}:{taken}"
        notices = [f"clients show the token of {token.source}"]
        if not ip_address(address).is_loopback:
            notices.append("warning: HTTP is not encrypted; put a server that speaks TLS before it")
        for line in notices:
            print(f"securevfl: {line}", file=sys.stderr, flush=True)
        print(json.dumps({"url": url}) if as_json else f"securevfl: serving {url}", flush=True)
        settings = ServerSettings(
            max_rows=max_rows,
            max_bytes=max_bytes,
            rate=rate,
            gather_s=gather,
        )
        run_server(application(model, token, settings), listener)
