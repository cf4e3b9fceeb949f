"""The ``securevfl`` command: its subcommands, and one line for each error.

Commands import what they need when they run: ``securevfl budget`` must not wait for torch.
"""

import io
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Final, TextIO

import typer
from typer.core import TyperGroup

from securevfl.cli.run import app as run_app
from securevfl.core import interrupts, logs
from securevfl.core.errors import SecureVflError, missing_extra, of_this_machine
from securevfl.desk import setup_commands
from securevfl.desk.budget_command import app as budget_app
from securevfl.desk.identity_command import app as identity_app
from securevfl.desk.ledger_command import app as ledger_app
from securevfl.desk.run_commands import app as use_app
from securevfl.desk.run_commands import model_app
from securevfl.lab.commands import app as lab_app
from securevfl.lab.commands import demo_app, link_app
from securevfl.serving.serve_command import app as serve_app
from securevfl.version import __version__


class _Commands(TyperGroup):
    """The commands, which know an option that is a setting of the federation file."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; of an option that is a setting of the federation file, name that."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            option = getattr(error, "option_name", None)
            takes_file = "federation" in _arguments(getattr(error, "ctx", None))
            if isinstance(option, str) and isinstance(error, _UsageError) and takes_file:
                setting = _setting(option.lstrip("-").replace("-", "_"))
                if setting is not None:
                    raise _UsageError(
                        f"No such option: {option}; it is a setting of the federation file: "
                        f"write {setting} there",
                        ctx=error.ctx,
                    ) from None
            raise


_UsageError: Final[Any] = typer.BadParameter.__base__
"""Error that Typer raises for a wrong command line; some versions bring their own Click."""


def _arguments(ctx: Any) -> set[str]:
    parameters = [] if ctx is None else ctx.command.params
    return {parameter.name for parameter in parameters if parameter.param_type_name == "argument"}


def _setting(name: str) -> str | None:
    """Return a setting's name with its section, such as ``training.epochs``, or None."""
    for section, table in json.loads(setup_commands.schema_text())["properties"].items():
        if any(name in choice.get("properties", {}) for choice in table.get("anyOf", [table])):
            return f"{section}.{name}"
    return None


app = typer.Typer(
    name="securevfl",
    cls=_Commands,
    help=(
        "Vertical federated learning on fuzzily linked tables, with secure averaging and a "
        "privacy budget."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In the order of ``--help``; each command names its panel there.
app.add_typer(demo_app)
app.add_typer(setup_commands.app)
app.add_typer(run_app)
app.add_typer(use_app)
app.add_typer(serve_app)
app.add_typer(model_app, name="model", rich_help_panel="Run")
app.add_typer(link_app)
app.add_typer(ledger_app, name="ledger", rich_help_panel="Check and audit")
app.add_typer(budget_app)
app.add_typer(identity_app, name="identity", rich_help_panel="Keys and identities")
app.add_typer(lab_app, name="lab", rich_help_panel="Experiments")

_LAST_STREAM = 2
_INTERRUPTED = 130
# What a shell says of other tools whose reader went away: 128 and the number of SIGPIPE.
_UNREAD = 141


def _register_methods() -> None:
    """Register the section that comparisons read."""
    import securevfl.lab.methods  # noqa: F401


setup_commands.REGISTRATIONS.append(_register_methods)


def _version(show: bool) -> bool:
    if show:
        print(f"securevfl {__version__}")
        raise typer.Exit
    return show


@app.callback()
def _options(
    version: Annotated[  # noqa: ARG001 - its callback has printed it
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    log_json: Annotated[
        Path | None,
        typer.Option(
            "--log-json", metavar="FILE", help="Append what happens as JSON lines; never data."
        ),
    ] = None,
) -> None:
    """Vertical federated learning on fuzzily linked tables."""
    if log_json is not None:
        logs.write_json_lines(log_json)
    words = [word for word in sys.argv[1:] if word[:1] != "-" and word != str(log_json)]
    logs.log("command", {"name": words[0], "version": __version__})


def main() -> None:
    """Run the command line; a user's mistake ends in one line and an exit code, never a traceback.

    Exit codes: 0 done; 2 wrong input; 3 a party was lost or refused; 4 the privacy budget forbids
    it, or what a run left does not hold; 130 SIGINT or SIGTERM has interrupted it; 141 nobody reads
    the output any more, as after `| head`; 1 a bug.
    """
    _open_missing_streams()
    _show_every_name(sys.stdout, sys.stderr)
    try:
        with interrupts.watch_signals():
            _run()
    except KeyboardInterrupt:
        _say("interrupted")
        sys.exit(_INTERRUPTED)
    except SecureVflError as error:
        logs.log_refusal(error)
        _say(" ".join(str(error).splitlines()))
        sys.exit(error.exit_code)
    except SystemExit as end:
        logs.log("ended", {"exit_code": end.code})
        # Typer turns Ctrl-C into this code and says nothing.
        if end.code == _INTERRUPTED:
            _say("interrupted")
        # Rich and Typer turn a reader that went away into code 1, and say nothing either.
        if isinstance(end.__context__, BrokenPipeError):
            _silence(sys.stdout)
            sys.exit(_UNREAD)
        raise
    except BrokenPipeError:
        _silence(sys.stdout)
        sys.exit(_UNREAD)
    except ImportError as error:
        lacks = missing_extra(error)
        if lacks is None:
            raise
        _say(str(lacks))
        sys.exit(lacks.exit_code)
    except (OSError, MemoryError, RuntimeError) as error:
        # A table of figures that was written by another library, or what we print itself.
        known = of_this_machine(error, place="standard output")
        if known is None:
            raise
        _say(str(known))
        _silence(sys.stdout)
        sys.exit(known.exit_code)


def _run() -> None:
    """Run the command and flush its output, while an error can still be reported."""
    try:
        app()
    except SecureVflError:
        # Its line says why, whether or not somebody has read what came before.
        try:
            sys.stdout.flush()
        except OSError:
            _silence(sys.stdout)
        raise
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            sys.stdout.flush()
        raise


def _open_missing_streams() -> None:
    """Open the null device for each standard stream that was closed, as services may have it.

    Another file that got the stream's number would receive what is printed.
    """
    while (handle := os.open(os.devnull, os.O_RDWR)) <= _LAST_STREAM:
        pass
    os.close(handle)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _show_every_name(*streams: object) -> None:
    """Write characters that a terminal or file cannot show as escapes; none ends a command."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _say(text: str) -> None:
    try:
        print(f"securevfl: {text}", file=sys.stderr)
    except OSError:
        # A log on a full disk takes no line; the exit code still says what happened.
        _silence(sys.stderr)


def _silence(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    main()
