"""A policy has a prompt and a tokenizer if its family has language, and neither otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.rules import check_guidable, check_spec, dump_spec, parse_spec
from vla_runtime.bundle.schema import ImageSpec
from vla_runtime.bundle.statistics import check_statistics
from vla_runtime.bundle.success import spec_identity
from vla_runtime.bundle.summary import describe
from vla_runtime.families.bundle_contents import check_contents
from vla_runtime.files.field_error import FieldError

WITH, WITHOUT = tiny_spec('pi0'), tiny_spec('act')
# Recordings made before `normalisation.images` and policies without language name this one.
IDENTITY = '6bae8704a9a0d054a2f474252eab3a23f9af7b0df5b9d2ddd98e944dc36b3990'


@pytest.mark.parametrize(
    ('spec', 'message'),
    [
        (replace(WITH, prompt=None), 'field prompt'),
        (replace(WITH, tokenizer=None), 'field tokenizer'),
        (replace(WITHOUT, prompt=WITH.prompt), 'field prompt'),
        (replace(WITHOUT, tokenizer='a.json'), 'field tokenizer'),
        (replace(WITHOUT, images=ImageSpec('none', 'bilinear')), 'its resample is none'),
        (
            replace(WITHOUT, images=ImageSpec('centre', 'bilinear')),
            'field normalisation.images',
        ),
        (
            replace(WITHOUT, dims=replace(WITHOUT.dims, images=((9000, 64),))),
            'field dimensions.images',
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_field(spec, message):
    with pytest.raises(FieldError, match=message):
        check_spec(spec)


def test_a_bundle_without_language_is_whole_without_a_tokenizer(tmp_path):
    bundle = read_bundle(write_tiny_policy(tmp_path / 'act', WITHOUT))
    check_contents(bundle)
    assert not [name for name in bundle.spec.files if 'tokenizer' in name]
    text = describe(bundle.spec)
    assert 'none: the policy has no language' in text
    assert '48x64 px, not resized' in text and 'vocabulary' not in text


def test_guidance_says_that_there_is_no_language():
    with pytest.raises(ValueError, match='cfg_enabled'):
        check_guidable(WITHOUT, 'cfg_enabled')


def test_the_identity_of_a_bundle_without_new_fields_is_what_it_was():
    assert spec_identity(WITH) == IDENTITY


@pytest.mark.parametrize('lost', ['images.top.mean', 'images.wrist.std'])
def test_statistics_of_every_camera_are_needed(tmp_path, lost):
    bundle = read_bundle(write_tiny_policy(tmp_path / 'act', WITHOUT))
    kept = {name: values for name, values in bundle.statistics.items() if name != lost}
    with pytest.raises(FieldError, match=f'field {lost}: is missing'):
        check_statistics(WITHOUT, kept)
    with pytest.raises(FieldError, match=r'images\.top\.mean'):
        check_statistics(WITHOUT, {**bundle.statistics, 'images.top.mean': np.zeros(2)})
    with pytest.raises(FieldError, match=r'images\.side\.mean'):
        check_statistics(WITHOUT, {**bundle.statistics, 'images.side.mean': np.zeros(3)})


PI05 = tiny_spec('pi05')


@pytest.mark.parametrize(
    ('spec', 'field'),
    [
        (replace(WITHOUT, images=replace(WITHOUT.images, bars=-3.0)), 'images.bars'),
        (replace(WITH, images=replace(WITH.images, bars=-9.0)), 'images.bars'),
        (replace(WITH, prompt=replace(WITH.prompt, state_bins=32)), 'prompt.state_bins'),
        (replace(PI05, prompt=replace(PI05.prompt, state_bins=1)), 'prompt.state_bins'),
        (replace(WITHOUT, flow_times='summed'), 'flow_times'),
    ],
)
def test_what_early_releases_did_goes_with_what_it_is_about(spec, field):
    with pytest.raises(FieldError) as caught:
        check_spec(spec)
    assert caught.value.field == field


def test_what_early_releases_did_is_read_back_and_makes_another_bundle():
    prompt = replace(PI05.prompt, template='pi05_state', state_bins=32)
    early = replace(
        PI05, prompt=prompt, images=replace(PI05.images, bars=-3.0), flow_times='summed'
    )
    assert parse_spec(dump_spec(early)) == early
    assert spec_identity(early) != spec_identity(PI05)
