#!/bin/bash
# Imports a cluster's first images and those of /images.tar into /var/lib/containerd. Nodes begin with a copy of it, so
# that no node has to import and unpack them again.
set -o errexit -o nounset -o pipefail

containerd > /var/log/containerd.log 2>&1 &
until ctr version > /dev/null 2>&1; do
  kill -0 $! || { cat /var/log/containerd.log; exit 1; }
  sleep 0.2
done
for archive in /kind/images/*.tar /images.tar; do
  ctr --namespace k8s.io images import "$archive" > /dev/null
done
touch /var/lib/containerd/images-imported
kill $!
wait
