"""Tiny diffusers pipelines of every family except FLUX.1: random weights, nothing to load.

Each has a VAE and a scheduler, and text encoders unless its call takes embeddings. The images mean nothing, but every
part of the input changes them, so they show errors of a parallel run.
"""

from __future__ import annotations

from zoo.tiny.pipelines.components import TinyPipeline
from zoo.tiny.pipelines.image import IMAGE_PIPELINES
from zoo.tiny.pipelines.shelf import SHELF_PIPELINES
from zoo.tiny.pipelines.video import VIDEO_PIPELINES

PIPELINES: dict[str, TinyPipeline] = {**VIDEO_PIPELINES, **IMAGE_PIPELINES, **SHELF_PIPELINES}
