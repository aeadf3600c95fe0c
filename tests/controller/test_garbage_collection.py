"""What Python's full garbage collections, which block the event loop, visit in the operator's process."""

import asyncio
import gc
import os
import subprocess
import sys
from pathlib import Path

from ddpjob.api import names
from ddpjob_operator.cluster.connection import Connection
from ddpjob_operator.controller.cache import Cache
from ddpjob_operator.controller.watch_status import WatchStatus
from ddpjob_operator.controller.watches import JobWatch
from tests.processes import eventually_async
from tests.worlds.memory import MemoryCluster
from tests.worlds.memory.http import MemoryHttp

KOPF_DEFAULT_SECONDS = 5.0
"""kopf's own idle_timeout of a worker."""

COLLECTIONS = """
import gc, time
from ddpjob_operator.controller.main import main

def seconds():
    times = []
    for _ in range(5):
        started = time.perf_counter()
        gc.collect()
        times.append(time.perf_counter() - started)
    return min(times)

before = seconds()
code = main([])
print(code, before, seconds())
"""


def test_collections_leave_out_the_modules_objects(tmp_path: Path) -> None:
    """Measured: 66 ms before the start, 0.01 ms after it; without the freeze 66 ms for each collection."""
    command, environment = [sys.executable, "-c", COLLECTIONS], os.environ | {"KUBECONFIG": str(tmp_path / "absent")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    code, before, after = done.stdout.split()
    assert code == "1", "there is nothing to connect to"
    assert float(after) < float(before) / 4


async def test_kopf_drops_the_job_of_an_idle_worker(tmp_path: Path) -> None:
    """Measured with 2,000 starting pods, when kopf watched them: 35 workers and 117 MiB, with kopf's default 1,586
    workers and 155 MiB.
    """
    cluster = MemoryCluster()
    cache = Cache()
    async with MemoryHttp(cluster) as http:
        connection = await Connection.open(str(http.kubeconfig(tmp_path)))
        status = WatchStatus(names.DDPJOBS, None)
        watching = asyncio.create_task(JobWatch(connection=connection, cache=cache, scope=None, status=status).run())
        try:
            await eventually_async("the watch is open", lambda: status.is_open)
            seconds = [await _seconds_until_dropped(cluster, cache, attempt) for attempt in range(3)]
        finally:
            watching.cancel()
            await asyncio.wait({watching})
            await connection.close()
    assert min(seconds) < 0.8 * KOPF_DEFAULT_SECONDS


async def _seconds_until_dropped(cluster: MemoryCluster, cache: Cache, attempt: int) -> float:
    """Create jobs, and return the time from their arrival in the cache until kopf's workers have ended."""
    number, known = 50, len(cache.entries(names.DDPJOBS))
    for n in range(number):
        job = {"apiVersion": names.API_VERSION, "kind": "DDPJob", "metadata": {"name": f"job-{attempt}-{n}"}}
        cluster.server.create(names.DDPJOBS, "default", job | {"spec": {"image": "trainer:1"}})
    await eventually_async("the jobs are cached", lambda: len(cache.entries(names.DDPJOBS)) == known + number)
    clock = asyncio.get_running_loop().time
    started = clock()
    await eventually_async("kopf's workers have ended", lambda: _workers() <= number // 10)
    return clock() - started


def _workers() -> int:
    """Return the number of kopf's workers, which are tasks in a loop of another thread."""
    tasks = [found for found in gc.get_objects() if isinstance(found, asyncio.Task)]
    return sum(not task.done() and task.get_name().startswith("worker for") for task in tasks)
