"""A `single` head goes through the engines of a flow and refuses a flow's settings.

The family is the toy of docs/howto/adding_a_family.md, changed as that page says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_folders import edit_config
from families_beside import beside
from guided_policies import codec_of
from safetensors.torch import save_file
from test_family_page_end_to_end import EXPORT_OPTIONS, NAMES_AND_UNITS, write_folder
from tiny_policy import observation, tiny_spec, write_tiny_policy

from vla_convert.export.onnx.export import write_onnx
from vla_runtime.bundle.folder import BundleError, read_bundle
from vla_runtime.bundle.schema import WEIGHTS_FILE, BundleSpec
from vla_runtime.bundle.writer import new_bundle, seal
from vla_runtime.cli.main import main
from vla_runtime.families.flow_network import build_network
from vla_runtime.family.declaration import Family
from vla_runtime.family.listing import find_family
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy

DECLARATION = """
from dataclasses import replace

from vla_runtime.family.declaration import NoTimes
from vla_runtime.families.toy.declaration import FAMILIES as TOY

FAMILIES = (replace(TOY[0], name='one_pass', head='single', presets={}, time_table=NoTimes),)
"""
NETWORKS = """
from vla_runtime.families.flow_network import SinglePassNetwork
from vla_runtime.families.toy.networks import Toy


class OnePass(SinglePassNetwork, Toy):
    def actions(self, past, **rows):
        word = self.words.weight.float()[: self.dims.horizon]
        x = word[None, :, : self.dims.action_dim]
        return Toy.velocity(self, x, past, past['context'][:, :2])


NETWORKS = {'one_pass': OnePass}
"""
CHECKPOINT = """
from dataclasses import replace

from vla_convert.readers.toy import ToyReader


class OnePassReader(ToyReader):
    lerobot = (replace(ToyReader.lerobot[0], type='one_pass', denoise_steps_key=None),)


READER = OnePassReader()
"""
# Settings of a flow, each with a value that is not its default.
REFUSED = [
    ('seed', 3),
    ('denoise_steps', 1),
    ('rtc_mode', 'guided'),
    ('plan_schedule', 'linear'),
    ('max_guidance_weight', 3.0),
    ('rtc_horizon', 4),
]


@pytest.fixture(scope='module')
def one_pass(toy: Family, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    root = tmp_path_factory.mktemp('packages')
    written = {
        'vla_runtime/families/one_pass/__init__': '',
        'vla_runtime/families/one_pass/declaration': DECLARATION,
        'vla_runtime/families/one_pass/networks': NETWORKS,
        'vla_convert/readers/one_pass': CHECKPOINT,
    }
    for name, text in written.items():
        file = root / f'{name}.py'
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding='utf-8')
    with beside(root, 'one_pass'):
        yield find_family('one_pass')


def spec_of(one_pass: Family, toy: Family) -> BundleSpec:
    prompt = replace(tiny_spec().prompt, template='line')
    return replace(
        tiny_spec(), family=one_pass.name, dims=toy.presets['toy'], denoise_steps=1, prompt=prompt
    )


@pytest.fixture(scope='module')
def bundle(one_pass: Family, toy: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of the family with ONNX files."""
    target = tmp_path_factory.mktemp('bundles') / 'one_pass'
    base = read_bundle(write_tiny_policy(target.parent / 'base', tiny_spec()))
    spec = spec_of(one_pass, toy)
    torch.manual_seed(0)
    network = build_network('one_pass', spec.dims)
    with new_bundle(target) as folder:
        save_file(network.state_dict(), folder / WEIGHTS_FILE)
        for name in ('statistics.safetensors', spec.tokenizer):
            (folder / name).write_bytes((base.folder / name).read_bytes())
        write_onnx(folder, spec, 'float32')
        seal(folder, spec)
    return target


def test_a_checkpoint_becomes_a_bundle_of_one_step(
    one_pass: Family, toy: Family, tmp_path: Path
) -> None:
    folder = write_folder(toy, tmp_path / 'checkpoint')
    edit_config(folder, type=one_pass.name)
    words = ['export', str(folder), '--out', str(tmp_path / 'bundle')]
    # It cannot be guided.
    assert main([*words, *EXPORT_OPTIONS]) == 2 and not (tmp_path / 'bundle').exists()
    assert main([*words, *NAMES_AND_UNITS]) == 0
    spec = read_bundle(tmp_path / 'bundle').spec
    assert (spec.family, spec.denoise_steps) == ('one_pass', 1)
    assert main(['verify', str(tmp_path / 'bundle')]) == 0


def networks_actions(bundle: Path, policy: Policy) -> np.ndarray:
    """The network's own `actions` on the observation, (H, A) normalised."""
    spec = read_bundle(bundle, verify=False).spec
    torch.manual_seed(0)
    network = build_network('one_pass', spec.dims).eval()
    codec, seen = codec_of(bundle), observation()
    rows = codec.rows(seen.instruction, codec.check(seen), (None,))
    pixels, mask = codec.camera_images.encode(seen.images)
    with torch.no_grad():
        tokens = network.vision(torch.from_numpy(pixels))
        named = {name: torch.from_numpy(rows[name]) for name in ('tokens', 'token_mask')}
        past = network.prefix(tokens, torch.from_numpy(mask), **named)
        return network.actions(past)[0].numpy()


@pytest.mark.parametrize('backend', ['torch', 'onnxruntime'])
def test_the_chunk_is_the_networks_actions_whatever_the_inference_number(bundle, backend):
    policy = Policy.load(bundle, backend)
    expected = networks_actions(bundle, policy)
    for _ in range(2):
        chunk, report = policy.infer(observation())
        np.testing.assert_allclose(chunk.normalised, expected, rtol=0, atol=1e-6)
        assert report.denoise_steps == 1
        assert not report.noise.any()
    policy.close()


def test_on_pytorch_the_bits_are_those_of_the_network(bundle):
    policy = Policy.load(bundle)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    np.testing.assert_array_equal(
        policy.infer(observation())[0].normalised, networks_actions(bundle, policy)
    )
    torch.set_num_threads(threads)
    policy.close()


@pytest.mark.parametrize(('name', 'value'), REFUSED)
def test_a_setting_of_a_flow_is_refused_by_name(bundle, name, value):
    policy = Policy.load(bundle)
    with pytest.raises(ValueError, match=rf'{name}.*{value!r}.*: the head of one_pass \(single\)'):
        policy.settings = PolicySettings(**{name: value})
    with pytest.raises(ValueError, match='one_pass'):
        policy.infer(observation(), noise=np.zeros((8, 6), dtype=np.float32))
    policy.close()


def test_a_bundle_that_wants_several_steps_is_refused(one_pass, toy, tmp_path):
    spec = replace(spec_of(one_pass, toy), denoise_steps=3)
    with pytest.raises(BundleError, match='denoise_steps'):
        seal(tmp_path, spec)
