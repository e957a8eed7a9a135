"""Masks of a prefix are known by their type, whatever a family calls them."""

from __future__ import annotations

import numpy as np
import pytest

from vla_convert.export.onnx.cases import Case


def case(**past: np.ndarray) -> Case:
    nothing = np.zeros(0, dtype=np.float32)
    found = Case({}, [], nothing, {}, {}, nothing, nothing, nothing, nothing)
    found.past, found.row_axes = past, dict.fromkeys(past, 0)
    return found


def test_positions_that_a_mask_of_any_name_hides_are_left_out():
    context = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    seen = np.array([[True, False, True]])
    visible = case(context=context, seen=seen).visible({'context': context, 'seen': seen})
    np.testing.assert_array_equal(visible['context'], context[0, [0, 2]])
    np.testing.assert_array_equal(visible['seen'], seen)


def test_of_two_masks_one_is_enough_to_show_a_position():
    context = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    images, text = np.array([[True, False, False]]), np.array([[False, False, True]])
    found = case(context=context, images=images, text=text)
    np.testing.assert_array_equal(
        found.visible({'context': context})['context'], context[0, [0, 2]]
    )


@pytest.mark.parametrize('images', [2, 3])
def test_each_part_of_a_prefix_has_its_own_mask(images):
    """Also where both parts are as long."""
    past = {
        'text_key': np.arange(12, dtype=np.float32).reshape(1, 3, 4),
        'images_key': np.arange(4 * images, dtype=np.float32).reshape(1, images, 4),
        'text_seen': np.array([[True, True, False]]),
        'images_seen': np.arange(images)[None] > 0,
    }
    visible = case(**past).visible(past)
    np.testing.assert_array_equal(visible['text_key'], past['text_key'][0, :2])
    np.testing.assert_array_equal(visible['images_key'], past['images_key'][0, 1:])


def test_a_prefix_without_a_mask_is_compared_whole():
    context = np.ones((1, 3, 4), dtype=np.float32)
    assert case(context=context).visible({'context': context})['context'] is context
