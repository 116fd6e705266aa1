"""Where the bytes of a load come from, as the answer of a lookup describes it: memory of this host, or the
network.

A node reads what only its SSD has into memory before it answers the lookup, so a load never waits for an SSD.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

INCARNATION_BYTES = 16
PLACE_SHIFT = np.uint64(48)  # above an object's offset: the place of its holder, 0 for the own node
ROUTE_OF_THIS_HOST = b"unix:"
DESCRIPTOR = np.dtype([("offset", "<u8"), ("size", "<u8"), ("generation", "<u8"), ("crc_and_slot", "<u8")])

Flags = npt.NDArray[np.bool_]
Sizes = npt.NDArray[np.uint64]


def from_network(holders: bytes, descriptors: bytes) -> Flags:
    """For each object whether a node of another host has it.

    holders: the own node's incarnation, then of each other node its incarnation, the length of its route
        (u16) and the route.
    descriptors: 32 bytes for each object.
    """
    objects = np.frombuffer(descriptors, DESCRIPTOR)
    remote = _remote(holders)
    if not any(remote):
        return np.zeros(len(objects), np.bool_)
    places = objects["offset"] >> PLACE_SHIFT
    known = np.minimum(places, np.uint64(len(remote) - 1)).astype(np.intp)
    flags: Flags = np.array(remote, np.bool_)[known]
    return flags


def object_sizes(descriptors: bytes) -> Sizes:
    """Bytes of each object."""
    return np.frombuffer(descriptors, DESCRIPTOR)["size"]


def _remote(holders: bytes) -> list[bool]:
    """For each holder whether it is on another host."""
    remote, at = [False], INCARNATION_BYTES
    while at + INCARNATION_BYTES + 2 <= len(holders):
        at += INCARNATION_BYTES
        (length,) = struct.unpack_from("<H", holders, at)
        route = holders[at + 2 : at + 2 + length]
        remote.append(not route.startswith(ROUTE_OF_THIS_HOST))
        at += 2 + length
    return remote
