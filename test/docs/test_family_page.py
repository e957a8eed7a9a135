"""The family of docs/howto/adding_a_family.md, put into a folder as the page says.

Nothing in the package knows it: a LeRobot folder goes through `vla_runtime export` and `verify`,
and `Policy` runs its bundle on both backends.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_folders import copy_lerobot_folder, edit_config, edit_json
from network_cases import relative_error
from pages import blocks
from safetensors.torch import save_file

from vla_convert import readers
from vla_runtime import families
from vla_runtime.cli.main import main
from vla_runtime.families.flow_network import FlowNetwork, build_network
from vla_runtime.families.flow_step import DenoiseStep
from vla_runtime.family.declaration import Family
from vla_runtime.family.listing import family_names, find_family
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.types import ActionChunk, Observation
from vla_tools.selftest.policies import tried_families

PAGE = 'docs/howto/adding_a_family.md'
# Folder that the page names to the package that it is beside.
FOLDERS = {'vla_runtime/families/': families, 'vla_convert/readers/': readers}
_NAMES = ','.join(f'joint_{n}' for n in range(6))
EXPORT_OPTIONS = ('--state-names', _NAMES, '--action-names', _NAMES, '--units', 'rad')
EXPORT_OPTIONS += ('--rate-hz', '25', '--advantage', 'task_newline')
THEIR_NAMES = {
    'vision.patches': 'vision_tower.patches',
    'words': 'embed_tokens',
    'hidden': 'mlp.hidden',
    'out': 'mlp.out',
}


@pytest.fixture(scope='module')
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    """The page's family, found by listing a folder beside the package's own."""
    root = tmp_path_factory.mktemp('packages')
    for block in blocks(PAGE, 'python'):
        named = re.match(rf'# ({"|".join(FOLDERS)})(\S+)\n', block)
        if named is None:
            continue
        file = root / named[1] / named[2]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block, encoding='utf-8')
    for folder, package in FOLDERS.items():
        package.__path__.append(str(root / folder))
    importlib.invalidate_caches()
    try:
        yield find_family('toy')
    finally:
        for folder, package in FOLDERS.items():
            package.__path__.remove(str(root / folder))
            for module in [m for m in sys.modules if m.startswith(f'{package.__name__}.toy')]:
                del sys.modules[module]


@pytest.fixture(scope='module')
def network(toy: Family) -> FlowNetwork:
    torch.manual_seed(1)
    return build_network('toy', toy.presets['toy']).eval()


@pytest.fixture(scope='module')
def bundle(toy: Family, network: FlowNetwork, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy's bundle with ONNX files, as the verb writes it."""
    folder = write_folder(toy, network, tmp_path_factory.mktemp('checkpoint') / 'toy')
    target = tmp_path_factory.mktemp('bundles') / 'toy'
    assert main(['export', str(folder), '--out', str(target), *EXPORT_OPTIONS]) == 0
    return target


def write_folder(toy: Family, network: FlowNetwork, folder: Path) -> Path:
    """A LeRobot folder of the toy: another family's, with what is the toy's own changed."""
    copy_lerobot_folder(folder)
    dims = toy.presets['toy']
    edit_config(
        folder,
        type='toy',
        image_resolution=[dims.image_size, dims.image_size],
        chunk_size=dims.horizon,
        max_action_dim=dims.action_dim,
        max_state_dim=dims.state_dim,
        num_steps=4,
        tokenizer_max_length=dims.prompt_length,
    )
    own = 'pi05_prepare_state_tokenizer_processor_step'

    def change(document: dict) -> None:
        document['steps'] = [s for s in document['steps'] if s['registry_name'] != own]
        for step in document['steps']:
            if step['registry_name'] == 'tokenizer_processor':
                step['config']['max_length'] = dims.prompt_length

    edit_json(folder / 'policy_preprocessor.json', change)
    tensors = {}
    for name, tensor in network.state_dict().items():
        module, _, leaf = name.rpartition('.')
        tensors[f'model.{THEIR_NAMES[module]}.{leaf}'] = tensor
    (folder / 'model.safetensors').unlink()
    save_file(tensors, folder / 'model.safetensors')
    return folder


@torch.no_grad()
def prefix_of(network: FlowNetwork, toy: Family, rows: int, hidden: float = 0.0) -> Any:
    dims, length = network.dims, toy.presets['toy'].prompt_length
    pixels = torch.linspace(-1, 1, dims.cameras * 3 * dims.image_size**2)
    tokens = network.vision(pixels.view(dims.cameras, 3, dims.image_size, dims.image_size))
    tokens[1] = tokens[1] + hidden
    return network.prefix(
        tokens,
        torch.tensor([True, False]),
        tokens=torch.arange(rows * length).view(rows, length),
        token_mask=torch.arange(length).expand(rows, -1) < 9,
    )


def test_the_declaration_is_found_without_pytorch(toy: Family) -> None:
    assert toy.dims.__name__ == 'ToyDims'
    source = (Path(str(sys.modules['vla_runtime.families.toy.declaration'].__file__))).read_text()
    assert 'torch' not in source
    assert toy.name in family_names()
    # `selftest` has policies of the package's own families.
    assert toy.name not in tried_families()


def test_the_time_table_is_that_of_the_network(toy: Family, network: FlowNetwork) -> None:
    times = np.linspace(1.0, 0.0, 11, dtype=np.float32)
    table = toy.time_table(network.dims, None)  # type: ignore[arg-type]
    rows = network.time_conditioning(torch.from_numpy(times)).detach().numpy()
    assert rows.shape == (11, table.width)
    np.testing.assert_allclose(table(times), rows, atol=1e-6)


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


def observation(seed: int = 0) -> Observation:
    rng = np.random.default_rng(seed)
    images = {name: rng.integers(0, 256, (48, 64, 3), dtype=np.uint8) for name in ('top', 'wrist')}
    return Observation(images, rng.uniform(-0.1, 0.1, 6), 'touch the red block')


def chunks(bundle: Path, backend: str, settings: PolicySettings) -> list[ActionChunk]:
    policy = Policy.load(bundle, backend=backend, settings=settings)
    try:
        return [policy.infer(observation(seed))[0] for seed in (0, 0, 1)]
    finally:
        policy.close()


@pytest.mark.parametrize('cfg_enabled', [False, True])
def test_onnx_runtime_gives_the_chunks_of_pytorch(bundle: Path, cfg_enabled: bool) -> None:
    settings = PolicySettings(cfg_enabled=cfg_enabled, cfg_beta=1.5)
    ours, theirs = (chunks(bundle, backend, settings) for backend in ('onnxruntime', 'torch'))
    for one, other in zip(ours, theirs, strict=True):
        assert relative_error(one.normalised, torch.from_numpy(other.normalised)) < 5e-5
    assert not np.array_equal(ours[0].actions, ours[2].actions)


def test_verify_repeats_the_comparison(bundle: Path) -> None:
    assert main(['verify', str(bundle)]) == 0
