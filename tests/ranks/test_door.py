"""The door that a rank keeps, and the handshake at it: frames, proofs, strangers, and the key file."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import selectors
import socket
import stat
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from garbage import SEED, garbage

from pplx_comm.control import door as _door
from pplx_comm.control import handshake as _handshake
from pplx_comm.control import secret as _secret
from pplx_comm.control.connecting import NotReached, connect
from pplx_comm.control.door import Door
from pplx_comm.control.frames import HEADER, LIMIT, MAGIC, VERSION, FrameError, FrameReader, Kind, decode_object, frame, json_frame
from pplx_comm.control.handshake import ClientSide, Identity, WrongKey, derive_key
from pplx_comm.control.sockets import Address, listen_unix
from pplx_comm.errors import Error


def test_frames_under_garbage() -> None:
    """A reader gives whole allowed frames or FrameError, whatever comes in whatever pieces, and never keeps much."""
    rng = random.Random(SEED)
    for _ in range(3000):
        reader = FrameReader(_handshake.FROM_CLIENT)
        data = b"".join(garbage(rng) for _ in range(rng.randrange(1, 4)))
        with contextlib.suppress(FrameError):
            while data:
                cut = rng.randrange(1, len(data) + 1)
                for kind, payload in reader.feed(data[:cut]):
                    assert kind in _handshake.FROM_CLIENT
                    assert len(payload) <= LIMIT[kind]
                    decode_object(payload)
                data = data[cut:]
        assert len(reader._data) < 20_000, f"seed {SEED}"


def test_frames_are_whole_however_they_are_cut() -> None:
    frames = [(Kind.HELLO, b"a" * 1000), (Kind.PROOF, b""), (Kind.HELLO, b"b")]
    data = b"".join(frame(kind, payload) for kind, payload in frames)
    for step in (1, 7, len(data)):
        reader = FrameReader(_handshake.FROM_CLIENT)
        assert [got for at in range(0, len(data), step) for got in reader.feed(data[at : at + step])] == frames
    for bad in (b"QPLX" + data[4:], data[:4] + b"\x09" + data[5:], frame(Kind.GATHER, b"")):
        with pytest.raises(FrameError):
            list(FrameReader(_handshake.FROM_CLIENT).feed(bad))
    with pytest.raises(FrameError, match="over its limit"):
        list(FrameReader(_handshake.FROM_CLIENT).feed(HEADER.pack(MAGIC, VERSION, Kind.HELLO, 0, 1025)))
    with pytest.raises(Error, match="larger than its limit"):
        frame(Kind.HELLO, b"x" * 1025)


class _House:
    """A door with a thread that keeps it."""

    def __init__(self, me: Identity, **options: float) -> None:
        self.name = f"pplx_comm-test-{os.getpid()}-{random.SystemRandom().randrange(1 << 40)}"
        self.inside: dict[int, socket.socket] = {}
        self.first_words = b""
        self._selector = selectors.DefaultSelector()
        self.door = Door(
            self._selector,
            [listen_unix(self.name)],
            me,
            may_come=lambda rank: "here already" if rank in self.inside else None,
            came=self._came,
            **options,
        )
        self._stop = False
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()

    def _came(self, sock: socket.socket, rank: int) -> None:
        if self.first_words:
            sock.send(self.first_words)
        self.inside[rank] = sock

    def _keep(self) -> None:
        while not self._stop:
            for key, mask in self._selector.select(0.01):
                key.data(mask)
            self.door.expire()

    def wait_for(self, ranks: list[int]) -> None:
        """WELCOME is sent just before a guest counts as inside."""
        deadline = time.monotonic() + 5
        while sorted(self.inside) != ranks and time.monotonic() < deadline:
            time.sleep(0.001)
        assert sorted(self.inside) == ranks

    def call(self, me: Identity, server: int = 0) -> socket.socket:
        return connect([self.name], me, server, 5)

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(5)
        sock.connect("\0" + self.name)
        return sock

    def close(self) -> None:
        self._stop = True
        self._thread.join()
        self.door.close()
        self._selector.close()
        for sock in self.inside.values():
            sock.close()


HOST = Identity("mesh", b"k" * 32, 0, 4, "job")


@pytest.fixture
def house(request: pytest.FixtureRequest) -> Iterator[_House]:
    house = _House(HOST, **getattr(request, "param", {}))
    yield house
    house.close()


def _guest(**changes: Any) -> Identity:
    return Identity(**{**HOST.__dict__, "rank": 1, **changes})


def test_handshake(house: _House) -> None:
    with house.call(_guest()) as sock:
        assert sock.gettimeout() is None
    with pytest.raises(NotReached, match="here already"):
        house.call(_guest())
    house.call(_guest(rank=3)).close()
    house.wait_for([1, 3])


def test_handshake_leaves_what_follows_it(house: _House) -> None:
    """A rank may send as soon as it has let another in. A handshake that read on would swallow it, and descriptors."""
    house.first_words = b"first words"
    for rank in (1, 2, 3):
        with house.call(_guest(rank=rank)) as sock:
            sock.settimeout(5)
            assert sock.recv(100) == b"first words"


@pytest.mark.parametrize(
    ("changes", "problem", "words"),
    [
        ({"key": b"x" * 32}, WrongKey, "does not know this job's secret"),
        ({"purpose": "rendezvous"}, WrongKey, "does not know this job's secret"),
        ({"job": "other"}, NotReached, "another job"),
        ({"world_size": 5}, WrongKey, "world size 4"),
    ],
)
def test_handshake_refuses(house: _House, changes: dict[str, Any], problem: type[Exception], words: str) -> None:
    with pytest.raises(problem, match=words):
        house.call(_guest(**changes))
    assert not house.inside


def test_a_server_that_is_another_rank_says_so(house: _House) -> None:
    with pytest.raises(NotReached, match="rank 0 of this job listens here, not rank 2"):
        house.call(_guest(), server=2)


def test_jobs_of_two_launchers_are_told_apart() -> None:
    """Nothing names them, and address and secret are the same. A launcher's process means something on one host only."""
    here = Identity(**{**HOST.__dict__, "launcher": ("this host", "7@1")})
    house = _House(here)
    try:
        with pytest.raises(NotReached, match=r"another launcher process started.*PPLX_COMM_JOB"):
            house.call(_guest(launcher=("this host", "8@1")))
        assert not house.inside
        house.call(_guest(launcher=("this host", "7@1"))).close()
        house.call(_guest(rank=2, launcher=("another host", "8@1"))).close()
        house.wait_for([1, 2])
    finally:
        house.close()


