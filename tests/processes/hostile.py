"""Snippets that try to get out, to harm or to deceive, each with what the call must give: a pattern of its output, or of the reason why
the session ended (marked with `ended`)."""

import os
from dataclasses import dataclass

SECRET = "canary-5f1c9e"  # in this process's environment and in a file; no output may hold it


@dataclass(frozen=True)
class Snippet:
    name: str
    code: str
    pattern: str
    ended: bool | None = False  # None: either
    seconds: float = 20.0


def endless(name, code):
    return Snippet(name, code, "ran longer than 0.6 s", ended=True, seconds=0.6)


def ended(name, code, pattern):
    return Snippet(name, code, pattern, ended=True)


REFUSED = "PermissionError|FileNotFoundError"
SYSTEM_CALLS = {"fork": 57, "vfork": 58, "clone": 56, "clone3": 435, "execve": 59, "kill": 62, "tkill": 200, "tgkill": 234, "socket": 41,
                "socketpair": 53, "ptrace": 101, "prctl": 157, "unshare": 272, "mount": 165,
                "chroot": 161, "setrlimit": 160, "prlimit64": 302, "memfd_create": 319,
                "openat2": 437, "io_uring_setup": 425, "bpf": 321, "setitimer": 38, "alarm": 37, "timer_create": 222, "pidfd_open": 434,
                "process_vm_readv": 310, "setuid": 105, "rename": 82, "unlink": 87, "chmod": 90, "sendmsg": 46, "dup": 32, "fcntl": 72, "ioctl": 16,
                "shmget": 29, "keyctl": 250, "userfaultfd": 323, "setns": 308, "sched_setaffinity": 203, "setpriority": 141}

