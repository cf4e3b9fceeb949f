"""Similarities under Paillier, and on secret shares of two helpers."""

from securevfl.core.stages import Stage

STAGE = Stage(protections={"shares": "shares:Shares", "paillier": "paillier:Paillier"})
