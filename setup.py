"""Installs the package the same way for pip and for colcon.

Requirements are ranges here; the exact versions that the tests run with are in requirements/.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

PACKAGE = 'vla_runtime'
# `colcon build --symlink-install` runs a link to this file in its build folder.
ROOT = Path(__file__).resolve().parent
NODES = ('policy_node', 'executor_node', 'tabletop_node')


def version():
    text = (ROOT / PACKAGE / '__init__.py').read_text(encoding='utf-8')
    return re.search(r"__version__ = '([^']+)'", text).group(1)


def share(folder):
    """Data files of a folder and its subfolders, for share/vla_runtime."""
    found = {}
    for path in sorted((ROOT / folder).rglob('*')):
        if path.is_file() and '__pycache__' not in path.parts:
            file = path.relative_to(ROOT)
            found.setdefault(f'share/{PACKAGE}/{file.parent}', []).append(str(file))
    return list(found.items())


setup(
    version=version(),
    description='Vision-language-action policies on ROS 2 robots',
    long_description=(ROOT / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    author='vla_runtime maintainers',
    author_email='maintainers@vla-runtime.org',
    python_requires='>=3.10,<3.13',
    packages=find_packages(include=[PACKAGE, f'{PACKAGE}.*']),
    package_data={f'{PACKAGE}.sim': ['*.xml']},
    data_files=[
        ('share/ament_index/resource_index/packages', [f'resource/{PACKAGE}']),
        (f'share/{PACKAGE}', ['package.xml']),
        (f'lib/{PACKAGE}', [f'scripts/{node}' for node in NODES]),
        *share('launch'),
        *share('config'),
        *share('engines/demo'),
    ],
    entry_points={
        'console_scripts': [
            f'{PACKAGE} = {PACKAGE}.cli.main:main',
            *(f'{node} = {PACKAGE}.ros.node_main:{node}' for node in NODES),
        ],
    },
    # ROS 2 itself (rclpy and messages) is not named: it comes with the sourced installation, or
    # from requirements/wheels.txt.
    install_requires=[
        'numpy>=1.26',
        'opencv-python-headless>=4.8',
        'pillow>=9',
        'pyyaml>=5.4',
        'safetensors>=0.4',
        'sentencepiece>=0.1.99',
        'tokenizers>=0.15',
        'tqdm>=4.60',
        'transforms3d>=0.4.1',
    ],
    extras_require={
        'torch': ['torch>=2.4'],
        'onnx': ['onnx>=1.15', 'onnxruntime>=1.17'],
        'sim': ['mujoco>=3.1'],
        'report': ['matplotlib>=3.5', 'rosbags>=0.10'],
        'test': ['hypothesis>=6.80', 'mypy>=1.8', 'psutil>=5.9', 'pytest>=7.4', 'ruff>=0.6'],
    },
    zip_safe=False,
)
