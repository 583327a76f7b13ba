# Debian's registry, for tests/e2e/test_image.py: an empty one, without a password, that is gone with its container.
FROM debian:bookworm-slim AS package
RUN apt-get update && cd /tmp && apt-get download docker-registry && dpkg-deb --extract docker-registry_*.deb /package

FROM debian:bookworm-slim
COPY --from=package /package/usr/bin/docker-registry /usr/bin/
RUN install --directory --owner nobody --group nogroup /registry \
 && printf 'version: 0.1\nstorage: {filesystem: {rootdirectory: /registry}}\nhttp: {addr: ":5000"}\n' > /etc/registry.yml
USER 65534:65534
ENTRYPOINT ["/usr/bin/docker-registry", "serve", "/etc/registry.yml"]
