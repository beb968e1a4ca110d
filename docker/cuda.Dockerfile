# Trireme on NVIDIA GPUs, alone or on a Ray cluster. From the repository's root:
#   docker build -f docker/cuda.Dockerfile -t trireme:cuda .
#   docker run --rm --gpus all --shm-size 16g --user "$(id -u):$(id -g)" -e HOME=/tmp \
#       -v "$PWD:/work" trireme:cuda run my.yaml
# Two environments: Trireme's, and vLLM's in /opt/vllm (engine_type vllm). torch's Linux wheels carry CUDA and NCCL, so the base needs only Python; the driver is the host's.
FROM python:3.11-slim

ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# torch.compile and Triton build small C programs when they first run; any version of the compiler works
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends -y gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/trireme
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY trireme trireme
COPY trinity trinity
RUN pip install --no-cache-dir -c constraints.txt '.[ray]'

# vLLM with the trainer's torch and NCCL, because its workers join the trainer's group
COPY constraints-vllm-cuda.txt ./
RUN python -m venv /opt/vllm \
    && /opt/vllm/bin/pip install --no-cache-dir -c constraints-vllm-cuda.txt vllm
ENV TRIREME_VLLM_PYTHON=/opt/vllm/bin/python

# not root: workflows and plug-ins are programs of the user
RUN useradd --create-home --uid 1000 trireme && install -d -o trireme /work
USER 1000
WORKDIR /work
ENTRYPOINT ["trireme"]
CMD ["run"]
