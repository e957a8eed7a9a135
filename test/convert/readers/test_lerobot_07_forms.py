"""What LeRobot writes after 0.6.1: fields, steps and files of its development of August 2026.

The folders are those of 0.6 with what the later code adds; no release of it has written them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pi0_fast_cases
import pytest
import torch
from checkpoint_folders import copy_lerobot_folder, edit_config, edit_json, edit_step, joints
from folder_cases import Change, both, config, made, planned, step
from reference_cases import shipped
from safetensors.torch import load_file, save_file

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.checkpoints.reader import find_reader
from vla_convert.export.conversion import ExportPlan, plan_export
from vla_runtime.files.json_file import JsonError

AS_OF_06 = Change()


def plan_of(folder: Path, **further: Any) -> ExportPlan:
    """The plan of a pi0.5 folder."""
    names = tuple(joints().split(','))
    given = {'state_names': names, 'action_names': names, 'units': ('rad',), 'rate_hz': 30.0}
    options = ExportOptions(**{**given, 'vision_heads': 4, **further})
    return plan_export(folder, options, default_name='tiny')


def unread(plan: ExportPlan) -> list[str]:
    return [note for note in plan.notes if 'keys that this runtime' in note]


def save_artifact(folder: Path, name: str, step: str, key: str) -> Path:
    """Where a step of the preprocessor saves files of its own, as `artifacts` says."""

    def change(document: dict[str, Any]) -> None:
        (entry,) = (one for one in document['steps'] if one['registry_name'] == step)
        entry['config'][key] = name
        entry['artifacts'] = {key: name}

    edit_json(folder / 'policy_preprocessor.json', change)
    (folder / name).mkdir()
    return folder / name


def save_tokenizer(folder: Path) -> Path:
    """Move the tokenizer to where the step saves it, with the padding that the step uses."""
    target = save_artifact(folder, 'tokenizer', 'tokenizer_processor', 'tokenizer_name')
    path = (folder / 'tokenizer.json').rename(target / 'tokenizer.json')
    cut = {'direction': 'Right', 'max_length': 4, 'strategy': 'LongestFirst', 'stride': 0}
    edit_json(path, lambda document: document.update(truncation=cut))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_lerobot_folder(tmp_path / 'policy')


class TestPi05:
    def later(self, folder: Path, **changes: Any) -> Path:
        memory = {
            'use_visual_memory': False,
            'use_proprioceptive_memory': False,
            'memory_frames': 6,
            'memory_stride': 30,
            'memory_temporal_attention_every': 4,
        }
        edit_config(folder, **{**memory, 'rtc_training_max_delay': 0, **changes})
        step = 'pi05_prepare_state_tokenizer_processor_step'
        edit_step(folder, step, max_state_dim=32, include_state_in_prompt=True)
        save_tokenizer(folder)
        return folder

    def test_a_later_folder_is_the_same_policy_and_no_key_of_it_is_unread(self, folder, tmp_path):
        earlier = plan_of(copy_lerobot_folder(tmp_path / 'earlier'))
        later = plan_of(self.later(folder))
        assert (later.spec, unread(later)) == (earlier.spec, [])
        assert dict(later.origins)['tokenizer'] == 'tokenizer/tokenizer.json'

    def test_another_tokenizer_than_the_saved_one_is_a_conflict(self, folder, tmp_path):
        other = tmp_path / 'tokenizer.json'
        other.write_text((folder / 'tokenizer.json').read_text())
        with pytest.raises(ExportError, match=r'leave the option out to take .*tokenizer/token'):
            plan_of(self.later(folder), tokenizer=other)

    @pytest.mark.parametrize('key', ['use_visual_memory', 'use_proprioceptive_memory'])
    def test_a_memory_is_refused_by_its_field(self, folder, key):
        with pytest.raises(JsonError, match=f'field {key}: True is not supported'):
            plan_of(self.later(folder, **{key: True}))

    def test_a_prompt_without_the_state_is_refused_by_its_field(self, folder):
        name = 'pi05_prepare_state_tokenizer_processor_step'
        edit_step(self.later(folder), name, include_state_in_prompt=False)
        with pytest.raises(JsonError, match=r'policy_preprocessor.*include_state_in_prompt: False'):
            plan_of(folder)


class TestTypes:
    def test_a_policy_that_writes_subtasks_is_refused_by_name(self, folder):
        edit_config(folder, type='pi052', recipe_path='recipes/subtask_mem.yaml')
        message = (
            r"config\.json: field type: 'pi052' .*has neither that text .*Train --policy\.type=pi05"
        )
        with pytest.raises(JsonError, match=message):
            find_reader(folder)

    def test_so_is_an_adapter_of_one(self, folder, tmp_path):
        edit_config(folder, type='pi052')
        (folder / 'model.safetensors').unlink()
        (folder / 'adapter_model.safetensors').write_bytes(b'')
        (folder / 'adapter_config.json').write_text('{}')
        with pytest.raises(JsonError, match="'pi052' is not served"):
            plan_of(folder, base=copy_lerobot_folder(tmp_path / 'base'))

    @pytest.mark.parametrize('kind', ['eo1', 'fastwam', 'lawam', 'lingbot_va', 'wall_x'])
    def test_a_type_that_nothing_reads_is_refused_with_those_that_are(self, folder, kind):
        edit_config(folder, type=kind)
        with pytest.raises(JsonError, match=f"'{kind}' are not served, only 'act'.*'pi05'"):
            find_reader(folder)


@pytest.mark.parametrize('place', ['pytorch_model_fsdp_0', 'pretrained_model/pytorch_model_fsdp_0'])
def test_shards_of_a_sharded_training_say_how_to_convert_them(tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir(parents=True)
    with pytest.raises(ExportError, match=r'lerobot-convert-dcp --checkpoint_dir='):
        plan_of(tmp_path)


class TestPi0Fast:
    CASE = shipped('pi0_fast_a')

    def written(self, folder: Path, **changes: Any) -> Path:
        return pi0_fast_cases.write_folder(folder / 'fast_policy', self.CASE, **changes)

    def later(self, folder: Path) -> Path:
        """The action tokenizer in the folder, and settings that its step saves since."""
        written = self.written(folder)
        name = 'action_tokenizer_processor'
        saved = save_artifact(written, 'action_tokenizer', name, 'action_tokenizer_name')
        for file in (folder / 'fast').iterdir():
            file.rename(saved / file.name)
        edit_step(written, name, allow_truncation=True, fast_skip_tokens=128)
        save_tokenizer(written)
        return written

    def test_the_action_tokenizer_in_the_folder_is_found(self, tmp_path):
        options = pi0_fast_cases.options_of(self.CASE, tmp_path / 'x', action_tokenizer=None)
        plan = plan_export(self.later(tmp_path), options, default_name='tiny')
        (path,) = plan.files.values()
        assert path == tmp_path / 'fast_policy/action_tokenizer/tokenizer.json'
        assert unread(plan) == []

    def test_another_than_the_one_in_the_folder_is_a_conflict(self, tmp_path):
        folder = self.later(tmp_path)
        options = pi0_fast_cases.options_of(self.CASE, folder, action_tokenizer=tmp_path)
        with pytest.raises(ExportError, match=r'--action-tokenizer says .* but the LeRobot'):
            plan_export(folder, options, default_name='tiny')

    def test_a_form_with_other_words_is_refused_by_its_field(self, tmp_path):
        folder = self.written(tmp_path, auto_fit_fast_tokenizer=False)
        options = pi0_fast_cases.options_of(self.CASE, folder)
        with pytest.raises(JsonError, match=r'field auto_fit_fast_tokenizer: .*=pi05'):
            plan_export(folder, options, default_name='tiny')


class TestVlaJepa:
    LATER = config(
        use_relative_actions=False,
        relative_exclude_joints=['gripper'],
        gripper_joint_names=['gripper'],
        world_model_num_views=2,
        causal_world_model_context=False,
    )

    def steps(self, enabled: bool) -> Change:
        """Later steps in front of the normaliser and behind the network."""
        names = [f'action_{n}' for n in range(7)]
        settings = {'enabled': enabled, 'exclude_joints': ['action_6'], 'action_names': names}
        relative = {'registry_name': 'relative_actions_processor', 'config': settings}
        prepare = {
            'registry_name': 'vla_jepa_image_prep',
            'config': {'resize_to': None, 'expand_channels': True},
        }
        back = {'registry_name': 'absolute_actions_processor', 'config': {'enabled': enabled}}

        def change(folder: Path) -> None:
            edit_json(
                folder / 'policy_preprocessor.json',
                lambda d: d['steps'].__setitem__(slice(3, 3), [prepare, relative]),
            )
            edit_json(folder / 'policy_postprocessor.json', lambda d: d['steps'].insert(3, back))

        stated = config(
            use_relative_actions=enabled,
            relative_exclude_joints=['action_6'],
            action_feature_names=names,
        )
        return both(self.LATER, Change(change), stated)

    def off(self) -> Change:
        """Without the gripper's steps, which is the later default."""

        def change(document: dict[str, Any]) -> None:
            document['steps'] = [s for s in document['steps'] if 'grip' not in s['registry_name']]

        return both(
            self.steps(False),
            config(pre_snap_gripper_action=False, binarize_gripper_action=False),
            Change(lambda f: edit_json(f / 'policy_postprocessor.json', change)),
        )

    @pytest.mark.parametrize('grips', [True, False])
    def test_no_key_of_a_later_folder_is_unread(self, tmp_path, grips):
        change = self.steps(False) if grips else self.off()
        plan = planned('vla_jepa', tmp_path, change)
        assert unread(plan) == []
        assert [one.switch is None for one in plan.spec.actions] == [True] * 6 + [not grips]

    def test_relative_actions_leave_the_gripper_as_it_is(self, tmp_path):
        plan = planned('vla_jepa', tmp_path, self.steps(True))
        assert [one.kind for one in plan.spec.actions] == ['delta'] * 6 + ['absolute']
        assert plan.spec.actions[0].relative_to == 'state_0'

    def test_the_column_that_the_step_saved_counts_and_is_told_from_there(self, tmp_path):
        found = {'gripper_dim': 2, 'threshold': 0.25}
        of_steps = [step(index, 'postprocessor', **found) for index in (1, 3)]
        plan = planned('vla_jepa', tmp_path, both(self.LATER, *of_steps))
        assert [n for n, one in enumerate(plan.spec.actions) if one.switch is not None] == [2]
        place = 'policy_postprocessor.json, steps[1].config.gripper_dim'
        assert dict(plan.origins)['actions.switch'] == place


