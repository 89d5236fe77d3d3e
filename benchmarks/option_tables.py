"""Tables of options for pages, from the declarations of the options. They measure nothing."""

from __future__ import annotations

import re

from benchmarks.harness import markdown_table
from para_core.adapters.parallel.options import ParallelOptions
from para_core.cache.options import CacheOptions
from para_core.declared_options import Declaration, declarations, describe_values

_NOT_EXACT = "**Not exact.**"


def pipeline_parts() -> dict[str, list[str]]:
    """Return the table of docs/pipelines.md: each option with its values, its default and its first sentence."""
    rows = []
    for declaration in declarations(ParallelOptions):
        values = describe_values(declaration)
        rows.append([_linked(declaration, "pipelines.md"), values, _default(declaration), _first_sentence(declaration)])
    return {"options of parallelize_pipe": markdown_table(["option", "values", "default", "what it does"], rows)}


def cache_parts() -> dict[str, list[str]]:
    """Return the table of docs/cache.md: each option with its default and its description."""
    rows = [[_linked(each, "cache.md"), _default(each), _cell(each.option.help)] for each in declarations(CacheOptions)]
    return {"options of the cache": markdown_table(["option", "default", "what it does"], rows)}


def _linked(declaration: Declaration, page: str) -> str:
    """Return the name of an option for ``page``, linked to the section that explains it."""
    name, target = f"`{declaration.name}`", declaration.option.page.removeprefix(f"{page}#")
    if target != declaration.option.page:
        target = f"#{target}"
    return f"[{name}]({target})" if target else name


def _default(declaration: Declaration) -> str:
    if declaration.option.default:
        return declaration.option.default
    if declaration.is_optional:
        return "none"
    return f"`{declaration.default!r}`".replace("'", '"')


def _first_sentence(declaration: Declaration) -> str:
    sentence = re.split(r"(?<=\.) (?=[A-Z*])", declaration.option.help)[0]
    if _NOT_EXACT in declaration.option.help:
        sentence += f" {_NOT_EXACT}"
    return _cell(sentence)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
