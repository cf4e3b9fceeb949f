"""A ledger's file with what its lines say."""

from pathlib import Path

from securevfl.federation.chained_file import ChainedFile
from securevfl.federation.ledger_book import LedgerBook


class LedgerFile(ChainedFile):
    """A table's ledger, held open: nobody else writes to it until it is closed."""

    def __init__(self, path: Path | None, *, durable: bool = True, read_only: bool = False) -> None:
        """Open the file and read all its lines; see :class:`ChainedFile`.

        Raises:
            ConfigError: If it cannot be opened, is of another version, or another process holds it.
            PrivacyError: If it was altered.
        """
        self.book = LedgerBook()
        """What the lines said when the file was opened, and what its ledger adds."""
        super().__init__(path, durable=durable, read_only=read_only, take=self.book.take)
