"""The exceptions of a request without a result, and the conversion of exceptions to error messages for users."""

from __future__ import annotations


class ReplicaDied(RuntimeError):
    """Raised if a rank of a replica ended or no longer answers. The replica must be restarted.

    ``rank`` is the number of the rank that ended, None if it is not known.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class RanksEnded(RuntimeError):
    """Raised if ranks ended, or raised differently, so that all of them have been ended."""


class RequestFailed(RuntimeError):
    """Raised if the pipeline raised for a request on every rank. The replica stays usable."""


class RequestCancelled(RuntimeError):
    """Raised if a request was cancelled before it began, or after a step that all ranks had finished."""


# Maps the import name of an optional dependency to the extra of para_core that installs it.
_EXTRAS = {
    **dict.fromkeys(("typer", "rich", "pydantic", "diffusers", "transformers", "accelerate", "peft"), "cli"),
    **dict.fromkeys(("PIL", "matplotlib", "imageio", "yaml"), "cli"),
    **dict.fromkeys(("fastapi", "fastapi_offline", "starlette", "prometheus_client", "uvicorn"), "fleet"),
    "ray": "ray",
    **dict.fromkeys(("torchao", "gguf"), "quantize"),
}


def describe_exception(error: BaseException) -> str:
    """Return a message for users, in one line.

    The message is the exception's text. The type's name precedes it, unless messages of this type are written for users
    (such as ValueError). Missing optional dependencies and file errors get special messages.
    """
    text = " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        package = error.name.partition(".")[0]
        if package in _EXTRAS:
            extra = _EXTRAS[package]
            advice = f"pip install 'para_core[{extra}]' brings it, in a checkout pip install '.[{extra}]'."
            return f"{package} is not installed: {advice}"
    if isinstance(error, OSError) and error.strerror and error.errno is not None:
        if error.filename is None:
            return f"{error.strerror}."
        return f"{error.filename}: {error.strerror}."
    if text and isinstance(error, (ValueError, TypeError, OSError, RuntimeError, ImportError)):
        return text
    return f"{type(error).__name__}: {text}"
