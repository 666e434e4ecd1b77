"""Keeps a program that is not trusted to the files of its directory and of Python. Standard library only.

Linux' Landlock does it in the kernel, for what has no privileges too. Where it is missing, an audit hook refuses in the
interpreter what would change a file elsewhere; reading stays possible then.
"""

import ctypes
import os
import sys
from typing import Any

# The system calls have these numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE = 1 << 14
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
# All rights of each version of the interface; the last holds for later ones.
_ALL = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}
_READABLE = (
    "/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/proc/cpuinfo",
    "/proc/meminfo", "/sys/devices/system/cpu", "/dev/zero", "/dev/random", "/dev/urandom",
)  # fmt: skip
_CHANGES = (
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
    "os.utime", "os.setxattr", "os.removexattr",
)  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def confine(libc: Any) -> bool:
    """Whether the kernel does it from now on. It asks for no_new_privs before; `.` stays writable."""
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG)
    if version >= 1 and _restrict(libc, _ALL[min(version, max(_ALL))]):
        return True
    directory = os.path.realpath(".")
    sys.addaudithook(lambda event, arguments: refuse_changes(event, arguments, directory))
    return False


def _restrict(libc: Any, rights: int) -> bool:
    handled = ctypes.c_uint64(rights)
    ruleset = libc.syscall(_CREATE_RULESET, ctypes.byref(handled), ctypes.c_size_t(8), 0)
    if ruleset < 0:
        return False
    reading = _EXECUTE | _READ_FILE | _READ_DIR
    allowed = {path: reading for path in (*_READABLE, sys.prefix, sys.base_prefix, sys.exec_prefix)}
    for path, access in {**allowed, "/dev/null": _READ_FILE | _WRITE_FILE, ".": rights}.items():
        try:
            parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # not on this system
        access &= rights if os.path.isdir(path) else _OF_FILES
        rule = _PathBeneath(access, parent)
        libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
        os.close(parent)
    restricted = libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return restricted


def refuse_changes(event: str, arguments: tuple[Any, ...], directory: str) -> None:
    """An audit hook: raises PermissionError for what changes a file that is not in `directory`."""
    if event == "open":
        path, mode, flags = arguments
        writes = (flags or 0) & _WRITING or any(letter in (mode or "") for letter in "wax+")
        paths = [path] if writes else []
    elif event in _CHANGES:
        paths = [value for value in arguments if isinstance(value, str | bytes)]
        folders = [value for value in arguments[1:] if isinstance(value, int) and event in ("os.remove", "os.rmdir")]
        if any(folder >= 0 for folder in folders):  # names relative to an open directory
            paths = [os.path.join(os.readlink(f"/proc/self/fd/{folders[0]}"), os.fsdecode(paths[0]))]
    else:
        return
    for path in paths:
        if isinstance(path, int) or path is None:
            continue  # a descriptor: opened under this rule
        real = os.path.realpath(os.fsdecode(path))
        if real != os.devnull and not real.startswith(f"{directory}{os.sep}"):
            raise PermissionError(f"{event} of {real} is not allowed here")
