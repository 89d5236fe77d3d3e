"""Exceptions of a request that ends without a result, and error messages for users."""

from __future__ import annotations


class ReplicaDied(RuntimeError):
    """Death of a replica: a rank ended, or no longer answers. The replica must be restarted."""


class RequestFailed(RuntimeError):
    """Failure of a request: the pipeline refused it, or failed with it, on every rank. The replica stays usable."""


class RequestCancelled(RuntimeError):
    """Cancellation of a request: all ranks stopped after the same step."""


# The extra that brings a module.
_EXTRAS = {
    **dict.fromkeys(("typer", "rich", "pydantic", "diffusers", "transformers", "accelerate", "peft"), "cli"),
    **dict.fromkeys(("PIL", "matplotlib", "imageio"), "cli"),
    **dict.fromkeys(("ray", "fastapi", "starlette", "prometheus_client"), "fleet"),
    "skimage": "calibrate",
}


def sentence(error: BaseException) -> str:
    """Return an error message for users: the exception's text, with the type's name if it was not written for users."""
    text = " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        package = error.name.partition(".")[0]
        if package in _EXTRAS:
            advice = f"in a checkout of para_core, pip install '.[{_EXTRAS[package]}]' brings it."
            return f"{package} is not installed: {advice}"
    if isinstance(error, OSError) and error.strerror and error.errno is not None:
        file = "" if error.filename is None else f"{error.filename}: "
        return f"{file}{error.strerror}."
    plain = isinstance(error, (ValueError, TypeError, OSError, RuntimeError, ImportError)) and not isinstance(
        error, KeyError
    )
    return text if plain and text else f"{type(error).__name__}: {text}"
