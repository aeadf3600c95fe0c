#!/bin/bash
# Stands before kubeadm in kind's PATH. kind allows a node 30 s to say that it is up, and importing the images can take longer on a busy machine;
# so the entrypoint says so first, and what needs the images waits here.
for _ in $(seq 600); do
  [[ -f /run/images-imported ]] && exec /usr/bin/kubeadm "$@"
  sleep 0.5
done
echo "the node's images were not imported within 300 s; see /var/log/images.log" >&2
exit 1
