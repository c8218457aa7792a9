# A server with a GPU or without one:
#
#   docker build -t ktinject .
#   docker run --gpus all -p 8000:8000 -v /models:/models -v ./key:/key:ro ktinject serve /models/MODEL --host 0.0.0.0 --api-key-file /key
#
# The first stage compiles the wheel; the second has no compiler.
ARG CUDA=13.0.2
ARG SYSTEM=ubuntu24.04

FROM nvidia/cuda:${CUDA}-devel-${SYSTEM} AS build
# No versions: those of the image's own release are the ones that are kept safe.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-pip python3-venv patchelf \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /build && /build/bin/pip install --no-cache-dir auditwheel
COPY . /src
RUN PATH=/build/bin:$PATH /src/packaging/build_wheels /wheels python3

FROM nvidia/cuda:${CUDA}-base-${SYSTEM}
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 ktinject
COPY --from=build /wheels /wheels
RUN python3 -m venv /opt/ktinject \
    && /opt/ktinject/bin/pip install --no-cache-dir "$(ls /wheels/*.whl)[serve]" && rm -r /wheels
USER 10001
WORKDIR /home/ktinject
ENV PATH=/opt/ktinject/bin:$PATH
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["ktinject"]
CMD ["doctor"]
