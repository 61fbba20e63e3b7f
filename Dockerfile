# syntax=docker/dockerfile:1
# moored on the CPU, with the models of demo/ inside. See docker-compose.yml for how it is run.

FROM rust:1-bookworm AS builder
WORKDIR /source
COPY Cargo.toml Cargo.lock ./
COPY proto proto
COPY service service
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/source/target \
    cargo build --release --locked --package moored \
    && install -D target/release/moored /out/moored

FROM debian:bookworm-slim
# /var/lib/moored keeps locks, the hashes of model files, and models that are pulled from a hub; /models is where others are
# looked for.
RUN useradd --system --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin moored \
    && install -d -o moored -g moored /var/lib/moored /models
COPY --from=builder /out/moored /usr/local/bin/moored
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

USER moored
EXPOSE 50051
# The first SIGTERM drains: jobs that run may finish within service.drain.
STOPSIGNAL SIGTERM
ENTRYPOINT ["moored", "serve"]
