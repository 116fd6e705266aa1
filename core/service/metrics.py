"""The node's counters as Prometheus families.

The native server counts in atomics and hands out two dictionaries; this module names and describes them. It
knows no single metric by heart: a name that ends in ``_total`` is a counter, any other a gauge, and what
DESCRIPTIONS does not know gets a description made of its name. A name may carry labels:
``used_bytes{tenant="default"}``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from moonpool.core.service.process_metrics import ProcessMetrics

if TYPE_CHECKING:
    from moonpool import _native

PREFIX = "moonpool_node_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# (upper bounds of the buckets, count of each bucket and of what lies beyond the last, sum of all values)
Histogram = tuple[Sequence[float], Sequence[int], float]

DESCRIPTIONS: dict[str, str] = {
    "objects": "Complete objects.",
    "objects_max": "The most objects; beyond it the oldest are evicted, however small they are.",
    "object_bytes": "Bytes of the complete objects.",
    "objects_pinned": "Objects that pins keep from being evicted.",
    "objects_detached": "Objects that were removed or replaced while pinned, and wait for their readers.",
    "spaces": "Namespaces, each with a fingerprint, that are in use or have objects in memory.",
    "pins": "Pins that clients hold now.",
    "pinned_bytes": "Bytes of the objects that pins keep.",
    "remote_pinned_bytes": "Of them, those that pins of other hosts keep.",
    "pins_refused_total": "Objects that were not pinned because pins hold their share of the arena.",
    "pins_idle_total": "Connections of other hosts that ended because they held pins without a word.",
    "arena_bytes": "Size of the arenas.",
    "arena_ready_bytes": "Bytes of the arenas whose memory the kernel has given.",
    "arena_huge_page_bytes": "Bytes of the arenas that lie in huge pages.",
    "arena_free_bytes": "Bytes of the arenas that hold nothing.",
    "tenants": "Tenants of this node.",
    "tenants_shown": "Of them, those that have the metrics moonpool_node_tenant_*.",
    "tenant_dram_bytes": "Memory that the tenant has now, in use or free.",
    "tenant_dram_used_bytes": "Of it, what its objects and the leases of its clients take.",
    "tenant_dram_min_bytes": "Memory of the tenant's own: dram_min, or what the node's settings give it.",
    "tenant_dram_max_bytes": "The most memory of the tenant: dram_max, or what the node's settings give it.",
    "tenant_pinned_bytes": "Bytes of the tenant's objects that pins keep.",
    "tenant_pins_max_bytes": "The most of them: pins_max.",
    "tenant_bytes_per_s_max": "The most bytes a second that the node reads and puts for it: bytes_per_s.",
    "tenant_over_rate_total": "Objects and leases that were refused because the tenant was over that.",
    "tenant_evicted_total": "Objects of the tenant that were evicted from memory.",
    "tenant_evicted_for_others_total": "Of them, those whose memory went to another tenant, or was above "
    "dram_max.",
    "tenant_evicted_for_others_bytes_total": "Bytes of those.",
    "tenant_refused_total": "Leases of the tenant's clients for which there was no memory.",
    "tenant_ssd_bytes": "Bytes of the tenant's records on the SSDs.",
    "tenant_ssd_max_bytes": "The most of them: ssd_max.",
    "tenant_ssd_dropped_total": "Objects that left the SSDs because the tenant had its most bytes.",
    "arena_memory_short": "1 when the kernel could not give all of the arenas' memory.",
    "log_left_out_total": "Events that were not logged: too many of one kind at once.",
    "leased_bytes": "Bytes of the arenas that clients are writing into.",
    "connections": "Connections that are open now.",
    "connections_max": "The most connections of the own host: node.connections_max, or what it rose to.",
    "remote_connections": "Of them, those of other hosts.",
    "connections_total": "Connections that were accepted.",
    "connections_refused_total": "Connections that were refused because there were too many.",
    "connections_dropped_total": "Connections that the node cut off: garbled, stalled, or idle with pins.",
    "connections_closed_total": "Connections that their clients ended.",
    "auth_failures_total": "Connections that did not prove that they know the token.",
    "protocol_errors_total": "Connections that sent no valid frame.",
    "handshake_timeouts_total": "Connections that did not finish the handshake in time.",
    "stored_total": "Objects that were stored.",
    "stored_bytes_total": "Bytes that were stored.",
    "exists_total": "Puts of objects that were there already.",
    "put_refused_total": "Puts that were refused.",
    "lease_refused_total": "Requests for memory that were refused because pins and leases hold all of it.",
    "lookup_keys_total": "Keys that were looked up.",
    "lookup_hits_total": "Keys that were found.",
    "served_total": "Objects that readers say they have read.",
    "served_bytes_total": "Bytes that readers say they have read.",
    "removed_total": "Objects that were removed by request.",
    "evicted_total": "Objects that were evicted.",
    "evicted_bytes_total": "Bytes that were evicted.",
    "evicted_for_slots_total": "Objects that were evicted for their number (node.objects_max), not memory.",
    "tcp_sent_bytes_total": "Bytes of objects sent to clients over TCP.",
    "tcp_received_bytes_total": "Bytes of objects received from clients over TCP.",
    "tcp_damaged_total": "Objects that came over TCP and did not match their checksum; they were not stored.",
    "scrub_dropped_total": "Objects that were dropped because their bytes did not match their checksum.",
    "relay_connections": "Processes of this host that ask the master by this node.",
    "relay_masters_connected": "Connections to masters over which they ask: one for each tenant and range.",
    "relay_questions_total": "Questions of these processes.",
    "relay_late_total": "Of them, those that the master did not answer in the time of the process.",
    "relay_members_total": "Times that the node asked the master for the list of nodes, for all of them.",
    "relay_refused_total": "Of them, those that were refused because too many were under way.",
    "relay_master_lost_total": "Times that such a connection to the master was lost.",
    "master_joined": "1 while the master knows this node and all it holds.",
    "master_silent_ms": "Milliseconds since the master's last answer.",
    "master_joins_total": "Times that the node joined a master.",
    "master_connect_failures_total": "Attempts to reach the master that failed.",
    "masters_learned": "Masters that are not in its list, and that another one has named.",
    "masters_joined": "Of the masters that it is to join, those that know it and all it holds.",
    "master_inventories_total": "Times that the master was told all that the node holds.",
    "master_rows_sent_total": "Changes and inventory rows that the master was told.",
    "master_rows_waiting": "Changes that the master is not told yet.",
    "master_rows_waiting_max": "Beyond so many changes the master is told everything anew.",
    "master_log_overflows_total": "Times that this happened.",
    "master_beats_total": "Signs of life that were sent to the master.",
    "master_dropped_total": "Copies dropped because they were removed while this node was away.",
    "nodes_alive": "Nodes that were heard from within the last second.",
    "nodes_suspect": "Nodes that are silent, or whose connection broke.",
    "nodes_max": "The most nodes: master.nodes_max, or what it has risen to.",
    "members_epoch": "Changes with every change of the membership.",
    "suspicions_total": "Times that a node became suspect.",
    "nodes_gone_total": "Nodes that were given up.",
    "nodes_left_total": "Nodes that said that they stop serving.",
    "joins_total": "Times that a node joined.",
    "joins_refused_total": "Nodes that were refused: no room, or their name is taken.",
    "beats_total": "Signs of life of nodes.",
    "range_index": "The range of shards that this master has: master.range.",
    "range_count": "How many ranges the pool has.",
    "is_owner": "1 while this master orders removals.",
    "is_following": "1 while this standby knows all that its owner knows.",
    "standby_attached": "1 while a standby is there.",
    "standby_is_whole": "1 while it knows all: then removals wait for its word.",
    "standby_lag_ms": "For how long it has owed its word.",
    "standbys_lost_total": "Standbys that broke off without saying that they leave.",
    "takeovers_total": "Times that this master took over from its owner.",
    "nodes_beat_ms": "Milliseconds between two signs of life of a node, as the master asks for.",
    "nodes_batch_ms": "Milliseconds for which nodes gather changes, as the master asks for.",
    "inventories_total": "Inventories that nodes began to tell.",
    "directory_rows": "Rows of the directory: one for each holder of a key.",
    "directory_rows_void": "Rows of lives that ended, which wait to be swept.",
    "directory_rows_max": "The most rows of the directory.",
    "directory_rows_refused_total": "Rows that were not taken because the directory was full.",
    "directory_bytes": "Memory of the directory's tables.",
    "rows_added_total": "Rows that were added, or reported again.",
    "rows_removed_total": "Rows that were removed.",
    "rows_void_total": "Rows of copies that were removed or replaced before their nodes told of them.",
    "locate_keys_total": "Keys whose holders were asked for.",
    "locate_hits_total": "Keys that had a holder.",
    "places_total": "Requests for nodes with room.",
    "places_short_total": "Of them, those with fewer nodes than asked for.",
    "forgets_total": "Keys of which clients said that they are removed.",
    "removals": "Removals and replacements that are remembered for nodes that are away.",
    "removals_max": "The most of them; beyond it a node that was away drops what is older.",
    "orders_expired_total": "Removals whose client ended half way, and which the master carried out.",
    "drops_total": "Stale copies that nodes were told to drop.",
    "drop_alls_total": "Nodes that were told to drop all that is older than the removals remembered.",
    "connections_nodes": "Connections of nodes.",
    "connections_clients": "Connections of clients.",
    "connections_clients_max": "The most connections of clients: master.clients_max, or what it rose to.",
    "limits_raised_total": "Times that a limit of nodes or connections was raised because more came.",
    "join_seconds": "Time in the master that a node's joining takes.",
    "delta_seconds": "Time in the master that a batch of a node's changes takes.",
    "beat_seconds": "Time in the master that a sign of life takes.",
    "members_seconds": "Time in the master that telling the membership takes.",
    "locate_seconds": "Time in the master that a batch of keys takes.",
    "place_seconds": "Time in the master that finding room takes.",
    "forget_seconds": "Time in the master that a batch of removals takes.",
    "ssd_directories": "Directories on SSDs.",
    "ssd_directories_away": "Directories that belong to this node and are not there, or take no more writes.",
    "ssd_epoch": "Times that the SSD directories of this node were opened together.",
    "ssd_void_objects": "Objects of the SSD that did not count at the start, since their directory was away.",
    "ssd_io_uring": "How many of them are read and written by io_uring, and not by threads.",
    "ssd_buffered": "Directories whose file system refused O_DIRECT, so that the page cache is used.",
    "ssd_read_only": "Directories that are not written any more, after errors.",
    "ssd_off": "Directories that are not used any more, after errors.",
    "ssd_objects": "Objects on the SSD.",
    "ssd_object_bytes": "Bytes of the objects on the SSD.",
    "ssd_spaces": "Namespaces, each with a fingerprint, that the SSD directories know.",
    "ssd_bytes": "Size of the SSD directories.",
    "ssd_live_bytes": "Bytes of the SSD that hold objects, with what goes along with them.",
    "ssd_free_bytes": "Bytes of the SSD in segments that hold nothing.",
    "ssd_reads_waiting": "Reads of the SSD that were asked for and have not ended.",
    "ssd_writes_waiting": "Writes to the SSD that were asked for and have not ended.",
    "ssd_written_total": "Objects that were written to the SSD.",
    "ssd_written_bytes_total": "Bytes of objects that were written to the SSD.",
    "ssd_read_total": "Objects that were read from the SSD.",
    "ssd_read_bytes_total": "Bytes of objects that were read from the SSD.",
    "ssd_removed_total": "Objects of the SSD that were removed or replaced.",
    "ssd_evicted_total": "Objects that the SSD gave up to make room.",
    "ssd_evicted_bytes_total": "Bytes of the objects that the SSD gave up to make room.",
    "ssd_copied_total": "Objects that were written again so that a segment could be reclaimed.",
    "ssd_copied_bytes_total": "Bytes of objects that were written again for that.",
    "ssd_corrupt_total": "Objects of the SSD whose bytes did not match their checksum.",
    "ssd_read_errors_total": "Reads that the disk failed.",
    "ssd_write_errors_total": "Writes that the disk failed.",
    "ssd_write_refused_total": "Writes that were refused: too many waited, or the object was too large.",
    "ssd_reclaimed_segments_total": "Segments that were reclaimed.",
    "ssd_syncs_total": "Times the disk was asked to make safe what was written.",
    "ssd_recovered_damaged_segments": "Segments that were damaged at the start.",
    "ssd_recovered_scanned_segments": "Segments that were read whole at the start.",
    "ssd_recovered_bytes_read": "Bytes that were read at the start.",
    "ssd_saved_bytes": "Bytes of the objects in memory that the SSD has too.",
    "ssd_dirty_objects": "Objects in memory that wait to be written to the SSD.",
    "ssd_lost_total": "Objects that were evicted before they were written to the SSD.",
    "ssd_not_saved_total": "Objects that the SSD did not take: too large, or no room at the stop.",
    "ssd_promoting": "Objects that are on their way from the SSD into memory.",
    "ssd_writing": "Objects that are on their way from memory to the SSD.",
    "ssd_promoted_total": "Objects that were brought from the SSD into memory.",
    "ssd_promoted_bytes_total": "Bytes that were brought from the SSD into memory.",
    "ssd_promote_failed_total": "Objects that could not be brought: failed reads, and removals meanwhile.",
    "events_blocks": "KV blocks of which subscribers are told.",
    "events_objects": "Objects of those blocks.",
    "events_objects_max": "The most of them; more are not told of.",
    "events_ignored_total": "Objects of KV blocks that were not told of.",
    "events_overflows_total": "Times that events came faster than they were published; all was told anew.",
    "lease_seconds": "Time in the node that a request for memory takes.",
    "commit_seconds": "Time in the node that storing a batch of objects takes.",
    "lookup_seconds": "Time in the node that looking a batch of keys up takes.",
    "other_seconds": "Time in the node that any other request takes.",
}


class NodeCollector:
    """Turns one reading of a native server into metric families. Each scrape reads anew; nothing is kept."""

    def __init__(self, server: _native.Server | _native.MasterServer, *, prefix: str = PREFIX) -> None:
        self._server = server
        self._prefix = prefix

    def collect(self) -> Iterable[Metric]:
        """Metric families of one reading."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily] = {}
        for full_name, value in self._server.metrics().items():
            name, labels = split_labels(full_name)
            family = families.get(name)
            if family is None:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                family = families[name] = kind(self._named(name), describe(name), labels=list(labels))
            if not isinstance(family, HistogramMetricFamily):
                family.add_metric(list(labels.values()), float(value))
        for full_name, (bounds, counts, total) in self._server.histograms().items():
            name, labels = split_labels(full_name)
            family = families.get(name)
            if family is None:
                family = HistogramMetricFamily(self._named(name), describe(name), labels=list(labels))
                families[name] = family
            if isinstance(family, HistogramMetricFamily):
                family.add_metric(list(labels.values()), cumulative(bounds, counts), total)
        return families.values()

    def _named(self, name: str) -> str:
        return name if name.startswith("moonpool_") else self._prefix + name


