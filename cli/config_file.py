"""``--config FILE``: a command's options from a YAML file, which maps their names without leading dashes to values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from para_core.cli.options import INPUT


def config_option() -> Any:
    """Return the typer option ``--config FILE``. Options on the command line override those of the file."""
    return typer.Option(
        help="YAML with the names of options.",
        metavar="FILE",
        rich_help_panel=INPUT,
        # This option is read before the others, because it sets their defaults.
        is_eager=True,
        callback=read_config,
    )


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the values in the YAML file ``path`` the defaults of the command's options, and return ``path``.

    Raises:
        typer.BadParameter: If the file cannot be read, or names an option that the command does not have.
    """
    if path is None:
        return None
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise typer.BadParameter(f"{path} has {values!r:.40}; expected lines such as 'port: 8000'.")
    names = {
        option.lstrip("-"): parameter
        for parameter in context.command.params
        for option in parameter.opts
        if parameter.name != "config"
    }
    defaults: dict[str, Any] = {}
    for name, value in values.items():
        parameter = names.get(str(name).replace("_", "-"))
        if parameter is None:
            raise typer.BadParameter(f"{path} has {str(name)[:40]!r}; expected one of {', '.join(sorted(names))}.")
        several = getattr(parameter, "multiple", False) and not isinstance(value, list)
        defaults[str(parameter.name)] = [value] if several else value
    context.default_map = {**(context.default_map or {}), **defaults}
    return path
