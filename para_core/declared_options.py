"""Options that are declared once, as annotated fields of a frozen dataclass.

A field has a type, a default and an :class:`Option`, which says in words what the type cannot say::

    @dataclass(frozen=True, kw_only=True)
    class Options:
        placement: Annotated[Literal["all", "first"] | None, Option(10, "Where the weights are.")] = None

:func:`check_options` validates values by these types, :func:`takes_options` makes the fields the keyword
arguments of a function, and :func:`declarations` lists them for the command line and for the tables of pages.
Imports no torch. No option is declared here: see :mod:`para_core.pipeline_options`,
:mod:`para_core.cache.options`, ``adapters/parallel/options.py`` and ``fleet/recipe.py``. Tests:
tests/test_declared_options.py, tests/cli/test_help.py.
"""

from __future__ import annotations

import functools
import inspect
import math
import textwrap
import types
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

Keywords = ParamSpec("Keywords")
Options = TypeVar("Options")
Subject = TypeVar("Subject")
Decorated = TypeVar("Decorated", bound=Callable[..., Any])

# This line of a docstring stands for the options of a dataclass.
_PLACE_OF_OPTIONS = "{options}"
_DOCSTRING_WIDTH = 120


@dataclass(frozen=True)
class Command:
    """An option as ``para_core`` takes it on the command line.

    Args:
        help: A few words for ``--help``.
        metavar: The word that stands for the value, in capitals. Empty for a flag.
        panel: The panel of ``--help`` that lists the option.
        opposite: Whether a flag has a second form that turns it off, such as ``--no-vae``.
        plans: Whether ``para_core plan`` has the option as well.
    """

    help: str
    metavar: str
    panel: str
    opposite: bool = False
    plans: bool = False


@dataclass(frozen=True)
class Option:
    """The words of an option, and limits of its value.

    Args:
        order: Where lists have the option: signatures, ``--help`` and tables are sorted by this number.
        help: What the option does, in Markdown. The table of a page shows the first sentence, docstrings show
            all.
        default: The default in words for the table of a page. Empty to show the value itself.
        form: The values in words for docstrings and tables, in Markdown. Empty to derive it from the type.
        page: The section of a page in ``docs/`` that explains the option, relative to that folder.
        expected: What a valid value is, for error messages. Empty to derive it from the type.
        none: What None does, for error messages, such as ``"to leave them as they are"``.
        at_least, at_most: Limits of a number.
        is_checked: Whether :func:`check_options` checks type and limits. If not, the function that takes the
            option must.
        needs_ranks: Whether the option does something on several ranks only.
        needs_transformer: Whether the option is refused for denoisers that are no transformers, such as UNets.
        command: The option of ``para_core``. None if the command has none.
    """

    order: int
    help: str = ""
    default: str = ""
    form: str = ""
    page: str = ""
    expected: str = ""
    none: str = ""
    at_least: float = -math.inf
    at_most: float = math.inf
    is_checked: bool = True
    needs_ranks: bool = False
    needs_transformer: bool = True
    command: Command | None = None


@dataclass(frozen=True)
class Declaration:
    """A declared option: its name, the members of its type without None, and its words."""

    name: str
    members: tuple[Any, ...]
    is_optional: bool
    default: Any
    option: Option

    @property
    def choices(self) -> tuple[Any, ...]:
        """The names that the option accepts. Empty if it accepts other values only."""
        literals = [member for member in self.members if get_origin(member) is Literal]
        return tuple(choice for literal in literals for choice in get_args(literal))

    @property
    def classes(self) -> tuple[type, ...]:
        """The classes whose instances the option accepts."""
        return tuple(member for member in self.members if isinstance(member, type))

    @property
    def takes_functions(self) -> bool:
        return any(get_origin(member) is Callable for member in self.members)

    @property
    def expected(self) -> str:
        """A description of valid values for an error message."""
        words = [self.option.expected]
        if not self.option.expected:
            words = self._expected_by_type()
        if not self.is_optional:
            return join_words(words)
        none = f"None {self.option.none}".strip()
        return f"{', '.join(words)}, or {none}"

    def _expected_by_type(self) -> list[str]:
        nouns = {bool: "True or False", int: "an integer", float: "a number"}
        names = [repr(choice) for choice in self.choices]
        expected = [*names, *[nouns.get(kind, f"a {kind.__name__}") for kind in self.classes]]
        if self.takes_functions:
            expected.append("a function")
        return expected

    def accepts(self, value: Any) -> bool:
        """Whether the type of the option has ``value``. Limits of numbers are not considered."""
        if value is None and self.is_optional:
            return True
        if isinstance(value, bool):
            return bool in self.classes
        if isinstance(value, int) and float in self.classes:
            return True
        if callable(value) and self.takes_functions:
            return True
        if isinstance(value, self.classes):
            return not (isinstance(value, float) and math.isnan(value))
        # Comparing an array with a name gives an array.
        return isinstance(value, str) and value in self.choices

    def check(self, value: Any) -> None:
        """Validate a value of the option.

        Raises:
            TypeError: ``value`` is of another type than the option, or NaN.
            ValueError: ``value`` is an unknown name, or a number beyond the limits. Of an option that takes
                only names any other value is an unknown name.
        """
        if not self.accepts(value):
            message = f"{self.name} is {value!r}; expected {self.expected}."
            if self.choices and (isinstance(value, str) or not self.classes):
                raise ValueError(message)
            raise TypeError(message)
        # Most options are names and switches, which this saves a Python call.
        if value is not None and not isinstance(value, (str, bool)):
            self.check_limits(value)

    def check_limits(self, value: Any) -> None:
        """Raise ``ValueError`` if ``value`` is a number beyond the limits, or NaN."""
        option = self.option
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and not option.at_least <= value <= option.at_most:
            limits = {"at least": option.at_least, "at most": option.at_most}
            words = [f"{word} {limit}" for word, limit in limits.items() if math.isfinite(limit)]
            raise ValueError(f"{self.name} is {value}; expected {' and '.join(words) or 'a number'}.")


