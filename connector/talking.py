"""A session's transfer messages on the transport that carries them: bytes to messages and back."""

from collections.abc import Callable

from kvrelay.connector import wire
from kvrelay.connector.messages import Body, Envelope, Hello, HelloProof, Ping, TransferMessage
from kvrelay.connector.session import Say, Session
from kvrelay.connector.transport.base import Talking
from kvrelay.engine.errors import InvalidArgument
from kvrelay.engine.request import RequestKey


def sayer(session: Session, carrier: object, end: Callable[[str], None]) -> Say:
    """How to say something in a session: on `carrier`, if it takes messages. `end`: for a peer that reads none."""
    if not isinstance(carrier, Talking):
        return session.send

    def say(body: Body, key: RequestKey) -> None:
        if not carrier.say(session.nonce, wire.encode(Envelope(session.nonce, body, key))):
            end("the peer reads no messages")

    return say


def read(session_nonce: bytes, message: bytes) -> tuple[RequestKey, TransferMessage]:
    """Raises: InvalidArgument for what is no message about a transfer of this session."""
    envelope = wire.decode(message)
    body = envelope.body
    if envelope.session_nonce != session_nonce or envelope.key is None or isinstance(body, (Hello, HelloProof, Ping)):
        raise InvalidArgument("message", type(body).__name__, "is not about a transfer of this session")
    return envelope.key, body
