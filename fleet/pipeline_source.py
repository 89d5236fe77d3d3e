"""Pipeline classes of the installed diffusers, read from its source files, because importing one takes
seconds.

A class is described by the components of its ``__init__`` and the parameters of its ``__call__``. Nothing
here imports diffusers or torch.

`selection.py` and `classical.py` choose a class with it, `cli/checks.py` refuses options by it, and
`without_weights.py` asks for the multiple of height and width. An imported class is described in
`pipeline_info.py`. Tests: tests/fleet/test_model_files.py.
"""

from __future__ import annotations

import ast
import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from inspect import Parameter
from pathlib import Path
from typing import Any

# Components that denoise. Their class decides which pipelines can use the weights of a folder.
DENOISERS = ("transformer", "unet", "prior", "transformer_2")
CONTROLNET = "controlnet"
# Components whose classes are compared to say which pipelines fit a folder.
_COMPARED_COMPONENTS = (*DENOISERS, "vae", "text_encoder", "text_encoder_2", "text_encoder_3")
_SIDES = ("height", "width")
_SEQUENCES = ("list", "tuple", "List", "Tuple")
# Words of an annotation that are no class of a component.
_NO_CLASSES = (*_SEQUENCES, "Optional", "Union", "None")


@dataclass(frozen=True)
class PipelineSource:
    """Components and call of a pipeline class, as its source declares them."""

    name: str
    components: Mapping[str, str]  # parameters of __init__, with their annotations as text ("" without one)
    positional: tuple[str, ...]  # components without a default
    required: tuple[str, ...]  # those of them that the class does not declare as optional
    # Parameters of __call__ with their defaults: inspect.Parameter.empty without one, None if it is no
    # literal.
    call: Mapping[str, Any]
    # Expressions by which the class divides height or width, to check that nothing remains; for each the alternatives.
    divisors: tuple[tuple[ast.expr, ...], ...]

    @property
    def takes_images(self) -> bool:
        """Whether the call has a parameter for images to start from or to edit."""
        return any(name in ("image", "images") for name in self.call)

    @property
    def is_from_text(self) -> bool:
        """Whether the call has no parameter for an image, but those of IP adapters."""
        return not any(name.endswith(("image", "images")) and "ip_adapter" not in name for name in self.call)

    @property
    def single_controlnets(self) -> tuple[str, ...]:
        """Names of the ControlNet classes that the pipeline accepts; empty if it accepts none."""
        names = re.findall(r"\w+", self.components.get(CONTROLNET, ""))
        return tuple(dict.fromkeys(name for name in names if name not in _NO_CLASSES and "Multi" not in name))

    @property
    def takes_several_controlnets(self) -> bool:
        """Whether the annotation of the ControlNet allows a list, or a class for several."""
        names = re.findall(r"\w+", self.components.get(CONTROLNET, ""))
        return any(name in _SEQUENCES or "Multi" in name for name in names)

    def find_lacking(self, index: Mapping[str, Any], others: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the required components that neither the index of a folder has nor ``others`` names."""
        return tuple(name for name in self.required if name not in others and class_in(index, name) is None)

    def find_other_denoiser(self, index: Mapping[str, Any]) -> tuple[str, str, str] | None:
        """Return name, class and expected class of a denoiser that is not of the class that this pipeline
        takes.

        None if there is no such denoiser, or the source does not state the class.
        """
        for name in DENOISERS:
            cls = class_in(index, name)
            if name in self.components and not self._takes(name, cls):
                return name, str(cls), self.components[name]
        return None

    def fits(self, index: Mapping[str, Any]) -> bool:
        """Whether the class runs the weights of a folder with this index, perhaps with a ControlNet in
        addition.
        """
        if not any(name in self.components and class_in(index, name) is not None for name in DENOISERS):
            return False
        compared = [name for name in self.components if name in _COMPARED_COMPONENTS]
        same = all(self._takes(name, class_in(index, name)) for name in compared)
        # The index of a folder has optional components as well, without a class.
        same = same and all(name in index for name in compared if name in self.positional)
        return same and not self.find_lacking(index, (CONTROLNET,))

    def _takes(self, component: str, cls: str | None) -> bool:
        """Whether the annotation of a component names its class in a folder, or names none."""
        words = re.findall(r"\w+", self.components[component])
        named = [word for word in words if word.endswith("Model") or word.startswith("Autoencoder")]
        return cls is None or not named or cls in words or "PreTrainedModel" in words


def class_in(index: Mapping[str, Any], component: str) -> str | None:
    """Return the class name of a component in the index of a folder (model_index.json); None if it has none."""
    entry = index.get(component)
    if isinstance(entry, (list, tuple)) and len(entry) >= 2 and isinstance(entry[1], str):
        return entry[1]
    return None


@cache
def pipeline_files() -> Mapping[str, Path]:
    """Return the file of each pipeline class that diffusers exports, by class name; modular pipelines are
    left out.

    Empty if diffusers is not installed.
    """
    spec = find_spec("diffusers")
    if spec is None or not spec.submodule_search_locations:
        return {}
    folder = Path(next(iter(spec.submodule_search_locations)))
    exported = set(re.findall(r'"(\w+Pipeline)"', (folder / "__init__.py").read_text(encoding="utf-8")))
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("pipelines/**/*.py")):
        for name in re.findall(r"^class (\w+Pipeline)\b", path.read_text(encoding="utf-8"), re.MULTILINE):
            if name in exported:
                files.setdefault(name, path)
    files.pop("DiffusionPipeline", None)
    return files


@cache
def read_pipeline(name: str) -> PipelineSource | None:
    """Return the description of a pipeline class; None if the installed diffusers has no source of this name.

    What a class does not define itself is that of its first base with a source, all divisors or none:
    diffusers' pipelines hardly inherit from each other.
    """
    path = pipeline_files().get(name)
    if path is None:
        return None
    tree = ast.parse(path.read_text(encoding="utf-8"))
    cls = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    functions = {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}
    inherited = [read_pipeline(base.id) for base in cls.bases if isinstance(base, ast.Name)]
    base = next(
        (source for source in inherited if source is not None), PipelineSource(name, {}, (), (), {}, ())
    )
    components, positional, required = base.components, base.positional, base.required
    if "__init__" in functions:
        optional = _read_optional_components(cls)
        parameters = _read_parameters(functions["__init__"])
        components = {parameter.arg: _unparse_annotation(parameter) for parameter in parameters}
        positional = tuple(
            parameter.arg for parameter, default in parameters.items() if default is Parameter.empty
        )
        required = tuple(parameter for parameter in positional if parameter not in optional)
    call, divisors = base.call, base.divisors
    if "__call__" in functions:
        call = {
            parameter.arg: default for parameter, default in _read_parameters(functions["__call__"]).items()
        }
        checks = [functions[function] for function in ("check_inputs", "__call__") if function in functions]
        divisors = tuple(divisor for function in checks for divisor in _find_divisors(function))
    return PipelineSource(name, components, positional, required, call, divisors)


def _read_parameters(function: ast.FunctionDef) -> dict[ast.arg, Any]:
    """Return the default of each parameter but ``self``: Parameter.empty without one, None if it is no
    literal.
    """
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults += arguments.defaults
    pairs = [
        *zip(positional, defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return {parameter: _evaluate_default(default) for parameter, default in pairs[1:]}


def _unparse_annotation(parameter: ast.arg) -> str:
    if parameter.annotation is None:
        return ""
    return ast.unparse(parameter.annotation)


def _evaluate_default(default: ast.expr | None) -> Any:
    if default is None:
        return Parameter.empty
    try:
        return ast.literal_eval(default)
    except ValueError:
        return None


def _read_optional_components(cls: ast.ClassDef) -> list[str]:
    """Return the names in ``_optional_components`` of the class, empty if it has no such attribute."""
    for node in cls.body:
        if not isinstance(node, ast.Assign):
            continue
        if any(
            isinstance(target, ast.Name) and target.id == "_optional_components" for target in node.targets
        ):
            return [item.value for item in ast.walk(node) if isinstance(item, ast.Constant)]  # type: ignore[misc]
    return []


def _find_divisors(function: ast.FunctionDef) -> Iterator[tuple[ast.expr, ...]]:
    """Yield the divisors of ``height`` or ``width``: one expression, or for a local variable all that it
    is assigned. Only one of these applies, depending on the pipeline.
    """
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned.setdefault(node.targets[0].id, []).append(node.value)
    for node in ast.walk(function):
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Mod)
            and isinstance(node.left, ast.Name)
            and node.left.id in _SIDES
        ):
            divisor = node.right
            if isinstance(divisor, ast.Name) and divisor.id in assigned:
                yield tuple(assigned[divisor.id])
            else:
                yield (divisor,)


def multiple_of_sides(source: PipelineSource, pipe: Any) -> int:
    r"""Return the number by which a pipeline requires height and width to be divisible; 1 if it states none,
    or none that can be read here: the pipeline itself then refuses a size.

    ``pipe`` is an instance of the class. It may lack weights, because only numbers of its attributes are
    read. With None only constants count.

    >>> from types import SimpleNamespace
    >>> check = ast.parse("def f(self, height):\n if self.a: n = self.a\n else: n = self.b\n height % n")
    >>> source = PipelineSource("P", {}, (), (), {}, tuple(_find_divisors(check.body[0])))
    >>> multiple_of_sides(source, SimpleNamespace(a=16, b=None)), multiple_of_sides(source, None)
    (16, 1)
    """
    multiple = 1
    for alternatives in source.divisors:
        numbers = [_evaluate(divisor, pipe) for divisor in alternatives]
        positive = [number for number in numbers if number is not None and number > 0]
        # A size that one of several numbers divides may be valid, so require no more than all of them do.
        multiple = math.lcm(multiple, math.gcd(*positive) or 1)
    return multiple


def _evaluate(expression: ast.expr, pipe: Any) -> int | None:
    """Return the value of an integer, an attribute of ``self`` or an item of one, ``int()`` of one, or a
    product or power; else None.
    """
    value: Any = None
    if (
        isinstance(expression, ast.Call)
        and ast.unparse(expression.func) == "int"
        and len(expression.args) == 1
    ):
        return _evaluate(expression.args[0], pipe)
    if isinstance(expression, ast.Constant):
        value = expression.value
    if isinstance(expression, (ast.Attribute, ast.Subscript)):
        value = _read_attribute(expression, pipe)
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, (ast.Mult, ast.Pow)):
        base = _evaluate(expression.left, pipe)
        factor = _evaluate(expression.right, pipe)
        if base is None or factor is None:
            return None
        if isinstance(expression.op, ast.Mult):
            return base * factor
        return int(base**factor)
    if type(value) is int:
        return value
    return None


def _read_attribute(expression: ast.expr, pipe: Any) -> Any:
    """Return the value of ``self``, which is ``pipe``, or of an attribute or item of it; None for others."""
    if isinstance(expression, ast.Attribute):
        return getattr(_read_attribute(expression.value, pipe), expression.attr, None)
    if isinstance(expression, ast.Subscript):
        items = _read_attribute(expression.value, pipe)
        index = _evaluate(expression.slice, pipe)
        if isinstance(items, (list, tuple)) and index is not None and index < len(items):
            return items[index]
        return None
    if isinstance(expression, ast.Name) and expression.id == "self":
        return pipe
    return None


def find_fitting_pipelines(index: Mapping[str, Any]) -> list[PipelineSource]:
    """Return the pipeline classes that run the weights of a folder with this index, without deprecated ones.

    Those whose names begin like that of the folder's class come first, then those with short names.
    """
    denoisers = [name for name in (class_in(index, denoiser) for denoiser in DENOISERS) if name is not None]
    names = [
        name
        for name, path in pipeline_files().items()
        if "deprecated" not in path.parts
        # Parsing all files takes seconds, so only those that mention the class of the denoiser are parsed.
        and any(denoiser in path.read_text(encoding="utf-8") for denoiser in denoisers)
    ]
    family = str(index.get("_class_name")).removesuffix("Pipeline")
    names.sort(key=lambda name: (not name.startswith(family), len(name), name))
    sources = [read_pipeline(name) for name in names]
    return [source for source in sources if source is not None and source.fits(index)]


# Parts of the names of classes that need weights of their own: they were trained for another input, although
# the classes of their components are those of their family.
_OWN_WEIGHTS = re.compile(
    "Fill|Control(?!Net)|Redux|VisualCloze|Kontext|Edit|Layered|Animate|VACE|Upscal|Adapter|GLIGEN"
)


def find_advisable_pipelines(index: Mapping[str, Any]) -> list[PipelineSource]:
    """Return the classes of :func:`find_fitting_pipelines`, without those that need weights of their own."""
    inputs = set(_OWN_WEIGHTS.findall(str(index.get("_class_name"))))
    return [
        source for source in find_fitting_pipelines(index) if set(_OWN_WEIGHTS.findall(source.name)) <= inputs
    ]


def require_pipeline(
    name: str, model: str, index: Mapping[str, Any], others: Sequence[str] = ()
) -> PipelineSource:
    """Return the description of the class ``name`` for the weights of ``model``, a folder with this index.

    ``others`` names the components that come from elsewhere, such as a ControlNet.

    Raises:
        ModuleNotFoundError: diffusers is not installed.
        ValueError: diffusers has no such class, or the folder lacks one of its components, or has a denoiser
            of another class. The message names classes that fit the weights.
    """
    if not pipeline_files():
        raise ModuleNotFoundError("the classes of pipelines need diffusers", name="diffusers")
    source = read_pipeline(name)
    if source is None:
        close = difflib.get_close_matches(name, pipeline_files(), n=1)
        hint = ""
        if close:
            hint = f"Did you mean {close[0]}? "
        raise ValueError(
            f"pipeline is {name!r}, and this diffusers has no classical pipeline of this name. {hint}{_advise(index)}"
        )
    other = source.find_other_denoiser(index)
    if other is not None:
        component, cls, expected = other
        raise ValueError(
            f"pipeline is {name!r}, whose {component} is a {expected}, and that of {model!r} is a {cls}. "
            f"{_advise(index)}"
        )
    lacking = source.find_lacking(index, others)
    if CONTROLNET in lacking:
        raise ValueError(
            f"pipeline is {name!r}, which needs a ControlNet; expected --controlnet with a folder or Hub repository of "
            f"a {' or '.join(source.single_controlnets)}."
        )
    if lacking:
        noun = "component"
        if len(lacking) > 1:
            noun = "components"
        raise ValueError(
            f"pipeline is {name!r}, which needs {', '.join(lacking)}, and {model!r} has no such {noun}. "
            f"{_advise(index)}"
        )
    return source


def _advise(index: Mapping[str, Any]) -> str:
    """Return the end of an error message, which names the classes that fit the weights."""
    fitting = [source.name for source in find_fitting_pipelines(index)]
    if not fitting:
        return "Leave --pipeline out to use the class that the model names."
    return f"These classes take the weights of this model: {', '.join(fitting)}."
