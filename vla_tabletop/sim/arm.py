"""The tabletop's arm as its model file describes it, read without MuJoCo."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

MODEL_PATH = Path(__file__).with_name('tabletop.xml')
JOINT_NAMES = (
    'shoulder_pan',
    'shoulder_lift',
    'elbow_flex',
    'wrist_flex',
    'wrist_roll',
    'gripper',
)


def joint_ranges_rad() -> dict[str, tuple[float, float]]:
    """Lower and upper end stop of each joint, by name."""
    ranges = {}
    for joint in ElementTree.parse(MODEL_PATH).getroot().iter('joint'):
        if joint.get('name') in JOINT_NAMES:
            lower, upper = joint.attrib['range'].split()
            ranges[joint.attrib['name']] = (float(lower), float(upper))
    return ranges
