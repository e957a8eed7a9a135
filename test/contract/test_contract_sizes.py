"""Sizes of every family: parameters, what the prefix hands over, policy.yaml, refusals, times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from contract_cases import each_family, of_cases, sizes_of
from family_contracts import contract_of
from network_cases import relative_error
from safetensors.torch import save_file
from tiny_policy import tiny_dims, tiny_spec

from vla_runtime.bundle.rules import dump_spec, parse_spec
from vla_runtime.family.declaration import observation_steps, with_cameras
from vla_runtime.family.listing import find_family, preset, preset_names, read_time_table
from vla_runtime.inference.denoise import flow_times
from vla_runtime.models.base.flow_network import build_network, empty_network
from vla_runtime.models.shapes.traced_shapes import trace_shapes

WITH_STEPS = each_family(lambda contract: find_family(contract.family).takes_steps)


@pytest.mark.parametrize(('family', 'preset'), of_cases(lambda contract: contract.parameters))
def test_a_published_size_has_its_parameters(family: str, preset: str):
    network = empty_network(family, find_family(family).presets[preset])
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count == contract_of(family).parameters[preset]


@each_family()
def test_an_empty_network_has_the_names_and_shapes_of_a_real_one(family: str):
    dims = tiny_dims(family)
    empty, real = (make(family, dims).state_dict() for make in (empty_network, build_network))
    assert {name: value.shape for name, value in empty.items()} == {
        name: value.shape for name, value in real.items()
    }
    assert {value.device.type for value in empty.values()} == {'meta'}


@pytest.mark.parametrize(('family', 'variant'), of_cases(sizes_of))
def test_policy_yaml_keeps_every_size_and_the_prefix_hands_over_what_is_declared(
    family: str, variant: str
):
    contract = contract_of(family)
    dims = sizes_of(contract)[variant]
    spec = tiny_spec(family)
    if dims.cameras == len(spec.cameras):
        assert parse_spec(dump_spec(replace(spec, dims=dims))).dims == dims
    past = trace_shapes(empty_network(family, dims)).past
    if contract.past is not None:
        assert {name: of.shape for name, of in past.items()} == dict(contract.past(dims))


@pytest.mark.parametrize(('family', 'field'), of_cases(lambda contract: contract.refused))
def test_sizes_that_do_not_fit_are_refused_by_field(family: str, field: str):
    with pytest.raises(ValueError, match=field):
        contract_of(family).refused[field](tiny_dims(family))


@WITH_STEPS
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_the_numpy_time_table_is_the_networks(family: str, dtype: torch.dtype, tmp_path):
    network = build_network(family, tiny_dims(family))
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: (torch.randn(value.shape, generator=generator) * 0.2).to(dtype)
        for name, value in network.state_dict().items()
    }
    save_file(weights, tmp_path / 'weights.safetensors')
    network.load_state_dict({name: value.float() for name, value in weights.items()})
    table = read_time_table(family, network.dims, tmp_path / 'weights.safetensors')
    for steps in (1, 3, 4, 10, 32):
        times = flow_times(steps)
        rows = table(times)
        with torch.inference_mode():
            expected = network.time_conditioning(torch.tensor(times, dtype=torch.float32))
        assert rows.shape == (steps, table.width) == expected.shape and rows.dtype == np.float32
        # The sine of an angle of 999 rounds by the angle's own last bit.
        assert relative_error(rows, expected) <= 5e-5
        # A row does not depend on how many were asked for.
        np.testing.assert_array_equal(rows[-1], table(times[-1:])[0])


@pytest.mark.parametrize('name', preset_names())
def test_a_published_size_can_have_another_number_of_cameras(name):
    published = preset(name)[1]
    # Every camera has a frame of each step.
    frames = observation_steps(published) or 1
    counts = [frames * cameras for cameras in (1, 2, 3, 4, 5)]
    made = [with_cameras(published, count) for count in counts]
    assert [dims.cameras for dims in made] == counts
    steps = set(np.diff([dims.prefix_length for dims in made]))
    assert len(steps) == 1 and steps.pop() > 0
