"""Bytes that this process has sent and received over TCP, as the kernel counts them."""

import os
import socket
import stat
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from securevfl.core.errors import ConfigError

# Offsets in Linux's struct tcp_info (include/uapi/linux/tcp.h), stable since 4.19.
_BYTES_RECEIVED_AT: Final = 128
_BYTES_SENT_AT: Final = 200
_TCP_INFO_BYTES: Final = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes over all open TCP sockets of a process."""

    sent: int
    received: int

    def since(self, earlier: "Traffic") -> "Traffic":
        """Return what was added after ``earlier``."""
        return Traffic(sent=self.sent - earlier.sent, received=self.received - earlier.received)


def own_traffic() -> Traffic:
    """Add up the counters of every TCP socket that this process has open, TLS's own included.

    Raises:
        ConfigError: On systems other than Linux.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigError("bytes are counted by Linux's TCP_INFO, which this system lacks")
    sent = received = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            descriptor = os.dup(int(entry.name))
        except OSError:
            continue  # The listing's own descriptor is closed by now.
        try:
            counters = _tcp_counters(descriptor)
        finally:
            os.close(descriptor)
        sent += counters[0]
        received += counters[1]
    return Traffic(sent=sent, received=received)


def _tcp_counters(descriptor: int) -> tuple[int, int]:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return 0, 0
    with socket.socket(fileno=os.dup(descriptor)) as link:
        if link.family not in (socket.AF_INET, socket.AF_INET6) or link.type != socket.SOCK_STREAM:
            return 0, 0
        info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _BYTES_SENT_AT + 8:
        raise ConfigError("this kernel's TCP_INFO does not count bytes sent; it is older than 4.19")
    (sent,) = struct.unpack_from("<Q", info, _BYTES_SENT_AT)
    (received,) = struct.unpack_from("<Q", info, _BYTES_RECEIVED_AT)
    return sent, received
