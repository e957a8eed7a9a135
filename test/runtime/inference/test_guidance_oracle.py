"""Guidance against the plain network, and faults of others planted to see the oracle object.

The oracle is given the tokens that `PolicyCodec` made: what a row says is not judged here but in
`test_prompts.py` (`test_tag_is_the_only_difference_of_a_tagged_row`) and by the reference cases.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from guidance_oracle import GuidanceOracle, PlainVelocity, Prompt, Step
from guided_policies import load_policy
from network_cases import NetworkCase, load_network_case, network_case_paths
from thorough import thorough_but
from tiny_policy import observation, tiny_spec, write_tiny_policy

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.engines.torch.weights import load_network
from vla_runtime.inference.codec import PolicyCodec
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.types import Advantage, Observation

BETA = 2.0
SEEN = observation(3)


def _spec(family: str, **dims: int) -> BundleSpec:
    """pi0.5 has the state in its prompt, after the tag; pi0 has it in a token of its own."""
    spec = tiny_spec(family, advantage='in_task_space' if family == 'pi05' else 'task_newline')
    return replace(spec, dims=replace(spec.dims, **dims))


SPECS = {
    'state in prompt': _spec('pi05'),
    'state token': _spec('pi0'),
    'odd pi05': _spec('pi05', action_dim=7, horizon=5),
    'odd pi0': _spec('pi0', action_dim=9, horizon=3, state_dim=5),
}


@dataclass(frozen=True)
class Guided:
    """A policy and what it is judged by."""

    bundle: Path
    policy: Policy

    @property
    def engine(self) -> Any:
        return self.policy._engine

    @property
    def noise(self) -> np.ndarray:
        dims = self.policy.spec.dims
        random = np.random.default_rng(7)
        return random.normal(size=(dims.horizon, dims.action_dim)).astype(np.float32)

    def trace(self, seen: Observation = SEEN) -> list[Step]:
        steps: list[Step] = []
        self.policy.infer(
            seen,
            noise=self.noise,
            on_step=lambda _, x, velocity: steps.append(Step(x.copy(), velocity.copy())),
        )
        return steps

    def oracle(
        self, seen: Observation = SEEN, beta: float = BETA, advantage: Advantage = 'positive'
    ) -> GuidanceOracle:
        spec, bundle = self.policy.spec, read_bundle(self.bundle)
        network = load_network(
            spec.family, spec.dims, bundle.weights_path, device='cpu', precision='float32'
        )
        return GuidanceOracle(
            PlainVelocity(network), self.prompt(seen, advantage), self.prompt(seen, None), beta
        )

    def prompt(self, seen: Observation, advantage: Advantage | None) -> Prompt:
        codec = PolicyCodec(read_bundle(self.bundle))
        rows = codec.rows(seen.instruction, codec.check(seen), (advantage,))
        tokens, mask = rows['tokens'], rows['token_mask']
        all_pixels, visible = codec.camera_images.encode(seen.images)
        state = rows['state'] if codec.spec.dims.state_dim else None
        return Prompt(
            [pixels for pixels, shown in zip(all_pixels, visible, strict=True) if shown],
            tokens[0][mask[0]].tolist(),
            None if state is None else state[0],
        )

    def faults(self, seen: Observation = SEEN) -> set[str]:
        return self.oracle(seen).faults(self.noise, self.trace(seen))


def load(folder: Path, spec: BundleSpec) -> Guided:
    bundle = write_tiny_policy(folder, spec)
    settings = PolicySettings(cfg_enabled=True, cfg_beta=BETA)
    return Guided(bundle, Policy.load(bundle, settings=settings))


@pytest.fixture(params=SPECS)
def guided(request, tmp_path) -> Guided:
    return load(tmp_path / 'bundle', SPECS[request.param])


@pytest.fixture(params=['state in prompt', 'state token'])
def sound(request, tmp_path) -> Guided:
    """A policy for a fault to be planted in; without one, the first test finds no fault."""
    return load(tmp_path / 'bundle', SPECS[request.param])


# The oracle itself.


def _case_prompt(case: NetworkCase, prefix: str) -> Prompt:
    pixels, image_mask = case.images(0)
    tokens, mask = case.prompt(0, prefix)
    state = case.state(0)
    visible = [image.numpy() for image, shown in zip(pixels, image_mask, strict=True) if shown]
    return Prompt(visible, tokens[mask].tolist(), None if state is None else state[0].numpy())


@pytest.mark.cases
@pytest.mark.parametrize('path', network_case_paths('pi05'), ids=lambda path: path.stem)
def test_the_oracles_guided_chunk_is_the_references(path: Path):
    case = load_network_case(path)
    rows = _case_prompt(case, ''), _case_prompt(case, 'uncond_')
    oracle = GuidanceOracle(PlainVelocity(case.network), *rows, beta=2.5)
    chunk = oracle.chunk(case.tensors['noise'][0].numpy(), case.steps)
    expected = case.tensors['cfg_actions_beta_2.5'][0].numpy()
    # Ten guided steps in float32 are that far from each other.
    np.testing.assert_allclose(chunk, expected, atol=5e-4)
    assert np.abs(chunk - case.tensors['cfg_actions_beta_1.5'][0].numpy()).max() > 0.05


# What must hold.


def test_every_step_is_the_oracles(guided):
    assert guided.faults() == set()


@pytest.mark.parametrize('max_rows', [1, 2])
@pytest.mark.parametrize('name', thorough_but(['state in prompt', 'state token'], SPECS))
def test_every_step_of_the_rows_one_after_the_other_is_the_oracles(tmp_path, name, max_rows):
    bundle = write_tiny_policy(tmp_path / 'bundle', SPECS[name])
    serial = Guided(
        bundle, load_policy(bundle, max_rows, cfg_enabled=True, cfg_beta=BETA, cfg_mode='serial')
    )
    assert serial.faults() == set()


def test_a_hidden_camera_is_hidden_from_both_rows(guided):
    seen = observation(3, images={**SEEN.images, 'top': None})
    assert guided.faults(seen) == set()


def test_each_row_has_its_own_number_of_tokens(guided):
    conditioned, unconditioned = (guided.prompt(SEEN, tag) for tag in ('positive', None))
    assert len(conditioned.tokens) > len(unconditioned.tokens)


# Guidance so weak is guidance: two rows, and every step of them.
@pytest.mark.parametrize('beta', thorough_but([1.1], [1.01, 1.1, 3.5]))
def test_beta_is_changed_between_two_chunks(sound, beta):
    sound.policy.settings = replace(sound.policy.settings, cfg_beta=beta)
    trace = sound.trace()
    assert sound.oracle(beta=beta).faults(sound.noise, trace) == set()
    assert sound.oracle().faults(sound.noise, trace) == {'identity', 'chunk'}


def test_the_conditioned_row_has_the_tag_that_was_asked_for(sound):
    sound.policy.settings = replace(sound.policy.settings, advantage='negative')
    trace = sound.trace()
    assert sound.oracle(advantage='negative').faults(sound.noise, trace) == set()
    assert sound.oracle().faults(sound.noise, trace) >= {'conditioned velocity', 'chunk'}


def test_what_stands_in_the_padding_changes_nothing(sound, monkeypatch):
    clean = sound.trace()
    real = sound.engine.encode_prefix

    def fill_padding(image_mask, rows, *rest, **named):
        junk = np.random.default_rng(0).integers(1, 400, rows['tokens'].shape)
        filled = np.where(rows['token_mask'], rows['tokens'], junk)
        real(image_mask, {**rows, 'tokens': filled}, *rest, **named)

    monkeypatch.setattr(sound.engine, 'encode_prefix', fill_padding)
    sound.policy.reset()
    filled = sound.trace()
    np.testing.assert_array_equal(filled[-1].x, clean[-1].x)
    assert sound.oracle().faults(sound.noise, filled) == set()


def test_how_much_padding_there_is_changes_nothing(sound, tmp_path):
    spec = sound.policy.spec
    longer = replace(
        spec, dims=replace(spec.dims, prompt_length=spec.dims.prompt_length + 41), files={}
    )
    other = load(tmp_path / 'longer', longer)
    trace = other.trace()
    np.testing.assert_allclose(trace[-1].x, sound.trace()[-1].x, atol=1e-4)
    assert sound.oracle().faults(sound.noise, trace) == set()


# Faults that others have shipped, planted here: the oracle must object to each.


def test_the_oracle_objects_to_no_guidance(sound, monkeypatch):
    _plant_weights(sound, monkeypatch, lambda weights: np.float32([1, 0]))
    assert sound.faults() == {'identity', 'chunk'}


def test_the_oracle_objects_to_a_single_row(sound):
    sound.policy.settings = replace(sound.policy.settings, cfg_enabled=False)
    assert sound.faults() == {'rows'}


def test_the_oracle_objects_to_guidance_turned_around(sound, monkeypatch):
    _plant_weights(sound, monkeypatch, lambda weights: weights[::-1].copy())
    assert sound.faults() == {'identity', 'chunk'}


def test_the_oracle_objects_to_rows_combined_once_per_chunk(sound, monkeypatch):
    chains = []
    for weights in ([1, 0], [0, 1]):
        with monkeypatch.context() as planted:
            _plant_weights(sound, planted, lambda _, w=weights: np.float32(w))
            chains.append(sound.trace())
    combined = [
        Step(
            BETA * conditioned.x + (1 - BETA) * unconditioned.x,
            np.stack([conditioned.velocity[0], unconditioned.velocity[1]]),
        )
        for conditioned, unconditioned in zip(*chains, strict=True)
    ]
    faults = sound.oracle().faults(sound.noise, combined)
    # The steps add up and the first one is right: only velocities at the shared x show it.
    assert 'identity' not in faults
    assert faults >= {'conditioned velocity', 'unconditioned velocity', 'chunk'}
    assert sound.oracle().faults(sound.noise, combined[:1]).isdisjoint({'conditioned velocity'})


def test_the_oracle_objects_to_serial_rows_in_each_others_slots(tmp_path):
    bundle = write_tiny_policy(tmp_path / 'bundle', SPECS['state in prompt'])
    planted = Guided(
        bundle, load_policy(bundle, 1, cfg_enabled=True, cfg_beta=BETA, cfg_mode='serial')
    )
    real = planted.engine.use_prefix
    planted.engine.use_prefix = lambda rows, slot=0: real(rows, 1 - slot)
    assert planted.faults() >= {'conditioned velocity', 'direction', 'chunk'}


def test_the_oracle_objects_to_unmasked_padding_of_the_unconditioned_row(sound, monkeypatch):
    def unmask(image_mask, tokens, token_mask):
        return image_mask, tokens, token_mask | np.array([[False], [True]])

    _plant_prefix(sound, monkeypatch, unmask)
    faults = sound.faults()
    assert faults >= {'unconditioned velocity', 'direction', 'chunk'}
    assert 'conditioned velocity' not in faults


def test_the_oracle_objects_to_a_mask_shared_by_both_rows(sound, monkeypatch):
    def share(image_mask, tokens, token_mask):
        return image_mask, tokens, np.repeat(token_mask[:1], 2, axis=0)

    _plant_prefix(sound, monkeypatch, share)
    assert sound.faults() >= {'unconditioned velocity', 'chunk'}


def test_the_oracle_objects_to_swapped_rows(sound, monkeypatch):
    def swap(image_mask, tokens, token_mask):
        return image_mask, tokens[::-1].copy(), token_mask[::-1].copy()

    _plant_prefix(sound, monkeypatch, swap)
    faults = sound.faults()
    assert faults >= {'conditioned velocity', 'unconditioned velocity', 'direction', 'chunk'}
    assert 'size' not in faults


def test_the_oracle_objects_to_an_unconditioned_row_without_the_state(tmp_path, monkeypatch):
    planted = load(tmp_path / 'bundle', SPECS['state token'])
    real = planted.engine.load_step_inputs

    def forget(inputs):
        real(replace(inputs, rows={'state': inputs.rows['state'] * np.float32([[1], [0]])}))

    monkeypatch.setattr(planted.engine, 'load_step_inputs', forget)
    assert planted.faults() >= {'unconditioned velocity', 'chunk'}


def _plant_weights(guided: Guided, monkeypatch, change) -> None:
    real = guided.engine.load_step_inputs

    def load_changed(inputs):
        real(replace(inputs, row_weight=change(inputs.row_weight)))

    monkeypatch.setattr(guided.engine, 'load_step_inputs', load_changed)


def _plant_prefix(guided: Guided, monkeypatch, change) -> None:
    real = guided.engine.encode_prefix

    def encode_changed(image_mask, rows, *rest, **named):
        image_mask, tokens, token_mask = change(image_mask, rows['tokens'], rows['token_mask'])
        changed = {**rows, 'tokens': tokens, 'token_mask': token_mask}
        real(image_mask, changed, *rest, **named)

    monkeypatch.setattr(guided.engine, 'encode_prefix', encode_changed)
    guided.policy.reset()
