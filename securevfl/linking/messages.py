"""The kinds of message of linking."""

from securevfl.transport.message import MessageKind


class LinkingKind(MessageKind):
    """What parties tell one another to link their keys."""

    LINK_KEYS = 7
    """Primary to every secondary: its key columns with their mean and deviation, as the linkage
    protection ``none`` allows."""

    LINKED = 8
    """Secondary to primary: linkage is done; for families that read them, noised similarities of
    every row's links, in falling order and without record numbers."""

    LINK_CODES = 21
    """Data party to coordinator: Bloom-filter codes of its keys under the linkage secret, and a
    value that tells whether two secrets are equal."""

    LINK_TURN = 22
    """Whose turn in a protected linkage: numbers of rows and records. Tells nothing else."""

    LINK_DEALING = 23
    """Dealer to a data party: uniformly random masks for one block."""

    LINK_MASKED = 24
    """Data party to data party: its keys under a mask that the other does not know."""

    LINK_SHARE = 25
    """Data party to coordinator: its share of one block's squared distances."""

    LINK_CIPHERS = 26
    """Primary to a secondary: its keys, encrypted; back: masked distances, encrypted."""

    LINK_LISTS = 27
    """Coordinator to a secondary: for each primary row, record numbers in order of distance."""

    SIMILARITIES = 28
    """Coordinator to primary: one secondary's noised similarities in falling order, without
    record numbers."""

    LINK_CELLS = 29
    """Primary to a secondary: a random shift of the grid. Data party to coordinator: the grid cell
    of each of its keys, shifted. Only where ``linkage.cell`` says so."""

    LINK_BLOCK = 30
    """Coordinator to primary: numbers of its rows to compare next, with how many records. To a
    secondary: numbers of its records to compare next, with how many rows. Without
    ``linkage.cell`` it tells nothing but sizes."""
