"""Pickles that travel between the caller and its ranks: tensors and images by their memory, the user's
functions by value.

``wire.py`` makes and loads bodies by this; ``handle.py`` asks which module and which generators are the
user's. Tests: tests/launcher/test_wire.py.
"""

from __future__ import annotations

import io
import pickle
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

try:
    import cloudpickle
except ModuleNotFoundError:
    cloudpickle = None

_Base: Any = pickle.Pickler if cloudpickle is None else cloudpickle.Pickler
# Modes of PIL images whose pixels are plain bytes.
_IMAGE_MODES = ("L", "RGB", "RGBA")
# cloudpickle keeps one registry of modules for the whole process. Held during dump(), which a value's own
# method may call again.
_registry_lock = threading.RLock()


class _Pickler(_Base):  # type: ignore[misc]
    """Pickler that copies tensors to the CPU, and hands the memory of tensors and images to ``buffer_callback``."""

    def reducer_override(self, value: Any) -> Any:
        torch, pil = sys.modules.get("torch"), sys.modules.get("PIL.Image")
        if torch is not None and isinstance(value, torch.Tensor):
            return _reduce_tensor(torch, value)
        if torch is not None and isinstance(value, torch.Generator):
            return _load_generator, (value.device.type, value.get_state())
        if pil is not None and isinstance(value, pil.Image) and value.mode in _IMAGE_MODES:
            return _load_image, (value.mode, value.size, pickle.PickleBuffer(value.tobytes()), value.info)
        reduced: Any = NotImplemented
        if cloudpickle is not None:
            reduced = super().reducer_override(value)
        if isinstance(value, type) and isinstance(reduced, tuple) and len(reduced) == 6:
            return _reduce_class(value, reduced)
        return reduced


# Classes of this process that were sent or received by value. cloudpickle gives such a class the same
# identity each time that it is loaded, but would set its attributes again.
_known_classes: weakref.WeakSet[type] = weakref.WeakSet()


def _reduce_class(cls: type, reduced: Any) -> Any:
    """Return cloudpickle's reduction of a class by value, with attributes that are set in a process only
    once.

    Otherwise a call that merely mentions the class would undo what the process has changed in it since.
    """
    _known_classes.add(cls)
    make, arguments, state, _, _, setter = reduced
    return make, arguments, (setter, state), None, None, _set_once


def _set_once(cls: type, state: tuple[Callable[[type, Any], Any], Any]) -> None:
    """Set the attributes of a class that was received, unless this process knows it. Pickle calls this on loading."""
    if cls not in _known_classes:
        setter, attributes = state
        setter(cls, attributes)
        _known_classes.add(cls)


