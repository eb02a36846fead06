//! The names of other RDMA software, with the defaults there and why ours differ.
//!
//! The first documentation of Ferrite and brpc's RDMA documentation. The book has it as a table.

/// A setting of other RDMA software.
#[derive(Debug, Clone, Copy)]
pub struct Foreign {
    /// Its name there, as a file of ours accepts it.
    pub name: &'static str,
    /// Its default, or the value of the example, there.
    pub default: &'static str,
    /// Why our default differs. Empty if it does not.
    pub why: &'static str,
}

const fn row(name: &'static str, default: &'static str, why: &'static str) -> Foreign {
    Foreign { name, default, why }
}

const GROWS: &str = "memory grows with the load instead of being pinned at start";

/// All of them.
pub const FOREIGN: &[Foreign] = &[
    // Keys of the first documentation, in its table [network].
    row("network.rdma_enabled", "true", ""),
    row("network.rdma_fallback", "tcp", ""),
    row("network.rdma_device", "mlx5_0", "an example there; the address decides"),
    row("network.rdma_port", "1", "the address decides, which is right on devices with two ports"),
    row("network.rdma_gid_index", "3", "the address decides; an index changes with every address"),
    // Keys of the first documentation, in its table [network.rdma].
    row("network.rdma.max_connections", "1000", "as the engine's own `maxclients`"),
    row("network.rdma.connection_timeout_ms", "5000", ""),
    row("network.rdma.max_mr_size", "1GB", ""),
    row("network.rdma.inline_threshold", "256", "220 is the most that mlx5 takes in 4 blocks"),
    row("network.rdma.send_queue_depth", "128", ""),
    row("network.rdma.recv_queue_depth", "128", "all links of a device share these receives"),
    row("network.rdma.max_send_sge", "4", ""),
    row("network.rdma.max_recv_sge", "4", ""),
    row("network.rdma.cq_size", "4096", "all links of a device share the completion queue"),
    row("network.rdma.poll_batch", "32", ""),
    row("network.rdma.adaptive_polling", "true", ""),
    row("network.rdma.busy_poll_us", "100", "polling delays the engine's other clients"),
    row("network.rdma.pin_memory", "true", ""),
    row("network.rdma.huge_pages", "true", "most hosts reserve none"),
    row("network.rdma.recv_buffer_pool_size", "10000", GROWS),
    row("network.rdma.recv_buffer_size", "4096", "a value of 64 KiB then needs one frame"),
    row("network.rdma.connection_retries", "3", "a link on TCP upgrades to RDMA by itself"),
    row("network.rdma.retry_delay_ms", "1000", ""),
    // brpc.
    row("rdma_trace_verbose", "false", ""),
    row("rdma_recv_zerocopy", "true", ""),
    row(
        "rdma_zerocopy_min_size",
        "512",
        "a copy costs more, and credits bound what a peer can hold",
    ),
    row("rdma_recv_block_type", "default (8KB)", "a value of 64 KiB then needs one frame"),
    row("rdma_prepared_qp_size", "128", ""),
    row("rdma_prepared_qp_cnt", "1024", "a queue pair costs memory even if nobody connects"),
    row("rdma_max_sge", "0", ""),
    row("rdma_sq_size", "128", ""),
    row("rdma_rq_size", "128", "all links of a device share these receives"),
    row("rdma_cqe_poll_once", "32", ""),
    row("rdma_gid_index", "-1 (the largest)", "-1 is the entry of the local address"),
    row("rdma_port", "1", "the address decides, which is right on devices with two ports"),
    row("rdma_device", "empty (the first active)", "the devices with the listen address are used"),
    row("rdma_memory_pool_initial_size_mb", "1024", GROWS),
    row("rdma_memory_pool_increase_size_mb", "1024", GROWS),
    row("rdma_memory_pool_max_regions", "16", "regions are smaller"),
    row("rdma_memory_pool_buckets", "4", "one for each CPU"),
    row("rdma_memory_pool_tls_cache_num", "128", ""),
];
