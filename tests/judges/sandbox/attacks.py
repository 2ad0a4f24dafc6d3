"""Programs that attack whoever runs them. Each prints ESCAPED, and how, when it reached what it should not.

They read what there is to attack from standard input, as JSON: see `World` in `test_attacks.py`. Those in `HARMLESS`
also run without a sandbox, where they must succeed: otherwise they would show nothing.
"""

BEGIN = """
import ctypes, errno, json, os, signal, socket, sys, time
world = json.loads(sys.stdin.readline())
C = ctypes.CDLL(None, use_errno=True)
def attempt(how, function, *arguments):
    try:
        result = function(*arguments)
    except (OSError, RuntimeError, MemoryError) as error:
        print("stopped", how, error, flush=True)
        return None
    print("ESCAPED", how, str(result)[:200], flush=True)
    return result
def call(name, *arguments):
    if getattr(C, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)
"""

CONNECT = """
def connect(family, kind, address):
    with socket.socket(family, kind) as s:
        s.settimeout(5)
        s.connect(address)
        s.send(b"x")
"""

HARMLESS = {
    "loopback": CONNECT + "attempt('tcp', connect, socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', world['port']))",
    "outside": CONNECT + "attempt('udp', connect, socket.AF_INET, socket.SOCK_DGRAM, ('192.0.2.1', 9))",
    "unix socket": CONNECT + "attempt('path', connect, socket.AF_UNIX, socket.SOCK_STREAM, world['socket'])",
    "abstract socket": CONNECT
    + "attempt('@', connect, socket.AF_UNIX, socket.SOCK_STREAM, chr(0) + world['abstract'])",
    "pair of datagram sockets": """
def send():
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.sendto(b"x", chr(0) + world["datagrams"])
attempt("sendto", send)
""",
    "network interfaces": "attempt('netlink', socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "environment of others": """
def environments():
    for pid in [p for p in os.listdir("/proc") if p.isdigit()]:
        try:
            if world["token"].encode() in open(f"/proc/{pid}/environ", "rb").read():
                return pid
        except OSError:
            pass
    raise OSError("none")
attempt("environment", environments)
if world["token"] in str(os.environ): print("ESCAPED own environment")
""",
    "processes of others": """
try: others = os.listdir("/proc")
except OSError: others = []
if str(world["victim"]) in others: print("ESCAPED sees processes")
attempt("command line", lambda: open(f"/proc/{world['victim']}/cmdline").read())
""",
    "files of the host": """
for path in (world["secret"], "/etc/passwd", "/etc/hostname"):
    attempt(path, lambda: open(path).read())
for path in (world["folder"], "/root", "/home"):
    attempt(path, os.listdir, path)
""",
    "link to a file of the host": """
def read():
    path = "link-" + world["token"]
    try: os.symlink(world["secret"], path)
    except OSError: path = world["link"]
    try: return open(path).read()
    finally:
        if path != world["link"]: os.unlink(path)
attempt("symlink", read)
""",
    "writing outside": """
def write(path):
    with open(path, "w") as file: file.write("x")
    return path
for folder in (world["folder"], "/var/tmp", "/usr", "/usr/local", "/etc", "/root", "/home", "/dev", "/"):
    attempt(folder, write, f"{folder}/{world['token']}")
attempt("append", lambda: open(world["own"], "a"))
attempt("mkdir", os.mkdir, world["folder"] + "/d-" + world["token"])
""",
    "changing a file of the same user": """
attempt("chmod", os.chmod, world["own"], 0o600)
attempt("utime", os.utime, world["own"], (1, 1))
attempt("truncate", os.truncate, world["own"], 0)
attempt("O_TRUNC", os.open, world["own"], os.O_RDONLY | os.O_TRUNC)
attempt("rename", os.rename, world["own"], world["own"] + "-moved")
attempt("unlink", os.unlink, world["own"])
""",
    "signals": """
attempt("kill", os.kill, world["victim"], 0)
attempt("killpg", os.killpg, world["victim"], 0)
""",
    "signals by descriptors": """
import fcntl
def own():
    r, w = os.pipe()
    fcntl.fcntl(r, fcntl.F_SETOWN, world["victim"])
attempt("F_SETOWN", own)
def ioctl():
    r, w = socket.socketpair()
    fcntl.ioctl(r.fileno(), 0x8901, world["victim"].to_bytes(4, "little"))
attempt("FIOSETOWN", ioctl)
""",
    "tracing": """
attempt("ptrace", call, "ptrace", 16, world["victim"], None, None)
C.ptrace(17, world["victim"], None, None)
""",
    "limits and priority of others": """
import resource
attempt("prlimit", resource.prlimit, world["victim"], resource.RLIMIT_NOFILE)
attempt("priority", os.setpriority, os.PRIO_PROCESS, world["victim"], os.getpriority(os.PRIO_PROCESS, world["victim"]))
attempt("affinity", os.sched_setaffinity, world["victim"], os.sched_getaffinity(world["victim"]))
""",
    "pidfd of others": "attempt('pidfd', os.pidfd_open, world['victim'])",
    "new namespaces": """
def unshare():
    if os.fork() == 0:
        os._exit(C.unshare(0x10000000) != 0)
    if os.wait()[1]: raise OSError("unshare")
attempt("unshare", unshare)
def clone():
    number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    pid = C.syscall(ctypes.c_long(number), ctypes.c_long(0x10000000 | 17), None, None, None, None)
    if pid == 0: C._exit(0)
    if pid < 0: raise OSError(ctypes.get_errno(), "clone")
    os.waitpid(pid, 0)
attempt("clone", clone)
""",
    "memory that no limit counts": """
def memfd():
    file = os.memfd_create("x")
    os.write(file, b"x" * 4096)
attempt("memfd", memfd)
def segment():
    number = C.shmget(0, 4096, 0o1600)
    if number < 0: raise OSError(ctypes.get_errno(), "shmget")
    C.shmctl(number, 0, None)
attempt("shmget", segment)
def shared(name, *way):
    import mmap
    descriptor = os.open(name, os.O_RDWR) if name else -1
    pages = mmap.mmap(descriptor, 1 << 20, *way)  # of which all but one may be unmapped, and stay in memory
    return len(pages)
attempt("shared", shared, None)
attempt("shared zeros", shared, "/dev/zero")
attempt("huge pages", shared, None, 0x40022)
""",
    "pages in pipes": """
import fcntl
r, w = os.pipe()
class Part(ctypes.Structure): _fields_ = [("start", ctypes.c_char_p), ("length", ctypes.c_size_t)]
attempt("vmsplice", call, "vmsplice", w, ctypes.byref(Part(b"x" * 4096, 4096)), 1, 0)
with open(os.__file__, "rb") as file:
    attempt("splice", call, "splice", file.fileno(), None, w, None, 4096, 0)
    attempt("sendfile", os.sendfile, w, file.fileno(), 0, 4096)
os.write(w, b"x")
attempt("tee", call, "tee", r, os.pipe()[1], 1, 0)
attempt("F_SETPIPE_SZ", fcntl.fcntl, w, 1031, 1 << 20)
""",
    "names by watching": """
def watch():
    queue = C.inotify_init1(0o4000)
    if queue < 0: raise OSError(ctypes.get_errno(), "inotify_init1")
    call("inotify_add_watch", queue, world["folder"].encode(), 0xFFF)
attempt("inotify", watch)
""",
    "calls of the kernel": """
userfaultfd = {"x86_64": 323, "aarch64": 282}[os.uname().machine]
for name, number in (("io_uring_setup", 425), ("userfaultfd", userfaultfd), ("open_tree", 428)):
    def one():
        if C.syscall(number, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS):
            raise OSError(ctypes.get_errno(), name)
    attempt(name, one)
""",
    "privileges": """
if C.prctl(39, 0, 0, 0, 0) != 1: print("ESCAPED setuid programs have effect")
""",
    "fork bomb": """
started = 0
try:
    while started < 100:
        if os.fork() == 0:
            os.closerange(0, 3); time.sleep(5); os._exit(0)
        started += 1
    print("ESCAPED", started, "processes")
except OSError as error:
    print("stopped after", started, error)
""",
    "thread bomb": """
import threading
threading.stack_size(65536)
started = 0
try:
    while started < 100:
        threading.Thread(target=time.sleep, args=(3,), daemon=True).start()
        started += 1
    print("ESCAPED", started, "threads", flush=True)
except RuntimeError as error:
    print("stopped after", started, error, flush=True)
os._exit(0)
""",
    "memory": "attempt('1.2 GiB', lambda: len(bytearray(1200 << 20)))",
    "a large file": """
def fill():
    with open("large-" + world["token"], "wb") as file:
        try:
            for _ in range(40): file.write(b"x" * (1 << 20)); file.flush()
        finally: os.unlink(file.name)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
attempt("40 MiB", fill)
""",
    "many files": """
def fill():
    names = []
    try:
        for number in range(3000):
            names.append(f"f{number}-{world['token']}")
            open(names[-1], "w").close()
    finally:
        for name in names:
            if os.path.exists(name): os.unlink(name)
attempt("3000 files", fill)
""",
    "a full /tmp": """
def fill():
    names = []
    try:
        for number in range(20):
            names.append(f"/tmp/f{number}-{world['token']}")
            with open(names[-1], "wb") as file: file.write(b"x" * (8 << 20))
    finally:
        for name in names:
            if os.path.exists(name): os.unlink(name)
attempt("160 MiB", fill)
""",
}
"""Name -> attack; also run without a sandbox. What they take is given back."""

INSIDE = {
    "its own input": "attempt('write', lambda: os.pwrite(0, b'x', 0))",
    "who it is": "if os.geteuid() == 0 or os.getgroups() not in ([], [os.getgid()]): print('ESCAPED', os.getgroups())",
    "ending the box": """
for pid in {os.getppid(), 1}:
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP):
        try: os.kill(pid, number)
        except OSError: pass
