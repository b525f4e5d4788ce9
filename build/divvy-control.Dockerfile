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
    -o /out/divvy-control ./cmd/divvy-control

# One static program; the certificate of the API server comes with the service
# account.
FROM scratch
COPY --from=build /out/divvy-control /usr/bin/divvy-control
LABEL org.opencontainers.image.source=https://github.com/divvy-gpu/divvy \
      org.opencontainers.image.licenses=Apache-2.0
USER 65532:65532
ENTRYPOINT ["/usr/bin/divvy-control"]
