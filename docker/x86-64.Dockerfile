# A PC with x86-64: Ubuntu 24.04, ROS 2 Jazzy, PyTorch, ONNX Runtime. Build from the project's root:
#
#     docker build -f docker/x86-64.Dockerfile -t vla_runtime:x86-64 .
#     docker run --rm --network host --ipc host vla_runtime:x86-64
#
# With a GPU: --build-arg TORCH=torch (3 GB of CUDA), and docker run --gpus all. It ends with the
# self-test on the CPU; --network host and --ipc host let it meet the drivers of this computer.
# Nobody has built it yet.
ARG BASE=ubuntu:24.04
FROM ${BASE}
ARG TORCH=torch==2.13.0+cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

SHELL ["/bin/bash", "-eo", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive LANG=C.UTF-8 PYTHONUNBUFFERED=1

RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates curl python3-pip \
    && curl -fsSL https://raw.githubusercontent.com/ros/rosdistro/master/ros.key \
        -o /usr/share/keyrings/ros-archive-keyring.gpg \
    && echo "deb [signed-by=/usr/share/keyrings/ros-archive-keyring.gpg] http://packages.ros.org/ros2/ubuntu noble main" \
        > /etc/apt/sources.list.d/ros2.list \
    && apt-get update \
    && apt-get install -y --no-install-recommends ros-jazzy-ros-base ros-jazzy-control-msgs \
        ros-jazzy-controller-manager-msgs ros-jazzy-trajectory-msgs ros-jazzy-diagnostic-msgs \
        python3-colcon-common-extensions python3-numpy python3-yaml libosmesa6 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /workspace
COPY . src/vla_runtime

# Some that apt brought are replaced by newer ones, and pip cannot uninstall those of apt. What pip
# brought goes first: files of two releases of NumPy or OpenCV in one folder cannot be imported.
RUN for package in numpy opencv-python opencv-python-headless opencv; do \
        python3 -m pip uninstall -y --break-system-packages $package || true; \
    done \
    && python3 -m pip install --break-system-packages --ignore-installed --no-cache-dir \
        --extra-index-url ${TORCH_INDEX} \
        -c src/vla_runtime/requirements/versions.txt \
        -c src/vla_runtime/requirements/sourced-ros.txt \
        ${TORCH} onnxruntime opencv-python-headless safetensors sentencepiece tokenizers rosbags \
        pillow tqdm transforms3d jinja2 numpy pyyaml argcomplete \
    && python3 -c 'import cv2, numpy, torch; torch.ones(2).numpy(); print(numpy.__version__)'

RUN source /opt/ros/jazzy/setup.bash \
    && colcon build --packages-select vla_runtime

ENV RMW_IMPLEMENTATION=rmw_fastrtps_cpp
CMD ["/bin/bash", "-c", "source /workspace/install/setup.bash && vla_runtime selftest --device cpu"]