time.sleep(0.1)
""",
    "tracing the box": """
for pid in {os.getppid(), 1}:
    attempt("ptrace", call, "ptrace", 16, pid, None, None)
    attempt("memory", lambda: open(f"/proc/{pid}/mem", "rb"))
    attempt("descriptors", lambda: os.listdir(f"/proc/{pid}/fd"))
""",
    "other descriptors": """
for number in range(3, 1024):
    attempt(f"descriptor {number}", os.fstat, number)
""",
    "mounts": """
attempt("mount", call, "mount", b"tmpfs", b"/tmp", b"tmpfs", 0, None)
attempt("umount", call, "umount2", b"/tmp", 2)
attempt("chroot", os.chroot, "/tmp")
""",
    "raised limits": """
import resource
for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU):
    soft, hard = resource.getrlimit(kind)
    try:
        resource.setrlimit(kind, (hard + 1, hard + 1))
        print("ESCAPED limit", kind)
    except (OSError, ValueError):
        pass
""",
    "a daemon": """
for _ in range(2):
    if os.fork():
        os._exit(0)
    try: os.setsid()
    except OSError: pass
os.closerange(0, 64)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
time.sleep(600)
""",
    "a daemon that holds the output": """
if os.fork() == 0:
    try: os.setsid()
    except OSError: pass
    time.sleep(600)
