"""Keys: declares a key that Trinity-RFT's files have, for a service that is not reached here."""

from typing import Annotated, Any

from trireme.config.section import After, Refused, Section


class TrinityModel(Section, defer_build=True):
    """Trinity-RFT's keys of the section `model`."""

    tinker: Annotated[
        dict[str, Any],
        After("rope_theta"),
        Refused("is not supported: leave it out, and this machine or your cluster trains"),
    ] = {}
    """Options of the Tinker service."""
