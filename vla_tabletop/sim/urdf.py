"""The tabletop's arm and table as a URDF, for programs that show robots; made from the model."""

from __future__ import annotations

from xml.etree.ElementTree import Element, SubElement, tostring

import numpy as np

from vla_tabletop.sim.gl import mujoco

_EFFORT, _VELOCITY = 12.0, 3.0


def tabletop_urdf(model: mujoco.MjModel) -> str:
    """Return the URDF of everything that belongs to the robot or stands still, without blocks.

    Links have the names of the model's bodies, joints those of its joints; `tip` is the point
    between the jaws' ends.
    """
    robot = Element('robot', name='tabletop')
    kept = [body for body in range(model.nbody) if not _is_free(model, body)]
    for body in kept:
        link = SubElement(robot, 'link', name=model.body(body).name)
        for geom in range(model.ngeom):
            if model.geom_bodyid[geom] == body:
                _add_visual(link, model, geom)
        if body:
            _add_joint(robot, model, body)
    for site in range(model.nsite):
        name, parent = model.site(site).name, model.body(model.site_bodyid[site]).name
        SubElement(robot, 'link', name=name)
        _add_fixed(robot, name, parent, model.site_pos[site], model.site_quat[site])
    return tostring(robot, encoding='unicode')


def _is_free(model: mujoco.MjModel, body: int) -> bool:
    first = model.body_jntadr[body]
    return first >= 0 and model.jnt_type[first] == mujoco.mjtJoint.mjJNT_FREE


def _add_joint(robot: Element, model: mujoco.MjModel, body: int) -> None:
    parent = model.body(model.body_parentid[body]).name
    place, quaternion = model.body_pos[body], model.body_quat[body]
    name, first = model.body(body).name, model.body_jntadr[body]
    if first < 0:
        _add_fixed(robot, name, parent, place, quaternion)
        return
    joint = SubElement(robot, 'joint', name=model.joint(first).name, type='revolute')
    _attach(joint, parent, name, place, quaternion)
    SubElement(joint, 'axis', xyz=_numbers(model.jnt_axis[first]))
    lower, upper = model.jnt_range[first]
    limits = {'lower': lower, 'upper': upper, 'effort': _EFFORT, 'velocity': _VELOCITY}
    SubElement(joint, 'limit', {key: f'{value:g}' for key, value in limits.items()})


def _add_fixed(
    robot: Element, name: str, parent: str, place: np.ndarray, quaternion: np.ndarray
) -> None:
    joint = SubElement(robot, 'joint', name=f'{name}_joint', type='fixed')
    _attach(joint, parent, name, place, quaternion)


def _attach(
    joint: Element, parent: str, child: str, place: np.ndarray, quaternion: np.ndarray
) -> None:
    SubElement(joint, 'parent', link=parent)
    SubElement(joint, 'child', link=child)
    _add_origin(joint, place, quaternion)


def _add_visual(link: Element, model: mujoco.MjModel, geom: int) -> None:
    size, kind = model.geom_size[geom], model.geom_type[geom]
    place, quaternion = model.geom_pos[geom], model.geom_quat[geom]
    parts: list[tuple[str, dict[str, str], np.ndarray]] = []
    if kind == mujoco.mjtGeom.mjGEOM_BOX:
        parts.append(('box', {'size': _numbers(2 * size)}, place))
    else:
        radius, half = size[0], size[1]
        shape = {'radius': f'{radius:g}', 'length': f'{2 * half:g}'}
        parts.append(('cylinder', shape, place))
        if kind == mujoco.mjtGeom.mjGEOM_CAPSULE:
            # URDF knows no capsule.
            way = _axis_z(quaternion) * half
            for end in (place + way, place - way):
                parts.append(('sphere', {'radius': f'{radius:g}'}, end))
    for number, (name, shape, where) in enumerate(parts):
        visual = SubElement(link, 'visual')
        _add_origin(visual, where, quaternion)
        SubElement(SubElement(visual, 'geometry'), name, shape)
        material = SubElement(visual, 'material', name=f'geom_{geom}_{number}')
        SubElement(material, 'color', rgba=_numbers(model.geom_rgba[geom]))


def _add_origin(element: Element, place: np.ndarray, quaternion: np.ndarray) -> None:
    SubElement(element, 'origin', xyz=_numbers(place), rpy=_numbers(_rpy(quaternion)))


def _rotation(quaternion: np.ndarray) -> np.ndarray:
    matrix = np.zeros(9)
    mujoco.mju_quat2Mat(matrix, quaternion)
    return matrix.reshape(3, 3)


def _axis_z(quaternion: np.ndarray) -> np.ndarray:
    return _rotation(quaternion)[:, 2]


def _rpy(quaternion: np.ndarray) -> np.ndarray:
    """Return roll, pitch and yaw about fixed axes, as a URDF has them."""
    rotation = _rotation(quaternion)
    return np.array(
        [
            np.arctan2(rotation[2, 1], rotation[2, 2]),
            np.arctan2(-rotation[2, 0], np.hypot(rotation[0, 0], rotation[1, 0])),
            np.arctan2(rotation[1, 0], rotation[0, 0]),
        ]
    )


def _numbers(values: np.ndarray) -> str:
    return ' '.join(f'{value:.6g}' for value in values)
