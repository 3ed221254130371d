"""Whatever bytes come, decoding gives a message or InvalidArgument, and a mutated message is no exception."""

import contextlib

from hypothesis import given, strategies as st

from kvrelay.connector import wire
from kvrelay.connector.base import GrantedRange, GrantPlan
from kvrelay.connector.messages import Envelope, GrantMessage
from kvrelay.engine.errors import InvalidArgument
from kvrelay.engine.request import RequestKey

GRANT = wire.encode(
    Envelope(b"s" * 32, GrantMessage(b"g" * 16, GrantPlan((GrantedRange(0, 9, (1, 2)),))), RequestKey("r", 0))
)


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_refused(payload):
    with contextlib.suppress(InvalidArgument):
        wire.decode(payload)
    with contextlib.suppress(InvalidArgument):
        wire.decode_header(payload)


@given(st.integers(0, len(GRANT) - 1), st.integers(0, 255), st.integers(0, len(GRANT)))
def test_a_damaged_message_decodes_or_is_refused(position, byte, length):
    damaged = bytearray(GRANT)
    damaged[position] = byte
    with contextlib.suppress(InvalidArgument):
        wire.decode(bytes(damaged[:length]))
