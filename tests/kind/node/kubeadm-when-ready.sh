#!/bin/bash
# Precedes kubeadm in kind's PATH, and waits for the images. kind allows a node 30 s to report that it is up, and the
# import can take longer on a busy machine, so the entrypoint reports before the import has finished.
for _ in $(seq 600); do
  [[ -f /run/images-imported ]] && exec /usr/bin/kubeadm "$@"
  sleep 0.5
done
echo "timed out after 300 s waiting for the import of the node's images; see /var/log/images.log" >&2
exit 1
