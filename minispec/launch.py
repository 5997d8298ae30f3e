"""Ranks as processes: how they start, what rank 0 tells the others, the watch over all of them, and their common end.

Rank 0 is the user's process. The others are started by it on its host, or all by torchrun on one host or several; either way a rank
above 0 runs `Engine()`, which mirrors what rank 0's engine does (mirror.py) and never returns. Each has one connection to rank 0. On it
go lines of JSON: commands down, errors up, and signs of life both ways. One thread a rank listens and judges, on rank 0 for all:
whoever dies, falls silent or stands still ends the run, with one line that names it.
"""
import json
import os
import queue
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from dataclasses import is_dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep

from minispec.errors import MinispecError

JOIN = 300          # seconds in which every rank must have come up: importing torch from a cold network disk takes minutes
CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from minispec.engine import Engine; Engine()"
REFUSED, LOST, FAILED, BROKEN = range(4)    # how well an error explains the end of a run: what was said plainly, a rank that died or
                                            # stands still, another exception, a collective that broke because some other rank ended


def environment():
    """(rank, size, local rank) in a process that torchrun, or another launcher with its variables, started; else None."""
    found = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")]
    return tuple(map(int, found[:3])) if all(found) else None


def size_of(tensor_parallel):
    """Ranks of an engine: as asked, else torchrun's, else 1. MinispecError where the two disagree."""
    size, world = tensor_parallel, environment()
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= 1024):
        raise MinispecError(f"tensor_parallel must be a whole number from 1 to 1024, not {size!r}")
    if world and size not in (None, world[1]):
        raise MinispecError(f"tensor_parallel={size}, but torchrun started {world[1]} ranks (WORLD_SIZE); leave it out, or start {size}")
    return world[1] if world else size or 1


def explain(error):
    """(how well it explains an end, one line) of an exception."""
    text, name = str(error).strip().partition("\n")[0], type(error).__name__
    if isinstance(error, MinispecError):
        return REFUSED, text
    if isinstance(error, MemoryError) or name == "OutOfMemoryError" or "can't allocate memory" in text:
        return REFUSED, f"out of memory: {text}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    kind = BROKEN if isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text) else FAILED
    return kind, f"{name}: {text} ({Path(place.filename).name} line {place.lineno})"


def oom_kills():
    """Processes that the kernel has killed for memory since it started; 0 where it does not say."""
    file = Path("/proc/vmstat")
    return int(dict(line.split() for line in file.read_text().splitlines()).get("oom_kill", 0)) if file.is_file() else 0


def kill_rank(rank, pid):
    """Ends a rank that torchrun started, if it is on this host and still there: torchrun gives a stopped process 30 s."""
    try:
        if {f"RANK={rank}", f"MASTER_PORT={os.environ['MASTER_PORT']}"} <= set(Path(f"/proc/{pid}/environ").read_text().split("\0")):
            os.kill(pid, signal.SIGKILL)
    except (OSError, ValueError):
        pass


class Child:
    """A rank that this process started, in a session of its own: a terminal's Ctrl-C and Ctrl-Z are rank 0's to act on."""

    def __init__(self, rank, size, port):
        self.errors, self.ooms = tempfile.TemporaryFile(), oom_kills()
        here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "MINISPEC_CHILD": 1}
        self.process = subprocess.Popen(        # the standard input is a pipe that nobody writes to: it ends when this process does
            [sys.executable, "-c", CODE, json.dumps(sys.path)], env=os.environ | {name: str(value) for name, value in here.items()},
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self.errors, start_new_session=True)

    def status(self):
        """Why it ended, or None while it runs."""
        code = self.process.poll()
        if code is None or code >= 0:
            self.errors.seek(0)
            said = self.errors.read().decode(errors="replace").split("\n")
            return None if code is None else f"ended with status {code}: {next(filter(None, map(str.strip, said[::-1])), 'no message')}"
        memory = -code == signal.SIGKILL and oom_kills() > self.ooms
        return f"killed by signal {-code} ({signal.Signals(-code).name})" + ": the kernel was out of memory" * memory

    def kill(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)         # with the compilers that it may have started
            self.process.wait()


