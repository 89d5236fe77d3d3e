"""Files of options for ``--config``: YAML, JSON or TOML whose keys are the names of a command's options.

A key that is the name of a command holds a section for this command alone. Values are read as texts, so that
click converts and refuses them as on the command line: ``compile: no`` is the text "no". A null, such as
YAML's ``~``, is refused: to leave a key out is the way to have the default. `options.py` declares
``--config`` with these callbacks. Tests: tests/cli/test_option_files.py.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer

from para_core.option_values import require_unique_keys

SUFFIXES = (".yaml", ".yml", ".json", ".toml")
# Names that the command line accepts in place of an option's own name.
ALIASES = {"attention-backend": "backend"}
# The value of a flag whose second name, such as no-vae, has one of these values.
_OPPOSITE_VALUES = {
    "true": "false",
    "yes": "false",
    "on": "false",
    "false": "true",
    "no": "true",
    "off": "true",
}
# Plain scalars that are null in YAML 1.1. In quotes they are texts.
_YAML_NULLS = ("", "~", "null", "Null", "NULL")
# Options that a file cannot set.
_COMMAND_LINE_ONLY = ("help",)


@dataclass(frozen=True)
class _Target:
    """The parameter of a command that an option name sets. ``negated`` marks the second name of a flag."""

    parameter: Any
    negated: bool = False


def is_option_file(value: str) -> bool:
    """Whether a value of ``--config`` names a file of options, and not the configs of a model."""
    return Path(value).suffix.lower() in SUFFIXES


def read_option_files(context: typer.Context, values: Sequence[str] | None) -> list[str]:
    """Make the values in files of options the defaults of the command, and return the other values of
    ``--config``.

    Runs before click reads the other options. A later file has priority over an earlier one, and the command
    line over files. At most one value is returned: the configs of a single-file model.

    Raises:
        typer.BadParameter: A file cannot be read, or has an unknown key, two keys of one option, or a value that
        the option cannot have.
    """
    if context.resilient_parsing:
        return []
    defaults: dict[str, Any] = {}
    for value in values or ():
        if is_option_file(value):
            defaults |= _read_defaults(Path(value), context)
    # What this callback returns is the value of --config, so those in files cannot be its default.
    configs_in_files = defaults.pop("config", [])
    context.default_map = {**(context.default_map or {}), **defaults}
    configs_on_line = [value for value in values or () if not is_option_file(value)]
    return _choose_configs(configs_on_line, configs_in_files)


def _choose_configs(on_line: list[str], in_files: list[str]) -> list[str]:
    """Return the configs of a model: those on the command line, or else those in files. At most one.

    Both are lists because the option may be repeated. Raise typer.BadParameter if there are several, or if a
    file of options names another one.
    """
    for value in in_files:
        if is_option_file(value):
            raise typer.BadParameter(
                f"config is {value!r} in a file of options; expected the configs of a model."
            )
    configs = on_line or in_files
    if len(configs) > 1:
        raise typer.BadParameter(
            f"{' and '.join(configs)}: expected the configs of one model, or files of options ({', '.join(SUFFIXES)})."
        )
    return configs


def read_option_files_only(context: typer.Context, values: Sequence[str] | None) -> list[str]:
    """Do the same as :func:`read_option_files` for a command without a model of files.

    Raises:
        typer.BadParameter: A value names no file of options; and as :func:`read_option_files`.
    """
    configs = read_option_files(context, values)
    if configs:
        raise typer.BadParameter(f"{configs[0]}: expected a file of options ({', '.join(SUFFIXES)}).")
    return []


def options_in_files(arguments: Sequence[str]) -> list[str]:
    """Return ``--name`` for each key of the files of options in a command line.

    By these `app.py` finds that an error message is about an option that a file has set. A file that cannot
    be read adds none: its own error is that of :func:`read_option_files`.
    """
    values = [value for argument, value in pairwise(arguments) if argument == "--config"]
    values += [argument.partition("=")[2] for argument in arguments if argument.startswith("--config=")]
    names: list[str] = []
    for value in filter(is_option_file, values):
        try:
            content = _parse(Path(value))
        except typer.BadParameter:
            continue
        sections = [section for section in content.values() if isinstance(section, dict)]
        names += [_option_name(key) for entries in (content, *sections) for key in entries]
    return [f"--{name}" for name in names]


def _read_defaults(path: Path, context: typer.Context) -> dict[str, Any]:
    """Return the values in a file by parameter of the command. Those in its section have priority.

    The keys in sections of other commands are checked as well, but set nothing.
    """
    content = _parse(path)
    commands: Mapping[str, Any] = {}
    if context.parent is not None:
        commands = getattr(context.parent.command, "commands", {})
    # The name of a command has no dash, so a key that names one is equal to it.
    sections = {key: value for key, value in content.items() if key in commands}
    for key, section in sections.items():
        if not isinstance(section, dict):
            raise typer.BadParameter(
                f"{path} has {section!r:.40} for {key}, a command; expected its options."
            )
        _targets_of_keys(path, section, commands[key], key, {})
    outside = {key: value for key, value in content.items() if key not in commands}
    name = context.info_name or ""
    defaults: dict[str, Any] = {}
    for entries in (outside, sections.get(name, {})):
        for key, target in _targets_of_keys(path, entries, context.command, name, commands).items():
            defaults[target.parameter.name] = _read_value(path, key, entries[key], target)
    return defaults


def _read_value(path: Path, key: str, value: Any, target: _Target) -> str | list[str]:
    """Return the text of a value, or the texts if the option may be repeated.

    Raise typer.BadParameter if the value cannot be one of the option.
    """
    several = bool(getattr(target.parameter, "multiple", False))
    if isinstance(value, dict) or (isinstance(value, list) and not several):
        raise typer.BadParameter(f"{path} has {value!r:.60} for {key}; expected one value.")
    values = value
    if not isinstance(values, list):
        values = [values]
    texts = [_make_text(path, key, item) for item in values]
    if several:
        return texts
    if target.negated:
        if texts[0].lower() not in _OPPOSITE_VALUES:
            raise typer.BadParameter(
                f"{path} has {texts[0]!r:.60} for {key}, a flag; expected true or false."
            )
        return _OPPOSITE_VALUES[texts[0].lower()]
    return texts[0]


def _make_text(path: Path, key: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        raise typer.BadParameter(
            f"{path} has null for {key}; expected a text or a number. Leave the key out to have the default, or put "
            "a text that means null into quotes."
        )
    if isinstance(value, (dict, list)):
        raise typer.BadParameter(f"{path} has {value!r:.60} for {key}; expected texts or numbers.")
    return str(value)


def _targets_of_keys(
    path: Path, keys: Iterable[str], command: Any, name: str, commands: Mapping[str, Any]
) -> dict[str, _Target]:
    """Return the target of each key.

    Raise typer.BadParameter if two keys set the same option, such as ``vae`` and ``no-vae``, or as
    :func:`_require_known`, which has the same other arguments.
    """
    targets: dict[str, _Target] = {}
    key_of: dict[str, str] = {}
    for key in keys:
        target = _require_known(path, key, command, name, commands)
        other = key_of.setdefault(target.parameter.name, key)
        if other != key:
            raise typer.BadParameter(
                f"{path} has {other} and {key}, which set the same option; expected one."
            )
        targets[key] = target
    return targets


def _require_known(path: Path, key: str, command: Any, name: str, commands: Mapping[str, Any]) -> _Target:
    """Return the target of a key. Raise typer.BadParameter if the command has no option of this name.

    ``name`` is that of ``command``. Of the other ``commands`` one that has the option is named in the
    message.
    """
    targets = _find_targets(command)
    target = targets.get(_option_name(key))
    if target is not None:
        return target
    close = difflib.get_close_matches(_option_name(key), targets, n=1)
    owners = [other for other, sibling in commands.items() if _option_name(key) in _find_targets(sibling)]
    if owners:
        hint = f"It is an option of {', '.join(owners)}: write it below '{owners[0]}:'."
    elif close:
        hint = f"Did you mean {close[0]}?"
    else:
        hint = f"Expected one of {', '.join(sorted(targets))}."
    raise typer.BadParameter(f"{path} has {key[:40]!r}, which is no option of para_core {name}. {hint}")


def _find_targets(command: Any) -> dict[str, _Target]:
    """Return the options of a command by their names without dashes, second names included."""
    return {
        option.lstrip("-"): _Target(parameter, negated)
        for parameter in command.params
        if parameter.name not in _COMMAND_LINE_ONLY
        for negated, options in ((False, parameter.opts), (True, parameter.secondary_opts))
        for option in options
    }


def _option_name(key: str) -> str:
    """Return the option's own name, without dashes in front, for a key of a file, which may be an alias."""
    name = key.replace("_", "-")
    return ALIASES.get(name, name)


