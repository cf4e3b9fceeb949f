"""Similarities under Paillier, and on secret shares of two helpers."""

from securevfl.core.stages import StageManifest

STAGE = StageManifest(protections={"shares": "shares:Shares", "paillier": "paillier:Paillier"})