class Peer:
    """The connection to another rank."""

    def __init__(self, connection, timeout):
        connection.settimeout(timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)        # a command is small and nothing answers it
        self.connection, self.lock, self.rest, self.heard = connection, threading.Lock(), b"", monotonic()
        self.state, self.pid = ("", [0, 0], 0.0), None

    def send(self, *message):
        line = json.dumps(message, default=lambda value: vars(value) if is_dataclass(value) else str(value)).encode() + b"\n"
        with self.lock:
            self.connection.sendall(line)

    def read(self):
        """Messages that have come, after a wait for at least some bytes; None at the connection's end."""
        try:
            data = self.connection.recv(1 << 16)
            *lines, self.rest = (self.rest + data).split(b"\n")
            self.heard = monotonic()
            return [list(json.loads(line)) for line in lines] if data else None
        except (OSError, ValueError, TypeError):        # also of a stranger who speaks something else
            return None


class Team:
    """What one rank knows of the others.

    rank, size; local: the rank's number on its host, so its GPU's; store: a c10d store to build process groups from; patience: seconds
    without any progress, on any rank, after which a step hangs (half of it for signs of life, 15 times it for loading); error: the line
    that ended the run, or None; abort: called, from another thread, to free this rank from a collective that will never end.
    """

    def __init__(self, rank, size, local, store, patience):
        self.rank, self.size, self.local, self.store, self.patience = rank, size, local, store, patience
        self.peers, self.children, self.causes, self.gone = {}, {}, [], set()
        self.commands, self.ready, self.over, self.error, self.abort = queue.SimpleQueue(), threading.Semaphore(0), threading.Event(), None, lambda: None
        self.what, self.at, self.moved, self.began, self.beaten, self.gathering = "", [0, 0], monotonic(), monotonic(), 0.0, None
        self.told = False       # the main thread knows of the error
        self.held = None        # Ctrl-C while a command is under way: its signals, else None

    def tick(self):
        """Something moved: a collective begins, a tensor is read, a kernel compiled."""
        self.at[1] += 1
        self.moved = monotonic()

    def begin(self, what):
        """This rank starts on a command. `what`: how a message calls it; as a context, its end, which takes over errors of other ranks."""
        self.at, self.moved, self.what = [self.at[0] + 1, 0], monotonic(), what
        return self

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if self.rank and self.peers:
            return error and self._fall(error)
        if error and self.peers:
            kind, text = explain(error)
            self.causes.append((kind, [0], text))
            self.over.wait(self.patience)
        interrupted = self._release()
        if error is None or isinstance(error, Exception):
            self.check(error)
        if interrupted:
            raise KeyboardInterrupt

    def _release(self):
        """The end of a command -> whether Ctrl-C came meanwhile."""
        self.what, held, self.held = "", self.held, None
        if held is not None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return bool(held)

    def check(self, error=None):
        """MinispecError where the run has ended."""
        if self.error:
            self._release()
            self.told = True
            raise MinispecError(self.error) from error

    def meet(self):
        """Rank 0 waits until all the others have come here."""
        for peer in self.peers.values():
            if self.rank:
                peer.send("ready")
            else:
                while not self.ready.acquire(timeout=0.05):
                    self.check()

    def progress(self, inner):
        """progress(done, total, what) that also counts as a sign of life and stops a rank whose run has ended."""
        def called(*report):
            self.tick()
            self.check()
            if inner:
                inner(*report)
        return called

    def tell(self, action, *payload):
        """Rank 0: the command for every other rank, which each carries out in turn -> this, as the context of the same work here."""
        self.check()
        self.begin(f"step {self.at[0]}" if action == "step" else action)
        # until the command ends Ctrl-C waits, but in loading: a rank that leaves a step half-way is lost to the others
        if action != "loading" and threading.current_thread() is threading.main_thread() \
                and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self.held = []
            signal.signal(signal.SIGINT, lambda *signals: self.held.append(signals))
        for rank, peer in self.peers.items():
            try:
                peer.send("do", action, *payload)
            except OSError:
                self.causes.append((LOST, [rank], f"takes no command for {self.patience / 2:g} s"))
        self.check()
        return self

    def _fall(self, error):
        """A rank above 0 tells rank 0 why it ends, and ends with the connection: torchrun must not notice before rank 0 has spoken."""
        self.peers[0].send("error", *explain(error))
        sleep(self.patience)
        os._exit(1)

    def close(self):
        """Rank 0: ends the others, waits for those started here. Called twice is closed."""
        if not self.over.is_set():
            self.over.set()
            for peer in self.peers.values():
                try:
                    peer.send("do", "close")
                except OSError:
                    pass                        # it has ended already
            until = monotonic() + 5
            while monotonic() < until and any(child.process.poll() is None for child in self.children.values()):
                sleep(0.01)
            self._disband()
            self.abort()

    def _disband(self):
        for child in self.children.values():
            child.kill()
        for peer in self.peers.values():
            peer.connection.close()

    def watch(self, listener, token):
        """Rank 0's thread: takes the others in, listens to them, judges."""
        with selectors.DefaultSelector() as selector, listener:
            selector.register(listener, selectors.EVENT_READ)
            while not self.over.is_set():
                for key, _ in selector.select(self.patience / 40):
                    if key.data is None:
                        self._greet(Peer(listener.accept()[0], 1), token, selector)
                    elif (messages := self.peers[key.data].read()) is None:
                        selector.unregister(key.fileobj)
                        self._lost(key.data)
                    else:
                        for what, *rest in messages:
                            if what == "beat":
                                self.peers[key.data].state = rest
                            elif what == "ready":
                                self.ready.release()
                            else:
                                self.causes.append((rest[0], [key.data], rest[1]))
                if not self.over.is_set():
                    self._beat()
                    self._judge()

    def _greet(self, peer, token, selector):
        hello = peer.read()
        if not hello or hello[0][0] != token:
            return peer.connection.close()
        _, rank, peer.pid = hello[0]
        peer.connection.settimeout(self.patience / 2)
        self.peers[rank] = peer
        selector.register(peer.connection, selectors.EVENT_READ, rank)

    def _lost(self, rank):
        if rank not in self.gone:
            self.gone.add(rank)
            self.causes.append((LOST, [rank], "ended without a word"))

    def _beat(self):
        now = monotonic()
        if now - self.beaten > self.patience / 20:
            self.beaten = now
            for peer in list(self.peers.values()):
                try:
                    peer.send("beat", self.what, self.at, now - self.moved)
                except OSError:
                    pass                        # its end is noticed where it is read

    def _judge(self):
        """Looks for ranks that died, fell silent or stand still; ends the run half a second after the first sign, when all signs are in."""
        now = monotonic()
        busy = {0: (self.what, self.at, now - self.moved)} if self.what else {}
        for rank, child in list(self.children.items()):
            if child.process.poll() is not None:
                self._lost(rank)
        for rank, peer in self.peers.items():
            if now - peer.heard > self.patience / 2 and rank not in self.gone:
                self.gone.add(rank)
                self.causes.append((LOST, [rank], f"no sign of life for {self.patience / 2:g} s; it is stopped, or cut off from rank 0"))
            if peer.state[0]:
                busy[rank] = (*peer.state[:2], peer.state[2] + now - peer.heard)
        if len(self.peers) < self.size - 1 and now - self.began > JOIN:
            missing = [rank for rank in range(1, self.size) if rank not in self.peers]
            self.causes.append((LOST, missing, f"not there {JOIN} s after rank 0"))
        if busy and not self.causes:
            what, at, _ = min(busy.values(), key=lambda state: state[1])
            limit = self.patience * (15 if what == "loading" else 1)
            if min(age for *_, age in busy.values()) > limit:
                last = [rank for rank, state in busy.items() if state[1] == at]
                self.causes.append((LOST, last, f"hangs in {what}: no rank has moved for {limit:g} s"))
        if self.causes and not self.gathering:
            self.gathering = now
        if self.causes and now - self.gathering > (0.5 if min(self.causes)[0] < BROKEN else 3):
            self._end()

    def _end(self):
        kind, ranks, text = min(self.causes)
        if child := len(ranks) == 1 and text == "ended without a word" and self.children.get(ranks[0]):
            text = child.status() or text
        name = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: "
        self.error = name * (ranks != [0] or kind != REFUSED or text.startswith("out of memory")) + text
        self._disband()
        if not self.children:
            sleep(0.3)
            for rank, peer in self.peers.items():
                kill_rank(rank, peer.pid)
        self.over.set()
        threading.Thread(target=self.abort, daemon=True).start()
        until = monotonic() + self.patience / 4
        while self.what and monotonic() < until:
            sleep(0.05)
        if self.what:                           # nothing frees this rank's main thread
            os.write(2, f"minispec: error: {self.error}\n".encode())
            os._exit(2)

    def follow(self):
        """The thread of a rank above 0: hears commands, shows that it lives, and ends the process with rank 0's."""
        peer = self.peers[0]
        with selectors.DefaultSelector() as selector:
            selector.register(peer.connection, selectors.EVENT_READ)
            while True:
                if selector.select(self.patience / 40):
                    messages = peer.read()
                    if messages is None:
                        os._exit(1)
                    for what, *rest in messages:
                        if rest == ["close"]:
                            os._exit(0)
                        if what == "do":
                            self.commands.put(rest)
                if monotonic() - peer.heard > self.patience / 2:
                    os._exit(1)
                self._beat()


