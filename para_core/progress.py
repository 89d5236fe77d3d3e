"""Progress of what takes long before the first step, as records of one logger: loading, sharding, compiling,
warm-up.

Nothing is shown unless a handler is attached. Records of a counted phase have the attributes ``done`` and
``total``. Commands (:mod:`para_core.cli.progress`), ranks (:mod:`para_core.launcher.report_loading`) and
replicas attach handlers. Tests: tests/cli/test_progress.py and tests/launcher/test_loading.py.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

# Suffixes of weight files. Repositories hold the same weights in several formats, so only the largest format
# counts.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
# This logger of diffusers says "Loaded NAME as CLASS from …" after each component of a pipeline.
DIFFUSERS = "diffusers.pipelines.pipeline_utils"


@contextmanager
def pass_records_to(handler: logging.Handler, source: logging.Logger = logger) -> Iterator[None]:
    """Inside this context, pass the records of ``source`` at INFO or above to ``handler`` alone.

    For loggers of para_core, whose records ``handler`` shows. Use :func:`copy_records_to` for a logger of
    another library. Contexts of one logger must be left in reverse order, because each restores its state.
    """
    level, propagate = source.level, source.propagate
    source.addHandler(handler)
    source.setLevel(logging.INFO)
    # Handlers of the loggers above would show records that the level of ``source`` hid before.
    source.propagate = False
    try:
        yield
    finally:
        source.propagate = propagate
        source.setLevel(level)
        source.removeHandler(handler)


class _Onward(logging.Handler):
    """Handler of the logger ``source`` that gives records to the handlers above ``source``: those records
    that reached them before :func:`pass_records_to` changed its level and ``propagate``.
    """

    def __init__(self, source: logging.Logger) -> None:
        super().__init__()
        self._above, self._level = source.parent, source.level

    def emit(self, record: logging.LogRecord) -> None:
        # The level above is looked up here, because what runs in the context may change it.
        if self._above is not None and record.levelno >= (self._level or self._above.getEffectiveLevel()):
            self._above.callHandlers(record)


@contextmanager
def copy_records_to(handler: logging.Handler, source: logging.Logger) -> Iterator[None]:
    """Inside this context, pass the records of ``source`` at INFO or above to ``handler``, too. The handlers
    above ``source`` get the records that they get without this context, such as warnings.
    """
    onward: AbstractContextManager[None] = nullcontext()
    # Inside another such context, the outer one passes records on.
    if source.propagate:
        onward = pass_records_to(_Onward(source), source)
    with onward, pass_records_to(handler, source):
        yield


def report(text: str, done: int | None = None, total: int | None = None) -> None:
    """Log that a phase begins. A counted phase has ``done`` of ``total`` parts behind it."""
    logger.info(text, extra={"done": done, "total": total})


def readable_bytes(count: float) -> str:
    """Return a number of bytes with three digits and its unit.

    >>> readable_bytes(6_335_688), readable_bytes(23_802_816_640), readable_bytes(999_600)
    ('6.34 MB', '23.8 GB', '1 MB')
    """
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        # From 999.5 on three digits are 1000, which the format writes as 1e+03.
        if count < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def component_bytes(folder: Path | None, components: Collection[str] | None = None) -> dict[str, int]:
    """Return the bytes of weights by subfolder of a pipeline's folder, of those in ``components`` or of all.
    Subfolders without weights, or that cannot be read, are left out.
    """
    sizes: dict[str, int] = {}
    if folder is None:
        return sizes
    for subfolder in folder.iterdir():
        # A folder may have others, such as a second autoencoder.
        if components is not None and subfolder.name not in components:
            continue
        # A file may be a link to nothing. That is for the loader to report, not for a line of progress.
        with suppress(OSError):
            size = _weight_bytes(subfolder)
            if size:
                sizes[subfolder.name] = size
    return sizes


def _weight_bytes(folder: Path) -> int:
    """Return the bytes of the weights in the largest format in ``folder``; 0 if it is no folder. Variants,
    such as ``x.fp16.safetensors``, count only without a ``x.safetensors``, which diffusers loads by default.

    Raises:
        OSError: A file cannot be read.
    """
    sizes: Counter[tuple[str, str]] = Counter()
    if folder.is_dir():
        for file in folder.iterdir():
            if file.suffix in _WEIGHTS:
                # A part of a variant is named "x.fp16-00001-of-00002.safetensors".
                variant = file.stem.partition(".")[2].partition("-")[0]
                sizes[variant, file.suffix] += file.stat().st_size
    usual = [size for (variant, _), size in sizes.items() if not variant]
    return max(usual or sizes.values(), default=0)


class _ComponentCounter(logging.Handler):
    """Handler of diffusers' log messages that reports each component once it is loaded."""

    def __init__(self, name: str, components: Sequence[str]) -> None:
        super().__init__(logging.INFO)
        self._name, self._components = name, components
        self._sizes: dict[str, int] | None = None
        self._count = self._bytes = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Report the component that a message "Loaded NAME as …" names; other messages say nothing."""
        words = record.getMessage().split(maxsplit=2)
        if len(words) < 2 or words[0] != "Loaded":
            return
        if self._sizes is None:
            # A repository of the Hub is complete on this disk only now.
            self._sizes = component_bytes(folder_on_disk(self._name), self._components)
        self._count += 1
        size = self._sizes.get(words[1], 0)
        self._bytes += size
        text = f"loaded component {self._count} of {len(self._components)}: {words[1]}"
        if size:
            text = f"{text} ({readable_bytes(size)})"
        report(text, self._bytes, sum(self._sizes.values()) or None)


def folder_on_disk(name: str) -> Path | None:
    """Return the folder of model ``name``, a folder or a repository in the Hub's cache; None if it is on no disk."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def counts_components() -> bool:
    """Whether this process is inside :func:`report_components`, so that components are reported already."""
    return any(isinstance(handler, _ComponentCounter) for handler in logging.getLogger(DIFFUSERS).handlers)


@contextmanager
def report_components(name: str, components: Sequence[str]) -> Iterator[None]:
    """Inside this context, in which diffusers loads model ``name``, report each of its components once it is
    loaded.

    The order of loading differs from process to process: diffusers keeps the names in a set.
    """
    folder = folder_on_disk(name)
    size = "to be downloaded"
    if folder is not None:
        size = readable_bytes(sum(component_bytes(folder, components).values()))
    report(f"loading {name}: {len(components)} components, {size}")
    source = logging.getLogger(DIFFUSERS)
    counter = _ComponentCounter(name, components)
    with copy_records_to(counter, source):
        yield
