"""Ranks as processes: how they start.

Rank 0 is the user's process. The others are started by it on its host, or all by torchrun on one host or several; either way a rank
above 0 runs `Engine()`, which mirrors what rank 0's engine does (mirror.py) and never returns.
"""
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from time import monotonic

from minispec.errors import MinispecError
from minispec.watch import Peer, Team, die, explain, run

JOIN = 300          # seconds in which every rank must have come up: importing torch from a cold network disk takes minutes
# until a rank has its connection, rank 0's end is the end of a pipe that it holds
CODE = """import json, os, sys, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
sys.path[:] = json.loads(sys.argv[1])
from minispec.engine import Engine
Engine()"""


def environment():
    """(rank, size, local rank) in a process that torchrun, or another launcher with its variables, started; else None."""
    found = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR")}
    if not all(found.values()):
        return None
    rank, size, local, port = numbers = [int(text) if text.isdecimal() else -1 for text in list(found.values())[:4]]
    if min(numbers) < 0 or rank >= size or port >= 2**16:
        raise MinispecError(f"{' '.join(f'{name}={text}' for name, text in found.items())}: no such rank can be; unset these variables, or "
                            "start with torchrun, which sets them")
    return rank, size, local


def size_of(tensor_parallel):
    """Ranks of an engine: as asked, else torchrun's, else 1. MinispecError where the two disagree."""
    size, world = tensor_parallel, environment()
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= 1024):
        raise MinispecError(f"tensor_parallel must be a whole number from 1 to 1024, not {size!r}")
    if world and size not in (None, world[1]):
        raise MinispecError(f"tensor_parallel={size}, but torchrun started {world[1]} ranks (WORLD_SIZE); leave it out, or start {size}")
    return world[1] if world else size or 1


class Child(subprocess.Popen):
    """A rank that this process starts, in a session of its own: a terminal's Ctrl-C and Ctrl-Z are rank 0's to act on."""

    def __init__(self, rank, size, port, threads=1):
        self.log, self.killed = tempfile.TemporaryFile(), oom_kills()
        here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {"OMP_NUM_THREADS": str(threads)} | os.environ | {name: str(value) for name, value in here.items()}
        super().__init__([sys.executable, "-c", CODE, json.dumps(sys.path)], env=environment,
                         stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self.log, start_new_session=True)

    def status(self):
        """Why it ended; None while it runs."""
        if (code := self.poll()) is None:
            return None
        if code < 0:
            memory = ": the kernel was out of memory" * (code == -signal.SIGKILL and oom_kills() > self.killed)
            return f"killed by signal {-code} ({signal.Signals(-code).name}){memory}"
        self.log.seek(0)
        said = self.log.read().decode(errors="replace").split("\n")
        return f"ended with status {code}: {next(filter(None, map(str.strip, said[::-1])), 'no message')}"

    def kill(self):
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)     # with the compilers that it may have started
            self.wait()


def oom_kills():
    """Processes that the kernel has killed for memory since it started; 0 where it does not say."""
    file = Path("/proc/vmstat")
    return int(dict(line.split() for line in file.read_text().splitlines()).get("oom_kill", 0)) if file.is_file() else 0


def store_of(rank, size):
    from torch.distributed.rendezvous import rendezvous

    try:
        return next(rendezvous("env://", rank, size, timeout=timedelta(seconds=JOIN)))[0]
    except (RuntimeError, ValueError) as error:
        raise MinispecError(f"the ranks cannot meet at MASTER_ADDR={os.environ['MASTER_ADDR']} MASTER_PORT={os.environ['MASTER_PORT']}: "
                            f"{str(error).partition(chr(10))[0]}") from error


def start(size, patience, options):
    """Rank 0: brings the other ranks up and gives them the engine's options -> Team, as the context of loading. None for a single rank."""
    if size == 1:
        return None
    from torch import get_num_threads, set_num_threads
    from torch.distributed import TCPStore

    world, token, until = environment(), secrets.token_hex(16), monotonic() + JOIN
    store = store_of(0, size) if world else TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=JOIN))
    if store.add("minispec/engines", 1) > 1:
        raise MinispecError("a run of torchrun has one engine, and this one has had it: start it again, or let tensor_parallel start the ranks")
    team, main = Team(0, size, world[2] if world else 0, store, patience), threading.current_thread() is threading.main_thread()
    if world and main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: _terminated(team))
    run(team.watch)
    dual = bool(world) and socket.has_dualstack_ipv6()
    listener = socket.create_server(("" if world else "127.0.0.1", 0), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual)
    with team, listener:
        store.set("minispec/rank 0", json.dumps([listener.getsockname()[1], token, patience, os.getpid()]))
        listener.settimeout(0.1)
        if not world:           # torchrun has seen to the threads; here the ranks share the cores
            set_num_threads(min(get_num_threads(), max(1, (os.cpu_count() or 1) // size)))
            for rank in range(1, size):
                team.children[rank] = Child(rank, size, store.port, get_num_threads())
        while len(team.peers) < size - 1:
            team.check()
            with suppress(TimeoutError):
                run(_greet, team, listener.accept()[0], token)
            if monotonic() > until:
                raise MinispecError(f"ranks {sorted({*range(1, size)} - {*team.peers})}: not there {JOIN} s after rank 0")
    return team.tell("loading", options)


def _greet(team, connection, token):
    """The thread of a connection: listens to a rank that knows the token, is deaf to anyone else."""
    peer = Peer(connection, team.patience / 2)
    with suppress(OSError, ValueError, TypeError):
        given, rank, peer.pid = json.loads(peer.lines.readline())
        if given == token:
            team.peers[rank] = peer
            return team.listen(rank, peer)
    connection.close()


def _terminated(team):
    """torchrun ends all ranks as soon as one has ended: rank 0 first says which. Where its main thread is about to, that is done."""
    team.over.wait(4)
    if team.error and not team.told:
        die(team.error)
    elif not team.error:
        os._exit(128 + signal.SIGTERM)


def join():
    """A rank above 0: finds rank 0 -> Team, whose first command holds the options of the engine, and in whose context exceptions go to rank 0."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    rank, size, local = environment()
    try:
        store = store_of(rank, size)
        port, token, patience, pid = json.loads(store.get("minispec/rank 0"))
        connection = socket.create_connection((os.environ["MASTER_ADDR"], port), JOIN)
    except (RuntimeError, ValueError, OSError) as error:        # the command line of this rank is mute
        die(f"rank {rank}: {explain(error)[1]}")
    team = Team(rank, size, local, store, patience)
    peer = team.peers[0] = Peer(connection, patience / 2)
    peer.pid = pid
    peer.send(token, rank, os.getpid())
    run(team.listen, 0, peer)
    run(team.watch)
    return team