def _reject(sock: socket.socket) -> None:
    """As another job's rank answers."""
    sock.recv(4096)
    sock.sendall(json_frame(Kind.REJECT, {"reason": "planted", "final": True}))


@pytest.fixture
def strangers() -> Iterator[list[Address]]:
    """Listeners of strangers: one answers as another job's rank does, one talks nonsense, one says nothing."""
    with contextlib.ExitStack() as cleanup:
        addresses: list[Address] = []
        for talk in (_reject, lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), lambda sock: sock.recv(4096)):
            listener = cleanup.enter_context(socket.create_server(("127.0.0.1", 0)))
            addresses.append(("127.0.0.1", int(listener.getsockname()[1])))

            def serve(listener: socket.socket = listener, talk: Any = talk) -> None:
                with contextlib.suppress(OSError):
                    while True:
                        sock, _ = listener.accept()
                        cleanup.callback(sock.close)
                        talk(sock)

            thread = threading.Thread(target=serve)
            thread.start()
            cleanup.callback(thread.join)
            cleanup.callback(listener.shutdown, socket.SHUT_RDWR)
        yield addresses


def test_strangers_at_some_addresses_of_a_rank(house: _House, strangers: list[Address]) -> None:
    """An address that many hosts have (a container bridge's) leads each caller to the listener on its own host."""
    for rank, addresses in enumerate(itertools.permutations([*strangers, house.name]), 1):
        began = time.monotonic()
        connect(addresses, _guest(rank=1 + rank % 3), 0, 20).close()
        assert time.monotonic() - began < 5, addresses
        house.wait_for([1 + rank % 3])
        house.inside.popitem()[1].close()


def test_no_address_leads_to_the_rank(house: _House, strangers: list[Address]) -> None:
    """Each address's own answer is told."""
    reject, nonsense, silent = strangers
    with pytest.raises(NotReached) as told:
        connect([reject, nonsense, silent, house.name], _guest(job="other"), 0, 2.0)
    assert f"{reject[0]}:{reject[1]}: planted" in told.value.answers
    assert f"{nonsense[0]}:{nonsense[1]}: it does not answer like a rank" in told.value.answers
    assert f"{silent[0]}:{silent[1]}: no answer" in told.value.answers
    assert f"@{house.name}: another job listens here" in told.value.answers
    assert told.value.strangers == 1
    with pytest.raises(WrongKey, match="planted"):
        connect([reject, reject], _guest(), 0, 5)


