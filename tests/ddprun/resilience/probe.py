"""What a script can observe of its process: run under a launcher, it writes its facts to ``facts-RANK.json``.

Its first line takes what imports change. Names of facts are paths with dots. Those that differ are
in docs/reference/ddprun-and-torchrun.md.
"""

# ruff: noqa: E402, PLC0415

import sys

MODULES, MAIN, PATH = sorted(sys.modules), dict(globals()), list(sys.path)

import atexit
import builtins
import ctypes
import faulthandler
import gc
import json
import locale
import logging
import os
import random
import resource
import signal
import tempfile
import threading
import warnings
from collections import Counter
from pathlib import Path


def name_of(value):
    return getattr(value, "__qualname__", None) or type(value).__qualname__


def stream(value, original):
    names = ["encoding", "errors", "name", "mode", "closed", *(["line_buffering", "write_through"] * value.writable())]
    facts = {name: getattr(value, name, "absent") for name in names}
    facts |= {"type": name_of(type(value)), "isatty": value.isatty(), "fileno": value.fileno()}
    return facts | {"original": value is original, "buffered": hasattr(value.buffer, "raw")}


def descriptors():
    """Return what the descriptors are open on, and how many; a file that is mapped is open twice."""
    opened, memory, own = Counter(), set(), f"-{os.environ.get('RANK')} (deleted)"
    for entry in Path("/proc/self/fd").iterdir():
        descriptor = int(entry.name)
        try:
            target, inherited = str(entry.readlink()), os.get_inheritable(descriptor)
        except OSError:
            continue  # of the directory itself
        place = entry.name if descriptor < 3 else "inheritable" if inherited else "open"
        if target.startswith("/memfd:") and target.endswith(own):
            memory.add(f"{place} {target}")
        else:
            is_file = target[0] == "/" and Path(target).is_file()
            opened[f"{place} {'file' if is_file else target.partition(':[')[0]}"] += 1
    opened.update(f"{each.partition(' ')[0]} memory of the rank" for each in memory)
    return {f"{name} {count}": True for name, count in opened.items()}


def read(name):
    return Path(f"/proc/self/{name}").read_text()


def process():
    pid, libc = os.getpid(), ctypes.CDLL(None)
    death = ctypes.c_int()
    libc.prctl(2, ctypes.byref(death))
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
        terminal = "open"
    except OSError as error:
        terminal = error.strerror
    mask = os.umask(0)
    os.umask(mask)
    environ = {line.split("=", 1)[0] for line in read("environ").split("\0")}
    status = dict(line.split(":", 1) for line in read("status").splitlines())
    kept = ("NoNewPrivs", "Seccomp", "CapEff", "Cpus_allowed_list")
    masks = {name: int(status[name], 16) for name in ("SigBlk", "SigIgn", "SigCgt", "ShdPnd")}
    signals = {name: {str(n): True for n in range(1, 65) if mask >> (n - 1) & 1} for name, mask in masks.items()}
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name[:7] == "RLIMIT_"}
    return {
        "session": os.getsid(0) == pid, "group": os.getpgrp() == pid, "terminal": terminal, "umask": mask,
        "deathSignal": death.value, "nice": os.nice(0), "cwd": str(Path.cwd()), "limits": limits,
        "subreaper": libc.prctl(37, ctypes.byref(death)), "dumpable": libc.prctl(3), "oom": read("oom_score_adj"),
        "comm": read("comm").strip(), "cmdline": read("cmdline").split("\0")[1:],
        "environ": sorted(environ ^ set(os.environ)), "alarm": signal.getitimer(signal.ITIMER_REAL),
        "status": {name: status.get(name, "").strip() for name in kept}, **signals,
    }  # fmt: skip


