"""The generated parts of a page under docs/."""

from __future__ import annotations


def fill(text: str, parts: dict[str, list[str]]) -> str:
    """``text`` with every part between ``<!-- name -->`` and ``<!-- end of name -->`` written anew.

    Raises:
        ValueError: the page lacks one of them.
    """
    for name, lines in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found and found_end):
            raise ValueError(f"the page has no part between {begin.strip()} and {end}")
        text = before + begin + "\n" + "\n".join(lines) + "\n\n" + end + after
    return text
