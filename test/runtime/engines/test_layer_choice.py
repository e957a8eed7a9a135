"""Choice between the operators and another form of the layers, and the option's words."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime.engines.recorded_cases import BOUNDS
from vla_runtime.engines.torch.buffers import Variant
from vla_runtime.engines.torch.layer_choice import LayerChoice, ShapedStep, largest_error, remedy
from vla_runtime.engines.triton_option import check_triton
from vla_runtime.policy import Policy

BOUND = BOUNDS['float32'].tensor
SHAPES = (Variant(1), Variant(2))


class Step:
    """A denoise step whose operators write 0, and another form of it an error.

    Args:
        error: largest error of the other form, by shape.
    """

    def __init__(self, error: dict[Variant, float]) -> None:
        self.layers: dict[Variant, Any] = {}
        self.looked_at: list[Variant] = []
        self.made = 0
        self._error = error

    def chosen(self, fault: str = '') -> LayerChoice:
        def inspect(step: ShapedStep, form: Any) -> str:
            self.looked_at.append(step.shape)
            return fault

        steps = [self._step(shape) for shape in self._error]
        choice = LayerChoice(steps, self.layers, self._make, BOUND, inspect)
        choice.compare()
        choice.compare()
        return choice

    def _make(self) -> str:
        self.made += 1
        return 'form'

    def _step(self, shape: Variant) -> ShapedStep:
        output = torch.zeros(2)

        def work() -> None:
            output.fill_(self._error[shape] if shape in self.layers else 0.0)

        return ShapedStep(shape, work, lambda: {'x': output.clone()})


def test_what_is_right_in_all_shapes_is_taken():
    step = Step(dict.fromkeys(SHAPES, 0.5 * BOUND))
    choice = step.chosen()
    assert not step.layers, 'nothing of it runs before it is chosen'
    assert choice.choose()
    assert step.layers == dict.fromkeys(SHAPES, 'form')
    assert step.made == 1


@pytest.mark.parametrize('wrong', [2 * BOUND, float('nan'), float('inf')])
def test_one_wrong_shape_leaves_all_in_the_operators(wrong):
    step = Step({SHAPES[0]: 0.0, SHAPES[1]: wrong})
    choice = step.chosen()
    assert not choice.choose() and not step.layers
    assert choice.fault and not choice.failure
    # What is beyond its bound is not looked at closer.
    assert SHAPES[1] not in step.looked_at


def test_a_fault_that_a_closer_look_finds_counts():
    step = Step(dict.fromkeys(SHAPES, 0.0))
    choice = step.chosen('layer 3 is wrong')
    assert not choice.choose() and not step.layers
    assert 'layer 3 is wrong' in choice.describe()


def test_the_reason_has_the_first_line_of_an_error_and_no_more(monkeypatch, caplog):
    step = Step(dict.fromkeys(SHAPES, 0.0))

    def fail() -> Any:
        raise RuntimeError(f'\nE: {"x" * 400}\nand more')

    monkeypatch.setattr(step, '_make', fail)
    choice = step.chosen()
    said = choice.describe()
    assert len(said) < 260 and 'more' not in said
    with caplog.at_level(logging.WARNING):
        assert not choice.choose()
    (record,) = caplog.records
    assert remedy('') in record.getMessage()


def test_errors_are_in_units_of_the_largest_number():
    reference = {'a': torch.tensor([0.0, 10.0])}
    assert largest_error({'a': torch.tensor([1.0, 10.0])}, reference) == 0.1
    assert largest_error({'a': torch.tensor([np.nan, 10.0])}, reference) == np.inf


@pytest.mark.parametrize(
    ('error', 'what'),
    [
        ('Cannot find a working triton installation', 'pip install triton'),
        ("ModuleNotFoundError: No module named 'triton'", 'pip install triton'),
        ('0 active drivers ([]). There should only be one.', 'CUDA device'),
        ('fatal error: Python.h: No such file', 'python3-dev'),
        ('Failed to find C compiler', 'gcc'),
        ('OutOfResources', 'report'),
    ],
)
def test_a_remedy_is_named(error, what):
    assert what in remedy(error)


@pytest.mark.parametrize('backend', ['torch', 'auto', 'onnxruntime', 'tensorrt'])
def test_words_are_checked_before_anything_is_loaded(backend):
    check_triton('off', backend)
    for word in ('none', 'triton', 'vision+prefix', 'ON', '', 'auto'):
        with pytest.raises(ValueError, match='known are: on, off'):
            check_triton(word, backend)
    if backend in ('torch', 'auto'):
        check_triton('on', backend)
        return
    with pytest.raises(ValueError, match=f"'on': backend '{backend}'"):
        check_triton('on', backend)


def test_a_policy_says_whether_its_layers_run_in_kernels(tmp_path):
    bundle = write_tiny_policy(tmp_path / 'tiny', tiny_spec())
    options = {'precision': 'float32', 'threads': 1, 'verify': False}
    with closing(Policy.load(bundle, 'torch', **options)) as policy:
        assert (policy.triton, policy.why) == ('off', '')
    with pytest.raises(ValueError, match="'on'"):
        Policy.load(bundle, 'onnxruntime', triton='on')