class TestMolmoAct2:
    def later(self, **changes: Any) -> Change:
        def change(folder: Path) -> None:
            def renamed(document: dict[str, Any]) -> None:
                for key in ('enable_lora_vlm', 'enable_lora_action_expert', 'model_dtype'):
                    del document[key]
                del document['train_action_expert_only']
                document |= {
                    'train_mode_vlm': 'fft',
                    'dtype': 'bfloat16',
                    'llm_residual_dropout': 0.1,
                    'norm_stats_path': None,
                    'compile_model': False,
                    **changes,
                }

            edit_json(folder / 'config.json', renamed)
            masks = {name: [True] * 6 for name in ('observation.state', 'action')}
            edit_step(folder, 'molmoact2_clamp_normalized', normalization_masks=masks)

        return Change(change)

    def test_the_expert_sees_all_where_the_later_config_says_continuous(self, tmp_path):
        # The model below says `both`, which counted until 0.6.1.
        earlier = planned('molmoact2', tmp_path / 'earlier', AS_OF_06)
        later = planned('molmoact2', tmp_path / 'later', self.later())
        assert earlier.spec.dims.hides_first and earlier.spec.dims.hidden_end > 0
        assert (later.spec.dims.hides_first, later.spec.dims.hidden_end) == (False, 0)
        assert unread(later) == []

    def test_it_hides_the_same_tokens_where_the_later_config_says_both(self, tmp_path):
        earlier = planned('molmoact2', tmp_path / 'earlier', AS_OF_06)
        later = planned('molmoact2', tmp_path / 'later', self.later(action_mode='both'))
        assert later.spec.dims == earlier.spec.dims

    @pytest.mark.parametrize('later', [True, False])
    def test_adapters_among_the_weights_are_refused_with_what_merges_them(self, tmp_path, later):
        def adapt(folder: Path) -> None:
            """Names of PEFT's model around the model, as LeRobot saves them."""
            stored = load_file(folder / 'model.safetensors')
            named = {}
            for name, tensor in stored.items():
                name = name.replace('model.', 'model.base_model.model.', 1)
                module = name.removesuffix('.weight')
                if name.endswith('self_attn.att_proj.weight') and 'transformer' in name:
                    named[f'{module}.base_layer.weight'] = tensor
                    named[f'{module}.lora_A.default.weight'] = torch.zeros(2, tensor.shape[1])
                    named[f'{module}.lora_B.default.weight'] = torch.zeros(tensor.shape[0], 2)
                else:
                    named[name] = tensor
            assert any('lora_A' in name for name in named)
            save_file(named, folder / 'model.safetensors')

        of = self.later(train_mode_vlm='lora') if later else config(enable_lora_vlm=True)
        folder, options = made('molmoact2', tmp_path, both(of, Change(adapt)))
        key = 'train_mode_vlm' if later else 'enable_lora_vlm'
        with pytest.raises(ExportError, match=rf'lora_A.*{key}.*merge_and_unload\(\)'):
            plan_export(folder, options, default_name='tiny')


def test_later_keys_of_a_training_stay_in_its_own_file(folder: Path) -> None:
    """train_config.json has those of sharded trainings and averages, and nobody reads it."""
    document = {'checkpoint_format': 'safetensors', 'ema': {'enable': True}, 'parallelism': {}}
    (folder / 'train_config.json').write_text(json.dumps(document))
    assert not unread(plan_of(folder))
