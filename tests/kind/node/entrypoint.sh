#!/bin/bash
# PID 1 of a node. It does the part of systemd's work in kind's node image that kind and kubeadm need.
# containerd, logind and kubelet run in restart loops; their logs are in /var/log.
set -o errexit -o nounset -o pipefail

trap 'exit 0' TERM INT

prepare_machine() {
  # Mount propagation, so that containers see the mounts of their pods (secrets, volumes).
  mount --make-rshared /
  # kubelet identifies a node by these ids; by default all containers of a host share them.
  tr -d - < /proc/sys/kernel/random/uuid > /etc/machine-id
  mkdir -p /kind
  [[ -f /kind/product_uuid ]] || cat /proc/sys/kernel/random/uuid > /kind/product_uuid
  local dmi
  for dmi in /sys/class/dmi/id/product_uuid /sys/devices/virtual/dmi/id/product_uuid; do
    [[ -f "$dmi" ]] && mount -o ro,bind /kind/product_uuid "$dmi"
  done
  mkdir -p /etc/kubernetes/manifests /etc/cni/net.d /var/log/pods /var/log/containers
}

prepare_cgroups() {
  # In cgroup v2 a group has either processes or controlled children. Pods need children: move the processes down.
  [[ -f /sys/fs/cgroup/cgroup.controllers ]] || return 0
  mkdir -p /sys/fs/cgroup/init
  local pid
  while read -r pid; do
    echo "$pid" > /sys/fs/cgroup/init/cgroup.procs 2>/dev/null || true # the process may have exited, or be a kernel thread
  done < /sys/fs/cgroup/cgroup.procs
  sed -e 's/ / +/g' -e 's/^/+/' /sys/fs/cgroup/cgroup.controllers > /sys/fs/cgroup/cgroup.subtree_control
}

choose_runc() {
  local bounding
  bounding=$(awk '/^CapBnd:/ {print $2}' /proc/self/status)
  if (( (16#$bounding >> 24 & 1) == 0 )); then # CAP_SYS_RESOURCE
    sed -i 's|BinaryName = .*|BinaryName = "/usr/bin/runc-reduced"|' /etc/containerd/config.toml
  fi
}

run_logind() {
  mkdir -p /run/dbus /run/systemd
  dbus-daemon --system --fork
  while true; do
    /lib/systemd/systemd-logind >> /var/log/logind.log 2>&1 || true
    sleep 1
  done
}

wait_for_logind() { # kubelet asks for it only when it starts
  local login=org.freedesktop.login1
  for _ in $(seq 50); do
    dbus-send --system --print-reply --dest=org.freedesktop.DBus / org.freedesktop.DBus.NameHasOwner "string:$login" \
      2>> /var/log/logind.log | grep -q true && return
    sleep 0.2
  done
}

run_containerd() {
  while true; do
    containerd >> /var/log/containerd.log 2>&1 || true
    sleep 1
  done
}

import_images() {
  until ctr version > /dev/null 2>&1; do sleep 0.2; done
  # A node that begins with a filled store, or that starts again, has them.
  [[ -f /var/lib/containerd/images-imported ]] && { touch /run/images-imported; return; }
  local archives=(/kind/images/all-nodes.tar) archive
  [[ "$(hostname)" == *-control-plane* ]] && archives+=(/kind/images/control-plane.tar)
  for archive in "${archives[@]}"; do
    ctr --namespace k8s.io images import "$archive"
  done >> /var/log/images.log 2>&1
  touch /var/lib/containerd/images-imported /run/images-imported
}

run_kubelet() {
  wait_for_logind
  # kubeadm writes both files before it starts kubelet; without an init system, their existence is the signal.
  while true; do
    if [[ -f /var/lib/kubelet/config.yaml && -f /var/lib/kubelet/kubeadm-flags.env ]]; then
      local KUBELET_KUBEADM_ARGS=""
      # shellcheck source=/dev/null
      source /var/lib/kubelet/kubeadm-flags.env
      # kind's configuration sets systemd's cgroups below /kubelet, which do not exist here; flags take precedence.
      # shellcheck disable=SC2086 # the arguments are words
      kubelet --bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf --kubeconfig=/etc/kubernetes/kubelet.conf \
        --config=/var/lib/kubelet/config.yaml $KUBELET_KUBEADM_ARGS \
        --cgroup-driver=cgroupfs --cgroup-root=/ --feature-gates=KubeletInUserNamespace=true >> /var/log/kubelet.log 2>&1 || true
    fi
    sleep 0.5
  done
}

prepare_machine
prepare_cgroups
choose_runc
run_logind &
run_containerd &
import_images &
run_kubelet &
# kind waits for this line in the container's log.
if [[ -f /sys/fs/cgroup/cgroup.controllers ]]; then
  echo "Reached target Multi-User System"
else
  echo "detected cgroup v1"
fi
# Not `wait -n`, because the import exits by itself. Only the trapped signals interrupt this loop.
while true; do wait || true; sleep 1; done
