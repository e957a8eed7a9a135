"""Size of images of which the policy sees the middle, after they are cut."""

from __future__ import annotations

from vla_runtime.bundle.schema import CropSpec
from vla_runtime.processing.cropped_images import shortest_edge_size


def cut_image_size(size: tuple[int, int], crop: CropSpec) -> tuple[int, int]:
    """Height and width of an image that keeps its aspect (resample `area`), in pixels.

    Args:
        size: of the camera's image.
        crop: of the bundle.
    """
    return shortest_edge_size(size, crop.edge)