def _converse(sock: socket.socket, message: bytes) -> tuple[Kind, dict[str, Any]] | None:
    sock.sendall(message)
    reader = FrameReader(_handshake.FROM_SERVER)
    while data := sock.recv(4096):
        for kind, payload in reader.feed(data):
            return kind, decode_object(payload)
    return None


def _hello(nonce: str = "0" * 32, rank: int = 1) -> bytes:
    return json_frame(Kind.HELLO, {"rank": rank, "wants": 0, "world": 4, "job": HOST.job_digest, "nonce": nonce})


def test_a_stranger_learns_nothing_to_guess_a_secret_with(house: _House) -> None:
    """Until it has proved that it knows the secret, the server says nothing that depends on it."""
    with house.connect() as sock:
        answer = _converse(sock, _hello())
        assert answer is not None
        assert answer[0] == Kind.CHALLENGE
        assert set(answer[1]) == {"nonce"}
        refused = _converse(sock, json_frame(Kind.PROOF, {"proof": "0" * 64}))
        assert refused is not None
        assert (refused[0], set(refused[1])) == (Kind.REJECT, {"reason", "final"})


def test_a_server_that_cannot_prove_itself_is_left() -> None:
    client = ClientSide(_guest(), 0)
    client.receive(json_frame(Kind.CHALLENGE, {"nonce": "0" * 32}))
    with pytest.raises(WrongKey):
        client.receive(json_frame(Kind.WELCOME, {"proof": "0" * 64}))
    assert not client.welcome


def test_proofs_are_good_once_and_one_way(house: _House) -> None:
    """The server's own proof, another rank's, and one of an earlier conversation open nothing."""
    with house.connect() as sock:
        answer = _converse(sock, _hello())
        assert answer is not None
        nonces = ("0" * 32, answer[1]["nonce"])
        old = (_guest().proof("client", 1, 0, nonces), answer[1]["nonce"])
        reflected = _converse(sock, json_frame(Kind.PROOF, {"proof": HOST.proof("server", 1, 0, nonces)}))
        assert reflected is not None
        assert reflected[0] == Kind.REJECT
    with house.connect() as sock:
        answer = _converse(sock, _hello())
        assert answer is not None
        assert answer[1]["nonce"] != old[1]
        replayed = _converse(sock, json_frame(Kind.PROOF, {"proof": old[0]}))
        assert replayed is not None
        assert replayed[0] == Kind.REJECT
    with house.connect() as sock:
        answer = _converse(sock, _hello(rank=2))
        assert answer is not None
        other = _guest().proof("client", 1, 0, ("0" * 32, answer[1]["nonce"]))
        refused = _converse(sock, json_frame(Kind.PROOF, {"proof": other}))
        assert refused is not None
        assert refused[0] == Kind.REJECT
    assert not house.inside


def test_proof_before_hello_and_two_hellos(house: _House) -> None:
    for messages in (json_frame(Kind.PROOF, {"proof": "0" * 64}), _hello() + _hello()):
        with house.connect() as sock:
            sock.sendall(messages)
            reader, kinds = FrameReader(_handshake.FROM_SERVER), []
            while data := sock.recv(4096):
                kinds += [kind for kind, _ in reader.feed(data)]
            assert kinds[-1] == Kind.REJECT
    assert not house.inside


@pytest.mark.parametrize("house", [{"patience": 0.3}], indirect=True, ids=["impatient"])
def test_slow_guests_are_shown_out(house: _House) -> None:
    with house.connect() as slow:
        began = time.monotonic()
        slow.sendall(_hello()[:5])
        assert slow.recv(100) == b""
        assert 0.2 < time.monotonic() - began < 15
    assert house.door.refused == {"too slow": 1}


def test_a_crowd_of_silent_guests_keeps_no_rank_out(house: _House) -> None:
    with contextlib.ExitStack() as crowd:
        for _ in range(_door.MOST_GUESTS + 100):
            crowd.enter_context(house.connect())
        with house.call(_guest()):
            assert house.door.refused["too many connections"] >= 100
            house.wait_for([1])


