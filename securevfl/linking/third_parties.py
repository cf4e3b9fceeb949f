"""Who helps two data parties to link, and what both tell the coordinator in the same way."""

from securevfl.config.federation import FederationConfig
from securevfl.data.tables import KeyTable
from securevfl.linkage.secret import LinkageSecret
from securevfl.linking.key_metric import encode
from securevfl.linking.lines import Desk
from securevfl.linking.messages import LinkingKind
from securevfl.transport.message import Message


def third_parties(config: FederationConfig) -> tuple[str, str]:
    """Return the names of the coordinator and the dealer; "" stands for no dealer."""
    coordinator, dealer = config.helper("coordinator"), config.helper("dealer")
    assert coordinator is not None, "required before any party starts"
    return coordinator.name, "" if dealer is None else dealer.name


def send_codes(
    config: FederationConfig, keys: KeyTable, secret: LinkageSecret, session: bytes, desk: Desk
) -> None:
    """Send a data party's codes to the coordinator, with a check value of the secret behind them.

    Raises:
        DataError: If a key leaves its agreed range.
        ProtocolError: If a party leaves the protocol or fails.

    Reveals:
        To the coordinator: the codes, and whether both data parties hold one secret.
    """
    coordinator, _ = third_parties(config)
    check = secret.check_value(session.hex())
    codes = encode(config, keys, secret)
    desk.send(
        coordinator,
        Message(kind=LinkingKind.LINK_CODES, meta={"check": check}, tensors={"codes": codes}),
    )