""",
    "processes that fork for ever": """
while True:
    try: os.fork()
    except OSError: pass
""",
    "memory of many processes": """
for _ in range(6):
    if os.fork() == 0:
        kept = bytearray(b"x" * (400 << 20)); break
time.sleep(600)
""",
    "a loop": "while True: pass",
    "waiting": "time.sleep(600)",
    "a name that is no text": """
ctypes.CDLL(None).prctl(15, bytes([255, 254, 41]), 0, 0, 0)
time.sleep(600)
""",
    "children that nobody waits for": """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    if os.fork() == 0:
        end = time.monotonic() + 0.55
        while time.monotonic() < end: pass
        os._exit(0)
    time.sleep(0.25)
""",
    "stopping itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    "ignoring signals": """
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
while True: pass
""",
    "output without end": """
while True: os.write(1, b"x" * 65536)
""",
    "errors without end": """
while True: os.write(2, b"x" * 65536)
""",
}
"""Name -> attack that runs only in a sandbox."""
ENDED = {
    "memory of many processes": ["memory"],
    "processes that fork for ever": ["time", "infrastructure"],
    "a loop": ["time"],
    "waiting": ["time"],
    "a name that is no text": ["time"],
    "children that nobody waits for": ["time", "infrastructure"],
    "stopping itself": ["time"],
    "output without end": ["output"],
    "errors without end": ["time", "infrastructure"],
}
"""What becomes of attacks that do not end by themselves. Of those that compute until the clock ends them, the other is
what they get on a machine that is busy meanwhile."""
