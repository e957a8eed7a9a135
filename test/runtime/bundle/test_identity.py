"""Identity of a bundle: what later releases added is no part of it while it changes nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tiny_policy import tiny_spec

from vla_runtime.bundle import success
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.bundle.success import spec_identity


def contents_of(spec: BundleSpec, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Contents that an identity is of."""
    seen: list[dict[str, Any]] = []
    dumps = json.dumps

    def note(contents: dict[str, Any], **how: Any) -> str:
        seen.append(contents)
        return dumps(contents, **how)

    monkeypatch.setattr(success.json, 'dumps', note)
    spec_identity(spec)
    (contents,) = seen
    return contents


def test_what_older_bundles_lack_is_left_out_with_its_default(monkeypatch):
    contents = contents_of(tiny_spec('multi_task_dit'), monkeypatch)
    assert 'separate_encoders' not in contents['dims']
    assert 'angles' not in contents['normalisation']
    crop = contents_of(tiny_spec('groot_n17'), monkeypatch)['images'].get('crop')
    assert crop is None or 'letterbox' not in crop


def test_what_changes_the_output_changes_the_identity():
    spec = tiny_spec('multi_task_dit')
    separate = replace(spec, dims=replace(spec.dims, separate_encoders=True))
    angles = replace(spec.normalisation, angles=(spec.state_names[:2],))
    found = {spec_identity(one) for one in (spec, separate, replace(spec, normalisation=angles))}
    assert len(found) == 3
