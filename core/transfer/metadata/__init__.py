"""Metadata by name: a store in which transfer engines find each other by the names of their segments.

    metadata_of("etcd://h1:2379")  ->  Metadata: publish, withdraw, resolve
                                         HttpMetadata, EtcdMetadata, RedisMetadata
    Publication                    keeps one engine's name published, on a thread of its own
    Names                          opens peers by name; known peers go on without the store

A name is an entry with a lease: an engine that ends withdraws it, and of one that is killed the lease ends.
"""

from moonpool.core.transfer.metadata.backend import Metadata, NameTaken
from moonpool.core.transfer.metadata.record import SegmentRecord

__all__ = ["Metadata", "NameTaken", "SegmentRecord"]
