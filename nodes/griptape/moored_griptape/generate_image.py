"""The node Generate Image: text to image."""

from __future__ import annotations

from moored_griptape.picture_node import PictureNode


class MooredGenerateImage(PictureNode):
    """Generates a picture from a prompt."""
