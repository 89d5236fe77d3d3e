"""A tiny Wan trained from scratch on moving shapes and their captions."""

from pathlib import Path

PIPELINE = Path(__file__).parent / "pipeline"
