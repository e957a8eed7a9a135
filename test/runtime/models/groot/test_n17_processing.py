"""Images, prompt, state and actions of GR00T N1.6 and N1.7 against the training code's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from groot_cases import N16, N17, load_groot_case
from groot_n17_folders import write_backbone
from network_cases import each_case, each_entry, relative_error

from vla_convert.readers.groot.n17_groups import grouped_columns
from vla_runtime.declarations.groot import N16_PROMPT
from vla_runtime.files.json_file import JsonMapping
from vla_runtime.processing.actions import ActionSpace, PoseColumns
from vla_runtime.processing.normalization import Normalizer
from vla_runtime.processing.plain_images import cropped
from vla_runtime.processing.prompts import PromptFormat, prompt_parts
from vla_runtime.processing.tokenizer import Tokenizer

pytestmark = pytest.mark.cases

entries = each_entry(N17)
of_both = each_entry(N16, N17)
cases = each_case(N16, N17)


def columns_of(path: Path):
    d = json.loads(path.read_text())
    if not d['modality_config']:
        pytest.skip('the case has no groups')
    return grouped_columns(
        JsonMapping(path, d['statistics']),
        JsonMapping(path, d['modality_config']),
        percentiles=d['use_percentiles'],
        relative=True,
    )


@of_both
def test_images_cut_by_area_equal_the_reference_s(path: Path, b: int):
    case = load_groot_case(path, b)
    d = case.description
    transform = d['image_transform'] if d['kind'] == N16 else d['cv2_transform']
    for index in range(d['cameras']):
        reference = case.tensors[f'cv2_image_{index}'][b].numpy()
        image = cropped(
            case.tensors[f'raw_image_{index}'][b].numpy(),
            reference.shape[:2],
            edge=transform['shortest_image_edge'],
            fraction=transform['crop_fraction'],
            resample='area',
        )
        if d['kind'] == N17:
            np.testing.assert_array_equal(image, reference)
        # Where two sizes share a factor, OpenCV's rounding decides.
        assert np.abs(image.astype(int) - reference).max() <= 1


@each_entry(N16)
def test_the_task_stands_before_the_images_in_n16_s_prompt(path: Path, b: int, tmp_path):
    """The case's prompt is a stand-in without system message and numbers of images."""
    case = load_groot_case(path, b)
    d = case.description
    layout = replace(
        N16_PROMPT,
        text=N16_PROMPT.text.partition('<|im_end|>\n')[2],
        image=N16_PROMPT.image.replace('<image {number}>', ''),
    )
    prompt = prompt_parts(layout, PromptFormat('chat', 'letters'), d['tasks'][b], None)
    assert prompt[1] == d['cleaned_tasks'][b]
    tokenizer = Tokenizer.load(write_backbone(tmp_path / 'backbone', path), bos=False)
    pieces = layout.pieces(d['cameras'], prompt, tokenizer.special)
    length = len(case.rows()['tokens'][0])
    tokens, mask = tokenizer.encode_pieces(pieces, length + 5, padding_first=True)
    assert tokens[mask].tolist() == [int(i) for i in case.ids if i != d['image_token']]
    counts = [len(ids) for ids in tokenizer.piece_tokens(pieces)]
    places = layout.image_places(counts, d['cameras'], length + 5)
    assert places == tuple(place + 5 for place in case.network.dims.image_places)


@of_both
def test_state_and_actions_equal_the_reference_s(path: Path, b: int):
    case, columns = load_groot_case(path, b), columns_of(path)
    raw = case.tensors['raw_state'][b].numpy().reshape(-1, columns.state)
    state = Normalizer(
        'clipped_range',
        {name: columns.statistics[f'state.{name}'] for name in ('low', 'high')},
    ).normalise(raw)
    reference = case.tensors['state'][b]
    assert relative_error(state, reference[:, : columns.state]) <= 1e-6
    assert not reference[:, columns.state :].any()
    decoded = Normalizer(
        'clipped_range',
        {name: columns.statistics[f'actions.{name}'] for name in ('low', 'high')},
    ).denormalise(case.tensors['actions'][b, : columns.horizon, : columns.actions].numpy())
    poses = tuple(
        PoseColumns(
            name=pose.name,
            position=tuple(range(pose.action, pose.action + 3)),
            rotation=tuple(range(pose.action + 3, pose.action + 9)),
            form=pose.form,
            kind='delta' if pose.is_delta else 'absolute',
            frame='tool',
            state_position=() if pose.state is None else tuple(range(pose.state, pose.state + 3)),
            state_rotation=(
                () if pose.state is None else tuple(range(pose.state + 3, pose.state + 9))
            ),
        )
        for pose in columns.poses
    )
    in_pose = {column for pose in poses for column in pose.columns}
    space = ActionSpace(
        names=tuple(f'a{index}' for index in range(columns.actions)),
        kinds=tuple('absolute' if anchor is None else 'delta' for anchor in columns.deltas),
        state_columns=tuple(
            None if column in in_pose else anchor for column, anchor in enumerate(columns.deltas)
        ),
        poses=poses,
    )
    found = space.to_robot(decoded, raw[-1])
    reference = case.tensors['actions_robot_units'][b].double()
    assert found.shape == reference.shape
    assert relative_error(found, reference) <= 1e-5
