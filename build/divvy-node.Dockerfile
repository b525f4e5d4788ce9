# divvy-node binds NVML with cgo and loads the other vendors' libraries of the
# host, which are built for glibc and may want libstdc++; therefore a Debian and
# not an empty image.
FROM --platform=$BUILDPLATFORM golang:1.26-bookworm AS build
ARG BUILDARCH TARGETARCH
# A compiler for the other architecture, where the image is for one.
RUN if [ "$BUILDARCH" != "$TARGETARCH" ]; then \
      case "$TARGETARCH" in amd64) gnu=x86-64 ;; arm64) gnu=aarch64 ;; *) echo "no compiler for $TARGETARCH" >&2; exit 1 ;; esac \
      && apt-get update \
      && apt-get install -y --no-install-recommends "gcc-$gnu-linux-gnu" "libc6-dev-$TARGETARCH-cross" \
      && rm -rf /var/lib/apt/lists/*; \
    fi
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY api api
COPY cmd cmd
COPY internal internal
ARG TARGETOS VERSION=dev COMMIT=unknown
RUN if [ "$BUILDARCH" != "$TARGETARCH" ]; then \
      case "$TARGETARCH" in amd64) export CC=x86_64-linux-gnu-gcc ;; arm64) export CC=aarch64-linux-gnu-gcc ;; esac; \
    fi \
    && CGO_ENABLED=1 GOOS=$TARGETOS GOARCH=$TARGETARCH go build -trimpath -tags netgo,osusergo \
    -ldflags "-s -w -extldflags=-Wl,-z,lazy -X github.com/divvy-gpu/divvy/internal/version.Version=$VERSION -X github.com/divvy-gpu/divvy/internal/version.Commit=$COMMIT" \
    -o /out/divvy-node ./cmd/divvy-node

FROM debian:bookworm-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends libstdc++6 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /out/divvy-node /usr/bin/divvy-node
# Where a vendor's container runtime is in use, the daemon itself sees all cards,
# and of NVIDIA's libraries the one for management.
ENV ENFLAME_VISIBLE_DEVICES=all \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=utility
LABEL org.opencontainers.image.source=https://github.com/divvy-gpu/divvy \
      org.opencontainers.image.licenses=Apache-2.0
ENTRYPOINT ["/usr/bin/divvy-node"]
