"""Exceptions of the checks that docs/refusals.md lists."""

from __future__ import annotations

from typing import TypeVar

RaisedError = TypeVar("RaisedError", bound=Exception)


def refusal(kind: type[RaisedError], reason: str, instead: str) -> RaisedError:
    """Return an exception of class ``kind`` whose message is ``reason``, then ``instead``, both whole
    sentences.

    docs/refusals.md shows ``instead``, which says what to do. A check may raise without this function if the
    message is one sentence that says why, followed by sentences that all say what to do.
    """
    return kind(f"{reason} {instead}")
