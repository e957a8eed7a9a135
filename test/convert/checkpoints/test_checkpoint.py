"""Tensors of a checkpoint: the same ones whoever wrote them, and every defect named."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from checkpoint_folders import (
    LM_HEAD,
    TEXT_TABLE,
    copy_lerobot_folder,
    lerobot_folder,
    pi0_tensors,
    save_tensors,
    tiny_tensors,
    write_shards,
)
from safetensors.torch import load_file, save_file

from vla_convert.checkpoints.dims import ShownDims
from vla_convert.checkpoints.tensors import CheckpointError, copy_tensors, read_tensors
from vla_convert.readers.pi import NAMES, family_of
from vla_runtime.bundle.tensors import StoredTensor, TensorsError, check_tensors
from vla_runtime.declarations.pi import PiDims
from vla_runtime.family.listing import find_family
from vla_runtime.files.json_file import JsonError
from vla_runtime.models.base.flow_network import weight_shapes


def loaded(folder: Path, target: Path) -> dict[str, torch.Tensor]:
    """Tensors that a bundle would hold."""
    copy_tensors(read_tensors(folder, NAMES), target)
    return load_file(target)


def saved(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_tensors(folder, tensors)
    return folder


def dims_of(tensors: Mapping[str, StoredTensor], vision: int = 4, kv: int = 1) -> PiDims:
    heads = {'vision.num_heads': vision, 'language.num_kv_heads': kv}
    shown = ShownDims(PiDims, tensors, heads)
    return shown.make(cameras=2, prompt_length=64, horizon=12)


def expected_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    tensors = read_tensors(folder, NAMES)
    return weight_shapes(family_of(tensors), dims_of(tensors))


@pytest.fixture
def reference(tmp_path) -> dict[str, torch.Tensor]:
    return loaded(lerobot_folder(), tmp_path / 'reference.safetensors')


def assert_equal(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == reference.keys()
    for name, tensor in reference.items():
        assert torch.equal(ours[name], tensor), name


def test_the_copy_holds_the_very_numbers_under_our_names(reference):
    theirs = tiny_tensors()
    assert len(reference) == len(theirs) - 2, 'the two vocabulary heads are not needed'
    for name, tensor in theirs.items():
        if 'lm_head' not in name:
            assert torch.equal(reference[NAMES.ours(name)], tensor), name


@pytest.mark.parametrize('family', ['pi05', 'pi0'])
def test_the_tensors_are_exactly_those_of_the_network(tmp_path, family):
    folder = saved(tmp_path / 'c', tiny_tensors() if family == 'pi05' else pi0_tensors())
    check_tensors(read_tensors(folder, NAMES), expected_shapes(folder))
    assert family_of(read_tensors(folder, NAMES)) == family


def test_openpi_names_give_the_same_tensors(tmp_path, reference):
    folder = saved(tmp_path / 'openpi', tiny_tensors())
    assert_equal(loaded(folder, tmp_path / 'w.safetensors'), reference)


def test_shards_give_the_same_tensors(tmp_path, reference):
    folder = tmp_path / 'shards'
    folder.mkdir()
    write_shards(folder, tiny_tensors())
    assert_equal(loaded(folder, tmp_path / 'w.safetensors'), reference)


def test_older_module_nesting_gives_the_same_tensors(tmp_path, reference):
    def older(name: str) -> str:
        name = name.replace('paligemma.model.language_model.', 'paligemma.language_model.model.')
        name = name.replace('paligemma.lm_head', 'paligemma.language_model.lm_head')
        return name.replace('paligemma.model.', 'paligemma.')

    folder = saved(tmp_path / 'older', {older(k): v for k, v in tiny_tensors().items()})
    assert_equal(loaded(folder, tmp_path / 'w.safetensors'), reference)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_a_precision_is_kept_as_it_is(tmp_path, reference, dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in tiny_tensors().items()}
    # Norms and patch embedding often stay float32 beside halves.
    tensors = {k: v.float() if 'patch_embedding' in k else v for k, v in tensors.items()}
    ours = loaded(saved(tmp_path / 'half', tensors), tmp_path / 'w.safetensors')
    for name, tensor in reference.items():
        same = dtype if 'patch_embedding' not in name else torch.float32
        assert ours[name].dtype == same
        assert torch.equal(ours[name], tensor.to(dtype).to(same)), name


def test_the_text_table_may_exist_as_the_head_it_is_tied_to(tmp_path, reference):
    tensors = tiny_tensors()
    tensors[LM_HEAD] = tensors.pop(TEXT_TABLE)
    folder = saved(tmp_path / 'tied', tensors)
    assert_equal(loaded(folder, tmp_path / 'w.safetensors'), reference)


def test_the_text_table_wins_over_a_head_beside_it(tmp_path, reference):
    tensors = tiny_tensors()
    tensors[LM_HEAD] = torch.zeros_like(tensors[TEXT_TABLE])
    folder = saved(tmp_path / 'both', tensors)
    assert_equal(loaded(folder, tmp_path / 'w.safetensors'), reference)


def test_progress_adds_up_to_all_bytes(tmp_path):
    counts: list[int] = []
    tensors = read_tensors(lerobot_folder(), NAMES)
    copy_tensors(tensors, tmp_path / 'w.safetensors', advance=counts.append)
    assert sum(counts) == sum(stored.size for stored in tensors.values())


class TestFit:
    def test_missing_unexpected_and_misshaped_tensors_are_listed_together(self, tmp_path):
        expected = expected_shapes(lerobot_folder())
        tensors = tiny_tensors()
        del tensors['time_mlp_out.bias']
        tensors['proprio_history_proj.weight'] = torch.zeros(4, 5)
        tensors['action_in_proj.bias'] = torch.zeros(7)
        folder = saved(tmp_path / 'c', tensors)
        with pytest.raises(TensorsError) as caught:
            check_tensors(read_tensors(folder, NAMES), expected)
        text = str(caught.value)
        assert "missing 'time_out.bias' [32]" in text
        assert "unexpected 'proprio_history_proj.weight' [4, 5] (model.safetensors)" in text
        assert "'action_in_proj.bias' has shape [7] where [32] is expected for 'action_in" in text

    def test_a_long_list_ends_in_a_count(self, tmp_path):
        tensors = {f'extra_{index}': torch.zeros(1) for index in range(25)}
        folder = saved(tmp_path / 'c', {**tiny_tensors(), **tensors})
        with pytest.raises(TensorsError) as caught:
            check_tensors(read_tensors(folder, NAMES), expected_shapes(lerobot_folder()))
        lines = str(caught.value).splitlines()
        assert len(lines) == 12
        assert lines[-1] == '  and 15 more'

    def test_full_size_networks_are_compared_without_making_them(self):
        for family in ('pi05', 'pi0'):
            dims = find_family(family).presets[family]
            shapes = weight_shapes(family, dims)
            assert shapes['language.embedding.weight'] == (257152, 2048)


class TestDims:
    def dims(self, folder: Path, **heads: int) -> PiDims:
        return dims_of(read_tensors(folder, NAMES), **heads)

    def test_all_sizes_are_read_off_the_tensors(self):
        dims = self.dims(lerobot_folder())
        assert (dims.vision.width, dims.vision.depth, dims.vision.mlp_dim) == (32, 2, 48)
        assert (dims.vision.patch_size, dims.vision.image_size) == (14, 56)
        assert (dims.language.width, dims.language.depth, dims.language.mlp_dim) == (64, 2, 96)
        assert (dims.language.num_heads, dims.language.head_dim) == (8, 16)
        assert (dims.expert.width, dims.expert.mlp_dim) == (32, 64)
        assert (dims.vocabulary, dims.action_dim, dims.state_dim) == (400, 32, 0)

    def test_pi0_pads_its_state(self, tmp_path):
        assert self.dims(saved(tmp_path / 'c', pi0_tensors())).state_dim == 32

    def test_key_value_heads_that_do_not_divide_are_refused(self):
        with pytest.raises(CheckpointError):
            self.dims(lerobot_folder(), kv=3)

    def test_vision_heads_that_do_not_divide_are_refused(self):
        with pytest.raises(CheckpointError, match='num_heads'):
            self.dims(lerobot_folder(), vision=5)

    @pytest.mark.parametrize(
        ('drop', 'pattern'),
        [
            ('time_mlp', "'time_mlp_in'"),
            ('gemma_expert.model.layers.0.', "'expert.blocks.0.attention.q.weight'"),
            ('patch_embedding', "'vision.patch_embedding.weight'"),
        ],
    )
    def test_a_checkpoint_of_something_else_is_named(self, tmp_path, drop, pattern):
        tensors = {k: v for k, v in tiny_tensors().items() if drop not in k}
        with pytest.raises(CheckpointError, match=pattern):
            folder = saved(tmp_path / 'c', tensors)
            family_of(read_tensors(folder, NAMES))
            self.dims(folder)

    def test_a_block_missing_in_the_middle_is_named(self, tmp_path):
        tensors = {
            k: v for k, v in pi0_tensors().items() if 'gemma_expert.model.layers.1.' not in k
        }
        with pytest.raises(CheckpointError, match=r'blocks\.1'):
            self.dims(saved(tmp_path / 'c', tensors))

    def test_positions_that_form_no_square_are_refused(self, tmp_path):
        tensors = tiny_tensors()
        name = next(key for key in tensors if 'position_embedding' in key)
        tensors[name] = tensors[name][:15]
        with pytest.raises(CheckpointError):
            self.dims(saved(tmp_path / 'c', tensors))


class TestFiles:
    def refuses(self, folder: Path, pattern: str) -> None:
        with pytest.raises(CheckpointError, match=pattern):
            read_tensors(folder, NAMES)

    @pytest.mark.parametrize('name', ['pytorch_model.bin', 'model.pt', 'a.pth', 'b.ckpt', 'c.pkl'])
    def test_a_pickle_is_refused_by_name_and_never_opened(self, tmp_path, name):
        (tmp_path / name).write_bytes(pickle.dumps(print))
        self.refuses(tmp_path, f'{name}: is a pickle, .* runs the code inside it')
        self.refuses(tmp_path / name, f'{name}: is a pickle')

    def test_pickles_beside_safetensors_are_not_needed(self, tmp_path):
        folder = saved(tmp_path / 'c', tiny_tensors())
        (folder / 'optimizer.pt').write_bytes(b'\x80garbage')
        assert read_tensors(folder, NAMES)

    def test_a_pickled_shard_is_refused(self, tmp_path):
        index = {'weight_map': {'action_in_proj.weight': 'pytorch_model-00001.bin'}}
        (tmp_path / 'model.safetensors.index.json').write_text(json.dumps(index))
        self.refuses(tmp_path, 'is a pickle')

    def test_a_shard_outside_of_the_folder_is_refused(self, tmp_path):
        index = {'weight_map': {'action_in_proj.weight': '../other.safetensors'}}
        (tmp_path / 'model.safetensors.index.json').write_text(json.dumps(index))
        self.refuses(tmp_path, 'not the plain name of a safetensors file')

    def test_a_missing_folder_says_what_is_expected(self, tmp_path):
        self.refuses(tmp_path / 'pi05_base', 'no such folder; expected the folder of a checkpoint')

    def test_an_empty_folder_says_what_is_missing(self, tmp_path):
        self.refuses(tmp_path, r'has neither model\.safetensors nor model\.safetensors\.index')

    @pytest.mark.parametrize(
        ('found', 'hint'),
        [
            ('params/x', 'convert_jax_model_to_pytorch'),
            ('model.safetensors.incomplete', 'not finished .* hf download'),
            ('.cache/huggingface/download/model.safetensors.ab12.incomplete', 'not finished'),
        ],
    )
    def test_the_usual_wrong_folders_get_a_hint(self, tmp_path, found, hint):
        (tmp_path / found).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / found).write_text('x')
        self.refuses(tmp_path, hint)

    @pytest.mark.parametrize(
        ('named', 'policies', 'meant'),
        [
            ('.', ['pretrained_model'], 'pretrained_model'),
            ('run', ['run/checkpoints/000200/pretrained_model'], '000200/pretrained_model'),
            (
                'run',
                ['run/checkpoints/last/pretrained_model', 'run/checkpoints/9/pretrained_model'],
                'last/pretrained_model',
            ),
            ('run/checkpoints', ['run/checkpoints/last/pretrained_model'], 'last/pretrained_model'),
            (
                'run',
                ['run/checkpoints/900/pretrained_model', 'run/checkpoints/1000/pretrained_model'],
                '1000/pretrained_model',
            ),
            ('experiment', ['experiment/5000', 'experiment/20000'], 'experiment/20000'),
            ('models--lerobot--pi05', ['models--lerobot--pi05/snapshots/0a'], 'snapshots/0a'),
        ],
    )
    def test_the_policy_below_the_named_folder_is_told(self, tmp_path, named, policies, meant):
        for policy in policies:
            (tmp_path / policy).mkdir(parents=True)
            (tmp_path / policy / 'model.safetensors').touch()
        self.refuses(tmp_path / named, rf'did you mean .*{meant}\?$')

    def test_a_folder_without_tensors_is_not_suggested(self, tmp_path):
        (tmp_path / 'pretrained_model').mkdir()
        with pytest.raises(CheckpointError, match='has neither') as refused:
            read_tensors(tmp_path, NAMES)
        assert 'did you mean' not in str(refused.value)

    def test_one_file_and_shards_together_are_ambiguous(self, tmp_path):
        folder = copy_lerobot_folder(tmp_path / 'c')
        (folder / 'model.safetensors.index.json').write_text('{}')
        self.refuses(folder, 'has both model')

    def test_a_truncated_file_is_named(self, tmp_path):
        folder = copy_lerobot_folder(tmp_path / 'c')
        path = folder / 'model.safetensors'
        path.write_bytes(path.read_bytes()[:-100])
        self.refuses(folder, r'model\.safetensors: is not a whole safetensors file')

    @pytest.mark.parametrize(
        ('content', 'remedy'),
        [
            (b'', 'is empty: .* get the file again'),
            (
                b'version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n',
                'git lfs pull',
            ),
        ],
        ids=['empty', 'pointer of git lfs'],
    )
    def test_a_file_that_never_arrived_is_named_with_the_remedy(self, tmp_path, content, remedy):
        folder = copy_lerobot_folder(tmp_path / 'c')
        (folder / 'model.safetensors').write_bytes(content)
        self.refuses(folder, rf'model\.safetensors: .*{remedy}')

    def test_an_unfinished_download_is_seen_in_the_cache_of_the_hub(self, tmp_path):
        (tmp_path / 'blobs').mkdir()
        (tmp_path / 'blobs' / 'ab12.incomplete').write_text('x')
        snapshot = tmp_path / 'snapshots' / 'main'
        snapshot.mkdir(parents=True)
        self.refuses(snapshot, r'not finished \(ab12\.incomplete\)')

    def test_a_lost_shard_is_named(self, tmp_path):
        write_shards(tmp_path, tiny_tensors())
        (tmp_path / 'model-00002-of-00003.safetensors').unlink()
        self.refuses(tmp_path, r'model-00002-of-00003\.safetensors: is missing')

    def test_a_tensor_in_no_shard_is_named(self, tmp_path):
        write_shards(tmp_path, tiny_tensors())
        index = tmp_path / 'model.safetensors.index.json'
        document = json.loads(index.read_text())
        document['weight_map']['lost'] = 'model-00001-of-00003.safetensors'
        index.write_text(json.dumps(document))
        self.refuses(tmp_path, "names tensors that are in no shard: 'lost'")

    def test_a_tensor_the_index_does_not_know_is_named(self, tmp_path):
        write_shards(tmp_path, tiny_tensors())
        index = tmp_path / 'model.safetensors.index.json'
        document = json.loads(index.read_text())
        del document['weight_map']['action_in_proj.bias']
        index.write_text(json.dumps(document))
        self.refuses(tmp_path, "holds tensor 'action_in_proj.bias', which .* places in no file")

    @pytest.mark.parametrize(
        ('text', 'pattern'),
        [
            ('', 'index.json'),
            ('[]', 'index.json'),
            ('{"weight_map": 3}', 'field weight_map'),
            ('{}', 'field weight_map'),
            ('{"weight_map": {"a": 7}}', 'field weight_map.a'),
        ],
    )
    def test_an_index_of_another_form_is_named(self, tmp_path, text, pattern):
        (tmp_path / 'model.safetensors.index.json').write_text(text)
        with pytest.raises(JsonError, match=pattern):
            read_tensors(tmp_path, NAMES)

    def test_an_unknown_precision_is_named(self, tmp_path):
        save_file({'action_in_proj.weight': torch.zeros(2, dtype=torch.int8)}, tmp_path / 'model.s')
        (tmp_path / 'model.s').rename(tmp_path / 'model.safetensors')
        self.refuses(tmp_path, "tensor 'action_in_proj.weight' is I8; expected one of F32, BF16")

    def test_one_tensor_under_two_names_is_refused(self, tmp_path):
        tensors = tiny_tensors()
        tensors['model.action_in_proj.bias'] = tensors['action_in_proj.bias'].clone()
        self.refuses(saved(tmp_path / 'c', tensors), 'are the same tensor .*under two names')

    def test_a_file_that_shrinks_while_it_is_copied_is_named(self, tmp_path):
        folder = copy_lerobot_folder(tmp_path / 'c')
        tensors = read_tensors(folder, NAMES)
        path = folder / 'model.safetensors'
        path.write_bytes(path.read_bytes()[:10_000])
        with pytest.raises(CheckpointError, match=r'model\.safetensors'):
            copy_tensors(tensors, tmp_path / 'w.safetensors')
