"""How ranks know of each other: commands from rank 0, signs of life both ways, and one end for all.

Each rank above 0 has a connection to rank 0, on which go lines of JSON. On either side a thread listens to it and another shows that this
rank lives; rank 0's also judges: who dies, falls silent or stands still ends the run, with one line that names it.
"""
import json
import os
import queue
import signal
import socket
import struct
import threading
import traceback
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from time import monotonic, sleep

from minispec.errors import MinispecError

# how well an error explains the end of a run: said plainly; a rank that died or stands still; another exception; a collective that broke,
# which it does where some other rank has ended
REFUSED, LOST, FAILED, BROKEN = range(4)
WORDLESS = "ended without a word"


def explain(error):
    """(how well it explains an end, one line) of an exception."""
    text, name = str(error).strip().partition("\n")[0], type(error).__name__
    if isinstance(error, MinispecError):
        return REFUSED, text
    if isinstance(error, MemoryError) or name == "OutOfMemoryError" or "can't allocate memory" in text:
        return REFUSED, f"out of memory: {text}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    broken = isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text)
    return BROKEN if broken else FAILED, f"{name}: {text} ({Path(place.filename).name} line {place.lineno})"


def die(line):
    """Where an exception would never be seen: the main thread stands in a call that does not end."""
    os.write(2, f"minispec: error: {line}\n".encode())
    os._exit(2)


def run(function, *arguments):
    threading.Thread(target=function, args=arguments, daemon=True).start()


class Peer:
    """The connection to another rank."""

    def __init__(self, connection, timeout):
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)        # a command is small and nothing answers it
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(timeout), int(timeout % 1 * 1e6)))
        self.connection, self.lines, self.lock = connection, connection.makefile("rb"), threading.Lock()
        self.heard, self.state, self.pid = monotonic(), ("", [0, 0], 0.0), None

    def send(self, *message):
        """Whether the message could be sent in time."""
        line = json.dumps(message, default=lambda value: vars(value) if is_dataclass(value) else str(value)).encode() + b"\n"
        with self.lock, suppress(OSError):
            self.connection.sendall(line)
            return True
        return False


