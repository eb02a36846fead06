//! A software provider behind the function tables of libibverbs and librdmacm. Its hosts, devices
//! and network exist only in this process.
//!
//! The higher layers can run on it without a device: under Miri, in a unit test, on a laptop. It
//! can also cause rare events: a call that fails, a port that goes down, a black hole, a device
//! that is removed.
//!
//! ```
//! # use ferrite_verbs::fake::{DeviceSpec, Objects, World};
//! let world = World::new();
//! world.add_device(DeviceSpec::new("fake1", "10.0.0.1".parse().expect("an address")));
//! let context = world.verbs().device("fake1").expect("device").open().expect("open");
//! world.fail_next("ibv_alloc_pd", 12); // ENOMEM
//! context.allocate_protection_domain().expect_err("injected failure");
//! drop(context);
//! assert_eq!(world.objects(), Objects::default());
//! ```
//!
//! # Structure
//!
//! ```text
//!  caller            C struct                       state
//!  QueuePair ──────► Object<ibv_qp> ───┐
//!  MemoryRegion ───► Object<ibv_mr> ───┤ id, world
//!  CmId ───────────► Object<rdma_cm_id>┤
//!  …                                   ▼
//!  World ──────────────────────────► Inner ── Mutex<State> ── BTreeMap<id, …> per kind of object
//!  Verbs ── tables ──► extern "C" fn ──┘ (each locks the state, then fails as injected, or runs)
//!                                     State owns the devices' C structs; every Object that it
//!                                     points to is in one of its maps
//! ```
//!
//! # What it models
//!
//! The fake models reliable connections as in the verbs specification and in Soft-RoCE:
//! - the states of queue pairs, flushing in order, and receiver-not-ready,
//! - queue entries that become free when completions are polled,
//! - keys, bounds and permissions on both sides, and memory windows of type 2B,
//! - shared receive queues,
//! - events and their acknowledgement,
//! - `EBUSY` while an object has children.
//!
//! For RDMA CM, the fake gives the same events and padding as librdmacm does for identifiers
//! without a queue pair.
//!
//! Every operation is executed at once, on the caller's thread, under one lock. No packet is in
//! flight, no thread runs in the background, and the same calls give the same completions. The fake
//! has no clock: where a device would retry for a time and then fail, the fake fails at once. A
//! device may also retry until the cause disappears (`rnr_retry` 7, `timeout` 0, a peer that is not
//! ready to receive yet). In these cases the request waits until the cause has disappeared.
//!
//! To find bugs, the fake is stricter than devices:
//! - local and remote keys differ and are never reused,
//! - queues are exactly as deep as requested,
//! - send queue entries become free only with a polled completion,
//! - a queue pair cannot be destroyed before the windows that are bound to it.
//!
//! # What it does not model
//!
//! - packet numbers, splitting into packets, packet loss (except a black hole), partial transfers,
//! - UD, UC, atomics, memory windows of type 1, inline receives,
//! - resizing, the drained state of a send queue, TIMEWAIT_EXIT,
//! - memlock and cgroups (inject `ENOMEM` or `EAGAIN` instead),
//! - sysfs (a fake device has no driver, NUMA node or netdev).

mod cm;
mod completion;
mod device;
mod enter;
mod execution;
mod handshake;
mod late;
mod memory;
mod object;
mod queue_pair;
mod receive;
mod records;
mod state;
mod table;
#[cfg(test)]
mod tests;
mod window;

use std::cell::RefCell;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

use rustix::io::Errno;

use crate::sys;
use object::Id;
use records::Subject;
use state::State;
pub(crate) use table::{CM, IBV};

/// A set of hosts that are isolated from other worlds. Clones share it. It lives as long as any
/// object created from it.
#[derive(Clone)]
pub struct World(Arc<Inner>);

struct Inner {
    state: Mutex<State>,
    /// Notified after every change, to wake waiting calls.
    changed: Condvar,
}

