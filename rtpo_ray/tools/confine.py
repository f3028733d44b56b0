"""The layers that confine the sandbox, by system call: the standard library has none of them.

Every function binds the calling process, and whatever it forks afterwards, for good. Each raises OSError where the machine lacks the
layer. They need no privilege; where user namespaces are forbidden, the other namespaces need root.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterable

_LIBC = ctypes.CDLL(None, use_errno=True)

_NAMESPACES = {"user": 0x10000000, "network": 0x40000000, "pid": 0x20000000, "mount": 0x00020000, "ipc": 0x08000000, "uts": 0x04000000}

# The same on every architecture.
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE, _OPEN_TREE_CLONE, _MOVE_FROM_EMPTY_PATH = -100, 0x1000, 0x8000, 1, 4
_MS_PRIVATE_RECURSIVE, _MS_NOSUID_NODEV, _DETACH = 0x4000 | 0x40000, 2 | 4, 2
_READ_ONLY_NOSUID_NODEV = 1 | 2 | 4
_NEW_ROOT = "/tmp"  # where the new root is put together; any folder that is always there

_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}  # Landlock version: how many rights it knows, from bit 0

_ADDR_NO_RANDOMIZE = 0x0040000
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38

# What a session may ask of the kernel (x86_64): memory, clocks, reading files, and its one channel. No process, thread, socket, signal to
# others, timer, or change of any file has a number here.
_ALLOWED = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "lseek": 8, "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12,
    "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "pread64": 17, "access": 21, "sched_yield": 24, "mremap": 25, "madvise": 28,
    "nanosleep": 35, "getpid": 39, "exit": 60, "uname": 63, "getcwd": 79, "readlink": 89, "gettimeofday": 96, "getrusage": 98, "times": 100,
    "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "sigaltstack": 131, "gettid": 186, "time": 201, "futex": 202,
    "sched_getaffinity": 204, "getdents64": 217, "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230,
    "exit_group": 231, "newfstatat": 262, "readlinkat": 267, "faccessat": 269, "getrandom": 318, "statx": 332, "faccessat2": 439,
}
_OPENS = {"open": (2, 1), "openat": (257, 2)}  # number, and which argument holds the flags
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | (os.O_TMPFILE & ~os.O_DIRECTORY)
_ARCHITECTURE, _X32 = 0xC000003E, 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _NOT_PERMITTED = 0x7FFF0000, 0x80000000, 0x00050000 | 1


def fix_addresses() -> bool:
    """Ask that memory be laid out the same in every process from the next exec on: what cells print, and the order of some sets, depends on
    addresses.

    Returns:
        whether an exec is needed. Not when it is so already, or when the machine refuses.
    """
    present = _LIBC.personality(ctypes.c_ulong(0xFFFFFFFF))
    return not present & _ADDR_NO_RANDOMIZE and _LIBC.personality(ctypes.c_ulong(present | _ADDR_NO_RANDOMIZE)) >= 0


def enter_namespaces() -> dict[str, str]:
    """Leave the machine's namespaces for empty ones: no network but a loopback that is down, no other process once forked.

    Returns:
        by namespace: empty, or why it could not be had.
    """
    missing, uid, gid = {}, os.geteuid(), os.getegid()
    for name, flag in _NAMESPACES.items():
        try:
            _checked(name, _LIBC.unshare(flag))
            if name == "user":  # the identity stays, so that files stay readable; all power over the machine goes
                _write("/proc/self/setgroups", "deny")
                _write("/proc/self/uid_map", f"{uid} {uid} 1")
                _write("/proc/self/gid_map", f"{gid} {gid} 1")
            if name == "uts":
                _checked("sethostname", _LIBC.sethostname(b"sandbox", 7))
            missing[name] = ""
        except OSError as error:
            missing[name] = str(error)
    return missing


def hide_files(paths: Iterable[str]) -> None:
    """Take a new root that holds `paths` alone, read-only; needs the mount namespace."""
    _mount(None, "/", None, _MS_PRIVATE_RECURSIVE)
    trees = [(path, os.path.isdir(path), _system(_OPEN_TREE, _AT_FDCWD, path.encode(), _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC))
             for path in paths]  # all before the next mount, which may hide some
    _mount("tmpfs", _NEW_ROOT, "tmpfs", _MS_NOSUID_NODEV, "size=4m,mode=755")
    try:
        for path, folder, tree in trees:
            target = _NEW_ROOT + path
            os.makedirs(target if folder else os.path.dirname(target), exist_ok=True)
            if not folder:
                _write(target, "")
            _read_only(tree, b"", _AT_EMPTY_PATH | _AT_RECURSIVE)
            _system(_MOVE_MOUNT, tree, b"", _AT_FDCWD, target.encode(), _MOVE_FROM_EMPTY_PATH)
            os.close(tree)
        _read_only(_AT_FDCWD, _NEW_ROOT.encode(), 0)
        os.chdir(_NEW_ROOT)
        _checked("pivot_root", _LIBC.pivot_root(b".", b"."))
    except OSError:
        _LIBC.umount2(_NEW_ROOT.encode(), _DETACH)  # it would hide files without having taken their place
        raise
    _checked("umount2", _LIBC.umount2(b".", _DETACH))
    os.chdir("/")


def drop_capabilities() -> None:
    """Root without any power of root; execve can give none back."""
    _checked("prctl", _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))))
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)  # version 3, this process
    _checked("capset", _LIBC.capset(header, nothing))


def landlock(readable: Iterable[str], listable: Iterable[str]) -> None:
    """From now on read no file but `readable` ones and those below, list these folders and `listable` ones, write none, use no TCP."""
    version = _system(_LANDLOCK_CREATE_RULESET, None, 0, 1)
    rights = (1 << _FILE_RIGHTS[max(known for known in _FILE_RIGHTS if known <= version)]) - 1
    tcp, signals_and_sockets = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    attributes = struct.pack("QQQ", rights, tcp, signals_and_sockets)
    ruleset = _system(_LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    rules = [(path, _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)) for path in readable] + [(path, _READ_DIR) for path in listable]
    for path, allowed in rules:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _system(_LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed, descriptor), 0)
        os.close(descriptor)
    _checked("prctl", _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))))
    _system(_LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def seccomp() -> None:
    """From now on every system call outside the short list of a calculating process is refused with EPERM; opening a file for writing too."""
    if platform.machine() != "x86_64":
        raise OSError(f"seccomp: the list of system calls is for x86_64, not for {platform.machine()}")
    filters = [_step(_LOAD, 4), _step(_EQUAL, _ARCHITECTURE, 1, 0), _step(_RETURN, _KILL),
               _step(_LOAD, 0), _step(_AT_LEAST, _X32, 0, 1), _step(_RETURN, _KILL)]
    for number, flags in _OPENS.values():
        filters += [_step(_EQUAL, number, 0, 4), _step(_LOAD, 16 + 8 * flags), _step(_ANY_BIT, _WRITING, 1, 0), _step(_RETURN, _ALLOW),
                    _step(_RETURN, _NOT_PERMITTED)]
    for number in _ALLOWED.values():
        filters += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _ALLOW)]
    _install([*filters, _step(_RETURN, _NOT_PERMITTED)])


def die_with_parent() -> None:
    """Be killed when the process that forked this one ends. Only for parents with a single thread: it is the thread that counts."""
    _checked("prctl", _LIBC.prctl(_PR_SET_PDEATHSIG, *map(ctypes.c_ulong, (9, 0, 0, 0))))


def _install(filters: list[bytes]) -> None:
    program = ctypes.create_string_buffer(b"".join(filters))
    pointer = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(filters), ctypes.addressof(program)))
    _checked("prctl", _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))))
    _checked("seccomp", _LIBC.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(2), pointer, ctypes.c_ulong(0), ctypes.c_ulong(0)))


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    texts = [text.encode() if text is not None else None for text in (source, target, kind)]
    _checked(f"mount {target}", _LIBC.mount(*texts, ctypes.c_ulong(flags), options.encode()))


def _read_only(folder: int, path: bytes, flags: int) -> None:
    attributes = struct.pack("QQQQ", _READ_ONLY_NOSUID_NODEV, 0, 0, 0)
    _system(_MOUNT_SETATTR, folder, path, flags, attributes, len(attributes))


def _system(number: int, *arguments: int | bytes | None) -> int:
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]  # a bare int would go as 32 bits
    return _checked(f"system call {number}", _LIBC.syscall(ctypes.c_long(number), *values))


def _checked(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
