"""The family of docs/howto/adding_a_family.md keeps the contract of a family."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vla_convert.checkpoints.reader import Source
from vla_convert.checkpoints.reader import _readers as checkpoint_readers
from vla_convert.checkpoints.tensors import read_tensors
from vla_runtime.bundle.tensors import check_tensors
from vla_runtime.families.flow_network import FlowNetwork, weight_shapes
from vla_runtime.families.flow_step import DenoiseStep
from vla_runtime.families.traced_shapes import trace_shapes
from vla_runtime.family.declaration import Family


def row_inputs(toy: Family, rows: int) -> dict[str, torch.Tensor]:
    given = toy.prefix_inputs(toy.presets['toy'])
    generator = torch.Generator().manual_seed(rows)
    return {
        'tokens': torch.randint(0, 512, (rows, *given['tokens'].shape), generator=generator),
        'token_mask': torch.arange(given['token_mask'].shape[0]).expand(rows, -1) < 9,
    }


@torch.no_grad()
def prefix_of(network: FlowNetwork, toy: Family, rows: int, hidden: float = 0.0) -> Any:
    dims = network.dims
    pixels = torch.linspace(-1, 1, dims.cameras * 3 * dims.image_size**2)
    pixels = pixels.view(dims.cameras, 3, dims.image_size, dims.image_size)
    tokens = network.vision(pixels)
    tokens[1] = tokens[1] + hidden
    return network.prefix(tokens, torch.tensor([True, False]), **row_inputs(toy, rows))


def test_the_declaration_is_found_without_pytorch(toy: Family) -> None:
    assert toy.dims.__name__ == 'ToyDims'
    source = (Path(str(sys.modules['vla_runtime.families.toy.declaration'].__file__))).read_text()
    assert 'torch' not in source


def test_the_time_table_is_that_of_the_network(toy: Family, network: FlowNetwork) -> None:
    times = np.linspace(1.0, 0.0, 11, dtype=np.float32)
    table = toy.time_table(network.dims, None)  # type: ignore[arg-type]
    rows = network.time_conditioning(torch.from_numpy(times)).detach().numpy()
    assert rows.shape == (11, table.width)
    np.testing.assert_allclose(table(times), rows, atol=1e-6)


def test_shapes_are_read_off_the_network(network: FlowNetwork) -> None:
    shapes = trace_shapes(network)
    assert shapes.image_tokens == (16, 32)
    assert shapes.conditioning == 2
    assert {name: tensor.for_rows(2) for name, tensor in shapes.past.items()} == {
        'context': (2, 32)
    }


def test_the_reader_finds_names_and_sizes_of_a_checkpoint(
    toy: Family, network: FlowNetwork, tmp_path: Path
) -> None:
    (reader,) = (reader for reader in checkpoint_readers() if type(reader).__name__ == 'ToyReader')
    theirs = {
        'vision.patches': 'vision_tower.patches',
        'words': 'embed_tokens',
        'hidden': 'mlp.hidden',
        'out': 'mlp.out',
    }
    tensors = {}
    for name, tensor in network.state_dict().items():
        module, _, leaf = name.rpartition('.')
        tensors[f'model.{theirs[module]}.{leaf}'] = tensor
    save_file(tensors, tmp_path / 'model.safetensors')
    stored = read_tensors(tmp_path, reader.names)
    check_tensors(stored, weight_shapes('toy', network.dims))
    facts = SimpleNamespace(image_size=32)
    nothing: Any = None
    make = reader.sizes(Source(tmp_path, stored, facts, nothing, nothing))  # type: ignore[arg-type]
    assert make is not None
    assert make(2, 32, 8) == toy.presets['toy']


def test_a_hidden_camera_does_not_matter(toy: Family, network: FlowNetwork) -> None:
    seen, broken = (prefix_of(network, toy, 1, hidden)['context'] for hidden in (0.0, np.nan))
    assert torch.equal(seen, broken)


@pytest.mark.parametrize(('rows', 'requests'), [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_a_denoise_step_takes_rows_and_requests(
    toy: Family, network: FlowNetwork, rows: int, requests: int
) -> None:
    dims, step = network.dims, DenoiseStep(network)
    x = torch.linspace(-1, 1, requests * dims.horizon * dims.action_dim)
    x = x.view(requests, dims.horizon, dims.action_dim)
    past = prefix_of(network, toy, requests * rows)
    plan = torch.zeros_like(x)
    weight = torch.full((requests, rows) if requests > 1 else (rows,), 1.0 / rows)
    t, dt = torch.tensor(1.0), torch.tensor(-0.1)
    conditioning = network.time_conditioning(t[None])
    plan_weight = torch.zeros(requests, dims.horizon, 1)
    x_next, velocity = step(x, past, conditioning, t, dt, weight, plan, plan_weight, {})
    assert velocity.shape == (requests * rows, dims.horizon, dims.action_dim)
    alone = [
        network.velocity(x[r // rows][None], {'context': past['context'][r : r + 1]}, conditioning)
        for r in range(requests * rows)
    ]
    mixed = torch.stack(alone).view(requests, rows, dims.horizon, dims.action_dim).mean(dim=1)
    torch.testing.assert_close(x_next, x - 0.1 * mixed, atol=1e-5, rtol=0)