thread_local! {
    /// The worlds for calls without an object on this thread, innermost last: see [`World::enter`].
    static CURRENT: RefCell<Vec<World>> = const { RefCell::new(Vec::new()) };
}

/// Returns the static name of `call` from the table of calls.
fn call_name(call: &str) -> &'static str {
    let known = table::CALLS.iter().find(|known| **known == call);
    known.unwrap_or_else(|| panic!("unknown C function: {call}"))
}

impl World {
    /// Creates an empty world.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new_cyclic(|me| Inner {
            state: Mutex::new(State::new(me.clone())),
            changed: Condvar::new(),
        }))
    }

    /// Adds a device. All its ports are up, and it reaches all other devices.
    ///
    /// # Panics
    /// If the world already has a device with that name.
    pub fn add_device(&self, spec: DeviceSpec) {
        self.with(|state| {
            assert!(
                state.device_named(&spec.name).is_none(),
                "there already is a device called {}",
                spec.name
            );
            state.add_device(spec);
        });
    }

    /// Makes the next call of the C function `call` fail with `errno`. Several failures are used in
    /// order, one per call. Operations of a context have the names of their C wrappers
    /// (`ibv_post_send`, `ibv_poll_cq`), and `ibv_reg_mr` stands for every registration.
    ///
    /// A destroy that fails leaves its object unchanged.
    ///
    /// # Panics
    /// If there is no such function, or it cannot fail.
    pub fn fail_next(&self, call: &str, errno: i32) {
        self.with(|state| state.inject(call_name(call), Errno::from_raw_os_error(errno)));
    }

    /// Makes every call of the C function `call` wait until [`World::let_go`]. This imitates calls
    /// that block. For example, the real `ibv_modify_qp` waits for a second while the kernel
    /// resolves the hardware address of a silent peer (`ib_resolve_eth_dmac` in Linux). Functions
    /// that take no object, such as `ibv_get_device_list`, do not wait.
    ///
    /// # Panics
    /// As [`World::fail_next`].
    pub fn hold(&self, call: &str) {
        self.with(|state| state.held.insert(call_name(call)));
    }

    /// Ends [`World::hold`].
    ///
    /// # Panics
    /// As [`World::fail_next`].
    pub fn let_go(&self, call: &str) {
        self.with(|state| state.held.remove(call_name(call)));
    }

    /// Returns how many calls of a held function are waiting now.
    ///
    /// # Panics
    /// As [`World::fail_next`].
    #[must_use]
    pub fn waiting_in(&self, call: &str) -> usize {
        self.lock().waiting.get(call_name(call)).copied().unwrap_or(0)
    }

    /// Returns the names of the C functions that a thread has called on objects of this world since
    /// the last [`World::forget_calls`], each name once. `ibv_free_device_list`,
    /// `ibv_ack_async_event` and `rdma_destroy_event_channel` appear as an empty name.
    /// `ibv_get_device_name` and `rdma_ack_cm_event` do not appear.
    #[must_use]
    pub fn calls_of(&self, thread: ThreadId) -> Vec<&'static str> {
        self.with(|state| state.calls.get(&thread).into_iter().flatten().copied().collect())
    }

    /// Clears the record of calls of all threads.
    pub fn forget_calls(&self) {
        self.with(|state| state.calls.clear());
    }

    /// Simulates a kernel before 5.12, which does not copy pinned pages for a forked child
    /// (`get_copy_on_fork` and `ibv_is_fork_initialized` in rdma-core's `libibverbs/memory.c`).
    pub fn run_on_old_kernel(&self) {
        self.with(|state| state.forks = sys::ibv_fork_status::IBV_FORK_DISABLED);
    }

    /// Returns whether registered memory is protected against forks, by the kernel or because a
    /// program called `ibv_fork_init`.
    #[must_use]
    pub fn is_fork_safe(&self) -> bool {
        self.lock().forks != sys::ibv_fork_status::IBV_FORK_DISABLED
    }

    /// Makes the next `ibv_post_send` fail with `errno` after it has queued all its requests,
    /// without naming a refused request. Soft-RoCE does this when its doorbell fails
    /// (`rxe_post_send` and `post_send_db` in rdma-core's `providers/rxe/rxe.c`).
    pub fn fail_next_doorbell(&self, errno: i32) {
        self.with(|state| state.inject(execution::DOORBELL, Errno::from_raw_os_error(errno)));
    }

    /// Takes all ports of a device down. Its users get one async event, about port 1, and its peers
    /// get no answer.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn device_down(&self, name: &str) {
        self.with_device(name, |state, device| state.set_port_up(device, false));
    }

    /// Brings all ports of a device up again. Its users get one async event, about port 1, and
    /// waiting requests continue.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn device_up(&self, name: &str) {
        self.with_device(name, |state, device| state.set_port_up(device, true));
    }

    /// Loses every packet between two devices (or from a device to itself) until [`World::heal`].
    /// Requests fail with "transport retry exceeded", or wait if the timeout of their queue pair is
    /// 0. Handshakes get no answer.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn black_hole(&self, one: &str, other: &str) {
        self.with_wire(one, other, |state, wire| {
            state.black_holes.insert(wire);
        });
    }

    /// Ends a [`World::black_hole`]. Waiting requests continue.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn heal(&self, one: &str, other: &str) {
        self.with_wire(one, other, |state, wire| {
            state.black_holes.remove(&wire);
        });
    }

    /// Removes a device. Its users get an async event and a CM event, its queue pairs fail, and its
    /// peers are disconnected. After that, calls that query the device or a queue pair, change a
    /// queue pair, post sends or create objects fail with EIO. Completions and events can still be
    /// fetched, and objects can be destroyed.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn remove_device(&self, name: &str) {
        self.with_device(name, State::remove);
    }

    /// Takes a device away from its users, as the kernel does when a device is removed or its
    /// firmware is reset.
    ///
    /// The users get an async event and a CM event. All their objects are destroyed, except
    /// contexts and channels. Then the event descriptors report a hang-up (in Linux, an error).
    /// Queries of a context and destroys of the destroyed objects fail with EIO. (libibverbs passes
    /// this error on unless RDMAV_ALLOW_DISASSOC_DESTROY is set: `libibverbs/cmd_write.h`.) Other
    /// calls on destroyed objects fail with EINVAL (in Linux, with EIO). The kernel disassociates a
    /// device if the driver allows it. mlx5 and most other drivers do (`ib_uverbs_remove_one` and
    /// `ib_uverbs_free_hw_resources` in the kernel's `drivers/infiniband/core/uverbs_main.c`).
    ///
    /// # Panics
    /// If there is no such device.
    pub fn disassociate_device(&self, name: &str) {
        self.with_device(name, State::disassociate);
    }

    /// Breaks a queue pair. It moves to ERROR with an async event, and its requests are flushed.
    /// Returns `false` if no queue pair has this number.
    #[expect(clippy::must_use_candidate, reason = "called for its effect")]
    pub fn break_queue_pair(&self, qp_num: u32) -> bool {
        self.with(|state| {
            let Some(id) = state.by_qp_num.get(&qp_num).copied() else { return false };
            let context = state.queue_pairs[&id].context;
            state.notify(context, sys::ibv_event_type::IBV_EVENT_QP_FATAL, Subject::QueuePair(id));
            state.fail(id);
            state.settle();
            true
        })
    }

    /// Returns the numbers of live objects.
    #[must_use]
    pub fn objects(&self) -> Objects {
        self.lock().objects()
    }

    /// Returns the sizes that programs have asked for.
    #[must_use]
    pub fn sizes(&self) -> Sizes {
        let state = self.lock();
        let largest = state.regions.values().map(|region| region.len as usize).max();
        Sizes { largest_region: largest, ..state.sizes }
    }

    /// Runs `call` in this world. C functions that take no object, called by `call`, use this
    /// world.
    pub(crate) fn enter<T>(&self, call: impl FnOnce() -> T) -> T {
        struct Leave;
        impl Drop for Leave {
            fn drop(&mut self) {
                CURRENT.with_borrow_mut(Vec::pop);
            }
        }
        CURRENT.with_borrow_mut(|worlds| worlds.push(self.clone()));
        let _leave = Leave;
        call()
    }

    fn current() -> Option<Self> {
        CURRENT.with_borrow(|worlds| worlds.last().cloned())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, run: impl FnOnce(&mut State) -> T) -> T {
        let result = run(&mut self.lock());
        self.0.changed.notify_all();
        result
    }

    fn with_device(&self, name: &str, run: impl FnOnce(&mut State, Id)) {
        self.with(|state| {
            let device =
                state.device_named(name).unwrap_or_else(|| panic!("no device called {name}"));
            run(state, device);
        });
    }

    fn with_wire(&self, one: &str, other: &str, run: impl FnOnce(&mut State, (Id, Id))) {
        self.with_device(one, |state, one| {
            let other =
                state.device_named(other).unwrap_or_else(|| panic!("no device called {other}"));
            run(state, (one.min(other), one.max(other)));
            state.settle();
        });
    }

    /// Waits for a change; returns `true` if `timeout` passed first.
    fn wait<'a>(
        &self,
        state: MutexGuard<'a, State>,
        timeout: Option<Duration>,
    ) -> (MutexGuard<'a, State>, bool) {
        match timeout {
            None => (self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner), false),
            Some(timeout) => {
                let (state, waited) = self
                    .0
                    .changed
                    .wait_timeout(state, timeout)
                    .unwrap_or_else(PoisonError::into_inner);
                (state, waited.timed_out())
            }
        }
    }
}

