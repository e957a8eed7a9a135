"""The family of docs/howto/adding_a_family.md, put into a folder as the page says.

Nothing in the package knows it: a LeRobot folder goes through `vla_runtime export` and `verify`,
and `Policy` runs its bundle on both backends.
"""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from network_cases import relative_error
from pages import blocks
from paths import ROOT

from vla_convert import readers
from vla_runtime import declarations, models
from vla_runtime.cli.main import main
from vla_runtime.family.declaration import Family
from vla_runtime.family.listing import family_names, find_family
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.models.base.flow_network import FlowNetwork, build_network
from vla_runtime.models.base.flow_step import DenoiseStep
from vla_runtime.policy import Policy
from vla_runtime.types import ActionChunk, Observation
from vla_tools.selftest.policies import tried_families

PAGE = 'docs/howto/adding_a_family.md'
# Folder that the page names to the package that it is beside.
FOLDERS = {
    'vla_runtime/declarations/': declarations,
    'vla_runtime/models/': models,
    'vla_convert/readers/': readers,
}
# Guidance is between two advantage tags.
TAGS = ('--advantage', 'task_newline')


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
def checkpoint(toy: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the page's script writes."""
    folder = tmp_path_factory.mktemp('checkpoint') / 'toy'
    names: dict[str, Any] = {'__name__': 'make_toy'}
    exec(script('make_toy.py'), names)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        names['write_checkpoint'](folder)
    return folder


@pytest.fixture(scope='module')
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy's bundle with ONNX files, as the page's command writes it, with tags for guidance."""
    target = tmp_path_factory.mktemp('bundles') / 'toy'
    assert export(checkpoint, target, *TAGS) == 0
    return target


def export(checkpoint: Path, target: Path, *options: str) -> int:
    places = {'checkpoints/toy': str(checkpoint), 'engines/toy': str(target)}
    return main([*(places.get(word, word) for word in export_command()), *options])


def script(name: str) -> str:
    """A Python block of the page by the name in its first line."""
    found = [one for one in blocks(PAGE, 'python') if one.startswith(f'# {name}\n')]
    assert len(found) == 1
    return found[0]


def export_command() -> list[str]:
    """Words behind `vla_runtime` of the page's export."""
    (shell,) = (block for block in blocks(PAGE, '') if 'vla_runtime export' in block)
    values = dict(re.findall(r'^([A-Z]+)=(.*)$', shell, re.MULTILINE))
    (line,) = (one for one in shell.splitlines() if 'vla_runtime export' in one)
    words = shlex.split(line.partition('vla_runtime ')[2])
    return [values.get(word.removeprefix('$'), word) for word in words]


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
    source = (Path(str(sys.modules['vla_runtime.declarations.toy'].__file__))).read_text()
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
    images = {
        name: rng.integers(0, 256, (48, 64, 3), dtype=np.uint8) for name in ('front', 'wrist')
    }
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


def test_the_export_of_the_page_raises_no_alarm_and_its_bundle_fits_the_tabletop(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / 'toy'
    assert export(checkpoint, target, '--onnx-precision', 'none') == 0
    said = ''.join(capsys.readouterr())
    assert 'does not know' not in said
    assert main(['check', 'tabletop', str(target)]) == 0


def test_the_inference_of_the_page_runs(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / 'engines').mkdir()
    (tmp_path / 'engines' / 'toy').symlink_to(bundle)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(script('infer.py'), names)
    assert names['chunk'].actions.shape == (8, 6)
    assert names['chunk'].names[-1] == 'gripper'


def test_the_code_of_the_page_passes_ruff(tmp_path: Path) -> None:
    ruff = shutil.which('ruff', path=Path(sys.executable).parent)
    if ruff is None:
        pytest.skip('ruff is not installed')
    for index, block in enumerate(blocks(PAGE, 'python')):
        (tmp_path / f'block_{index}.py').write_text(block, encoding='utf-8')
    # As where the page's files are in their folders.
    ours = 'lint.isort.known-first-party = ["vla_runtime", "vla_convert"]'
    words = [ruff, 'check', '--no-cache', '--config', str(ROOT / 'pyproject.toml')]
    words += ['--config', ours, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
