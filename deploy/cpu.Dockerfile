# Controller, trainer and rollout server without a GPU: the packages and versions of `make install`.
#
#   docker build --file deploy/cpu.Dockerfile --tag slipstream:cpu .

# Debian with Python 3.11 or 3.12 as `python`. A host without Docker Hub names an image of its own.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE} AS build
# An index that serves torch's CPU build.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/slipstream
ENV PATH=/opt/slipstream/bin:$PATH
COPY requirements/common.txt requirements/cpu.txt /build/requirements/
RUN pip install --index-url ${TORCH_INDEX} $(grep '^torch==' /build/requirements/cpu.txt)
RUN pip install --no-deps --ignore-requires-python --requirement /build/requirements/cpu.txt
COPY pyproject.toml README.md LICENSE /build/
COPY protos /build/protos
COPY core /build/core
COPY client /build/client
COPY environments /build/environments
COPY rollout_server /build/rollout_server
COPY learner /build/learner
COPY extensions /build/extensions
RUN pip install --no-deps /build

FROM ${PYTHON_IMAGE}
# vLLM's kernels are linked with libnuma.
RUN apt-get update && apt-get install --yes --no-install-recommends libnuma1 \
    && apt-get clean && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/slipstream /opt/slipstream
RUN useradd --uid 1000 --create-home slipstream \
    && install --directory --mode 1777 /cache \
    && install --directory /environments /models /runs
# TORCHDYNAMO_DISABLE: without a compiler in the image, vLLM would die at the first log-probabilities.
ENV PATH=/opt/slipstream/bin:$PATH \
    HOME=/tmp \
    XDG_CACHE_HOME=/cache \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TORCHDYNAMO_DISABLE=1
USER slipstream
WORKDIR /environments
CMD ["slipstream", "--help"]
