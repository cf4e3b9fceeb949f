"""Sessions between parties: handshake, membership, validation of requests, and a party's files."""
