# kube-proxy, the only part of the control plane that is more than one static program: it calls iptables, conntrack and modprobe.
# The network agent (default-cni.yaml) runs from this image too.
ARG DEBIAN
FROM ${DEBIAN}
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends conntrack iproute2 iptables kmod \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
COPY kube-proxy /usr/local/bin/kube-proxy
CMD ["kube-proxy"]