class Team:
    """What one rank knows of the others. As a context: of a command, whose exceptions end the run.

    rank, size; local: the rank's number on its host, so its GPU's; store: a c10d store to build process groups from; patience: seconds
    without progress on any rank after which a step hangs (half of it for signs of life, 15 times it for loading). peers: by rank, on
    rank 0 all others, elsewhere rank 0; without any (and without `watch`) each rank runs a program of its own. children: the ranks that
    this process started (launch.Child). error: the line that ended the run, or None. abort: called from another thread, frees this
    rank from a collective that will never end.
    """

    def __init__(self, rank, size, local, store, patience):
        self.rank, self.size, self.local, self.store, self.patience = rank, size, local, store, patience
        self.peers, self.children, self.commands, self.ready = {}, {}, queue.SimpleQueue(), threading.Semaphore(0)
        self.what, self.at, self.moved = "", [0, 0], monotonic()    # the command under way; how many, and ticks in it; time of the last
        self.causes, self.since, self.error, self.told, self.over, self.abort = [], None, None, False, threading.Event(), lambda: None
        self.watched, self.held = False, None                       # held: the Ctrl-Cs that wait for the end of a command

    def tick(self):
        """Something moved: a collective begins, a tensor was read."""
        self.at[1] += 1
        self.moved = monotonic()

    def begin(self, action):
        """A command is under way, in messages by its name, a step by its number."""
        self.at, self.moved, self.what = [self.at[0] + 1, 0], monotonic(), f"step {self.at[0]}" if action == "step" else action

    def progress(self, inner):
        """progress(done, total, what) that is a sign of life too, and stops a rank whose run has ended."""
        def called(*report):
            self.tick()
            self.check()
            if inner:
                inner(*report)
        return called

    def tell(self, action, *payload):
        """Rank 0: a command to all others, which carry out one after the other -> this, as the context of the same work here."""
        self.check()
        self.begin(action)
        # a rank that leaves a step half-way is lost to the others: Ctrl-C waits for its end, but not for that of loading
        if action != "loading" and threading.current_thread() is threading.main_thread() \
                and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self.held = []
            signal.signal(signal.SIGINT, lambda *signals: self.held.append(signals))
        for rank, peer in self.peers.items():
            if not peer.send("do", action, *payload):
                self.blame(LOST, [rank], f"takes no command for {self.patience / 2:g} s")
        self.check()
        return self

    def meet(self):
        """Rank 0 waits until all the others have come here."""
        for peer in self.peers.values():
            if self.rank:
                peer.send("ready")
            else:
                while not self.ready.acquire(timeout=0.05):
                    self.check()

    def check(self, error=None):
        """MinispecError where the run has ended."""
        if self.error:
            self._release()
            self.told = True
            raise MinispecError(self.error) from error

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if error and self.watched:
            if self.rank:                       # ends with the connection: torchrun must not notice before rank 0 has spoken
                self.peers[0].send("error", *explain(error))
                sleep(self.patience)
                os._exit(1)
            kind, text = explain(error)
            self.blame(kind, [0], text)
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

    def blame(self, kind, ranks, text):
        self.since = self.since or monotonic()
        self.causes.append((kind, ranks, text))

    def listen(self, rank, peer):
        """The thread of one connection, until it ends."""
        with suppress(OSError, ValueError):
            for line in peer.lines:
                what, *rest = json.loads(line)
                peer.heard = monotonic()
                if what == "beat":
                    peer.state = rest
                elif what == "ready":
                    self.ready.release()
                elif what == "error":
                    self.blame(rest[0], [rank], rest[1])
                elif rest == ["close"]:
                    os._exit(0)
                else:
                    self.commands.put(rest)
        if self.rank:
            os._exit(1)
        self.blame(LOST, [rank], WORDLESS)

    def watch(self):
        """The thread that shows that this rank lives and looks whether the others do."""
        self.watched = True
        while not self.over.wait(self.patience / 40):
            for rank, peer in list(self.peers.items()):
                peer.send("beat", self.what, self.at, monotonic() - self.moved)
                if monotonic() - peer.heard > self.patience / 2:
                    text = f"no sign of life for {self.patience / 2:g} s; it is stopped, or cut off from rank {1 if self.rank else 0}"
                    if self.rank:
                        if self.rank == 1:      # nobody else is left to say so
                            os.write(2, f"minispec: error: rank 0: {text}\n".encode())
                        _kill(0, peer.pid)
                        os._exit(1)
                    self.blame(LOST, [rank], text)
            if not self.rank:
                self._judge()

    def _judge(self):
        """Ends the run half a second after the first sign of trouble, when the others are in."""
        now, own = monotonic(), (self.what, self.at, monotonic() - self.moved)
        for rank in [rank for rank, child in list(self.children.items()) if child.poll() is not None]:
            self.blame(LOST, [rank], WORDLESS)
        others = {rank: (what, at, age + now - peer.heard) for rank, peer in list(self.peers.items()) for what, at, age in [peer.state]}
        busy = {rank: state for rank, state in {0: own, **others}.items() if state[0]}
        what, at, _ = min(busy.values(), key=lambda state: state[1], default=own)
        limit = self.patience * (15 if what == "loading" else 1)
        if busy and min(age for *_, age in busy.values()) > limit:
            last = [rank for rank, state in busy.items() if state[1] == at]
            self.blame(LOST, last, f"hangs in {what}: no rank has moved for {limit:g} s")
        if self.causes and now - self.since > (0.5 if min(self.causes)[0] < BROKEN else 3):
            self._end(*min(self.causes))

    def _end(self, kind, ranks, text):
        if text == WORDLESS and ranks[0] in self.children:
            text = self.children[ranks[0]].status() or text
        named = ranks != [0] or kind != REFUSED or text.startswith("out of memory")
        self.error = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: " * named + text
        self.disband()
        self.over.set()
        run(self.abort)
        until = monotonic() + self.patience / 4
        while self.what and monotonic() < until:
            sleep(0.05)
        if self.what:
            die(self.error)

    def disband(self):
        """Nobody is left: the connections end, with them the ranks that still can, then the others."""
        for peer in self.peers.values():
            with suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)
        sleep(0.3 * (not self.children))
        for rank, peer in self.peers.items():
            if rank not in self.children:
                _kill(rank, peer.pid)
        for child in self.children.values():
            child.kill()

    def close(self):
        """Rank 0: all others end, as they should."""
        if not self.over.is_set():
            self.over.set()
            for peer in self.peers.values():
                peer.send("do", "close")
            until = monotonic() + 5
            while monotonic() < until and any(child.poll() is None for child in self.children.values()):
                sleep(0.01)
            for child in self.children.values():
                child.kill()
            self.abort()


def _kill(rank, pid):
    """Ends a rank of torchrun that is on this host and still there: a stopped one would have 30 s from torchrun."""
    with suppress(OSError, ValueError):
        if {f"RANK={rank}", f"MASTER_PORT={os.environ['MASTER_PORT']}"} <= set(Path(f"/proc/{pid}/environ").read_text().split("\0")):
            os.kill(pid, signal.SIGKILL)
