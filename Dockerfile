# syntax=docker/dockerfile:1
# moored with the models of demo/ inside. See docker-compose.yml for how it is run.
#
#   docker build .                        on the CPU
#   docker build --target cuda .          for NVIDIA cards, from 8.0 (Ampere) on
#
# scripts/release makes the stage `cpu` without a container engine.
ARG BASE=debian:bookworm-slim

FROM rust:1-bookworm AS builder
WORKDIR /source
COPY Cargo.toml Cargo.lock ./
COPY proto proto
COPY service service
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/source/target \
    cargo build --release --locked --package moored \
    && install -D target/release/moored /out/moored

FROM rust:1-bookworm AS builder-cuda
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY Cargo.toml Cargo.lock ./
COPY proto proto
COPY scripts scripts
COPY service service
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/root/.cache/moored \
    --mount=type=cache,target=/source/target \
    eval "$(scripts/cuda-environment)" \
    && cargo build --release --locked --package moored --features cuda \
    && install -D target/release/moored /out/moored

FROM ${BASE} AS run
# /var/lib/moored keeps locks, the hashes of model files, and models that are pulled from a hub; /models is where others are
# looked for.
RUN useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin moored \
    && install -d -o moored -g moored /var/lib/moored /models
# The program finds `demo/` in the folder that it is started in (WORKDIR).
COPY demo/model /usr/share/moored/demo/model
COPY demo/film/model /usr/share/moored/demo/film/model
COPY demo/sound/model /usr/share/moored/demo/sound/model
COPY demo/adapters /usr/share/moored/demo/adapters
COPY LICENSE /usr/share/doc/moored/LICENSE
WORKDIR /usr/share/moored

# From outside of the container a service is beyond loopback: it does not start without a token and a certificate, unless
# MOORED_SERVICE_ALLOW_WITHOUT_TLS=true says that TLS is another's, as docker-compose.yml does.
# MOORED_TOKEN_FILE is the same token for `moored status` and the other commands inside of it.
ENV MOORED_SERVICE_LISTEN=0.0.0.0:50051 \
    MOORED_SERVICE_TOKEN_FILE=/run/secrets/moored_token \
    MOORED_TOKEN_FILE=/run/secrets/moored_token \
    MOORED_SERVICE_STATE=/var/lib/moored \
    MOORED_MODELS_FOLDERS=/models \
    MOORED_HUB_CACHE=/var/lib/moored/hub

EXPOSE 50051
# The first SIGTERM drains: jobs that run may finish within service.drain.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["moored", "status", "--json"]
ENTRYPOINT ["moored", "serve"]

FROM run AS cuda
# NVIDIA's libraries as its wheels have them, of the versions that the wheel moored-service asks for.
RUN apt-get update && apt-get install -y --no-install-recommends python3-pip \
    && pip install --no-cache-dir --break-system-packages --target /opt/nvidia 'nvidia-cublas>=13.0,<14' 'nvidia-cuda-nvrtc>=13.0,<14' \
       'nvidia-cuda-runtime>=13.0,<14' 'nvidia-cudnn-cu13>=9.13.1,<10' 'nvidia-curand>=10.4,<11' \
    && apt-get purge -y --auto-remove python3-pip && rm -rf /var/lib/apt/lists/*
ENV LD_LIBRARY_PATH=/opt/nvidia/nvidia/cu13/lib:/opt/nvidia/nvidia/cudnn/lib \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=builder-cuda /out/moored /usr/local/bin/moored
USER moored

FROM run AS cpu
COPY --from=builder /out/moored /usr/local/bin/moored
USER moored