def exposition(server: _native.Server | _native.MasterServer, *, prefix: str = PREFIX) -> bytes:
    """The whole text of GET /metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(NodeCollector(server, prefix=prefix))
    registry.register(ProcessMetrics(prefix))
    return generate_latest(registry)


def describe(name: str) -> str:
    """The HELP text of a metric, by its name without prefix and labels."""
    name = name.removeprefix(PREFIX)
    return DESCRIPTIONS.get(name) or name.removesuffix("_total").replace("_", " ").capitalize() + "."


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Prometheus's buckets: each counts all values up to its bound, the last one, +Inf, all values."""
    if len(counts) != len(bounds) + 1:
        raise ValueError(f"{len(bounds)} bounds need {len(bounds) + 1} counts, not {len(counts)}")
    buckets: list[tuple[str, float]] = []
    running = 0
    for bound, count in zip([*map(float, bounds), float("inf")], counts, strict=True):
        running += count
        buckets.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(running)))
    return buckets


_LABELLED = re.compile(r'([a-zA-Z_]\w*)="([^"]*)"')


def split_labels(name: str) -> tuple[str, dict[str, str]]:
    """``used_bytes{tenant="a"}`` -> ("used_bytes", {"tenant": "a"})."""
    bare, _, rest = name.partition("{")
    return bare, dict(_LABELLED.findall(rest))
