# divvy-node loads the vendor's library of the host, which is built for glibc and
# may want libstdc++; therefore a Debian and not an empty image.
FROM --platform=$BUILDPLATFORM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY api api
COPY cmd cmd
COPY internal internal
ARG TARGETOS TARGETARCH VERSION=dev COMMIT=unknown
RUN CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH go build -trimpath \
    -ldflags "-s -w -X github.com/divvy-gpu/divvy/internal/version.Version=$VERSION -X github.com/divvy-gpu/divvy/internal/version.Commit=$COMMIT" \
    -o /out/divvy-node ./cmd/divvy-node

FROM debian:bookworm-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends libstdc++6 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /out/divvy-node /usr/bin/divvy-node
# Where Enflame's container runtime is in use, the daemon itself sees all cards.
ENV ENFLAME_VISIBLE_DEVICES=all
LABEL org.opencontainers.image.source=https://github.com/divvy-gpu/divvy \
      org.opencontainers.image.licenses=Apache-2.0
ENTRYPOINT ["/usr/bin/divvy-node"]
