"""What every family must satisfy through `Policy`, from observations to robot units."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from contract_cases import each_family, of_cases
from family_contracts import contract_of
from family_contracts.declaration import Folder
from guided_policies import without_ages
from made_once import made_once
from network_cases import relative_error
from onnx_bundles import tiny_onnx_bundle, write_onnx_once
from thorough import thorough_after
from tiny_policy import CAMERAS, observation, tiny_spec, write_tiny_policy

from vla_convert.export.conversion import plan_export, write_export
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.family.listing import find_family
from vla_runtime.inference.codec import PolicyCodec
from vla_runtime.inference.prefix_cache import CachePolicy
from vla_runtime.inference.request import cache_words
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.processing.prompts import STATE
from vla_runtime.types import CommittedPlan, InferenceReport

OFF = PolicySettings(cache=CachePolicy(mode='off'))


WITH_CHUNKS = each_family(lambda contract: contract.gives_chunks)


def noise_of(family: str, report: InferenceReport) -> np.ndarray | None:
    """The noise of an inference; a head that draws none takes none."""
    return report.noise if find_family(family).takes_steps else None


def tiny(family: str) -> Path:
    """A tiny policy, not to be changed."""
    return made_once(
        f'contract_{family}', lambda target: write_tiny_policy(target, tiny_spec(family))
    )


@WITH_CHUNKS
def test_a_hit_changes_nothing_and_needs_equal_inputs(family: str):
    bundle, declared = tiny(family), find_family(family)
    cached, fresh = Policy.load(bundle), Policy.load(bundle, settings=OFF)
    seen = observation()
    moved = replace(seen, state=seen.state + np.float32(0.1))
    other = replace(moved, images={**seen.images, 'top': 255 - seen.images['top']})
    layout = declared.templates.get(contract_of(family).template or '')
    # Where the prefix reads the state: as a token, in its prompt, or not at all.
    of_state = 'hit'
    if 'state' in declared.prefix_inputs(cached.spec.dims):
        of_state = 'miss (state)'
    elif layout is not None and STATE in layout.text:
        of_state = 'miss (tokens)'
    hit = 'top: hit, wrist: hit'
    looks = [
        (seen, 'top: miss (first), wrist: miss (first)', 'miss (first)'),
        (seen, hit, 'hit'),
        (moved, hit, of_state),
        (other, 'top: miss (pixels), wrist: hit', 'miss (images)'),
    ]
    if layout is not None:
        looks.append((replace(other, instruction='stop'), hit, 'miss (tokens'))
    for look, vision, prefix in looks:
        chunk, report = cached.infer(look)
        expected, without = fresh.infer(look)
        words = without_ages(cache_words(report.cache))
        assert words['vision'] == vision and words['prefix'].startswith(prefix)
        assert cache_words(without.cache)['prefix'] == 'off'
        np.testing.assert_array_equal(chunk.normalised, expected.normalised)


@WITH_CHUNKS
def test_an_absent_camera_counts_for_nothing(family: str):
    policy, seen = Policy.load(tiny(family)), observation()
    absent = replace(seen, images={**seen.images, 'wrist': None})
    both, report = policy.infer(seen)
    one, _ = policy.infer(absent, noise=noise_of(family, report))
    fresh, _ = Policy.load(tiny(family)).infer(absent, noise=noise_of(family, report))
    np.testing.assert_array_equal(one.normalised, fresh.normalised)
    if find_family(family).head != 'tokens':
        # A tiny policy's greedy answer may be the same.
        assert np.abs(one.normalised - both.normalised).max() > 1e-4


@each_family(lambda contract: contract.template is None)
def test_without_language_no_instruction_is_needed_and_none_changes_anything(family: str):
    policy = Policy.load(tiny(family))
    assert not policy.reads_instruction
    policy.warm_up()
    silent, first = policy.infer(observation(instruction=''))
    told, report = policy.infer(
        observation(instruction='pick up the cup'), noise=noise_of(family, first)
    )
    np.testing.assert_array_equal(silent.normalised, told.normalised)
    assert without_ages(cache_words(report.cache))['prefix'] == 'hit'
    assert report.tokens == ()


@WITH_CHUNKS
def test_guidance_without_tags_is_refused(family: str):
    with pytest.raises(ValueError, match='cfg_'):
        Policy.load(tiny(family)).check(PolicySettings(cfg_enabled=True, cfg_beta=1.5))


@WITH_CHUNKS
def test_a_plan_pulls_a_denoised_chunk_and_is_refused_by_other_heads(family: str):
    policy = Policy.load(tiny(family))
    guided = PolicySettings(rtc_mode='guided')
    if not find_family(family).takes_steps:
        with pytest.raises(ValueError, match='rtc_mode'):
            policy.check(guided)
        return
    free, report = policy.infer(observation())
    plan = CommittedPlan(free.actions[2:] + 0.3, delay_steps=2, execution_horizon=5)
    policy.settings = guided
    tied, report = policy.infer(observation(), noise=report.noise, plan=plan)
    assert report.rtc_mode == 'guided'
    wanted = plan.actions[:2]
    assert np.abs(tied.actions[:2] - wanted).max() < np.abs(free.actions[:2] - wanted).max()


@WITH_CHUNKS
@pytest.mark.parametrize('precision', thorough_after(1, ['bfloat16', 'float16']))
def test_half_matrices_give_nearly_the_same_chunk(family: str, precision: str):
    if find_family(family).head == 'tokens':
        pytest.skip('another token is another action')
    expected, report = Policy.load(tiny(family)).infer(observation())
    found, _ = Policy.load(tiny(family), precision=precision).infer(
        observation(), noise=noise_of(family, report)
    )
    error = np.abs(found.normalised - expected.normalised).max()
    assert 0 < error < 0.1 * max(1.0, np.abs(expected.normalised).max())


@WITH_CHUNKS
def test_onnx_runtime_gives_the_chunk_of_pytorch(family: str):
    bundle = tiny_onnx_bundle(family)
    expected, report = Policy.load(bundle).infer(observation())
    with closing(Policy.load(bundle, 'onnxruntime')) as policy:
        for runs in (len(CAMERAS), 0):
            found, own = policy.infer(observation(), noise=noise_of(family, report))
            assert own.runs['vision'] == runs
            assert relative_error(found.normalised, torch.from_numpy(expected.normalised)) <= 5e-5


FOLDERS = of_cases(lambda contract: contract.folders and contract.folders())


@pytest.fixture(scope='module', params=[pytest.param(of.values, id=of.id) for of in FOLDERS])
def folder(request, tmp_path_factory) -> Iterator[tuple[Folder, Path]]:
    """A checkpoint's folder, and the bundle with ONNX files that is made of it."""
    family, name = request.param
    with torch.inference_mode():
        made = contract_of(family).folders()[name](tmp_path_factory.mktemp('folder'))
    with pytest.MonkeyPatch.context() as patch:
        made.prepare(patch)
        bundle = tmp_path_factory.mktemp('exported') / 'bundle'
        write_export(
            plan_export(made.path, made.options, default_name='tiny'),
            bundle,
            finish=lambda target, spec: write_onnx_once(target, spec, 'float32'),
        )
        yield made, bundle


