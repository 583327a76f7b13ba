# Debian's Prometheus and promtool, for tests/e2e/test_monitoring.py: in the place of the image that compose.yaml pins.
FROM debian:bookworm-slim AS package
RUN apt-get update && cd /tmp && apt-get download prometheus && dpkg-deb --extract prometheus_*.deb /package

FROM debian:bookworm-slim
COPY --from=package /package/usr/bin/prometheus /package/usr/bin/promtool /usr/bin/
# a new volume takes over its owner from here
RUN install --directory --owner nobody --group nogroup /prometheus
USER 65534:65534
WORKDIR /prometheus
ENTRYPOINT ["/usr/bin/prometheus"]