SNIPPETS = [
    # time
    endless("endless loop", "while True: pass"),
    endless("endless loop in except BaseException", "while True:\n    try:\n        while True: 1/0\n    except BaseException: pass"),
    endless("endless loop in finally", "try:\n    1/0\nfinally:\n    while True: pass"),
    endless("endless sleep", "import time; time.sleep(10**6)"),
    endless("power", "x = 10**10**9"),
    endless("regular expression", "import re; re.match('(a+)+$', 'a'*60 + 'b')"),
    endless("sympy", "import sympy; sympy.factorint(2**1061 - 1)"),
    endless("endless output", "while True: print('x' * 1000)"),
    endless("endless output to descriptors", "import os\nwhile True: os.write(1, b'x' * 1000); os.write(2, b'y')"),
    endless("repr that does not return", "class E:\n    def __repr__(self):\n        while True: pass\nE()"),
    endless("traceback that does not return", "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E"),
    endless("every signal ignored", "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
            "    except (OSError, ValueError): pass\nwhile True: pass"),
    endless("deadlock", "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()"),
    endless("the channel read", "import os; os.read(3, 1)"),
    # memory
    ended("4 GiB at once", "x = bytearray(4 << 30)", "more than 256 MiB"),
    ended("hoarding", "x = []\nwhile True: x.append(bytearray(10**6))", "more than 256 MiB"),
    ended("hoarding, excepted", "x = []\ntry:\n    while True: x.append(bytearray(10**5))\nexcept MemoryError: pass", "more than 256 MiB"),
    ended("decompression bomb", "import zlib\nblock = zlib.compress(bytes(10**7))\ndata = b''.join(zlib.decompress(block) for _ in range(1000))",
          "more than 256 MiB"),
    Snippet("memory mapped", "import mmap\nm = [mmap.mmap(-1, 1 << 28) for _ in range(9)]", "Cannot allocate memory"),
    Snippet("recursion", "def f(): return f()\nf()", "RecursionError"),
    Snippet("recursion without limit", "import sys; sys.setrecursionlimit(10**9)\ndef f(x): return f(bytes(3000))\nf(0)",
            "more than 256 MiB|SIGSEGV|exit code 1|SystemError", ended=None),  # the interpreter itself is not sure
    Snippet("recursion in C", "x = []\nfor _ in range(10**5): x = [x]\nrepr(x)", "RecursionError"),
    ended("recursion in C without limit", "import sys; sys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6): x = [x]\nrepr(x)", "SIGSEGV"),
    Snippet("nested source", "(" * 10**5, "SyntaxError"),
    ended("nested expression", "-" * 10**6 + "1", "more than 256 MiB|SIGSEGV"),
    Snippet("huge output", "print('x' * 10**7)", r"^x{500}\n\.\.\. 9999001 characters cut \.\.\.\nx{499}$"),
    # processes and signals
    Snippet("fork", "import os; os.fork()", "PermissionError"),
    Snippet("fork bomb", "import os\nn = 0\nfor _ in range(10**4):\n    try:\n        os.fork(); n += 1\n    except OSError: pass\nn", "^0$"),
    Snippet("multiprocessing", "import multiprocessing as m; m.Process(target=print).start()", REFUSED),
    Snippet("subprocess", "import subprocess; subprocess.run(['/bin/ls'])", REFUSED),
    Snippet("shell", "import os; os.system('touch {folder}/new')", "^(-1|32512)$"),
    Snippet("exec", "import os; os.execv('/bin/sh', ['sh'])", "PermissionError"),
    Snippet("thread that goes on", "import threading\ndef f():\n    while True: pass\nthreading.Thread(target=f).start()", "can't start new thread"),
    Snippet("kill the parent", f"import os; os.kill({os.getpid()}, 9)", "PermissionError"),
    Snippet("kill everything", "import os; os.kill(-1, 9)", "PermissionError"),
    Snippet("kill the zygote", "import os; os.kill(os.getppid(), 9)", "PermissionError"),
    Snippet("kill itself", "import os; os.kill(os.getpid(), 9)", "PermissionError"),
    Snippet("timer", "import signal; signal.setitimer(signal.ITIMER_REAL, 0.001)", "itimer_error.*not permitted"),
    Snippet("limits lifted", "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "not allowed"),
    ended("os._exit", "import os; os._exit(3)", "exit code 3"),
    Snippet("sys.exit", "import sys; sys.exit(3)", "SystemExit: 3"),
    Snippet("quit", "quit()", "SystemExit|NameError"),
    ended("abort", "import os; os.abort()", "SIGABRT|SIGSEGV"),
    ended("null pointer", "import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    Snippet("system calls", f"import ctypes\nlibc = ctypes.CDLL(None)\n"
            f"[name for name, n in {SYSTEM_CALLS}.items() if libc.syscall(n, 0, 0, 0, 0, 0) != -1]",
            r"^\[\]$"),
    ended("system call of 32 bits", "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')\n"
          "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()", "SIGSYS|SIGSEGV"),
    # files and secrets
    Snippet("passwd", "open('/etc/passwd').read()", REFUSED),
    Snippet("a secret file", "open('{secret}').read()", REFUSED),
    Snippet("the parent's environment", f"open('/proc/{os.getpid()}/environ').read()", REFUSED),
    Snippet("its own environment", "open('/proc/self/environ').read()", REFUSED),
    Snippet("environment variables", "import os; 'RTPO_SECRET' in os.environ or 'PATH' in os.environ", "^False$"),
    Snippet("the root folder", "import os; os.listdir('/')", REFUSED),
    Snippet("the project", "import rtpo_ray.config", "ModuleNotFoundError"),
    Snippet("other packages", "import pytest", "ModuleNotFoundError"),
    Snippet("write a file", "open('{folder}/new', 'w').write('x')", REFUSED),
    Snippet("write in /tmp", "open('/tmp/new', 'w').write('x')", REFUSED),
    Snippet("append to a library", "import os; open(os.__file__, 'a').write('x')", REFUSED),
    Snippet("delete", "import os; os.remove('{secret}')", REFUSED),
    Snippet("rename", "import os; os.rename('{secret}', '{secret}2')", REFUSED),
    Snippet("chmod", "import os; os.chmod('{secret}', 0o777)", REFUSED),
    Snippet("chown", "import os; os.chown('{secret}', 1, 1)", REFUSED),
    Snippet("mkdir", "import os; os.mkdir('{folder}/new')", REFUSED),
    Snippet("link", "import os; os.symlink('/etc/passwd', '{folder}/new')", REFUSED),
    Snippet("shared memory", "open('/dev/shm/new', 'wb').write(bytes(1 << 30))", REFUSED),
    Snippet("shared memory of multiprocessing", "from multiprocessing.shared_memory import SharedMemory\n"
            "SharedMemory(create=True, size=1 << 20)", REFUSED),
    Snippet("temporary file", "import tempfile; tempfile.TemporaryFile()", REFUSED),
    Snippet("devices", "open('/dev/mem', 'rb').read(1)", REFUSED),
    # network
    Snippet("connect", "import socket; socket.create_connection(('127.0.0.1', {port}), timeout=5)", "PermissionError"),
    Snippet("listen", "import socket; socket.create_server(('127.0.0.1', 0))", "PermissionError"),
    Snippet("local socket", "import socket; socket.socket(socket.AF_UNIX)", "PermissionError"),
    Snippet("name look-up", "import socket; socket.gethostbyname('example.com')", "gaierror|PermissionError|herror"),
    Snippet("http", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}/')", "URLError|PermissionError"),
    # descriptors and the protocol
    Snippet("inherited descriptors", "import os\nfound = []\nfor n in range(5000):\n    try: os.fstat(n); found.append(n)\n"
            "    except OSError: pass\nfound",
            r"^\[0, 1, 2, 3\]$"),
    Snippet("reading descriptors", "import os; [os.read(n, 100) for n in (0, 1, 2)]", r"^\[b'', b'', b''\]$|OSError"),
    ended("every descriptor closed", "import os; os.closerange(0, 100)", "closed the sandbox's own connection|exit code 1"),
    endless("every descriptor closed, then a loop", "import os; os.closerange(0, 3)\nwhile True: pass"),
    ended("the channel closed, then a loop", "import os; os.close(3)\nwhile True: pass", "closed the sandbox's own connection"),
    ended("garbage on every descriptor", "import os\nfor n in range(100):\n    try: os.write(n, os.urandom(5000))\n    except OSError: pass",
          "own connection"),
    ended("a reply in advance", "import os, struct; os.write(3, struct.pack('>I', 21) + bytes(16) + b'hello')", "own connection"),
    ended("a reply without end", "import os, struct\nos.write(3, struct.pack('>I', 2**32 - 1))\nwhile True: os.write(3, bytes(4096))",
          "own connection"),
    endless("a reply in drops", "import os, struct, time\nos.write(3, struct.pack('>I', 2000))\nwhile True: os.write(3, b'x'); time.sleep(0.01)"),
    # the harness
    ended("builtins replaced", "import builtins\nfor n in ('len', 'bytes', 'max', 'isinstance'): setattr(builtins, n, None)", "exit code 1"),
    Snippet("output replaced", "import sys; sys.stdout = sys.stderr = None; 7", "^7$"),
    Snippet("main replaced", "import sys, types; sys.modules['__main__'] = types.ModuleType('x'); 7", "^7$"),
    ended("the harness's functions replaced", "import sys; sys._getframe(3).f_globals['_send'] = None", "exit code 1"),
    ended("the harness's frames", "import sys\nf = sys._getframe()\nwhile f.f_back: f = f.f_back\nnames = f.f_globals['__builtins__']\n"
          "(names if isinstance(names, dict) else vars(names)).clear()", "exit code 1|SIGSEGV"),
    Snippet("objects by gc", "import gc\n[str(x) for x in gc.get_objects()\n"
            " if isinstance(x, (dict, list)) and 'canary-' + '5f1c9e' in str(x)][:1]", r"^\[\]$"),
    Snippet("modules deleted", "import sys; sys.modules.clear()", r"^\(no output\)$"),
    Snippet("profile hook", "import sys\ndef hook(*a):\n    raise KeyboardInterrupt\nsys.setprofile(hook)", "KeyboardInterrupt"),
    Snippet("bad text", "print('\\ud800' * 2000)", r"^\?{500}\n\.\.\. 1001 characters cut \.\.\.\n\?{499}$"),
    Snippet("null byte", "1\0", "null bytes"),
    Snippet("surrogate in the code", "'\ud800'", "UnicodeEncodeError"),
]
