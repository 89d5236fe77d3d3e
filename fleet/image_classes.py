"""The error for an image that is sent to a pipeline that takes none: which classes of diffusers would take it,
and in which fields clients send images.
"""

from __future__ import annotations

from para_core.fleet.pipeline_info import Model

# Ends of the keys of diffusers' tables that name the editing checkpoints of a family: "flux" is FLUX.1-dev, and
# "flux-kontext" FLUX.1-Kontext.
_EDITING_SUFFIXES = ("kontext", "edit", "edit-plus", "layered", "i2v")
# The words that a class name has in addition if the class takes an image, for families that the tables lack:
# HunyuanVideoPipeline, HunyuanVideoImageToVideoPipeline.
_CLASS_NAME_PARTS = ("Img2Img", "Inpaint", "Edit", "ImageToVideo", "I2V", "I2I")


def classes_with_images(pipeline: str) -> tuple[str, ...]:
    """Return the names of diffusers' classes that take an image, of the family of the class ``pipeline``; empty
    if none is known.

    The family is looked up in the tables of diffusers' ``AutoPipeline`` classes, or else by class names. The
    classes that load the same weights come first, then those of the family's editing checkpoints.

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
    """Return the classes of diffusers whose name is that of ``pipeline`` with one of ``_CLASS_NAME_PARTS``."""
    import diffusers

    stem = pipeline.removesuffix("Pipeline").removesuffix("T2V").removesuffix("T2I")
    names = [f"{stem}{part}Pipeline" for part in _CLASS_NAME_PARTS]
    return [name for name in names if hasattr(diffusers, name)]


# The fields in which clients send an image: those of OpenAI's API, and the arguments of pipelines.
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


def explain_refused_image(model: Model) -> str:
    """Return the error message for an image that was sent to ``model``, which takes none. It names the classes that
    would take the image, if any is known.
    """
    classes = model.others or classes_with_images(model.pipeline)
    if not classes:
        return (
            f"{model.pipeline} takes no image, and para_core knows no class of its family that does. Send a "
            "prompt alone."
        )
    return (
        f"{model.pipeline} takes no image, and {' or '.join(classes)} would: load the model with one of these "
        f"(--pipeline {classes[0]}), or send a prompt alone."
    )
