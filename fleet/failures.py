"""Why a request has no result, and the conversion of exceptions to error messages for users.

A request that has no result has one of these exceptions, the same for a pipeline of ``para_core.launch``, for
the commands and for the server:

- the pipeline raised on all ranks, which stay usable: the pipeline's own exception, or :class:`RequestFailed`
  with its message if it must travel between processes that may not have its class. It is
  :class:`EncodingFailed` if the first rank cannot encode the result;
- :class:`~para_core.launcher.errors.Cancelled`: it was cancelled, and the ranks stay usable;
- :class:`~para_core.launcher.errors.RankDied`: a rank ended or no longer answers, also because of the
  network, or ranks raised differently. All ranks have been ended, and must start again.

Two functions translate them: :func:`para_core.cli.app.run` to an exit code and a sentence, and
:func:`para_core.fleet.http.errors.response_to` to an HTTP response.
"""

from __future__ import annotations


class RequestFailed(RuntimeError):
    """Raised if the pipeline raised for a request on every rank. The replica stays usable."""


class EncodingFailed(RequestFailed):
    """Raised if the result of a request cannot be encoded, as on a full disk. The replica stays usable."""


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

    The message is the exception's text. The type's name precedes it, unless messages of this type are written
    for users (such as ValueError). Missing optional dependencies and file errors get special messages.
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