def declarations(options: type[Any]) -> tuple[Declaration, ...]:
    """Return the options that the dataclass ``options`` declares, sorted by :attr:`Option.order`.

    Fields without an :class:`Option` are left out.

    Raises:
        TypeError: A field with an :class:`Option` has a ``default_factory``.
    """
    declared: tuple[Declaration, ...] = _declarations(options)  # type: ignore[arg-type]
    return declared


@cache
def _declarations(options: Any) -> tuple[Declaration, ...]:
    hints = get_type_hints(options, include_extras=True)
    declared: list[Declaration] = []
    for field in fields(options):
        hint = hints[field.name]
        if get_origin(hint) is not Annotated:
            continue
        kind, *notes = get_args(hint)
        is_union = get_origin(kind) in (Union, types.UnionType)
        members = (kind,)
        if is_union:
            members = get_args(kind)
        for option in notes:
            if isinstance(option, Option):
                if field.default_factory is not MISSING:
                    raise TypeError(
                        f"{options.__name__}.{field.name} has a default_factory; expected a default, which signatures "
                        "and tables show."
                    )
                others = tuple(member for member in members if member is not types.NoneType)
                declared.append(
                    Declaration(field.name, others, len(others) < len(members), field.default, option)
                )
    return tuple(sorted(declared, key=lambda declaration: declaration.option.order))


def check_options(options: Any) -> None:
    """Validate the values of ``options``, an instance of a dataclass, by its annotations.

    Raises:
        TypeError: A value has another type than its field.
        ValueError: A value is an unknown name, or a number beyond its limits.
    """
    for declaration in declarations(type(options)):
        if declaration.option.is_checked:
            declaration.check(getattr(options, declaration.name))


def check_values(options: Any) -> None:
    """Validate the values of ``options``, an instance of a dataclass, whose types are known to be right.

    For options that come from a command, whose user writes no quotes.

    Raises:
        ValueError: A text is none of its field's names, or a number is beyond its limits.
    """
    for declaration in declarations(type(options)):
        value = getattr(options, declaration.name)
        declaration.check_limits(value)
        if declaration.choices and isinstance(value, str) and value not in declaration.choices:
            raise ValueError(
                f"{declaration.name} is {value!r}; expected one of {', '.join(declaration.choices)}."
            )


def values_of(options: Any, declared_by: type[Any]) -> dict[str, Any]:
    """Return the values in ``options`` of the options that ``declared_by``, a base class of its class, declares."""
    return {declaration.name: getattr(options, declaration.name) for declaration in declarations(declared_by)}


class OptionsFunction(Protocol[Keywords]):
    """A function of one subject, which it returns, and of options as keyword arguments."""

    def __call__(self, subject: Subject, /, *args: Keywords.args, **kwargs: Keywords.kwargs) -> Subject: ...


