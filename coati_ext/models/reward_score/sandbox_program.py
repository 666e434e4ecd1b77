"""The process of a program that is not trusted: gives up what it can, then runs it. Standard library only.

Started by `sandbox_tests` as `python -I sandbox_program.py SETTINGS`. It knows the program and the inputs, never the
expected outputs. A process does not see into its parent: the parent is not dumpable, and this one is in a process
namespace of its own where the kernel allows it.
"""

import builtins
import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any, NoReturn

_NOBODY = 65534
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET, _CLONE_NEWIPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _CAPABILITY_VERSION_3 = 1, 38, 0x20080522
# Without namespaces these are refused inside the interpreter, by an audit hook, which cannot be removed.
_REFUSED = ("socket.", "subprocess.", "ctypes.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.kill")


def main() -> None:
    settings = json.loads(sys.argv[1])
    with os.fdopen(settings["program_fd"], "rb") as file:
        program = file.read().decode("utf-8", "replace")
    libc = ctypes.CDLL(None, use_errno=True)
    namespaces = isolate(libc)
    confined = sandbox_files.confine(libc)
    with os.fdopen(settings["note_fd"], "w") as note:
        note.write(f"{'namespace' if namespaces else 'refused'} {'kernel' if confined else 'interpreter'}")
    set_limits(settings)
    if not namespaces:
        sys.addaudithook(refuse)
    sys.set_int_max_str_digits(0)  # the limit of time holds for long numbers too
    sys.argv = ["solution.py"]
    module = {"__name__": "__main__" if settings["stdio"] else "solution", "__builtins__": builtins}
    exec(compile(program, "solution.py", "exec"), module)
    if not settings["stdio"]:
        serve(module, settings["requests_fd"], settings["answers_fd"])


def isolate(libc: Any) -> bool:
    """A network, process and IPC namespace of its own, and the user nobody where it was root; whether that worked.

    A new process namespace is entered by a fork; the process above it waits, and hands on how it ended.
    """
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    root = os.geteuid() == 0
    flags = _CLONE_NEWNET | _CLONE_NEWPID | _CLONE_NEWIPC
    if libc.unshare(flags if root else flags | _CLONE_NEWUSER) == 0:
        child = os.fork()
        if child:
            hand_on(child)
        namespaces = True
    else:
        namespaces = False
    if root:
        become_nobody(libc)
    drop_capabilities(libc)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user forgets it
    return namespaces


def become_nobody(libc: Any) -> None:
    """The user nobody. Where nobody cannot read the standard library (an environment in a home closed to others):
    root's files and nobody's limits, in a user namespace that makes its capabilities void elsewhere.
    """
    os.setegid(_NOBODY)
    os.seteuid(_NOBODY)
    readable = os.access(os.__file__, os.R_OK, effective_ids=True)
    os.seteuid(0)
    os.setegid(0)
    if readable:
        os.chown(".", _NOBODY, _NOBODY)
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    else:
        os.setresuid(_NOBODY, 0, 0)
        libc.unshare(_CLONE_NEWUSER)


def drop_capabilities(libc: Any) -> None:
    """All of them, for good: also those that a new user namespace gives in itself."""
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.capset((ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())


def hand_on(child: int) -> NoReturn:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(0, 64):  # the pipes must close when the program ends
        if descriptor != null:
            try:
                os.dup2(null, descriptor) if descriptor < 3 else os.close(descriptor)
            except OSError:
                continue
    _, status = os.waitpid(child, 0)
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def set_limits(settings: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_CPU: settings["cpu_s"],
        resource.RLIMIT_AS: settings["max_memory"],
        resource.RLIMIT_FSIZE: settings["max_file_size"],
        resource.RLIMIT_NPROC: 0,  # no process or thread besides this one; the kernel does not ask it of root
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for name, limit in limits.items():
        resource.setrlimit(name, (limit, limit))


def refuse(event: str, arguments: Any) -> None:
    if event.startswith(_REFUSED):
        raise PermissionError(f"{event} is not allowed here")


def serve(module: dict[str, Any], requests_fd: int, answers_fd: int) -> None:
    """Look up names and call functions of the program, as the tests ask for them."""
    from sandbox_values import decode, encode

    objects: list[Any] = [None]

    handles: dict[int, int] = {}

    def handle_of(value: Any) -> int:
        if id(value) not in handles:  # which stays its own: `objects` holds it
            handles[id(value)] = len(objects)
            objects.append(value)
        return handles[id(value)]

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        target = objects[request["on"]]
        if request["op"] == "get":
            value = module[request["name"]] if request["on"] == 0 else getattr(target, request["name"])
            return {"value": encode(value, handle_of)}
        if request["op"] == "list":
            return {"value": encode(list(target), handle_of)}
        arguments = decode(request["arguments"], objects.__getitem__)
        keywords = decode(request["keywords"], objects.__getitem__)
        value = target(*arguments, **keywords)
        return {"value": encode(value, handle_of), "arguments": encode(arguments, handle_of)}

    with os.fdopen(requests_fd, "rb") as requests, os.fdopen(answers_fd, "wb") as answers:
        for line in requests:
            try:
                reply = answer(json.loads(line))
            except Exception as error:
                reply = {"raised": type(error).__name__}
            answers.write(json.dumps(reply).encode() + b"\n")
            answers.flush()


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import sandbox_files
    import sandbox_values  # noqa: F401 (loaded before the program can change what it is)

    sys.path.pop(0)
    main()
