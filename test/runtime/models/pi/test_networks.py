"""The networks against LeRobot's own numbers, and against themselves without a cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from network_cases import (
    largest_error,
    load_network_case,
    network_case_paths,
)
from paths import ROOT
from reference_cases import find
from safetensors.torch import load_file

from vla_runtime.declarations.pi import PI05
from vla_runtime.models.blocks.action_time import time_embedding

pytestmark = pytest.mark.cases


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize('path', find('processing_*.safetensors'), ids=lambda path: path.stem)
def test_time_embedding_equals_the_reference(path: Path):
    tensors = load_file(path)
    names = [name for name in tensors if name.startswith('time_embedding_')]
    assert names
    for name in names:
        ours = time_embedding(tensors['time_values'], int(name.rpartition('_')[2]))
        assert largest_error(ours, tensors[name]) <= 1e-6


@pytest.mark.parametrize('path', network_case_paths('pi05'), ids=lambda path: path.stem)
def test_the_time_table_is_every_norms_modulation_in_order(path: Path):
    network = load_network_case(path).network
    t = torch.tensor([0.37])
    embedded = time_embedding(t, network.dims.expert.width)
    silu = torch.nn.functional.silu
    condition = silu(network.time_out(silu(network.time_in(embedded))))
    first = network.expert.layers[0].input_norm.modulation(condition)
    final = network.expert.norm.modulation(condition)
    split = network.split_conditioning(network.time_conditioning(t)).modulations
    assert len(split) == 2 * network.dims.expert.depth + 1
    for modulation, projected in ((split[0], first), (split[-1], final)):
        scale, shift, gate = projected[:, None].chunk(3, dim=-1)
        for found, expected in zip(modulation, (1.0 + scale, shift, gate), strict=True):
            assert largest_error(found, expected) <= 1e-6


@pytest.mark.thorough
def test_an_empty_network_needs_nothing_of_pytorchs_compiler():
    code = (
        'import sys; from vla_runtime.declarations.pi import PI05, PI0;'
        'from vla_runtime.models.base.flow_network import empty_network;'
        'empty_network("pi05", PI05); empty_network("pi0", PI0);'
        'sys.exit("torch._dynamo" in sys.modules or "sympy" in sys.modules)'
    )
    assert subprocess.run([sys.executable, '-c', code], cwd=ROOT, timeout=120).returncode == 0


def test_prefix_key_values_of_a_full_size_policy_take_35_7_megabytes():
    language = PI05.language
    numbers = 2 * language.depth * language.num_kv_heads * PI05.prefix_length * language.head_dim
    assert PI05.prefix_length == 968
    assert numbers * 4 / 1e6 == pytest.approx(35.7, abs=0.05)