def test_a_door_may_close_while_a_guest_is_heard() -> None:
    """One select() may report both the reason to close the door and a guest's next words."""
    ours, theirs = socket.socketpair()
    with selectors.DefaultSelector() as selector, ours, theirs:
        name = f"pplx_comm-test-{uuid.uuid4().hex}"
        door = Door(selector, [listen_unix(name)], HOST, may_come=lambda rank: None, came=lambda sock, rank: None)
        with socket.socket(socket.AF_UNIX) as guest:
            guest.connect("\0" + name)
            for key, mask in selector.select(5):
                key.data(mask)  # comes in
            guest.sendall(_hello())
            selector.register(ours, selectors.EVENT_READ, lambda _: door.close())
            theirs.send(b"close")
            while len(events := selector.select(5)) < 2:
                pass
            for key, mask in sorted(events, key=lambda event: event[0].fileobj is not ours):
                key.data(mask)
            with pytest.raises(ConnectionResetError):  # its words were left unread
                guest.recv(100)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_is_turned_away(house: _House) -> None:
    code = (
        "import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
        f"s.connect('\\0{house.name}'); s.settimeout(5); print(s.recv(9))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=20)
    assert run.stdout == "b''\n"
    assert any("uid 65534" in reason for reason in house.door.refused)


def test_almost_right_messages_at_the_door(house: _House) -> None:
    """With the right job in the HELLO, so that every field of every message is reached."""
    rng = random.Random(SEED)
    proofs = ["0" * 64, "", "\ud800", "\0", "\n", "x" * 900, 7, None, True, [], {}]
    ranks = [1, 2, 3, 1, 2, 3, 0, 4, -1, 10**30, True, None, "1", 1.5]
    for _ in range(400):
        hello = {
            "rank": rng.choice(ranks),
            "wants": rng.choice([0, 0, 0, 0, 0, *ranks]),
            "world": rng.choice([4, 4, 4, 4, 4, 5, "4", None]),
            "job": HOST.job_digest,
            "nonce": rng.choice([*["0" * 32] * 6, "\ud800" * 32, "0" * 31, "\n" * 32, 7]),
        }
        with house.connect() as sock, contextlib.suppress(ConnectionError):
            answer = _converse(sock, json_frame(Kind.HELLO, hello))
            if answer is not None and answer[0] == Kind.CHALLENGE:
                answer = _converse(sock, json_frame(Kind.PROOF, {"proof": rng.choice(proofs)}))
            assert answer is None or answer[0] == Kind.REJECT, f"seed {SEED}"
    house.call(_guest()).close()
    house.wait_for([1])


def test_session_keys() -> None:
    assert len({derive_key(key, nonce) for key in (b"a", b"b") for nonce in ("1", "2")}) == 4


def _home(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path / "gone")}


def test_key_file(tmp_path: Path) -> None:
    key = _secret.user_key(_home(tmp_path))
    assert len(key) == 64
    assert _secret.user_key(_home(tmp_path)) == key
    path = tmp_path / ".cache/pplx_comm/key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["key"]


def test_key_file_made_by_many_at_once(tmp_path: Path) -> None:
    keys: list[bytes] = []
    start = threading.Barrier(16)

    def make() -> None:
        start.wait()
        keys.append(_secret.user_key(_home(tmp_path)))

    threads = [threading.Thread(target=make) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 16
    assert len(set(keys)) == 1


@pytest.mark.parametrize("spoil", ["mode", "owner", "link", "short", "folder"])
def test_key_file_that_others_could_touch(spoil: str, tmp_path: Path) -> None:
    path = tmp_path / ".cache/pplx_comm/key"
    key = _secret.user_key(_home(tmp_path))
    if spoil == "mode":
        path.chmod(0o644)
    elif spoil == "owner":
        if os.geteuid() != 0:
            pytest.skip("needs root")
        os.chown(path, 65534, 65534)
    elif spoil == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif spoil == "short":
        path.write_text("abc")
    else:
        path.parent.chmod(0o777)
    if spoil == "link":
        # Not followed; the next place is taken.
        assert _secret.user_key(_home(tmp_path)) != key
    else:
        with pytest.raises(Error, match="remove it, or export PPLX_COMM_SECRET"):
            _secret.user_key(_home(tmp_path))
