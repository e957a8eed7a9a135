"""OpenVLA-OFT's folders: OpenVLA's, with the parts that its fine-tuning trains beside them.

What `checkpoints.oft_folder` reads is left out here.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from vla_runtime.checkpoints.adapters import ADAPTER_CONFIG, ADAPTER_TENSORS
from vla_runtime.checkpoints.errors import ExportError
from vla_runtime.checkpoints.folder_facts import CONFIG_FILE, FolderFacts
from vla_runtime.checkpoints.norm_stats import DataSet, read_data_set
from vla_runtime.checkpoints.oft_folder import (
    ACTION_HEAD,
    STATE_PROJECTION,
    files_of,
    oft_facts,
)
from vla_runtime.families.openvla.folder import PROMPT_LENGTH, read_images
from vla_runtime.files.checkpoint_folders import has_tensors
from vla_runtime.files.json_file import read_json

_ADAPTER_FOLDER = 'lora_adapter'


class _Platform(NamedTuple):
    """Constants of the training on one robot's data, which no file of a folder has.

    Attributes:
        horizon: actions of a chunk.
        action_dim: numbers of an action.
        state_dim: numbers of the state.
        by_range: -1 and 1 are the least and the greatest value, not q01 and q99.
    """

    horizon: int
    action_dim: int
    state_dim: int
    by_range: bool = False


# By a word in the name of the data set, in the order in which the training looks for it.
_PLATFORMS = {
    'libero': _Platform(8, 7, 8),
    'aloha': _Platform(25, 14, 14, by_range=True),
    'bridge': _Platform(5, 7, 7),
}


def is_oft(folder: Path) -> bool:
    """Return whether a folder of OpenVLA's has an action head beside it."""
    return bool(files_of(folder, ACTION_HEAD))


def refuse_unserved_oft(folder: Path) -> None:
    """Refuse forms of OpenVLA-OFT that are not served (ExportError); other folders pass."""
    if (folder / ADAPTER_CONFIG).is_file() and folder.name == _ADAPTER_FOLDER:
        above = folder.absolute().parent
        if is_oft(above):
            raise _unmerged(above)
    head, state = files_of(folder, ACTION_HEAD), files_of(folder, STATE_PROJECTION)
    if not (head or state) or not _is_openvla(folder):
        return
    if film := files_of(folder, 'vision_backbone'):
        raise ExportError(
            f'{film[0]}: is a vision backbone with FiLM (use_film of the training), which is not '
            'served: fine-tune the policy without --use_film'
        )
    if noisy := files_of(folder, 'noisy_action_projector'):
        raise ExportError(
            f'{noisy[0]}: is of an action head that denoises (use_diffusion of the training), '
            'which is not served; served are heads that were trained with L1 (use_l1_regression)'
        )
    if not head:
        raise ExportError(
            f'{folder}: has {state[0].name} but no {ACTION_HEAD}--*_checkpoint.pt: policies of '
            'OpenVLA-OFT that write tokens are not served. If the training used use_l1_regression, '
            'copy its action head into the folder'
        )
    adapted = (folder / _ADAPTER_FOLDER).is_dir() or (folder / ADAPTER_TENSORS).is_file()
    if adapted and not has_tensors(folder):
        raise _unmerged(folder)


def _unmerged(folder: Path) -> ExportError:
    return ExportError(
        f'{folder}: has an adapter (LoRA) that is not merged into OpenVLA, and --base '
        'merges none beside an action head. Merge it with '
        "OpenVLA-OFT's vla-scripts/merge_lora_weights_and_save.py, which writes the merged weights "
        'into this folder, and export the folder again'
    )


def _is_openvla(folder: Path) -> bool:
    """Return False for a folder of another project, whose files may have the same names."""
    path = folder / CONFIG_FILE
    return not path.is_file() or read_json(path).values.get('model_type') in (None, 'openvla')


def read_oft_folder(folder: Path, unnorm_key: str | None) -> FolderFacts:
    """Read all facts in a folder of OpenVLA-OFT.

    Args:
        folder: folder of the checkpoint.
        unnorm_key: data set whose statistics state and actions are in; needed where the folder has
            those of several.

    Raises:
        ExportError, JsonError: missing or damaged files, or settings that are not served.
    """
    data_set = read_data_set(folder, unnorm_key)
    platform = _platform_of(data_set)
    images = read_images(folder)
    notes = images.notes
    if platform is None and data_set.name is not None:
        notes += (
            f"the data set {data_set.name} is none that OpenVLA-OFT's training has constants for: "
            "state and actions are taken to be scaled by q01 and q99, as LIBERO's are",
        )
    if (folder / _ADAPTER_FOLDER).is_dir():
        notes += (
            f'{_ADAPTER_FOLDER}/ lies beside the weights, and nothing says whether it is merged '
            'into them: the training does so (merge_lora_during_training), or '
            'vla-scripts/merge_lora_weights_and_save.py. If neither did, these are the weights '
            "before the fine-tuning, and the bundle's actions are not the policy's",
        )
    return oft_facts(
        folder,
        data_set,
        kind='OpenVLA-OFT',
        family='openvla_oft',
        image_size=images.image_size,
        image_size_key='input_sizes',
        template='openvla',
        prompt_length=PROMPT_LENGTH,
        bounds=('min', 'max') if platform and platform.by_range else ('q01', 'q99'),
        usual_horizon=platform.horizon if platform else None,
        notes=notes,
    )


def _platform_of(data_set: DataSet) -> _Platform | None:
    """Return the constants that the training had; None where it must have been given others."""
    if data_set.name is None or data_set.statistics is None:
        return None
    name = data_set.name.lower()
    found = next((platform for word, platform in _PLATFORMS.items() if word in name), None)
    if found is None:
        return None
    groups = (data_set.statistics.mapping(key) for key in ('action', 'proprio'))
    counts = [len(group.get('q01', list)) for group in groups]
    return found if counts == [found.action_dim, found.state_dim] else None