impl Default for World {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("World").field(&self.objects()).finish()
    }
}

/// The specification of a fake device: its name, addresses and limits.
///
/// The GID table has a link-local address at index 0 and [`DeviceSpec::addresses`] from index 1,
/// all of them RoCE v2.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the limits are those of ibv_query_device(3)")]
pub struct DeviceSpec {
    /// The name, at most 63 bytes long.
    pub name: String,
    /// At most 15 addresses.
    pub addresses: Vec<IpAddr>,
    pub max_qp: u32,
    pub max_qp_wr: u32,
    pub max_sge: u32,
    pub max_inline: u32,
    pub max_cq: u32,
    pub max_cqe: u32,
    pub max_mr: u32,
    pub max_mr_bytes: u64,
    pub max_mw: u32,
    pub max_pd: u32,
    pub max_srq: u32,
    pub max_srq_wr: u32,
    pub max_srq_sge: u32,
    /// Maximum number of reads that a queue pair may have outstanding. Also the maximum number of
    /// reads that it serves at a time.
    pub max_reads: u32,
    /// Whether destroying a queue pair removes its unpolled completions and frees the entries of
    /// their receives in the shared receive queue. mlx5 does this: `mlx5_destroy_qp` (rdma-core's
    /// `providers/mlx5/verbs.c`) calls `__mlx5_cq_clean` (`cq.c`), which frees the entries. mlx4,
    /// hns and others do the same. Soft-RoCE does not.
    pub cleans_completions: bool,
    /// Whether the device reports IBV_EVENT_QP_LAST_WQE_REACHED when a queue pair with a shared
    /// receive queue fails. Soft-RoCE before Linux 6.11 does not (`flush_recv_queue` in the
    /// kernel's `drivers/infiniband/sw/rxe/rxe_resp.c`).
    pub reports_last_receive: bool,
    /// Whether memory windows can be bound to a queue pair. If not, the device has no windows.
    pub queue_pair_windows: bool,
    /// Whether the kernel reports windows of type 2, but the user-space provider has none, so that
    /// `ibv_alloc_mw` returns EOPNOTSUPP. bnxt_re is an example. `bnxt_re_query_device` (the
    /// kernel's `drivers/infiniband/hw/bnxt_re/ib_verbs.c`) sets IB_DEVICE_MEM_WINDOW_TYPE_2B and
    /// `max_mw`. But no version of rdma-core's `providers/bnxt_re` has an `alloc_mw`, so the stub
    /// in `libibverbs/dummy_ops.c` runs.
    pub windows_only_in_kernel: bool,
    /// Whether `max_mw` is 0 although the device has windows. `mlx4_ib_query_device` (the kernel's
    /// `drivers/infiniband/hw/mlx4/main.c`) never sets `max_mw`.
    pub hides_max_mw: bool,
    /// Whether a queue pair that exceeds the limits is refused without an error number, so that
    /// errno keeps its old value. bnxt_re does this (`bnxt_re_check_qp_limits` and
    /// `bnxt_re_create_qp` in rdma-core's `providers/bnxt_re/verbs.c`).
    pub refuses_silently: bool,
    /// The MTU of the port, as a verbs code: 1 is 256 bytes, 5 is 4096. The connection manager
    /// takes the path MTU from the port of the connecting side (`cma_resolve_iboe_route` in the
    /// kernel's `drivers/infiniband/core/cma.c`). The accepting side uses the MTU in the request,
    /// even if its own port has a different MTU (`cm_init_qp_rtr_attr` in `cm.c`).
    pub active_mtu: u32,
    /// The number of ports. Only the last one has the [`DeviceSpec::addresses`]; the link-local
    /// address belongs to port 1. All ports are up or down together. A ConnectX-3, for example, can
    /// have two ports (`phys_port_cnt` in the kernel's `drivers/infiniband/hw/mlx4/main.c`).
    pub port: u8,
    /// Whether `ibv_device` says that the device speaks iWARP. It does for `siw` and `irdma`
    /// (`decode_knode_type` in rdma-core's `libibverbs/init.c`).
    pub is_iwarp: bool,
}

