"""Kernels that `roofline` predicts with are those that `benchmark/kernels.py` counts."""

from __future__ import annotations

import sys

import pytest
from paths import ROOT
from triton_package import interpreted, needs_triton  # noqa: F401

sys.path.insert(0, str(ROOT / 'benchmark'))

import kernels

from vla_runtime.family.listing import performance_figures, preset_names

COUNTED = {
    name: counted for name in preset_names() if (counted := performance_figures(name).kernels)
}


@pytest.mark.thorough
@pytest.mark.parametrize('name', list(COUNTED))
def test_counts_of_the_roofline_are_those_of_todays_modules(name, tmp_path):
    bundle = kernels.write_deep(name, tmp_path / 'deep')
    assert kernels.packed_kernels(bundle) == COUNTED[name]['torch']


@needs_triton
@pytest.mark.usefixtures('interpreted')
@pytest.mark.parametrize('name', list(COUNTED))
def test_counts_in_triton_kernels_are_those_of_todays_modules(name, tmp_path):
    bundle = kernels.write_deep(name, tmp_path / 'deep')
    assert kernels.triton_kernels(bundle) == COUNTED[name]['triton']
