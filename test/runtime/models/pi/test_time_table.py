"""The numpy time table equals the networks' own, whatever float type the weights are stored in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_policy import tiny_dims

from vla_runtime.family.listing import read_time_table
from vla_runtime.files.safetensors_reader import (
    SafetensorsReader,
    bfloat16_to_float32,
    float32_to_bfloat16,
)
from vla_runtime.inference.denoise import flow_times


def test_bfloat16_rounds_to_nearest_even_and_keeps_what_is_no_number():
    values = np.array([1.0, -2.5, 3.14159, 1e-40, 3.4e38, np.inf, -np.inf, np.nan], np.float32)
    random = np.random.default_rng(0).standard_normal(1000, np.float32)
    # Halfway between two bfloat16 numbers, towards an even and from an odd one.
    halfway = np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)
    values = np.concatenate([values, random, halfway])
    expected = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    assert np.array_equal(
        bfloat16_to_float32(float32_to_bfloat16(values)), expected, equal_nan=True
    )


@pytest.mark.parametrize('data', [b'', b'\xff' * 8, b'\x04' + b'\0' * 7 + b'{"a"'])
def test_what_is_no_safetensors_file_is_told(data, tmp_path):
    path = tmp_path / 'weights.safetensors'
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r'weights\.safetensors'):
        SafetensorsReader(path)


def test_a_missing_tensor_is_named(tmp_path):
    save_file({'other': torch.zeros(1)}, tmp_path / 'weights.safetensors')
    with pytest.raises(ValueError, match=r'time_in\.weight'):
        read_time_table('pi05', tiny_dims('pi05'), tmp_path / 'weights.safetensors')(flow_times(2))
