"""Convert observations to network inputs and network output to actions, as policy.yaml says.

A bad observation is refused before anything runs on a device, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vla_runtime.bundle.folder import Bundle
from vla_runtime.family.declaration import (
    TOKEN_MASK,
    TOKENS,
    answer_decoder,
    image_places,
    language_dims,
    observation_steps,
)
from vla_runtime.family.listing import find_family
from vla_runtime.inference.camera_images import CameraImages
from vla_runtime.processing.actions import ActionSpace, PoseColumns
from vla_runtime.processing.joint_spaces import joint_space
from vla_runtime.processing.normalization import Normalizer
from vla_runtime.processing.poses import with_angles
from vla_runtime.processing.prompts import Piece, PromptFormat, prompt_parts, state_bins
from vla_runtime.processing.tokenizer import Tokenizer
from vla_runtime.types import ActionChunk, Advantage, CommittedPlan, Observation


class PolicyCodec:
    """Pre- and post-processing of one bundle, with its statistics and tokenizer loaded.

    `prompts` is None for a policy without language, `answer_decoder` for all but `tokens` heads.
    Statistics or a tokenizer that do not fit the bundle are a ValueError.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.spec = spec = bundle.spec
        self.prompts = None if spec.prompt is None else _Prompts(bundle, spec.prompt)
        self.camera_images = CameraImages(bundle)
        self._state_normalizer = self._normalizer(bundle, 'state')
        self._action_normalizer = self._normalizer(bundle, 'actions')
        self.answer_decoder = answer_decoder(
            find_family(spec.family), spec.dims, bundle.folder, spec.tokenizer
        )
        self.action_space = _action_space(bundle)
        self._switches = [
            (column, action.switch)
            for column, action in enumerate(spec.actions)
            if action.switch is not None
        ]
        self._joint_space = joint_space(spec.joint_space, spec.joint_frame)
        self._angles = [
            (spec.state_names.index(group[0]), len(group)) for group in spec.normalisation.angles
        ]
        # None: the network takes one state, without an axis of steps.
        self._history = observation_steps(spec.dims)

    def _normalizer(self, bundle: Bundle, group: str) -> Normalizer:
        statistics = {
            name.removeprefix(f'{group}.'): values
            for name, values in bundle.statistics.items()
            if name.startswith(f'{group}.')
        }
        names = self.spec.state_names if group == 'state' else self.spec.action_names
        return Normalizer(getattr(self.spec.normalisation, group), statistics, names)

    def check(self, observation: Observation) -> np.ndarray:
        """Return an observation's normalised state, (S,) float32; S with the cosines of `angles`.

        Raises:
            ValueError: wrong cameras, image type or shape, state length or values, instruction.
        """
        expected = {camera.name for camera in self.spec.cameras if camera.present}
        if not isinstance(observation.images, Mapping):
            raise ValueError(
                f'observation.images: expected a mapping of camera name to image, got '
                f'{type(observation.images).__name__}'
            )
        came = set(observation.images)
        if came != expected:
            raise ValueError(
                f'observation.images: expected the cameras {sorted(expected)}, got '
                f'{sorted(map(str, came))}; missing: {sorted(expected - came)}, unknown: '
                f'{sorted(map(str, came - expected))} (an absent camera is given as None)'
            )
        if all(image is None for image in observation.images.values()):
            raise ValueError('observation.images: every camera is absent; at least one is needed')
        self.camera_images.check(observation.images)
        instruction = observation.instruction
        if self.prompts is not None and (
            not isinstance(instruction, str) or not instruction.strip()
        ):
            raise ValueError(
                f'observation.instruction: expected a task in plain words, got {instruction!r}'
            )
        return self._checked_state('state', observation.state)

    def earlier_states(self, observation: Observation) -> np.ndarray:
        """Return normalised states of the steps before, (T - 1, S) float32, the newest first."""
        given, expected = observation.earlier_states, (self._history or 1) - 1
        if len(given) != expected:
            raise ValueError(
                f'observation.earlier_states: expected the {expected} states of the steps before, '
                f'the newest first, got {len(given)}'
            )
        states = [self._checked_state('earlier_states', one) for one in given]
        width = len(self.spec.state) + sum(count for _, count in self._angles)
        return np.array(states, dtype=np.float32).reshape(expected, width)

    def _checked_state(self, field: str, state: np.ndarray) -> np.ndarray:
        names = self.spec.state_names
        state = np.asarray(state)
        if state.shape != (len(names),) or state.dtype.kind not in 'fiu':
            raise ValueError(
                f'observation.{field}: expected {len(names)} numbers ({", ".join(names)}), got '
                f'shape {state.shape} of {state.dtype}'
            )
        with np.errstate(over='ignore', invalid='ignore'):
            # Checked after normalising, where a number too large for float32 shows.
            in_policy_space = self._joint_space.state_to_policy(state).astype(np.float32)
            normalised = self._state_normalizer.normalise(in_policy_space)
        bad = [f'{names[i]} = {state[i]}' for i in np.flatnonzero(~np.isfinite(normalised))]
        if bad:
            raise ValueError(f'observation.{field}: no usable number: {", ".join(bad)}')
        if not self._angles:
            return normalised
        return with_angles(normalised, in_policy_space, self._angles)

    def _state(self, observation: Observation) -> np.ndarray:
        """Return the state (S,) in float64 that deltas are relative to."""
        return self._joint_space.state_to_policy(np.asarray(observation.state, dtype=np.float64))

    def state_bins(self, state: np.ndarray) -> np.ndarray:
        """Return a normalised state's bins, (S,) int64; empty where the prompt has none."""
        if self.prompts is None or not self.prompts.has_state:
            return np.zeros(0, dtype=np.int64)
        return self.prompts.state_bins(state)

    def rows(
        self,
        instruction: str,
        state: np.ndarray,
        advantages: tuple[Advantage | None, ...],
        earlier: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Return the network inputs that have one row per prompt.

        Args:
            instruction: the task in plain words; not read without language.
            state: (S,) float32, normalised.
            advantages: advantage tag of each prompt row; None for a row without one.
            earlier: (T - 1, S) states of the steps before, the newest first; None: none.

        Returns:
            `state` (R, dims.state_dim) float32, normalised and padded, for a network with a state
            token, or (R, T, dims.state_dim), the oldest first, for one with a history;
            with language also `tokens` (R, L) int64 and `token_mask` (R, L) bool.

        Raises:
            ValueError: a prompt is too long; names the number of tokens too many.
        """
        rows = {}
        if self.prompts is not None:
            rows = self.prompts.rows(instruction, state, advantages)
        states = state[None] if earlier is None else np.concatenate([state[None], earlier])
        shape = (len(advantages), len(states), self.spec.dims.state_dim)
        padded = np.zeros(shape, dtype=np.float32)
        if self.spec.dims.state_dim:
            padded[:, :, : states.shape[1]] = states[::-1]
        return {**rows, 'state': padded[:, 0] if self._history is None else padded}

    def plan(self, plan: CommittedPlan, observation: Observation) -> np.ndarray:
        """Normalise the committed plan, as the network would have output it.

        Deltas are re-anchored to the state of this observation. A plan shorter than the horizon
        is padded with its last action (the weight there is zero). (H, A) float32.

        Raises:
            ValueError: wrong shape, no steps, not finite, or impossible horizons.
        """
        actions = np.asarray(plan.actions, dtype=np.float64)
        names = self.spec.action_names
        for field in ('delay_steps', 'execution_horizon'):
            if not isinstance(getattr(plan, field), int | np.integer):
                raise ValueError(
                    f'plan.{field}: expected a number of steps, got {getattr(plan, field)!r}'
                )
        if actions.ndim != 2 or not len(actions) or actions.shape[1] != len(names):
            raise ValueError(
                f'plan.actions: expected at least one row of {len(names)} numbers '
                f'({", ".join(names)}), got shape {actions.shape}'
            )
        rows = np.minimum(np.arange(self.spec.real_horizon), len(actions) - 1)
        with np.errstate(over='ignore', invalid='ignore'):
            normalised = self._action_normalizer.normalise(
                self.action_space.from_robot(
                    self._joint_space.actions_to_policy(actions[rows]), self._state(observation)
                )
            )
        if not np.isfinite(normalised).all():
            step, column = np.argwhere(~np.isfinite(normalised))[0]
            raise ValueError(
                f'plan.actions: no usable number: {names[column]} = '
                f'{actions[rows[step], column]} at step {step}'
            )
        for column, switch in self._switches:
            to_above, to_below = (
                np.abs(actions[rows, column] - level) for level in (switch.above, switch.below)
            )
            normalised[:, column] = np.where(to_above < to_below, 1.0, -1.0)
        padded = np.zeros((self.spec.dims.horizon, self.spec.dims.action_dim), dtype=np.float32)
        padded[self.spec.action_rows, : len(names)] = normalised
        return padded

    def actions(self, output: np.ndarray, observation: Observation) -> ActionChunk:
        """Convert network output to actions in robot units, those that reach the robot.

        Args:
            output: (H, A) float32; (n,) int64, the tokens of an answer of a `tokens` head.

        Raises:
            ValueError: a number that is not finite, or an answer that is no chunk.
        """
        normalised = output if self.answer_decoder is None else self.answer_decoder(output)
        require_finite(normalised)
        width = len(self.spec.actions)
        sent = normalised[self.spec.action_rows, :width]
        actions = self._action_normalizer.denormalise(sent)
        for column, switch in self._switches:
            is_above = sent[:, column] >= switch.at_least
            actions[:, column] = np.where(is_above, switch.above, switch.below)
        targets = self.action_space.to_robot(actions, self._state(observation))
        return ActionChunk(
            actions=self._joint_space.actions_to_robot(targets),
            names=self.spec.action_names,
            kinds=self.action_space.command_kinds,
            step_time_s=self.spec.step_time_s,
            normalised=normalised,
        )


class _Prompts:
    """Prompts of a policy with language.

    ValueError for a tokenizer that does not fit the network.
    """

    def __init__(self, bundle: Bundle, form: PromptFormat) -> None:
        dims = language_dims(bundle.spec.dims)
        self._length, self._cameras = dims.prompt_length, dims.cameras
        self._layout = find_family(bundle.spec.family).layout(form, dims)
        self._form = form
        self.tokenizer = Tokenizer.load(
            bundle.tokenizer_path, bos=self._layout.bos, closing=self._layout.closing
        )
        self._check_places(image_places(dims) or (), bundle.tokenizer_path)
        if self.tokenizer.vocabulary_size > dims.vocabulary:
            raise ValueError(
                f'{bundle.tokenizer_path}: has {self.tokenizer.vocabulary_size} tokens, but the '
                f'network knows {dims.vocabulary} (dimensions.vocabulary in policy.yaml): '
                'this is the tokenizer of another policy'
            )

    @property
    def has_state(self) -> bool:
        return self._layout.has_state

    def state_bins(self, state: np.ndarray) -> np.ndarray:
        return state_bins(self._layout, self._form, state)

    def rows(
        self, instruction: str, state: np.ndarray, advantages: tuple[Advantage | None, ...]
    ) -> dict[str, np.ndarray]:
        """Return `tokens` and `token_mask`, a row a tag; ValueError for too long a prompt."""
        prompts = (
            prompt_parts(self._layout, self._form, instruction, state, advantage)
            for advantage in advantages
        )
        encoded = [
            self.tokenizer.encode_pieces(
                self._pieces(prompt), self._length, padding_first=self._layout.images_last
            )
            for prompt in prompts
        ]
        return {
            TOKENS: np.stack([tokens for tokens, _ in encoded]),
            TOKEN_MASK: np.stack([mask for _, mask in encoded]),
        }

    def _pieces(self, prompt: tuple[str, str, str]) -> list[Piece]:
        return self._layout.pieces(self._cameras, prompt, self.tokenizer.special)

    def _check_places(self, places: tuple[int, ...], path: Path) -> None:
        """Refuse a tokenizer that puts images where the network does not expect them."""
        if not self._layout.image:
            return
        before, after = self._layout.around_task
        pieces = self._pieces((before, '', after))
        counts = [len(ids) for ids in self.tokenizer.piece_tokens(pieces)]
        found = self._layout.image_places(counts, self._cameras, self._length)
        if found != places:
            raise ValueError(
                f'{path}: puts {list(found)} text tokens before the images of the prompt, but '
                f'dimensions.image_places in policy.yaml says {list(places)}: this is not the '
                'tokenizer of the export'
            )


def _action_space(bundle: Bundle) -> ActionSpace:
    spec = bundle.spec
    columns = {name: index for index, name in enumerate(spec.action_names)}
    states = {name: index for index, name in enumerate(spec.state_names)}
    poses = tuple(
        PoseColumns(
            name=pose.name,
            position=tuple(columns[name] for name in pose.position),  # type: ignore[arg-type]
            rotation=tuple(columns[name] for name in pose.rotation),
            form=pose.form,
            euler_axes=pose.euler_axes or 'sxyz',
            kind=pose.kind,
            frame=pose.frame,
            state_position=tuple(states[name] for name in pose.state_position),
            state_rotation=tuple(states[name] for name in pose.state_rotation),
            delta_from=pose.delta_from,
        )
        for pose in spec.poses
    )
    return ActionSpace(
        names=spec.action_names,
        kinds=tuple(action.kind for action in spec.actions),
        state_columns=tuple(
            states[action.relative_to] if action.relative_to else None for action in spec.actions
        ),
        poses=poses,
    )


def require_finite(normalised: np.ndarray) -> None:
    """Refuse network output (H, A) with a number that is not finite (ValueError)."""
    if not np.isfinite(normalised).all():
        raise ValueError(
            'the policy returned a number that is not finite; the chunk is refused. Check the '
            'weights (`vla_runtime info BUNDLE`), the precision it runs in, and cfg_beta and '
            'max_guidance_weight, with which its velocities grow'
        )
