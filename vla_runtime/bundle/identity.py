"""Identity of a bundle: one SHA-256 over everything that its output depends on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields, replace
from typing import Any, cast

from vla_runtime.bundle.schema import VERIFICATION_FILE, BundleSpec
from vla_runtime.family.declaration import LATER


def spec_identity(spec: BundleSpec) -> str:
    """Return the SHA-256 of a bundle's policy.yaml and files, without what changes no output."""
    files = {name: sha for name, sha in spec.files.items() if name != VERIFICATION_FILE}
    contents = asdict(replace(spec, files=files))
    # It says how data is read, and changes nothing that the policy does.
    del contents['rename_map']
    # Recordings name bundles by an identity from before there were such fields.
    if spec.normalisation.images is None:
        del contents['normalisation']['images']
    if not spec.normalisation.angles:
        del contents['normalisation']['angles']
    if spec.joint_space is None:
        del contents['joint_space']
    crop = contents['images']['crop']
    if crop is None:
        del contents['images']['crop']
    else:
        for key in ('fraction_across', 'size'):
            if crop[key] is None:
                del crop[key]
        if not crop['letterbox']:
            del crop['letterbox']
    for one in fields(cast(Any, spec.dims)):
        if LATER in one.metadata and contents['dims'][one.name] == one.default:
            del contents['dims'][one.name]
    for pose in contents['poses']:
        if pose['delta_from'] == 'chunk':
            del pose['delta_from']
    if not spec.student_steps:
        del contents['student_steps']
    if spec.flow_times is None:
        del contents['flow_times']
    if spec.images.bars is None:
        del contents['images']['bars']
    if spec.images.fill is None:
        del contents['images']['fill']
    if spec.prompt is not None and spec.prompt.state_bins is None:
        del contents['prompt']['state_bins']
    for camera in contents['cameras']:
        if camera['frame_of'] is None:
            del camera['frame_of'], camera['steps_ago']
    text = json.dumps(contents, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
