"""The simulated robot: repeatable to the bit, bounded by its limits, seen as it is trained on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from thorough import thorough_but

from vla_runtime.processing.images import to_pixels
from vla_tabletop.sim.controller import CommandError, JointFollower
from vla_tabletop.sim.scene import (
    CAMERAS,
    COLOURS,
    HOME_RAD,
    VARIANTS,
    WORKSPACE_HIGH_M,
    WORKSPACE_LOW_M,
    Variant,
    layout_is_clear,
    sample_scene,
)
from vla_tabletop.sim.world import JOINT_NAMES, Tabletop


@pytest.fixture(scope='module')
def world() -> Iterator[Tabletop]:
    tabletop = Tabletop()
    yield tabletop
    tabletop.close()


def _commands(steps: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    return HOME_RAD + np.cumsum(rng.normal(0, 0.02, size=(steps, len(JOINT_NAMES))), axis=0)


def _play(world: Tabletop, seed: int, variant: Variant) -> list[np.ndarray]:
    world.reset(seed, variant)
    seen: list[np.ndarray] = []
    for i, command in enumerate(_commands(150)):
        world.step(command)
        if i % 50 == 0:
            seen += [world.render(camera, 64, 48) for camera in CAMERAS]
    state = world.state()
    return [*seen, state.joint_rad, state.joint_rad_s, state.tip_m, state.block_m]


@pytest.mark.parametrize('variant', thorough_but(['moving'], VARIANTS))
def test_same_seed_and_commands_give_the_same_bits(world: Tabletop, variant: Variant) -> None:
    first = _play(world, 11, variant)
    _play(world, 12, 'lighting')
    fresh = Tabletop()
    for again in (_play(world, 11, variant), _play(fresh, 11, variant)):
        for one, other in zip(first, again, strict=True):
            np.testing.assert_array_equal(one, other)
    fresh.close()


@pytest.mark.parametrize('sign', [-1, 1])
def test_joints_stay_within_their_limits_whatever_is_commanded(world: Tabletop, sign: int) -> None:
    world.reset(0)
    for _ in range(200):
        world.step(sign * np.full(len(JOINT_NAMES), 100.0))
        # The stops give a little under an arm that slams into them.
        positions = world.joint_positions
        assert np.all(positions > world.lower_rad - 0.05)
        assert np.all(positions < world.upper_rad + 0.05)
    assert np.all(positions > world.lower_rad - 0.01)
    assert np.all(positions < world.upper_rad + 0.01)


@pytest.mark.parametrize('command', [np.zeros(5), np.full(6, np.nan), np.full(6, np.inf)])
def test_a_command_of_wrong_size_or_value_is_refused(world: Tabletop, command: np.ndarray) -> None:
    before = world.sim_time_s
    with pytest.raises(ValueError, match='shoulder_pan'):
        world.step(command)
    assert world.sim_time_s == before


def test_a_control_rate_that_the_physics_cannot_keep_is_refused() -> None:
    with pytest.raises(ValueError, match='multiple'):
        Tabletop(control_rate_hz=130)


def test_servos_follow_a_setpoint_with_real_dynamics(world: Tabletop) -> None:
    world.reset(0)
    target = world.joint_positions + np.array([0.2, 0, 0, 0, 0, 0.2])
    world.step(target)
    moved = world.joint_positions[0] - (target[0] - 0.2)
    assert 0.001 < moved < 0.15, 'a servo has inertia: it neither jumps nor sleeps'
    for _ in range(60):
        world.step(target)
    np.testing.assert_allclose(world.joint_positions, target, atol=0.003)
    np.testing.assert_allclose(world.joint_velocities, 0, atol=0.02)


def _after_a_while(world: Tabletop, variant: Variant, steps: int = 240) -> tuple:
    before = world.reset(4, variant).block_m
    for _ in range(steps):
        world.step(world.scene.start_rad)
    return before, world.state().block_m


def test_still_blocks_stay(world: Tabletop) -> None:
    before, after = _after_a_while(world, 'still')
    np.testing.assert_allclose(after, before, atol=5e-4)


def test_moving_blocks_travel_together(world: Tabletop) -> None:
    before, after = _after_a_while(world, 'moving', steps=80)
    way = (after - before)[:, :2]
    assert np.linalg.norm(way, axis=1).min() > 0.01
    np.testing.assert_allclose(way, np.broadcast_to(way[0], way.shape), atol=1e-3)


def test_shoved_blocks_end_where_the_scene_says(world: Tabletop) -> None:
    before, after = _after_a_while(world, 'pushed')
    assert world.scene.shove is not None
    way = (after - before)[:, :2]
    # Friction takes about a centimetre off.
    wanted = world.scene.shove.displacement_m
    np.testing.assert_allclose(way, wanted, atol=0.015)
    assert np.all(np.sum(way * wanted, axis=1) > 0.5 * np.sum(wanted**2, axis=1))


@pytest.mark.parametrize('variant', ['lighting', 'camera_jitter'])
def test_looks_change_and_are_put_back(world: Tabletop, variant: Variant) -> None:
    def look(which: Variant) -> np.ndarray:
        world.reset(5, which)
        return np.stack([world.render(camera, 64, 48) for camera in CAMERAS])

    nominal = look('still')
    assert np.abs(look(variant).astype(int) - nominal).max() > 20
    np.testing.assert_array_equal(look('still'), nominal)


@pytest.mark.parametrize('camera', CAMERAS)
def test_a_small_frame_is_what_the_policy_makes_of_a_large_one(
    world: Tabletop, camera: str
) -> None:
    world.reset(8, 'lighting')
    small, large = world.render(camera, 64, 48), world.render(camera, 320, 240)
    assert small.shape == (48, 64, 3) and large.shape == (240, 320, 3)
    pixels = [
        to_pixels(image, 64, padding='centre', resample='bilinear') for image in (small, large)
    ]
    np.testing.assert_allclose(pixels[0], pixels[1], atol=1e-6)


@pytest.mark.parametrize('camera', CAMERAS)
def test_projection_points_at_the_block_in_the_image(world: Tabletop, camera: str) -> None:
    state = world.reset(1)
    image = world.render(camera, 320, 240).astype(int)
    for block, colour in enumerate(COLOURS):
        channel = COLOURS.index(colour)
        others = np.delete(image, channel, axis=2).max(axis=2)
        rows, columns = np.nonzero(image[..., channel] > others + 40)
        right, down = world.project(camera, state.block_m)[block]
        assert abs(columns.mean() - (160 + 120 * right)) < 6
        assert abs(rows.mean() - (120 + 120 * down)) < 6


def test_an_unknown_camera_is_named_with_the_known_ones(world: Tabletop) -> None:
    with pytest.raises(ValueError, match="'left'"):
        world.render('left')


def test_rendering_leaves_out_what_makes_it_slow(world: Tabletop) -> None:
    quality = world._model.vis.quality
    assert quality.shadowsize == 0 and quality.offsamples == 0
    assert not np.any(world._model.light_castshadow)


def test_blocks_keep_their_distance_inside_the_workspace_also_where_they_are_shoved() -> None:
    for scene in (sample_scene(seed) for seed in range(20)):
        assert layout_is_clear(scene.block_xy_m)
        assert np.all(scene.block_xy_m >= WORKSPACE_LOW_M)
        assert np.all(scene.block_xy_m <= WORKSPACE_HIGH_M)
    for scene in (sample_scene(seed, 'pushed') for seed in range(10)):
        assert scene.shove is not None
        assert layout_is_clear(scene.block_xy_m + scene.shove.displacement_m)


@pytest.mark.parametrize('variant', VARIANTS)
def test_a_variant_keeps_the_layout_of_its_seed(variant: str) -> None:
    still, other = sample_scene(7), sample_scene(7, variant)
    np.testing.assert_array_equal(other.block_xy_m, still.block_xy_m)
    np.testing.assert_array_equal(other.start_rad, still.start_rad)
    assert (np.any(other.belt_m_s) > 0) == (variant == 'moving')
    assert (other.shove is not None) == (variant == 'pushed')
    assert (other.lighting is not None) == (variant == 'lighting')
    assert bool(other.camera_offsets) == (variant == 'camera_jitter')


def test_an_unknown_variant_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'windy'"):
        sample_scene(0, 'windy')  # type: ignore[arg-type]


NAMES = ('a', 'b', 'c')
MEASURED = np.array([-1.0, 0.0, 1.0])


@pytest.fixture
def follower():
    return JointFollower(NAMES, np.array([0.0, 1.0, 2.0]))


def test_without_a_command_the_setpoints_stay(follower):
    assert list(follower.update(5.0, MEASURED)) == [0.0, 1.0, 2.0]


def test_a_setpoint_holds_from_the_next_update_on(follower):
    follower.follow(['b'], [0.0], np.array([[3.0]]))
    assert list(follower.update(1.0, MEASURED)) == [0.0, 3.0, 2.0]
    assert list(follower.update(9.0, MEASURED)) == [0.0, 3.0, 2.0]


def test_a_trajectory_from_time_zero_goes_along_straight_lines_wherever_the_robot_is(follower):
    follower.follow(['a'], [0.0, 1.0, 2.0], np.array([[0.5], [1.0], [0.0]]))
    values = [follower.update(t, MEASURED)[0] for t in (10.0, 10.5, 11.0, 11.75, 12.0, 13.0)]
    assert values == pytest.approx([0.5, 0.75, 1.0, 0.25, 0.0, 0.0])


def test_to_a_first_point_that_lies_ahead_it_goes_from_the_measured_position(follower):
    follower.follow(['a'], [1.0, 2.0], np.array([[1.0], [0.0]]), start_s=10.0)
    values = [follower.update(t, MEASURED)[0] for t in (10.0, 10.5, 11.0, 11.75, 12.0, 13.0)]
    assert values == pytest.approx([-1.0, 0.0, 1.0, 0.25, 0.0, 0.0])


def test_points_that_lie_ahead_with_every_update_keep_a_joint_where_it_is(follower):
    # Why the executor's trajectories begin at the last command.
    for tick in range(5):
        follower.follow(['a'], [0.01], np.array([[1.0]]))
        assert follower.update(0.01 * tick, MEASURED)[0] == -1.0


def test_a_new_command_drops_the_old_one_of_the_same_joint(follower):
    follower.follow(['a', 'b'], [0.0, 1.0], np.array([[0.0, 1.0], [1.0, 5.0]]))
    follower.update(0.0, MEASURED)
    follower.update(0.5, MEASURED)
    follower.follow(['a'], [0.0, 1.0], np.array([[0.5], [0.0]]))
    follower.update(0.5, MEASURED)
    assert follower.update(1.0, MEASURED)[0] == pytest.approx(0.25)
    # What the old one had for the other joint is dropped with it, as the real controller does.
    assert follower.update(1.0, MEASURED)[1] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ('names', 'times', 'positions'),
    [
        (['d'], [0.0], [[1.0]]),
        (['a', 'a'], [0.0], [[1.0, 1.0]]),
        (['a'], [0.0], [[np.nan]]),
        (['a'], [0.0], [[1.0, 2.0]]),
        (['a'], [0.2, 0.1], [[1.0], [2.0]]),
        (['a'], [], np.zeros((0, 1))),
    ],
)
def test_a_command_that_makes_no_sense_changes_nothing(follower, names, times, positions):
    with pytest.raises(CommandError):
        follower.follow(names, times, np.array(positions))
    assert list(follower.update(1.0, MEASURED)) == [0.0, 1.0, 2.0]


def test_restart_forgets_everything(follower):
    follower.follow(['a'], [1.0], np.array([[1.0]]))
    follower.restart(np.array([7.0, 8.0, 9.0]))
    assert list(follower.update(2.0, MEASURED)) == [7.0, 8.0, 9.0]