class PortableException:
    """A stand-in for an exception, which is loaded as that exception, whatever arguments the constructor of
    its class takes. Attributes that cannot be pickled are left out.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> Any:
        attributes = {name: value for name, value in vars(self._error).items() if _can_be_pickled(value)}
        args = tuple(value if _can_be_pickled(value) else str(value) for value in self._error.args)
        return _load_exception, (type(self._error), args, attributes)


def _load_exception(
    cls: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]
) -> BaseException:
    error = cls.__new__(cls, *args)
    error.args = args
    vars(error).update(attributes)
    return error


def _can_be_pickled(value: Any) -> bool:
    """Whether ``value`` can be pickled, and loaded again in this process."""
    try:
        # True keeps buffers in the pickle.
        pickle.loads(dump(value, lambda buffer: True))
    # Pickling and loading call the value's own methods.
    except Exception:
        return False
    return True


def _reduce_tensor(torch: Any, value: Any) -> Any:
    """Return the reduction of a tensor to bytes of the CPU. Memory that several tensors share is sent for each."""
    if type(value) is torch.nn.Parameter:
        return torch.nn.Parameter, (value.data, value.requires_grad)
    plain = type(value) is torch.Tensor and value.layout is torch.strided
    if not plain or value.is_meta or value.is_quantized or value.is_nested:
        return NotImplemented
    value = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    raw = value.reshape(-1).view(torch.uint8).numpy()
    return _load_tensor, (
        str(value.dtype).removeprefix("torch."),
        tuple(value.shape),
        pickle.PickleBuffer(raw),
    )


def _load_tensor(dtype: str, shape: tuple[int, ...], buffer: Any) -> Any:
    """Return the tensor of :func:`_reduce_tensor`, which shares the memory of ``buffer`` unless that is ``bytes``."""
    import torch

    # torch.frombuffer takes neither empty buffers nor, without a warning, read-only ones.
    if isinstance(buffer, bytes):
        buffer = bytearray(buffer)
    flat = torch.empty(0, dtype=torch.uint8)
    if len(buffer) > 0:
        flat = torch.frombuffer(buffer, dtype=torch.uint8)
    return flat.view(getattr(torch, dtype)).reshape(shape)


def _load_generator(device: str, state: Any) -> Any:
    import torch

    # A generator of an accelerator belongs to the device of the process that loads it.
    generator = torch.Generator(device if device == "cpu" else torch.accelerator.current_accelerator())
    generator.set_state(state)
    return generator


def _load_image(mode: str, size: tuple[int, int], buffer: Any, info: dict[str, Any]) -> Any:
    from PIL import Image

    image = Image.frombytes(mode, size, buffer)
    image.info.update(info)
    return image


def dump(
    value: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any], by_value: str | None = None
) -> bytes:
    """Return the pickle of ``value``. Large buffers go to ``buffer_callback``, as in :class:`pickle.Pickler`.

    Functions and classes of ``__main__``, and of the module that is named ``by_value``, are pickled by value;
    without cloudpickle, by name. Raise TypeError if ``value`` cannot be pickled.
    """
    stream = io.BytesIO()
    try:
        with _pickled_by_value(by_value):
            _Pickler(stream, protocol=5, buffer_callback=buffer_callback).dump(value)
    # Pickling calls methods of the value, which may raise anything.
    except Exception as error:
        advice = ""
        if cloudpickle is None:
            advice = (
                " Without cloudpickle only functions that a module defines at its top level can be sent: pip install "
                "'para_core[launch]' brings it."
            )
        raise TypeError(
            f"a value cannot be sent between this process and the ranks: {type(error).__name__}: {error}.{advice}"
        ) from error
    return stream.getvalue()


@contextmanager
def _pickled_by_value(name: str | None) -> Iterator[None]:
    """Inside this context, let cloudpickle pickle functions and classes of the module ``name`` by value."""
    module = None if name is None else sys.modules.get(name)
    if cloudpickle is None or module is None:
        yield
        return
    with _registry_lock:
        registered = name in cloudpickle.list_registry_pickle_by_value()
        if not registered:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            if not registered:
                cloudpickle.unregister_pickle_by_value(module)


def module_of_user(function: Callable[..., Any]) -> str | None:
    """Return the name of the user's module that defines ``function``; None for ``__main__`` and installed
    modules.

    If ranks imported the user's module, they would run it: it may be the program that launches them.
    """
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__module__", None) or type(function).__module__
    module = sys.modules.get(name)
    if module is None or name == "__main__" or _is_installed(module):
        return None
    return name


def _is_installed(module: ModuleType) -> bool:
    """Whether ranks can import ``module`` without running code of the user's."""
    file = getattr(module, "__file__", None)
    folders = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib"))
    return file is None or file.startswith(folders) or module.__name__.partition(".")[0] == "para_core"


def generators_in(value: Any) -> list[Any]:
    """Return the ``torch.Generator`` objects in nested lists, tuples and dicts, each one once."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    if isinstance(value, torch.Generator):
        return [value]
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    by_identity = {id(generator): generator for item in items for generator in generators_in(item)}
    return list(by_identity.values())
