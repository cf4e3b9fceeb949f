"""The kinds of message of pretraining."""

from securevfl.transport.message import MessageKind


class PretrainingKind(MessageKind):
    """What parties tell one another to pretrain."""

    PRETRAIN = 32
    """Primary to every secondary: an iteration of pretraining begins; which of its rows are held
    out for validation and testing."""

    CROSS = 33
    """Primary to every secondary: row ids of a batch and the primary's projections of them, with
    the noise that ``pretraining.primary_sends`` asks for."""

    PROJECTIONS = 34
    """Secondary to primary, in a plain exchange alone: its projections of the batch in clear. (In
    an averaged one it sends a SHARE.)"""

    LOCAL = 35
    """Primary to every secondary: learn from your own records. Tells nothing else."""

    TOPS = 36
    """Primary to every secondary: send your local top encoder's words. Tells nothing else."""

    PRETRAINED = 37
    """Primary to every secondary: so many iterations are done, and whether it was the last."""
