//! The names of other RDMA software, with the defaults there and why ours differ.
//!
//! The names are from Ferrite's first documentation and from brpc's RDMA documentation. The book
//! shows them as a table.

/// A setting of other RDMA software.
#[derive(Debug, Clone, Copy)]
pub struct Foreign {
    /// The name in the other software, as our file accepts or refuses it.
    pub name: &'static str,
    /// The default in the other software, or the value in its example.
    pub default: &'static str,
    /// Why our default differs. Empty if it does not.
    pub why: &'static str,
}

const fn row(name: &'static str, default: &'static str, why: &'static str) -> Foreign {
    Foreign { name, default, why }
}

const GROWS: &str = "memory grows with the load instead of being pinned at start";
const ONE_FRAME: &str = "a message of 64 KiB then needs only one frame";
const NEEDS_AGENT: &str = "`rdma` needs an agent; without one, replication and clusters use TCP";
const PORT_OF_ADDRESS: &str =
    "the local address selects the port, so devices with two ports work, too";

/// The settings of Ferrite's first documentation and of brpc's RDMA documentation.
pub const FOREIGN: &[Foreign] = &[
    // Keys of the first documentation, in its table [network].
    row("network.rdma_enabled", "true", ""),
    row("network.rdma_fallback", "tcp", ""),
    row(
        "network.rdma_device",
        "mlx5_0",
        "`mlx5_0` is only an example; the listen addresses select the devices",
    ),
    row("network.rdma_port", "1", PORT_OF_ADDRESS),
    row(
        "network.rdma_gid_index",
        "3",
        "the local address selects the entry; indexes change when addresses do",
    ),
    // Keys of the first documentation, in its table [network.rdma].
    row("network.rdma.max_connections", "1000", "the same as the engine's own `maxclients`"),
    row("network.rdma.connection_timeout_ms", "5000", ""),
    row("network.rdma.max_mr_size", "1GB", ""),
    row(
        "network.rdma.inline_threshold",
        "256",
        "with up to 220 bytes, a request takes at most 4 blocks of mlx5's send queue",
    ),
    row("network.rdma.send_queue_depth", "128", ""),
    row("network.rdma.recv_queue_depth", "128", "all links of a device share these receives"),
    row("network.rdma.max_send_sge", "4", ""),
    row("network.rdma.max_recv_sge", "4", ""),
    row("network.rdma.cq_size", "4096", "all links of a device share the completion queue"),
    row("network.rdma.poll_batch", "32", ""),
    row("network.rdma.adaptive_polling", "true", ""),
    row("network.rdma.busy_poll_us", "100", "polling delays the engine's other clients"),
    row("network.rdma.pin_memory", "true", ""),
    row("network.rdma.huge_pages", "true", "most hosts reserve no huge pages"),
    row("network.rdma.recv_buffer_pool_size", "10000", GROWS),
    row("network.rdma.recv_buffer_size", "4096", ONE_FRAME),
    row("network.rdma.connection_retries", "3", "a link on TCP upgrades to RDMA by itself"),
    row("network.rdma.retry_delay_ms", "1000", ""),
    // Keys of the first documentation, for replication and clusters.
    row("replication.transport", "rdma", NEEDS_AGENT),
    row("cluster.transport", "rdma", NEEDS_AGENT),
    row("cluster.rdma.gossip_rdma", "true", ""),
    row("cluster.rdma.migration_rdma", "true", ""),
    // Parameters of brpc.
    row("rdma_trace_verbose", "false", ""),
    row("rdma_recv_zerocopy", "true", ""),
    row(
        "rdma_zerocopy_min_size",
        "512",
        "copying a small message costs more than holding its buffer, and credits already limit \
         the buffers that a peer can hold",
    ),
    row("rdma_recv_block_type", "default (8KB)", ONE_FRAME),
    row("rdma_prepared_qp_size", "128", ""),
    row("rdma_prepared_qp_cnt", "1024", "a queue pair costs memory even if nobody connects"),
    row("rdma_max_sge", "0", ""),
    row("rdma_sq_size", "128", ""),
    row("rdma_rq_size", "128", "all links of a device share these receives"),
    row("rdma_cqe_poll_once", "32", ""),
    row("rdma_gid_index", "-1 (the largest)", "here -1 means the entry of the local address"),
    row("rdma_port", "1", PORT_OF_ADDRESS),
    row("rdma_device", "empty (the first active)", "the devices with the listen address are used"),
    row("rdma_memory_pool_initial_size_mb", "1024", GROWS),
    row("rdma_memory_pool_increase_size_mb", "1024", GROWS),
    row("rdma_memory_pool_max_regions", "16", "regions are smaller here"),
    row("rdma_memory_pool_buckets", "4", "here 0 means one for each CPU"),
    row("rdma_memory_pool_tls_cache_num", "128", ""),
];