impl DeviceSpec {
    /// Creates a specification with one address and the limits of Soft-RoCE.
    #[must_use]
    pub fn new(name: &str, address: IpAddr) -> Self {
        Self {
            name: name.to_owned(),
            addresses: vec![address],
            max_qp: 30_000,
            max_qp_wr: 1 << 20,
            max_sge: 32,
            max_inline: 512,
            max_cq: 65_536,
            max_cqe: 32_767,
            max_mr: 524_288,
            max_mr_bytes: 1 << 40,
            max_mw: 524_288,
            max_pd: 65_536,
            max_srq: 30_000,
            max_srq_wr: 1 << 20,
            max_srq_sge: 27,
            max_reads: 128,
            cleans_completions: false,
            reports_last_receive: true,
            queue_pair_windows: true,
            windows_only_in_kernel: false,
            hides_max_mw: false,
            refuses_silently: false,
            active_mtu: 5,
            port: 1,
            is_iwarp: false,
        }
    }
}

/// The sizes that programs have asked for: the size of the largest live region, and the most recent
/// value of each other kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sizes {
    /// Number of entries of a completion queue.
    pub completion_queue: usize,
    /// Maximum number of requests in a send queue.
    pub send_queue: u32,
    /// Maximum number of bytes that a request of a queue pair carries inline.
    pub inline: u32,
    /// Maximum number of receives in a shared receive queue.
    pub shared_receive_queue: u32,
    /// Maximum number of completions that the last poll could return.
    pub poll_batch: usize,
    /// Number of bytes in the largest live region; `None` if no region is live.
    pub largest_region: Option<usize>,
}

/// The number of live objects of each kind in a [`World`]: all zero once everything is released.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
#[non_exhaustive]
pub struct Objects {
    pub device_lists: usize,
    pub contexts: usize,
    pub protection_domains: usize,
    pub memory_regions: usize,
    pub memory_windows: usize,
    pub completion_channels: usize,
    pub completion_queues: usize,
    pub shared_receive_queues: usize,
    pub queue_pairs: usize,
    pub event_channels: usize,
    /// Includes the identifiers of connection requests that are not fetched yet.
    pub cm_ids: usize,
    /// Events that were fetched, but not acknowledged. Async events about a port or a device do not
    /// count.
    pub unacked_events: usize,
}
