"""The error for an image that is sent to a pipeline that takes none: which classes of diffusers would take
it, and in which fields clients send images.

``request_schema.py`` refuses an image in a field of a request, ``http/bodies.py`` one in a field of OpenAI's
API, and ``http/server.py`` a path of the API that is for images. Tests: tests/fleet/test_fields.py.
"""

from __future__ import annotations

import inspect
from typing import Any

from para_core.fleet.pipeline_info import PipelineInfo

# Ends of the keys of diffusers' tables that name the checkpoints of a family that begin from an image: "flux"
# is FLUX.1-dev, and "flux-kontext" FLUX.1-Kontext. Other ends are left out on purpose: "anyflow-far" takes a
# video.
_EDITING_SUFFIXES = ("kontext", "edit", "edit-plus", "layered", "i2v")
# The words that a class name has in addition if the class takes an image, for families that the tables lack:
# HunyuanVideoPipeline, HunyuanVideoImageToVideoPipeline.
_CLASS_NAME_PARTS = ("Img2Img", "Inpaint", "Edit", "ImageToVideo")
# The words that it has in place of another: Kandinsky5T2VPipeline, Kandinsky5I2VPipeline.
_REPLACED_PARTS = (("T2V", "I2V"), ("T2I", "I2I"))


def classes_with_images(pipeline: str) -> tuple[str, ...]:
    """Return the names of diffusers' classes that take an image, of the family of the class ``pipeline``;
    empty if none is known.

    The family is looked up in the tables of diffusers' ``AutoPipeline`` classes: the classes that load the
    same weights come first, then those of the family's editing checkpoints. Families that the tables lack are
    guessed by class names: such a class has a transformer or UNet of the same class, but may need another
    checkpoint (HunyuanVideo's image-to-video has its own).

    >>> classes_with_images("FluxPipeline")
    ('FluxImg2ImgPipeline', 'FluxInpaintPipeline', 'FluxKontextPipeline')
    """
    names = _classes_in_tables(pipeline) or _classes_by_name(pipeline)
    return tuple(dict.fromkeys(name for name in names if name != pipeline))


def _classes_in_tables(pipeline: str) -> list[str]:
    """Return the classes that take an image, of the families that list ``pipeline`` as a class of text alone."""
    from diffusers.pipelines import auto_pipeline as tables

    tables_of_text = (tables.AUTO_TEXT2IMAGE_PIPELINES_MAPPING, tables.AUTO_TEXT2VIDEO_PIPELINES_MAPPING)
    tables_of_images = (
        tables.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING,
        tables.AUTO_INPAINT_PIPELINES_MAPPING,
        tables.AUTO_IMAGE2VIDEO_PIPELINES_MAPPING,
    )
    families = [
        family for table in tables_of_text for family, cls in table.items() if cls.__name__ == pipeline
    ]
    editing = [f"{family}-{suffix}" for family in families for suffix in _EDITING_SUFFIXES]
    return [
        table[key].__name__ for key in (*families, *editing) for table in tables_of_images if key in table
    ]


def _classes_by_name(pipeline: str) -> list[str]:
    """Return the classes of diffusers whose name is that of ``pipeline`` with one of ``_CLASS_NAME_PARTS`` or
    ``_REPLACED_PARTS``, and whose denoisers have the same class.

    A name alone is not enough: SanaImageToVideoPipeline has another transformer than SanaPipeline.
    """
    import diffusers

    stem = pipeline.removesuffix("Pipeline")
    names = [f"{stem}{part}Pipeline" for part in _CLASS_NAME_PARTS]
    names += [pipeline.replace(old, new) for old, new in _REPLACED_PARTS if old in pipeline]
    denoisers = _denoiser_classes(getattr(diffusers, pipeline, None))
    return [
        name
        for name in names
        if hasattr(diffusers, name) and _denoiser_classes(getattr(diffusers, name)) == denoisers
    ]


def _denoiser_classes(pipeline: type | None) -> list[Any]:
    """Return the classes that the constructor of ``pipeline`` names for its transformer and UNet."""
    if pipeline is None:
        return []
    parameters = inspect.signature(pipeline).parameters
    return [parameters[name].annotation for name in ("transformer", "unet") if name in parameters]


# The fields in which clients send an image: those of OpenAI's API, and the arguments of pipelines. Unlike
# pipeline_info.py, which asks the signature of a pipeline that takes images, this is for one that takes none,
# so the list has what clients would send to another.
_IMAGE_FIELDS = (
    "image",
    "images",
    "input_image",
    "input_images",
    "input_reference",
    "mask",
    "mask_image",
    "image[]",
)


def is_image_field(name: str) -> bool:
    """Whether a field of this name is meant as an image by clients."""
    return name in _IMAGE_FIELDS


def explain_refused_image(model: PipelineInfo) -> str:
    """Return the error message for an image that was sent to ``model``, which takes none. It names the
    classes that would take the image, if any is known.
    """
    classes = model.others or classes_with_images(model.pipeline)
    if not classes:
        return (
            f"{model.pipeline} takes no image, and para_core knows no class of its family that does. Send a "
            "prompt alone."
        )
    return (
        f"{model.pipeline} takes no image, and {' or '.join(classes)} would: load the model, or its family's "
        f"checkpoint for images, with one of these (--pipeline {classes[0]}), or send a prompt alone."
    )
