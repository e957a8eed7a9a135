"""Images of a GR00T N1.7 folder: how they are cut, and their size at the network."""

from __future__ import annotations

import math

from vla_convert.checkpoints.errors import ExportError
from vla_convert.checkpoints.folder_facts import FolderFacts
from vla_runtime.bundle.schema import CropSpec, ImageSpec
from vla_runtime.files.json_file import JsonMapping
from vla_runtime.processing.cropped_images import shortest_edge_size


def image_spec(settings: JsonMapping, *, nvidia: bool) -> ImageSpec:
    """Return the resizing and cutting of images.

    Args:
        settings: `image_target_size`, `image_crop_size`, `shortest_image_edge`, `crop_fraction`,
            `use_albumentations` and `letter_box_transform`.
        nvidia: the folder is NVIDIA's, whose own code cuts height and width each by its own number
            where it uses torchvision (`use_albumentations: false`).

    Raises:
        JsonError: sizes that are missing or of another form.
    """
    target = _pair(settings, 'image_target_size')
    if target is None:
        raise settings.error(
            'image_target_size', 'is missing; images of any size are not supported'
        )
    edge = settings.get('shortest_image_edge', int, None) or target[0]
    fraction = settings.get('crop_fraction', float, None)
    crop = _pair(settings, 'image_crop_size')
    area = settings.get('use_albumentations', bool, False)
    letterbox = settings.get('letter_box_transform', bool, False)
    if nvidia and not area:
        if crop is None:
            raise settings.error('image_crop_size', 'is missing: how much is cut is not said')
        if any(kept > side for kept, side in zip(crop, target, strict=True)):
            raise settings.error('image_crop_size', f'{crop} is larger than the image, {target}')
        return ImageSpec(
            padding='crop',
            resample='bilinear_uint8',
            crop=CropSpec(target[0], crop[0] / target[0], crop[1] / target[1], letterbox=letterbox),
        )
    if fraction is None and crop is not None:
        fraction = crop[0] / target[0]
    if fraction is not None and not 0.0 < fraction < 1.0:
        fraction = None
    return ImageSpec(
        padding='crop',
        resample='area' if area else 'bicubic_uint8',
        crop=CropSpec(edge, 1.0 if fraction is None else fraction, letterbox=letterbox),
    )


def cut_image(
    settings: JsonMapping, images: ImageSpec, cameras: tuple[tuple[int, int], ...]
) -> tuple[int, int] | None:
    """Height and width of the images after they are cut, before Qwen's own resize.

    None where the cameras' aspect is kept and not known.

    Args:
        settings: settings of the processor, as for `image_spec`.
        images: result of `image_spec`.
        cameras: (height, width) of the cameras' images, where they are known.

    Raises:
        ExportError: cameras of different aspects.
    """
    target = _pair(settings, 'image_target_size')
    assert target is not None and images.crop is not None
    if images.resample != 'area':
        return target
    if images.crop.letterbox:
        return images.crop.edge, images.crop.edge
    # The aspect is kept, so the size follows from the cameras'.
    sizes = {shortest_edge_size(size, images.crop.edge) for size in cameras}
    if len(sizes) > 1:
        raise ExportError(
            f'{settings.path}: use_albumentations keeps the aspect of images, and the folder has '
            f'cameras of several aspects: {sorted(sizes)}'
        )
    return sizes.pop() if sizes else None


def network_image(facts: FolderFacts, block: int, least: int) -> tuple[int, int]:
    """Height and width of the network's images: Qwen's `smart_resize` of the cut ones.

    Args:
        facts: facts of the folder; `image_sizes` has the size of a cut image.
        block: edge of an image token in pixels.
        least: pixels of an image; a smaller one is enlarged.
    """
    (cut,) = facts.image_sizes
    # Python's round, to even.
    height, width = (block * round(edge / block) for edge in cut)
    if height * width < least:
        scale = math.sqrt(least / (cut[0] * cut[1]))
        height, width = (block * math.ceil(edge * scale / block) for edge in cut)
    return height, width


def _pair(settings: JsonMapping, key: str) -> tuple[int, int] | None:
    values = settings.get(key, list, None)
    if values is None:
        return None
    if len(values) != 2 or any(type(value) is not int or value < 1 for value in values):
        raise settings.error(key, f'{values} where height and width are expected')
    return values[0], values[1]