def interpreter():
    root = logging.getLogger()
    flags = {name: getattr(sys.flags, name) for name in dir(sys.flags) if name[0] != "_" and name[:2] != "n_"}
    hooks = (
        sys.excepthook is sys.__excepthook__, sys.unraisablehook is sys.__unraisablehook__,
        sys.displayhook is sys.__displayhook__, sys.breakpointhook is sys.__breakpointhook__,
        threading.excepthook is threading.__excepthook__, threading._profile_hook, threading._trace_hook,
    )  # fmt: skip
    collector = {"enabled": gc.isenabled(), "threshold": gc.get_threshold(), "frozen": gc.get_freeze_count() > 0}
    return {
        "argv": sys.argv, "orig_argv": sys.orig_argv, "executable": sys.executable, "prefix": sys.prefix,
        "flags": {name: value for name, value in flags.items() if isinstance(value, int)}, "xoptions": sys._xoptions,
        "warnoptions": sys.warnoptions, "recursion": sys.getrecursionlimit(), "switch": sys.getswitchinterval(),
        "trace": [sys.gettrace(), sys.getprofile()], "bytecode": sys.dont_write_bytecode,
        "meta_path": dict(Counter(getattr(each, "__name__", type(each).__name__) for each in sys.meta_path)),
        "signals": {str(n): str(signal.getsignal(n)).split(" at ")[0] for n in signal.valid_signals()},
        "wakeup": signal.set_wakeup_fd(-1), "builtins": sorted(vars(builtins)), "hooks": hooks, "gc": collector,
        "faulthandler": faulthandler.is_enabled(), "locale": locale.setlocale(locale.LC_ALL),
        "encodings": [locale.getpreferredencoding(), sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()],
        "atexit": atexit._ncallbacks(), "threadsAtexit": len(threading._threading_atexits),
        "filters": [str(each) for each in warnings.filters], "showwarning": name_of(warnings.showwarning),
        "logging": [root.level, [name_of(type(each)) for each in root.handlers], root.manager.disable],
        "tempdir": tempfile.gettempdir(),
    }  # fmt: skip


def multiprocessing_state():
    import multiprocessing

    return {
        "start": multiprocessing.get_start_method(allow_none=True), "name": multiprocessing.current_process().name,
        "children": len(multiprocessing.active_children()), "parent": multiprocessing.parent_process() is not None,
        "main": sys.modules.get("__mp_main__") is sys.modules["__main__"], "next": multiprocessing.Process().name,
    }  # fmt: skip


def torch_state():
    import numpy
    import torch
    import torch.distributed

    return {
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()], "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(), "cuda": torch.cuda.is_initialized(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "elastic": torch.distributed.is_torchelastic_launched(), "group": torch.distributed.is_initialized(),
        "handlers": len(logging.getLogger("torch").handlers),
    }, {"numpy": numpy.random.rand(), "torch": torch.rand(1).item()}  # fmt: skip


def facts():
    """Return what is not of a module that the script has imported."""
    return {
        "process": process(), "sys": interpreter(), "descriptors": descriptors(),
        "threads": dict(Counter(thread.name for thread in threading.enumerate())),
        "stdin": stream(sys.stdin, sys.__stdin__), "stdout": stream(sys.stdout, sys.__stdout__),
        "stderr": stream(sys.stderr, sys.__stderr__),
    }  # fmt: skip


found = {
    "start": facts() | {
        "modules": dict.fromkeys(MODULES, True), "path": PATH, "environ": dict(os.environ),
        "main": {name: name_of(type(value)) if name[:2] == "__" else "own" for name, value in MAIN.items()},
        "mainIsGlobals": vars(sys.modules["__main__"]) is globals(), "mainFile": __file__,
    },
}  # fmt: skip
of_torch, drawn = torch_state()
found["torch"] = facts() | {"torch": of_torch, "modules": dict.fromkeys(sorted(sys.modules), True)}
found["torch"]["multiprocessing"] = multiprocessing_state()
from multiprocessing import current_process

drawn |= {"hash": hash("seed"), "random": random.random(), "key": current_process().authkey.hex()}
drawn |= {"file": next(tempfile._get_candidate_names())}
text = json.dumps(found | {"drawn": drawn}, default=str)
Path(f"facts-{os.environ.get('RANK', '1')}.json").write_text(text)
