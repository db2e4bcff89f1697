# vlm-grpo with CUDA. Not built in CI. tests/test_package.py compares the RUN lines with the
# README's commands.
#
#   docker build -t vlm-grpo .
#   docker run --gpus all --shm-size 8g -v "$PWD:/work" vlm-grpo train counting
#
# The CUDA libraries come with PyTorch's wheels; the host needs the NVIDIA driver and the NVIDIA
# Container Toolkit.
FROM python:3.12-slim

ENV PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

WORKDIR /opt/vlm-grpo
COPY . .
RUN pip install --constraint constraints.txt .

WORKDIR /work
ENTRYPOINT ["vlm-grpo"]
CMD ["--help"]
