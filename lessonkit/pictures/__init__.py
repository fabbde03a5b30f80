"""Explanatory pictures of lessons, drawn by code from the lessons' own numbers, so that none can drift.

A lesson names its pictures in `about`, and `of("day2_triton_basics.lesson05_softmax")` gives them. Each draws itself as
SVG in English and Chinese. Some have a moving figure beside it: an HTML fragment with its own data and script.
"""

from lessonkit.pictures.registry import Picture, all_pictures, of

__all__ = ["Picture", "all_pictures", "of"]
