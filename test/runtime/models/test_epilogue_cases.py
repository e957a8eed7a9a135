"""pi0, pi0.5 and SmolVLA whose products take GELU and the residual stream along, as on CUDA.

What stands in for a GPU's products rounds once, as they do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from joined_networks import EXPERTS, inputs_of_case, joined, prefix_of, tiny
from network_cases import (
    ReferenceCase,
    denoised,
    each_entry,
    load_network_case,
    relative_error,
)
from smolvla_cases import load_smolvla_case
from torch import Tensor

from vla_runtime.models.blocks import epilogues, products
from vla_runtime.models.blocks.epilogues import Epilogue
from vla_runtime.models.blocks.layers import gelu_tanh

pytestmark = pytest.mark.cases

Shape = tuple[int, int, int]


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[Epilogue, set[Shape]]:
    """Shapes that were asked for; each product that follows has one of them."""
    found: dict[Epilogue, set[Shape]] = {epilogues.gelu: set(), epilogues.add: set()}

    def add(x: Tensor, weight: Tensor, stream: Tensor) -> Tensor:
        assert stream.dtype == torch.float32 and stream.is_contiguous()
        return stream.add_(x.float() @ weight.float().t())

    def gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return gelu_tanh(x.float() @ weight.float().t() + bias.float()).to(x.dtype)

    def use(wanted: Epilogue, device: Any, dtype: Any, shape: Shape) -> Epilogue:
        found[wanted].add(shape)
        of_form: Epilogue = gelu if wanted is epilogues.gelu else add

        def of_shape(x: Tensor, weight: Tensor, beside: Tensor) -> Tensor:
            assert (len(x), *weight.shape) == shape
            return of_form(x, weight, beside)

        return of_shape

    monkeypatch.setattr(products, 'usable', use)
    return found


@each_entry('pi05', 'pi0', 'smolvla')
def test_chunks_of_the_cases_with_epilogues(path, b, asked):
    load: Callable[..., ReferenceCase] = (
        load_smolvla_case if 'smolvla' in path.stem else load_network_case
    )
    case = load(path)
    network = joined(case.network, True)
    pixels, image_mask = case.images(b)
    rows, head = inputs_of_case(case, b)
    image_tokens = network.vision(pixels)
    given = [pixels, image_tokens, *rows.values()]
    before = [tensor.clone() for tensor in given]
    past = network.prefix(image_tokens, image_mask, **rows)
    # The stream that the products overwrite is the prefix's own.
    assert all(map(torch.equal, given, before))
    x, _ = denoised(network, past, case.tensors['noise'][b : b + 1], case.steps, rows=head)[-1]
    assert relative_error(x[0], case.tensors['actions'][b]) <= 5e-5
    assert all(asked.values())


@pytest.mark.parametrize('family', EXPERTS)
def test_every_number_of_tokens_that_runs_is_asked_for(family, asked):
    network = joined(tiny(family), True)
    dims = network.dims
    vision, language = dims.vision, dims.language
    heads = language.num_heads * language.head_dim
    of_vision, of_language, gates = set(), set(), set()
    for rows in (1, 2):
        prefix_of(network, rows)
        of_vision.add((dims.cameras * vision.tokens, vision.mlp_dim, vision.width))
        for inputs in (heads, language.mlp_dim):
            of_language.add((rows * dims.prefix_length, language.width, inputs))
        # SmolVLA's gates have another activation.
        if family != 'smolvla':
            gates.add((rows * dims.prefix_length, language.mlp_dim, language.width))
    assert asked == {epilogues.gelu: of_vision | gates, epilogues.add: of_language}