def _parse(path: Path) -> dict[str, Any]:
    """Return the content of a file, with numbers as texts. Raise typer.BadParameter if it cannot be read."""
    kind = {".json": "JSON", ".toml": "TOML"}.get(path.suffix.lower(), "YAML")
    try:
        text = path.read_text(encoding="utf-8-sig")
        content = _PARSERS[kind](text)
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{path} is no {kind}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise typer.BadParameter(f"{path} has {content!r:.40}; expected lines such as 'port: 8000'.")
    return content


def _parse_yaml(text: str) -> Any:
    import yaml

    try:
        # BaseLoader makes no numbers or booleans. With them "no" would become False.
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    if node is None:
        return {}
    return _yaml_value(node)


def _yaml_value(node: Any) -> Any:
    if node.id == "mapping":
        return require_unique_keys(_yaml_pairs(node))
    if node.id == "sequence":
        return [_yaml_value(item) for item in node.value]
    # Only a plain scalar has no style.
    if node.style is None and node.value in _YAML_NULLS:
        return None
    return node.value


def _yaml_pairs(node: Any) -> Iterator[tuple[str, Any]]:
    for key, value in node.value:
        if key.id != "scalar":
            raise ValueError("a key is no text")
        yield key.value, _yaml_value(value)


def _parse_json(text: str) -> Any:
    return json.loads(
        text, object_pairs_hook=require_unique_keys, parse_float=str, parse_int=str, parse_constant=str
    )


def _parse_toml(text: str) -> Any:
    return tomllib.loads(text, parse_float=str)


_PARSERS = {"JSON": _parse_json, "TOML": _parse_toml, "YAML": _parse_yaml}
