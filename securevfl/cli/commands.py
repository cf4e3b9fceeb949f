"""The order in which ``securevfl --help`` lists commands, and what it says of options."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import typer
from typer.core import TyperGroup

JOURNEY: Final[Mapping[str, tuple[str, ...]]] = {
    "Start": ("init", "check", "simulate"),
    "Train": ("demo", "train", "party", "provision", "trust", "pretrain"),
    "Use": ("predict", "serve", "export", "features"),
    "Look": ("report", "ledger", "verify", "budget"),
    "Experiments": (
        *("compare", "sweep", "advise", "audit", "bench", "contribution", "link", "columns"),
    ),
}
"""Commands by group, in the order in which a user needs them."""


class Commands(TyperGroup):
    """The commands of :data:`JOURNEY`, each in its group of the help page."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, in the journey's order."""
        order = [name for names in JOURNEY.values() for name in names]
        return sorted(super().list_commands(ctx), key=order.index)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, which knows its group of the help page."""
        command: Any = super().get_command(ctx, cmd_name)
        for group, names in JOURNEY.items():
            if cmd_name in names:
                command.rich_help_panel = group
        return command

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
"""What Typer raises for a command line that is wrong; some versions bring their own Click."""


def _arguments(ctx: Any) -> set[str]:
    parameters = [] if ctx is None else ctx.command.params
    return {one.name for one in parameters if one.param_type_name == "argument"}


def _setting(name: str) -> str | None:
    """Return the setting of that name with its section, ``training.epochs``; None if none is."""
    # Loaded here: it takes longer than all commands together.
    from securevfl.config.linkage import LinkageSettings
    from securevfl.config.sections import FederationSettings, RuntimeSettings, TrainingSettings
    from securevfl.dp.privacy import Privacy
    from securevfl.models.registry import FAMILIES

    sections: dict[str, list[Any]] = {
        "training": [TrainingSettings],
        "privacy": [Privacy],
        "federation": [FederationSettings],
        "linkage": [LinkageSettings],
        "runtime": [RuntimeSettings],
        "model": [family.settings_class for family in FAMILIES.values()],
    }
    for section, classes in sections.items():
        if any(name in {one.name for one in dataclasses.fields(cls)} for cls in classes):
            return f"{section}.{name}"
    return None
