"""Our TLS star against gRPC with mutual TLS and against bare TLS sockets, in one run.

Each round the primary announces 128 row ids to every secondary, and each answers with an array of
int64 words, as in SplitAvg. Every party is a process of its own, all variants are connected at
the same time and take turns; figures are medians over the turns, CPU is that of all processes.
Ratios between variants are what counts: absolute times depend on the machine and its load.

Run: ``python research/transport/transport.py [--secondaries 4] [--json]`` (needs grpcio, the extra
``bench``). The BoringSSL inside gRPC refuses Ed25519 certificates (no common signature
algorithms), so its parties have P-256 ones of an authority. All variants run with freed memory
kept (securevfl.core.memory); ``--default-malloc`` shows what that is worth.
"""

import argparse
import datetime
import ipaddress
import json
import queue
import resource
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from securevfl.core.memory import keep_freed_memory
from securevfl.federation.messages import RoundKind
from securevfl.launch.spawn import reserved_port
from securevfl.linkage.stage.messages import LinkingKind
from securevfl.transport.connection import tls_context
from securevfl.transport.identity import Identity, provision, public_text
from securevfl.transport.message import Message, StarKind
from securevfl.transport.star import PrimaryTransport, SecondaryTransport, new_session

WAIT_S = 60.0
ROWS = np.arange(128, dtype=np.int64)
METHOD = "/star/exchange"
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
VARIANTS = ("ours", "grpc_mtls", "raw_tls")
# Words of a share: a small message, and SplitAvg's at 640,000 elements in two lanes.
SIZES = {"1 kB": 128, "2.56 MB": 320_000}

Round = Callable[[int], int]
"""At the primary: run one round with shares of so many words, return a checksum."""


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# --- the primary's side of each variant ---


def ours_round(transport: PrimaryTransport, counter: Iterator[int]) -> Round:
    def run(words: int) -> int:
        number = next(counter)
        plan = Message(kind=RoundKind.PLAN, round_number=number, tensors={"rows": ROWS})
        transport.broadcast(transport.secondaries, plan)
        return sum(
            int(message.tensor("words", dtype="int64", shape=(words,))[-1])
            for message in transport.receive_each(
                transport.secondaries, RoundKind.SHARE, round_number=number, deadline_s=WAIT_S
            )
        )

    return run