def store_of(world):
    from torch.distributed.rendezvous import rendezvous

    return next(rendezvous("env://", world[0], world[1], timeout=timedelta(seconds=JOIN)))[0]


def start(size, patience, options):
    """Rank 0: brings the other ranks up and gives them the options of the engine -> Team, as the context of loading.

    None for a single rank.
    """
    if size == 1:
        return None
    from torch.distributed import TCPStore

    world, token = environment(), secrets.token_hex(16)
    store = store_of(world) if world else TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=JOIN))
    if store.add("minispec/engines", 1) > 1:
        raise MinispecError("a run of torchrun has one engine, and this one has had it: start it again, or let tensor_parallel start the ranks")
    team = Team(0, size, world[2] if world else 0, store, patience)
    dual = socket.has_dualstack_ipv6() if world else False
    listener = socket.create_server(("" if world else "127.0.0.1", 0), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual)
    if world and threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: _terminated(team))
    store.set("minispec/rank 0", json.dumps([listener.getsockname()[1], token, patience]))
    threading.Thread(target=team.watch, args=(listener, token), daemon=True).start()
    with team:
        for rank in range(1, 1 if world else size):
            team.children[rank] = Child(rank, size, store.port)
        while len(team.peers) < size - 1:
            team.check()
            sleep(0.01)
    return team.tell("loading", options)


def _terminated(team):
    """torchrun ends all ranks as soon as one has ended: rank 0 first says which."""
    team.over.wait(4)
    if team.told:
        return                  # and its caller is about to say so
    if team.error:
        os.write(2, f"minispec: error: {team.error}\n".encode())
    os._exit(2 if team.error else 128 + signal.SIGTERM)


def join():
    """A rank above 0: finds rank 0 -> Team, whose first command holds the options of the engine, and in whose context exceptions go to rank 0."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "MINISPEC_CHILD" in os.environ:          # until there is a connection: rank 0's end is the end of this pipe
        threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
    rank, size, local = environment()
    store = store_of((rank, size))
    port, token, patience = json.loads(store.get("minispec/rank 0"))
    team = Team(rank, size, local, store, patience)
    team.peers[0] = Peer(socket.create_connection((os.environ["MASTER_ADDR"], port), JOIN), patience / 2)
    team.peers[0].send(token, rank, os.getpid())
    threading.Thread(target=team.follow, daemon=True).start()
    return team
