"""An in-memory API server: the ``Cluster`` of the operator's tests.

It behaves like kube-apiserver with its garbage collector for the six kinds and the verbs that this project uses.
``tests/worlds/contract`` sends the same requests to both and compares the responses. It has one version counter, uids,
optimistic concurrency, merge patches, the status subresource, generations, the selectors of this project, watches with
history and 410, preconditions, graceful deletion, finalizers, background collection of owned objects, protection of
claims in use, and deletion of namespaces. DDPJobs are checked by the models of ``ddpjob.api``, not by the CRD's schema
and CEL rules; ``tests/api/test_verdicts.py`` compares the two.

What it does not do:

* other kinds, other verbs (update, apply, deletecollection), other subresources, other patch types;
* ``generateName``, ``managedFields``, dry runs, paging, bookmarks, foreground and orphaning deletion;
* defaults and checks of Kubernetes' own kinds, and of names, labels, annotations and finalizers: what the operator
  sends is checked by a real API server, in ``contract`` and in the tests of the operator's process;
* authentication, RBAC, quota, admission; Services with an address, enforcing NetworkPolicies, binding of claims,
  scheduling, running containers; expiry of Events;
* the API server's texts: class, code and fields of an error are the same, most explanations are not. Of a DDPJob with
  several mistakes it may report fewer.
"""

from tests.worlds.memory.server import RESOURCES, ApiServer, MemoryCluster
from tests.worlds.memory.watch import Watch

__all__ = ["RESOURCES", "ApiServer", "MemoryCluster", "Watch"]
