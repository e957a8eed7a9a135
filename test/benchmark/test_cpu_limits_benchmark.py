"""benchmark/cpu_limits.py: operators are sorted, and the parts of an inference add up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tiny_policy import tiny_spec, write_tiny_policy

sys.path.insert(0, str(Path(__file__).parents[2] / 'benchmark'))

import cpu_limits

from vla_runtime.policy import Policy


@pytest.mark.parametrize(
    ('operator', 'kind'),
    [
        ('aten::mm', 'products'),
        ('aten::addmm', 'products'),
        ('aten::mkldnn_convolution', 'products'),
        ('mkldnn::_linear_pointwise', 'products'),
        ('aten::_scaled_dot_product_flash_attention_for_cpu', 'attention'),
        ('aten::mul', 'rest'),
        ('aten::linear', 'rest'),
    ],
)
def test_operators_that_call_others_count_as_neither(operator, kind):
    assert cpu_limits.kind_of(operator) == kind


def test_products_are_found_with_their_shapes():
    x, layer = torch.randn(5, 8), torch.nn.Linear(8, 3, bias=False)
    with torch.inference_mode():
        times, shapes, operators = cpu_limits.split(lambda: layer(layer.weight.new_ones(5, 8)) + 1)
        assert shapes == {(5, 8, 3): 1} and times['products'] > 0.0 and times['attention'] == 0.0
        assert operators >= 3
        twice = cpu_limits.split(lambda: (layer(x), layer(x)))[1]
    assert twice == {(5, 8, 3): 2}
    assert cpu_limits.alone_ms(twice) > 0.0


def test_a_product_in_one_pass_has_its_matrix_the_other_way_round():
    assert cpu_limits.shape_of('aten::addmm', [[3], [5, 8], [8, 3]]) == (5, 8, 3)
    assert cpu_limits.shape_of(cpu_limits.ONE_PASS, [[1, 5, 8], [3, 8], [3]]) == (5, 8, 3)
    gated = [[1, 5, 8], [1, 5, 3], [3, 8], []]
    assert cpu_limits.shape_of(cpu_limits.ONE_PASS, gated) == (5, 8, 3)
    assert cpu_limits.shape_of('aten::bmm', [[2, 5, 8], [2, 8, 3]]) is None


def test_the_parts_of_an_inference_add_up(tmp_path):
    policy = Policy.load(write_tiny_policy(tmp_path / 'tiny', tiny_spec()), 'torch', threads=1)
    found = cpu_limits.measure(policy, rounds=1)
    policy.close()
    for case in ('miss', 'hit'):
        parts = [found[case][f'{part}_ms'] for part in ('products', 'attention', 'rest')]
        assert sum(parts) == pytest.approx(found[case]['ms'])
    assert found['miss']['operators'] > found['hit']['operators']
