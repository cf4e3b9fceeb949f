"""Who helps two data parties to link, and what both tell the coordinator in the same way."""

from securevfl.data.tables import KeyTable
from securevfl.linkage.metrics.bloom import encode
from securevfl.linkage.secret import LinkageSecret
from securevfl.linkage.spec import LinkSpec
from securevfl.linking.lines import Desk
from securevfl.linking.messages import LinkingKind
from securevfl.transport.message import Message


def third_parties(spec: LinkSpec) -> tuple[str, str]:
    """Return the names of the coordinator and the dealer; "" stands for no dealer."""
    helpers = spec.roles.helpers
    return helpers["coordinator"], helpers.get("dealer", "")


def send_codes(
    spec: LinkSpec, keys: KeyTable, secret: LinkageSecret, session: bytes, desk: Desk
) -> None:
    """Send a data party's codes to the coordinator, with a check value of the secret behind them.

    Raises:
        DataError: If a key leaves its agreed range.
        ProtocolError: If a party leaves the protocol or fails.

    Reveals:
        To the coordinator: the codes, and whether both data parties hold one secret.
    """
    coordinator, _ = third_parties(spec)
    check = secret.check_value(session.hex())
    codes = encode(spec.keys, keys, secret)
    desk.send(
        coordinator,
        Message(kind=LinkingKind.LINK_CODES, meta={"check": check}, tensors={"codes": codes}),
    )
