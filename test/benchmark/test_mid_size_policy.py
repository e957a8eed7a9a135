"""benchmark/mid_size.py: a policy whose networks are what an inference costs."""

from __future__ import annotations

import sys

from paths import ROOT

sys.path.insert(0, str(ROOT / 'benchmark'))

import mid_size

from vla_runtime.families.operation_counts import count_operations


def test_the_mid_size_policy_has_about_a_hundred_million_parameters():
    dims = mid_size.DIMS
    read = count_operations('pi05', dims).inference(steps=1, images=1)
    # Every weight once, but for the rows of the text table that are not looked up, the last prefix
    # layer's unused half and the time network.
    weights = sum(work.weight_bytes for work in read.values()) / 4
    assert 75e6 < weights + dims.vocabulary * dims.language.width < 110e6