def takes_options(
    options: Callable[Keywords, Options],
) -> Callable[[Callable[[Any, Options], Any]], OptionsFunction[Keywords]]:
    """Return a decorator that makes the fields of the dataclass ``options`` the keyword arguments of a
    function.

    The decorated function takes a subject, such as a pipeline, and an instance of ``options``; it returns the
    subject. Type checkers see the keyword arguments, because they are those of the dataclass. So do
    :func:`help` and editors: the signature is built from the fields, and ``{options}`` in the docstring is
    replaced by their descriptions.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class Options:
    ...     vae: Annotated[bool, Option(10, "Whether the VAE runs on all ranks.")] = False
    >>> @takes_options(Options)
    ... def parallelize(pipe, options):
    ...     return pipe
    >>> inspect.signature(parallelize)
    <Signature (pipe, *, vae: 'bool' = False)>
    """

    def decorate(function: Callable[[Any, Options], Any]) -> OptionsFunction[Keywords]:
        subject, _ = inspect.signature(function).parameters.values()

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            return function(bound.arguments.pop(subject.name), options(**bound.arguments))  # type: ignore[call-arg]

        declared = declarations(options)  # type: ignore[arg-type]
        signature = inspect.Signature(
            [subject, *map(_parameter_of, declared)], return_annotation=subject.annotation
        )
        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__doc__ = _fill_docstring(function.__doc__ or "", declared)
        return call

    return decorate


def shows_options(options: type[Any], **defaults: Any) -> Callable[[Decorated], Decorated]:
    """Return a decorator that shows the fields of ``options`` in a signature, in place of its ``**options``.

    ``defaults`` are default values that differ from those of the fields.
    """
    shown = [
        replace(declaration, default=defaults.get(declaration.name, declaration.default))
        for declaration in declarations(options)
    ]

    def show(function: Decorated) -> Decorated:
        signature = inspect.signature(function)
        others = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        parameters = [*others, *map(_parameter_of, shown)]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return show


def describe_options(options: type[Subject]) -> type[Subject]:
    """Replace ``{options}`` in the docstring of the dataclass ``options`` by the descriptions of its fields.

    The signature that :func:`help` shows gets the types alone.
    """
    declared = declarations(options)
    options.__doc__ = _fill_docstring(options.__doc__ or "", declared)
    shown = {declaration.name: _parameter_of(declaration) for declaration in declared}
    parameters = dict(inspect.signature(options).parameters)
    for name in shown.keys() & parameters.keys():
        parameters[name] = parameters[name].replace(annotation=shown[name].annotation)
    options.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    return options


def _parameter_of(declaration: Declaration) -> inspect.Parameter:
    """Return the keyword parameter of an option, as signatures show it: its annotation is a text."""
    default = declaration.default
    if default is MISSING:
        default = inspect.Parameter.empty
    annotation = " | ".join(_type_name(member) for member in declaration.members)
    if declaration.is_optional:
        annotation += " | None"
    return inspect.Parameter(
        declaration.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _type_name(member: Any) -> str:
    if get_origin(member) is Literal:
        return f"Literal[{', '.join(map(repr, get_args(member)))}]"
    return getattr(member, "__name__", str(member))


def _fill_docstring(docstring: str, declared: Iterable[Declaration]) -> str:
    """Return ``docstring`` with the line ``{options}`` replaced by a paragraph for each option.

    Other lines stay as they are, so a docstring that does not have this line says nothing of the options.
    """
    lines: list[str] = []
    for line in docstring.splitlines():
        if line.strip() != _PLACE_OF_OPTIONS:
            lines.append(line)
            continue
        indent = line[: -len(line.lstrip())]
        for declaration in declared:
            text = f"{declaration.name} ({describe_form(declaration)}): {declaration.option.help}"
            lines += textwrap.wrap(
                text,
                _DOCSTRING_WIDTH,
                initial_indent=indent,
                subsequent_indent=f"{indent}    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


def describe_form(declaration: Declaration) -> str:
    """Return the values of an option and whether it may be omitted, as docstrings state them."""
    values = describe_values(declaration)
    if declaration.is_optional:
        return f"{values}, *optional*"
    if declaration.default is MISSING:
        return values
    return f"{values}, defaults to `{declaration.default!r}`"


def describe_values(declaration: Declaration) -> str:
    """Return the values of an option in Markdown: its names and types."""
    names = [f"`{choice!r}`".replace("'", '"') for choice in declaration.choices]
    forms = [*names, *[f"`{kind.__name__}`" for kind in declaration.classes]]
    if declaration.takes_functions:
        forms.append("`Callable`")
    return declaration.option.form or join_words(forms)


def join_words(words: Iterable[str]) -> str:
    """Return words joined by commas, and the last one by "or".

    >>> join_words(["a", "b", "c"])
    'a, b or c'
    """
    *first, last = words
    if not first:
        return last
    return f"{', '.join(first)} or {last}"
