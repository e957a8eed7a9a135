"""Camera images to the networks' pixels, as policy.yaml says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from vla_runtime.bundle.folder import Bundle
from vla_runtime.bundle.statistics import CHANNELS, image_group
from vla_runtime.family.declaration import image_sizes, image_tiles
from vla_runtime.processing.images import BLACK, black_pixels, check_image, to_pixels
from vla_runtime.processing.normalization import Normalizer
from vla_runtime.processing.plain_images import (
    check_size,
    cropped,
    letterboxed,
    levels_per_unit,
    normalised_table,
    signed_table,
    stretched,
    stretched_levels,
    to_levels,
    to_plain_pixels,
)
from vla_runtime.processing.tiles import check_tiling, tiled
from vla_runtime.types import CroppedResample


class CameraImages:
    """Images of one bundle's cameras.

    Attributes:
        levels_per_unit: (V, 3) grey levels that one unit of a channel's pixels spans; None: 127.5.

    Raises:
        ValueError: statistics of the images that do not fit.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._spec = spec = bundle.spec
        self._sizes = image_sizes(spec.dims)
        self._tiles = image_tiles(spec.dims) or (None,) * len(self._sizes)
        self._padded = spec.images.padding in ('centre', 'left_top')
        self._tables: list[np.ndarray] = []
        self.levels_per_unit: np.ndarray | None = None
        self._pixels: np.ndarray | list[np.ndarray]
        if self._padded and spec.normalisation.images is None:
            self._pixels = np.stack([black_pixels(*size) for size in self._sizes])
            return
        self._tables = [_table(bundle, camera.frame_of or camera.name) for camera in spec.cameras]
        if spec.normalisation.images is not None:
            self.levels_per_unit = np.stack([levels_per_unit(table) for table in self._tables])
        pixels = [np.zeros((3, *size), dtype=np.float32) for size in self._sizes]
        self._pixels = np.stack(pixels) if len(set(self._sizes)) == 1 else pixels

    def check(self, images: Mapping[str, np.ndarray | None]) -> None:
        """Refuse images of wrong type or size (ValueError); None stands for an absent camera."""
        for camera, size, tiling in zip(self._spec.cameras, self._sizes, self._tiles, strict=True):
            image = images.get(camera.name)
            if image is None:
                continue
            try:
                check_image(image)
                if self._spec.images.padding == 'none':
                    check_size(image, size)
                if tiling is not None:
                    check_tiling(image, size, tiling)
            except ValueError as error:
                raise ValueError(f'observation.images[{camera.name}]: {error}') from None

    def encode(
        self, images: Mapping[str, np.ndarray | None]
    ) -> tuple[np.ndarray | Sequence[np.ndarray], np.ndarray]:
        """Convert every camera's image, in the bundle's camera order.

        Returns:
            pixels: (V, 3, S, S) float32 in [-1, 1], a buffer that the next call overwrites. Where
                images go in at their own sizes, V arrays (3, height, width) in the scale of
                `normalisation.images`; one array where the sizes are equal.
            mask: (V,) bool, False for an absent camera.

        Raises:
            ValueError: an image that cannot be resized; names the camera.
        """
        mask = np.zeros(len(self._spec.cameras), dtype=bool)
        for index, camera in enumerate(self._spec.cameras):
            image = images.get(camera.name)
            if image is None:
                self._pixels[index][:] = self._black(index)
                continue
            mask[index] = True
            try:
                self._convert(index, image)
            except ValueError as error:
                raise ValueError(f'observation.images[{camera.name}]: {error}') from error
        return self._pixels, mask

    def _convert(self, index: int, image: np.ndarray) -> None:
        size, out, spec = self._sizes[index], self._pixels[index], self._spec.images
        if self._padded:
            to_pixels(
                image,
                size,
                padding=spec.padding,
                resample=spec.resample,
                bars=BLACK if spec.bars is None else spec.bars,
                table=self._tables[index] if self._tables else None,
                out=out,
            )
        elif spec.resample == 'bicubic_float':
            to_levels(stretched_levels(image, size, spec.averaged), self._tables[index], out)
        else:
            if spec.resample == 'bilinear_points':
                picture = tiled(image, size, self._tiles[index])
            else:
                picture = self._resized(image, size)
            to_plain_pixels(picture, self._tables[index], out)

    def _resized(self, image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        resample, crop = self._spec.images.resample, self._spec.images.crop
        if crop is not None:
            return cropped(
                image,
                size,
                edge=crop.edge,
                fraction=crop.fraction,
                # The rules of the bundle let no other word come with a crop.
                resample=cast(CroppedResample, resample),
                fraction_across=crop.fraction_across,
                cut=crop.size,
                last=crop.last or 'bicubic_uint8',
                letterbox=crop.letterbox,
            )
        fill = self._spec.images.fill
        if fill is not None:
            return letterboxed(image, size[0], fill)
        if resample == 'bicubic' or resample == 'bicubic_uint8' or resample == 'bicubic_pillow':
            return stretched(image, size, resample)
        return image

    def _black(self, index: int) -> np.ndarray | float:
        return self._tables[index][:, 0][:, None, None] if self._tables else -1.0


def _table(bundle: Bundle, camera: str) -> np.ndarray:
    kind = bundle.spec.normalisation.images
    if kind is None:
        return signed_table()
    group = f'{image_group(camera)}.'
    statistics = {
        name.removeprefix(group): values
        for name, values in bundle.statistics.items()
        if name.startswith(group)
    }
    return normalised_table(Normalizer(kind, statistics, CHANNELS))