@pytest.mark.cases
@pytest.mark.parametrize('backend', ['torch', 'onnxruntime'])
def test_an_exported_folder_gives_the_projects_own_chunks(folder, backend: str):
    made, bundle = folder
    with closing(Policy.load(bundle, backend=backend)) as policy:
        for number, recorded in enumerate(made.recorded):
            chunk, report = policy.infer(recorded.seen, noise=recorded.noise)
            width = recorded.normalised.shape[1]
            found = torch.from_numpy(chunk.normalised[: len(recorded.normalised), :width])
            assert relative_error(found, recorded.normalised) <= made.bound, number
            assert chunk.actions.shape == recorded.actions.shape
            error = relative_error(torch.from_numpy(chunk.actions), recorded.actions.double())
            assert error <= 1e-4, number
            if recorded.tokens is not None:
                assert report.tokens == (len(recorded.tokens),)


@pytest.mark.cases
def test_an_exported_folder_reads_the_projects_own_tokens_and_state(folder):
    made, bundle = folder
    codec = PolicyCodec(read_bundle(bundle))
    for recorded in made.recorded:
        state = codec.check(recorded.seen)
        if recorded.tokens is not None:
            rows = codec.rows(recorded.seen.instruction, state, (None,))
            found = rows['tokens'][0][rows['token_mask'][0]]
            np.testing.assert_array_equal(found, recorded.tokens)
        if recorded.state is not None:
            # A network's state may be padded.
            assert relative_error(state, recorded.state[: len(state)]) <= 1e-6
