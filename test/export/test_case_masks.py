"""Masks of a prefix are known by their type, whatever a family calls them."""

from __future__ import annotations

import numpy as np

from vla_runtime.export.onnx.cases import Case


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


def test_a_prefix_without_a_mask_is_compared_whole():
    context = np.ones((1, 3, 4), dtype=np.float32)
    assert case(context=context).visible({'context': context})['context'] is context
