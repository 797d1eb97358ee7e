"""Key exchange of two agents that know each other's public key: the Noise handshake KK.

``Noise_KK_25519_AESGCM_SHA256`` of the Noise protocol framework (noiseprotocol.org, revision 34)
gives

- authentication: only the holders of the two identity keys can complete it;
- forward secrecy: traffic that was recorded cannot be read with identity keys stolen later, as each
  end contributes an ephemeral key;
- binding: both ends must have the same prologue, which names roster, purpose, session and agents,
  so that a handshake for one purpose or run never completes another.
"""

from __future__ import annotations

from typing import final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256, Hash
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from corn.errors import PublicError
from corn.noise import Identity, Secret, generate_identity
from corn.noise.keys import AGREEMENT_KEY_BYTES

TAG_BYTES = 16
HANDSHAKE_BYTES = AGREEMENT_KEY_BYTES + TAG_BYTES
"""The size of each of the two messages: an ephemeral key, and a tag without a payload."""

_PROTOCOL = b"Noise_KK_25519_AESGCM_SHA256"


class TamperedError(PublicError):
    """Bytes arrived that the other end did not seal: somebody changes what the network carries."""


@final
class NoiseHandshake:
    """One end of a handshake ``Noise_KK_25519_AESGCM_SHA256``: two messages of 48 bytes.

    The names are those of the specification: h is the hash of all that both ends have seen, ck the
    chaining key. Payloads are empty.
    """

    def __init__(
        self,
        identity: Identity,
        peer_key: bytes,
        prologue: bytes,
        *,
        is_initiator: bool,
        ephemeral: Identity | None = None,
    ) -> None:
        # An identity has two public keys. The first is that of X25519; the rest is for signatures.
        self._identity, self._peer_key = identity, peer_key[:AGREEMENT_KEY_BYTES]
        self._is_initiator = is_initiator
        # Tests pass one to compare with other implementations. Forward secrecy needs a new one per
        # handshake.
        self._ephemeral = ephemeral or generate_identity()
        # The specification pads a name of at most 32 bytes with zeros instead of hashing it; this
        # one has 28.
        self._h = self._ck = _PROTOCOL.ljust(32, b"\0")
        self._key = b""
        self._mix_hash(prologue)
        own = identity.public_key[:AGREEMENT_KEY_BYTES]
        # The initiator's key comes first at both ends.
        for known in (own, self._peer_key) if is_initiator else (self._peer_key, own):
            self._mix_hash(known)

    def write_first(self) -> bytes:
        """Return the initiator's message: e, es, ss."""
        own = self._ephemeral.public_key[:AGREEMENT_KEY_BYTES]
        self._mix_hash(own)
        self._mix_key(self._ephemeral.agree(self._peer_key))
        # ss proves the initiator's key already in the first message, so a stranger gets no answer.
        self._mix_key(self._identity.agree(self._peer_key))
        return own + self._seal()

    def read_first(self, message: bytes) -> None:
        """Read the initiator's message, at the responder."""
        ephemeral = self._read_ephemeral(message)
        self._mix_key(_agree(self._identity, ephemeral))
        self._mix_key(self._identity.agree(self._peer_key))
        self._open(message)
        self._peer_ephemeral = ephemeral

    def write_second(self) -> bytes:
        """Return the responder's message: e, ee, se."""
        own = self._ephemeral.public_key[:AGREEMENT_KEY_BYTES]
        self._mix_hash(own)
        # ee gives forward secrecy. The ephemeral keys are gone after the handshake.
        self._mix_key(_agree(self._ephemeral, self._peer_ephemeral))
        self._mix_key(self._ephemeral.agree(self._peer_key))
        return own + self._seal()

    def read_second(self, message: bytes) -> None:
        """Read the responder's message, at the initiator."""
        ephemeral = self._read_ephemeral(message)
        self._mix_key(_agree(self._ephemeral, ephemeral))
        self._mix_key(_agree(self._identity, ephemeral))
        self._open(message)

    def split(self) -> tuple[bytes, bytes]:
        """Return the keys to send and to receive with."""
        first, second = self._derive(b"")
        # The initiator sends under the first key and the responder under the second. One key for
        # both directions would use each counter twice.
        return (first, second) if self._is_initiator else (second, first)

    def _read_ephemeral(self, message: bytes) -> bytes:
        ephemeral = message[:AGREEMENT_KEY_BYTES]
        self._mix_hash(ephemeral)
        return ephemeral

    def _mix_hash(self, data: bytes) -> None:
        digest = Hash(SHA256())
        digest.update(self._h + data)
        self._h = digest.finalize()

    def _mix_key(self, secret: Secret) -> None:
        self._ck, self._key = self._derive(secret.reveal())

    def _derive(self, material: bytes) -> tuple[bytes, bytes]:
        # The HKDF of Noise with two outputs is that of RFC 5869 with empty info, T(1) and T(2).
        hkdf = HKDF(algorithm=SHA256(), length=64, salt=self._ck, info=b"")
        both = hkdf.derive(material)
        return both[:32], both[32:]

    def _seal(self) -> bytes:
        # The key is new since the last message, so its counter is zero.
        tag = AESGCM(self._key).encrypt(make_nonce(0), b"", self._h)
        self._mix_hash(tag)
        return tag

    def _open(self, message: bytes) -> None:
        tag = message[AGREEMENT_KEY_BYTES:]
        try:
            AESGCM(self._key).decrypt(make_nonce(0), tag, self._h)
        except InvalidTag:
            raise TamperedError(
                "the other end of a connection could not prove its key of the roster"
            ) from None
        self._mix_hash(tag)


def _agree(identity: Identity, ephemeral: bytes) -> Secret:
    # A point of low order makes the secret zero. Only an attacker sends one.
    try:
        return identity.agree(ephemeral)
    except ValueError:
        raise TamperedError("the other end of a connection sent an unusable key") from None


def rekey(key: bytes) -> bytes:
    """Return the next key of a direction: the function REKEY of Noise, section 4.2."""
    return AESGCM(key).encrypt(make_nonce((1 << 64) - 1), bytes(32), None)[:32]


def make_nonce(counter: int) -> bytes:
    """Return the nonce of AES-GCM for a counter, as Noise defines it."""
    return b"\0\0\0\0" + counter.to_bytes(8, "big")
