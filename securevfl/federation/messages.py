"""The kinds of message of a session's beginning and of its rounds."""

from securevfl.transport.message import MessageKind


class RoundKind(MessageKind):
    """What parties tell one another to join, and in rounds."""

    HELLO = 5
    """Secondary to primary: protocol version, digest of the federation file, its signed public key
    of the session, and the epochs that it could resume."""

    WELCOME = 6
    """Primary to every secondary: all have joined; their signed public keys of the session, and
    how many rows there are for training, validation and test."""

    PLAN = 9
    """Primary to every active secondary: row ids of a round, who is active and what it is for."""

    SHARE = 10
    """Active secondary to primary: its masked words; only the sum over all can be read."""

    GRADIENT = 11
    """Primary to every active secondary: one gradient for all, from which labels may leak."""

    AVERAGE = 12
    """Primary to every secondary: send your positional encodings' words. Tells nothing else."""

    MEAN = 13
    """Primary to every secondary: mean parameters."""

    EPOCH = 14
    """Primary to every secondary: an epoch has ended, and whether it was the best."""

    READY = 16
    """Secondary to primary: its table and its budget have room for the run. Tells nothing else."""
