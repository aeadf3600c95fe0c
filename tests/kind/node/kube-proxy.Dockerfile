# kube-proxy calls iptables, conntrack and modprobe; the other parts of the control plane are single static programs.
# The network agent (default-cni.yaml) uses this image too.
ARG DEBIAN
FROM ${DEBIAN}
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends conntrack iproute2 iptables kmod \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
COPY kube-proxy /usr/local/bin/kube-proxy
CMD ["kube-proxy"]
