"""OpenVLA's processing: both resizes, prompts and the closing token, against the cases."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from network_cases import network_case_paths
from PIL import Image
from safetensors.numpy import load_file

from vla_runtime.processing.plain_images import letterboxed, stretched
from vla_runtime.processing.tokenizer import Tokenizer

SIZES = [(96, 128), (112, 112), (150, 90), (480, 640), (37, 224), (225, 224), (90, 91), (61, 60)]


def random_image(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)


def pillow(image: np.ndarray, height: int, width: int) -> np.ndarray:
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))


@pytest.mark.parametrize(('height', 'width'), SIZES)
@pytest.mark.parametrize('edge', [112, 224])
def test_stretched_images_are_pillows(height: int, width: int, edge: int):
    image = random_image(height, width)
    found = stretched(image, (edge, edge), 'bicubic_pillow')
    assert np.array_equal(found, pillow(image, edge, edge))


@pytest.mark.parametrize(('height', 'width'), SIZES)
@pytest.mark.parametrize('edge', [112, 224])
def test_letterboxed_images_are_padded_before_they_are_resized(height: int, width: int, edge: int):
    """The class's transforms, written out on Pillow's own pictures."""
    image, fill = random_image(height, width), (127, 3, 250)
    longer = max(height, width)
    down, right = int((longer - height) / 2), int((longer - width) / 2)
    square = Image.new('RGB', (width + 2 * right, height + 2 * down), fill)
    square.paste(Image.fromarray(image), (right, down))
    short = min(square.size)
    wide, high = (edge if side == short else int(edge * side / short) for side in square.size)
    square = square.resize((wide, high), Image.Resampling.BICUBIC)
    top, left = round((high - edge) / 2.0), round((wide - edge) / 2.0)
    expected = np.asarray(square)[top : top + edge, left : left + edge]
    found = letterboxed(image, edge, fill)
    assert found.shape == (edge, edge, 3)
    assert np.array_equal(found, expected)


@pytest.mark.cases
@pytest.mark.parametrize('path', network_case_paths('openvla_full'), ids=lambda path: path.stem)
def test_images_and_tokens_of_the_cases(path: Path):
    d, tensors = json.loads(path.read_text()), load_file(path.with_suffix('.case.safetensors'))
    tokenizer = Tokenizer.load(path.with_suffix('.tokenizer.json'), closing='▁')
    mean, std = (
        np.array(d[name], dtype=np.float32).reshape(6, 1, 1)
        for name in ('image_means', 'image_stds')
    )
    for request in range(d['requests']):
        image, edge = tensors[f'raw_image_{request}'], d['image']
        if d['image_resize_strategy'] == 'resize-naive':
            resized = stretched(image, (edge, edge), 'bicubic_pillow')
        else:
            fill = tuple(int(255 * value) for value in d['image_means'][-1])
            resized = letterboxed(image, edge, fill)
        unit = np.tile(resized.transpose(2, 0, 1), (2, 1, 1)) / np.float32(255.0)
        expected = tensors[f'pixel_values_{request}']
        np.testing.assert_allclose((unit - mean) / std, expected, rtol=0, atol=2e-6)
        ids = tensors[f'input_ids_{request}']
        tokens, mask = tokenizer.encode(d['prompts'][request], 40)
        assert tokens[mask].tolist() == ids.tolist()
        assert ids[-1] == d['empty_token']