class GrpcStar:
    """One call a round and secondary: the share goes up, the next announcement comes down."""

    def __init__(self, folder: Path, names: list[str], port: int) -> None:
        self.plans = {name: queue.SimpleQueue[bytes]() for name in names}
        self.shares: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.server = grpc.server(ThreadPoolExecutor(len(names) + 1), options=UNLIMITED)
        handler = grpc.unary_unary_rpc_method_handler(self._exchange)
        self.server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("star", {"exchange": handler})]
        )
        credentials = grpc.ssl_server_credentials(
            [((folder / "agency.key").read_bytes(), (folder / "agency.pem").read_bytes())],
            root_certificates=(folder / "ca.pem").read_bytes(),
            require_client_auth=True,
        )
        self.server.add_secure_port(f"127.0.0.1:{port}", credentials)
        self.server.start()

    def _exchange(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        name = context.auth_context()["x509_common_name"][0].decode()
        self.shares.put(request)
        return self.plans[name].get(timeout=WAIT_S)

    def collect(self) -> int:
        """Take one share of every secondary."""
        arrived = (self.shares.get(timeout=WAIT_S) for _ in self.plans)
        return sum(int(np.frombuffer(raw, dtype=np.int64)[-1]) for raw in arrived)

    def announce(self) -> None:
        """Answer every secondary's call."""
        for waiting in self.plans.values():
            waiting.put(ROWS.tobytes())

    def run(self, _words: int) -> int:
        """Run one round."""
        self.announce()
        return self.collect()


class RawStar:
    """Blocking TLS sockets, read one after the other: what the wire itself costs."""

    def __init__(self, context: ssl.SSLContext, port: int, count: int) -> None:
        self.connections = []
        with socket.create_server(("127.0.0.1", port)) as listener:
            for _ in range(count):
                raw, _ = listener.accept()
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.connections.append(context.wrap_socket(raw, server_side=True))

    def run(self, words: int) -> int:
        """Run one round."""
        for connection in self.connections:
            connection.sendall(ROWS.data.cast("B"))
        return sum(int(receive_words(connection, words)[-1]) for connection in self.connections)


def receive_words(connection: ssl.SSLSocket, words: int) -> np.ndarray:
    array = np.empty(words, dtype=np.int64)
    rest = array.data.cast("B")
    while rest:
        rest = rest[connection.recv_into(rest) :]
    return array


# --- a secondary: answers whatever the control message asks for ---


def serve_secondary(folder: Path, name: str, ports: list[int]) -> None:
    identity = Identity.load(folder / name, name)
    pinned = {peer: public_text(c) for peer, c in identity.trusted.items()}
    ranks = {peer: rank for rank, peer in enumerate(sorted(pinned))}
    transport = SecondaryTransport(("127.0.0.1", ports[0]), identity, pinned, ranks)
    with transport, ExitStack() as stack:
        transport.connect(WAIT_S)
        exchange = stack.enter_context(grpc_client(folder, name, ports[1]))
        raw = stack.enter_context(raw_client(identity, ports[2]))
        while True:
            order = transport.receive(
                (RoundKind.EPOCH, StarKind.DONE), round_number=None, deadline_s=WAIT_S
            )
            if order.kind is StarKind.DONE:
                return
            words = np.full(order.figure("words", int), 1, dtype=np.int64)
            started = cpu_s()
            answer(order, words, transport, exchange, raw)
            spent = {"cpu_s": cpu_s() - started}
            transport.send(Message(kind=LinkingKind.LINKED, meta=spent))


def answer(
    order: Message,
    words: np.ndarray,
    transport: SecondaryTransport,
    exchange: Callable[..., bytes],
    raw: ssl.SSLSocket,
) -> None:
    variant, rounds = order.figure("variant", str), order.figure("rounds", int)
    if variant == "grpc_mtls":
        for _ in range(rounds + 1):  # the first answer only brings the first announcement
            exchange(words.tobytes(), timeout=WAIT_S)
        return
    for _ in range(rounds):
        if variant == "raw_tls":
            receive_words(raw, len(ROWS))
            raw.sendall(words.data.cast("B"))
        else:
            plan = transport.receive(RoundKind.PLAN, round_number=None, deadline_s=WAIT_S)
            transport.send(
                Message(
                    kind=RoundKind.SHARE,
                    round_number=plan.round_number,
                    tensors={"words": words},
                ),
                owned=True,
            )


@contextmanager
def grpc_client(folder: Path, name: str, port: int) -> Iterator[Callable[..., bytes]]:
    credentials = grpc.ssl_channel_credentials(
        (folder / "ca.pem").read_bytes(),
        (folder / f"{name}.key").read_bytes(),
        (folder / f"{name}.pem").read_bytes(),
    )
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options=UNLIMITED) as channel:
        grpc.channel_ready_future(channel).result(timeout=WAIT_S)
        yield channel.unary_unary(METHOD)


def connected(port: int) -> socket.socket:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@contextmanager
def raw_client(identity: Identity, port: int) -> Iterator[ssl.SSLSocket]:
    context = tls_context(identity, ["agency"], server=False)
    raw = connected(port)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with context.wrap_socket(raw) as connection:
        yield connection


# --- the measurement ---


def make_p256_identities(folder: Path, names: list[str]) -> None:
    """Write a certificate authority and one certificate a party, as gRPC's users have them."""
    now = datetime.datetime.now(datetime.UTC)
    authority = ec.generate_private_key(ec.SECP256R1())

    def certify(name: str, key: ec.EllipticCurvePrivateKey, *, ca: bool) -> x509.Certificate:
        common = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        host = x509.DNSName("localhost")
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        return (
            x509.CertificateBuilder()
            .subject_name(common)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([host, address]), critical=False)
            .sign(authority, hashes.SHA256())
        )

    pem = serialization.Encoding.PEM
    (folder / "ca.pem").write_bytes(certify("authority", authority, ca=True).public_bytes(pem))
    for name in names:
        key = ec.generate_private_key(ec.SECP256R1())
        (folder / f"{name}.pem").write_bytes(certify(name, key, ca=False).public_bytes(pem))
        (folder / f"{name}.key").write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )


