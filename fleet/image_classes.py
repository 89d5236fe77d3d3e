"""For a pipeline that takes no image: the classes of diffusers that take one, the fields in which clients
send one, and the error message.
"""

from __future__ import annotations

from para_core.fleet.pipeline_info import Model

# Ends of the keys of diffusers' tables that name editing checkpoints of a family, such as "flux-kontext".
_EDITING_SUFFIXES = ("kontext", "edit", "edit-plus", "layered", "i2v")
# Parts of class names, for families that the tables lack: HunyuanVideoPipeline,
# HunyuanVideoImageToVideoPipeline.
_CLASS_NAME_PARTS = ("Img2Img", "Inpaint", "Edit", "ImageToVideo", "I2V", "I2I")


def classes_with_images(pipeline: str) -> tuple[str, ...]:
    """Return the names of the classes that take an image, for the models of the class ``pipeline``. Maybe
    none.

    They are in the family of ``pipeline`` by the tables of diffusers' ``AutoPipeline`` classes, or else by
    their names: those that load the same weights first, then those of the family's editing checkpoints.

    >>> classes_with_images("FluxPipeline")
    ('FluxImg2ImgPipeline', 'FluxInpaintPipeline', 'FluxKontextPipeline')
    """
    import diffusers
    from diffusers.pipelines import auto_pipeline as tables

    sources = (tables.AUTO_TEXT2IMAGE_PIPELINES_MAPPING, tables.AUTO_TEXT2VIDEO_PIPELINES_MAPPING)
    targets = (
        *(tables.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING, tables.AUTO_INPAINT_PIPELINES_MAPPING),
        tables.AUTO_IMAGE2VIDEO_PIPELINES_MAPPING,
    )
    families = [family for table in sources for family, cls in table.items() if cls.__name__ == pipeline]
    keys = [*families, *(f"{family}-{end}" for family in families for end in _EDITING_SUFFIXES)]
    names = [table[key].__name__ for key in keys for table in targets if key in table]
    if not names:
        stem = pipeline.removesuffix("Pipeline").removesuffix("T2V").removesuffix("T2I")
        names = [name for part in _CLASS_NAME_PARTS if hasattr(diffusers, name := f"{stem}{part}Pipeline")]
    return tuple(dict.fromkeys(name for name in names if name != pipeline))


# Names of the fields by which clients send an image: those of OpenAI's API, and those of pipelines.
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
    """Return the error message for an image that was sent to ``model``, with the classes that would take
    it.
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
