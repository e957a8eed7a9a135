"""The numpy time table equals the networks' own, whatever float type the weights are stored in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_policy import tiny_dims

from vla_runtime.families.flow_network import build_network
from vla_runtime.family.listing import read_time_table
from vla_runtime.files.safetensors_reader import (
    SafetensorsReader,
    bfloat16_to_float32,
    float32_to_bfloat16,
)
from vla_runtime.inference.denoise import flow_times


@pytest.mark.parametrize('family', ['pi05', 'pi0'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_those_of_the_networks(family, dtype, tmp_path):
    generator = torch.Generator().manual_seed(3)
    network = build_network(family, tiny_dims(family))
    weights = {
        name: (torch.randn(value.shape, generator=generator) * 0.2).to(dtype)
        for name, value in network.state_dict().items()
    }
    save_file(weights, tmp_path / 'weights.safetensors')
    network.load_state_dict({name: value.float() for name, value in weights.items()})
    times = flow_times(10)
    with torch.inference_mode():
        expected = network.time_conditioning(torch.tensor(times, dtype=torch.float32)).numpy()
    table = read_time_table(family, tiny_dims(family), tmp_path / 'weights.safetensors')(times)
    assert table.dtype == np.float32 and table.shape == expected.shape
    assert np.abs(table - expected).max() <= 2e-6


def test_a_row_does_not_depend_on_how_many_were_asked_for(tmp_path):
    network = build_network('pi05', tiny_dims('pi05'))
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: torch.randn(value.shape, generator=generator)
        for name, value in network.state_dict().items()
    }
    save_file(weights, tmp_path / 'weights.safetensors')
    table = read_time_table('pi05', tiny_dims('pi05'), tmp_path / 'weights.safetensors')
    times = flow_times(7)
    assert np.array_equal(table(times)[4], table(times[4:5])[0])


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
    with pytest.raises(ValueError, match=r'weights\.safetensors: is not a whole safetensors file'):
        SafetensorsReader(path)


def test_a_missing_tensor_is_named(tmp_path):
    save_file({'other': torch.zeros(1)}, tmp_path / 'weights.safetensors')
    with pytest.raises(ValueError, match=r"float tensor 'time_in\.weight' is missing"):
        read_time_table('pi05', tiny_dims('pi05'), tmp_path / 'weights.safetensors')(flow_times(2))