def measure(count: int, *, turns: int, rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return wall and CPU milliseconds a round, by size and variant."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        parties = ["agency", *(f"party{rank}" for rank in range(1, count + 1))]
        pinned = provision(parties, folder, valid_days=1)
        make_p256_identities(folder, parties)
        ports = [stack.enter_context(reserved_port()) for _ in VARIANTS]
        identity = Identity.load(folder / "agency", "agency")
        ranks = {party: rank for rank, party in enumerate(parties)}
        transport = stack.enter_context(
            PrimaryTransport(("127.0.0.1", ports[0]), identity, pinned, new_session(), ranks)
        )
        transport.listen()
        star = GrpcStar(folder, parties[1:], ports[1])
        stack.callback(star.server.stop, None)
        for party in parties[1:]:
            arguments = [*sys.argv, "--serve", name, party, *map(str, ports)]
            process = stack.enter_context(subprocess.Popen([sys.executable, *arguments]))
            stack.callback(process.kill)
        raw = RawStar(tls_context(identity, parties[1:], server=True), ports[2], count)
        transport.wait_for_parties(WAIT_S)
        counter = iter(range(1, 1 << 62))
        runs: dict[str, Round] = {
            "ours": ours_round(transport, counter),
            "grpc_mtls": star.run,
            "raw_tls": raw.run,
        }
        result = {
            size: take_turns(transport, star, runs, words, turns=turns, rounds=rounds)
            for size, words in SIZES.items()
        }
        transport.broadcast(transport.secondaries, Message(kind=StarKind.DONE))
        return result


def take_turns(
    transport: PrimaryTransport,
    star: GrpcStar,
    runs: dict[str, Round],
    words: int,
    *,
    turns: int,
    rounds: int,
) -> dict[str, dict[str, float]]:
    walls: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    cpus: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for turn in range(turns + 1):
        for variant in VARIANTS:
            order = {"variant": variant, "words": words, "rounds": rounds}
            cpu = cpu_s()
            transport.broadcast(transport.secondaries, Message(kind=RoundKind.EPOCH, meta=order))
            if variant == "grpc_mtls":
                star.collect()  # a call brings its share first, and takes the announcement back
            started = time.perf_counter()
            for _ in range(rounds):
                assert runs[variant](words) == len(transport.secondaries)
            wall = time.perf_counter() - started
            if variant == "grpc_mtls":
                star.announce()
            reports = transport.receive_each(
                transport.secondaries, LinkingKind.LINKED, round_number=0, deadline_s=WAIT_S
            )
            others = sum(report.figure("cpu_s", float) for report in reports)
            if turn:  # the first turn warms up
                walls[variant].append(1e3 * wall / rounds)
                # gRPC sends one share more than there are rounds.
                sent = rounds + (variant == "grpc_mtls")
                cpus[variant].append(1e3 * (cpu_s() - cpu + others) / sent)
    return {
        variant: {
            "wall_ms": round(statistics.median(walls[variant]), 3),
            "cpu_ms": round(statistics.median(cpus[variant]), 3),
        }
        for variant in VARIANTS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--secondaries", type=int, default=4)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=10, help="rounds a turn")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--default-malloc", action="store_true", help="as a plain process has it")
    options = parser.parse_args()
    if not options.default_malloc:
        keep_freed_memory()
    if options.serve:
        folder, name, *ports = options.serve
        serve_secondary(Path(folder), name, [int(port) for port in ports])
        return
    result = measure(options.secondaries, turns=options.turns, rounds=options.rounds)
    if options.json:
        print(json.dumps({"secondaries": options.secondaries, "sizes": result}))
        return
    print(f"{options.secondaries} secondaries, milliseconds a round (ratio to gRPC)")
    print(f"{'share':>8} {'variant':>10} {'wall':>16} {'CPU of all':>16}")
    for size, variants in result.items():
        base = variants["grpc_mtls"]
        for variant, figures in variants.items():
            cells = "".join(
                f"{figures[unit]:9.2f} ({figures[unit] / base[unit]:4.2f})"
                for unit in ("wall_ms", "cpu_ms")
            )
            print(f"{size:>8} {variant:>10} {cells}")


if __name__ == "__main__":
    main()
