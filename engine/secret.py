"""Proof that both ends of a connection know the cluster secret, without sending it. Standard library only.

Each side draws a nonce; each proves the secret over both nonces and its own part of the talk, so that a proof can
neither be replayed nor reflected. It authenticates the opening of a connection, not each byte on it: between hosts
that do not trust the wire, TLS and CURVE are to stand below it.
"""

import hashlib
import hmac
import secrets

NONCE_BYTES = 16


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def new_epoch() -> str:
    """A name for one life of a process: drawn at its start, never used again."""
    return secrets.token_hex(8)


def prove(secret: str, speaker: str, *parts: bytes) -> bytes:
    """What `speaker` sends to show that it knows `secret`. 32 bytes."""
    mac = hmac.new(secret.encode(), speaker.encode(), hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(8, "big") + part)
    return mac.digest()


def verify(secret: str, proof: bytes, speaker: str, *parts: bytes) -> bool:
    """Whether `proof` is what `speaker` had to send; takes the same time whatever the answer."""
    return hmac.compare_digest(proof, prove(secret, speaker, *parts))
