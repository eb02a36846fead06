//! The queue pair of a link. It is created in a command, connected as agreed with the connection
//! manager, and registered with its link.

use std::net::SocketAddr;
use std::sync::Arc;

use ferrite_verbs::{Access, CmId, ConnectParams, Context, Mtu, QueuePair, State};

use super::{Handshake, own_limits};
use crate::device::device_objects::{NewQueuePair, QueuePairBuilder};
use crate::device::shared_device::SharedDevice;
use crate::device::slots::SendQueue;
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::poller::Poller;
use crate::fabric::timers::Timer;
use crate::link::shared::LinkShared;
use crate::link::state::LinkState;
use crate::source::Source;
use crate::wire::Hello;

/// Unlimited retries to a peer without posted receives. Such a peer has stopped consuming, which is
/// back-pressure and not a failure.
pub(super) const RNR_RETRIES: u8 = 7;

impl Poller {
    /// Returns a builder for a queue pair on `device`. The caller must call
    /// [`Poller::end_queue_pair`] when the build has finished or failed.
    pub(super) fn begin_queue_pair(
        &mut self,
        shared: &Shared,
        device: &Arc<SharedDevice>,
    ) -> Result<QueuePairBuilder, Error> {
        let objects = self.device_objects[device.index].as_mut().filter(|_| !device.is_gone());
        let Some(objects) = objects else {
            return Err(device.absence());
        };
        objects.under_way += 1;
        let builder = objects.queue_pair_builder(device, &shared.config);
        self.prepare_queue_pairs(shared, device);
        Ok(builder)
    }

    pub(crate) fn end_queue_pair(&mut self, shared: &Shared, device: &SharedDevice) {
        if let Some(objects) = &mut self.device_objects[device.index] {
            objects.under_way -= 1;
        }
        self.retire_if_unused(shared, device.index);
    }

    /// Destroys a queue pair that nobody needs any more.
    pub(super) fn destroy_new_queue_pair(
        &mut self,
        shared: &Shared,
        device: &Arc<SharedDevice>,
        source: Source,
        made: NewQueuePair,
    ) {
        let device = Arc::clone(device);
        let work = |made: &mut Option<NewQueuePair>| {
            drop(made.take());
            Ok(())
        };
        self.command(shared, source, Some(made), work, move |poller, shared, _, _| {
            poller.end_queue_pair(shared, &device);
        });
    }

    /// Creates and registers a link on `device` over a new queue pair. Destroys the queue pair if
    /// there can be no link. Calls [`Poller::end_queue_pair`] in either case, for a failed link
    /// after the queue pair was destroyed.
    pub(super) fn create_link(
        &mut self,
        shared: &Shared,
        device: &Arc<SharedDevice>,
        made: NewQueuePair,
        peer: Option<SocketAddr>,
        moves: bool,
    ) -> Result<(Arc<LinkShared>, Hello), Error> {
        let source = Source::of_any(peer);
        if device.is_gone() {
            self.destroy_new_queue_pair(shared, device, source, made);
            return Err(device.absence());
        }
        let inline = made.qp.capacity().max_inline.min(device.inline()) as usize;
        let (links, reserved) = {
            let mut links = shared.links.write().unwrap_or_else(std::sync::PoisonError::into_inner);
            (links.len(), links.reserve())
        };
        let Some((name, generation)) = reserved else {
            self.destroy_new_queue_pair(shared, device, source, made);
            return Err(Error::new(ErrorKind::Resources, "too many links: no link number is free"));
        };
        let hello = shared.hello(links, moves);
        let limits = own_limits(shared, hello, name);
        let queue = SendQueue::new(made.qp, made.taker, name.index, device.index, generation);
        let state = LinkState::new(queue, Arc::clone(device), inline, limits);
        let (pool, mailbox) = (shared.pool.clone(), Arc::clone(&shared.mailbox));
        let link = Arc::new(LinkShared::new(name, state, pool, mailbox));
        // Set the address now, because it decides which source the link's commands are charged to,
        // even if the handshake fails.
        link.set_route(|route| route.peer = peer);
        self.register_link(shared, &link);
        self.end_queue_pair(shared, device);
        Ok((link, hello))
    }

    /// Opens the link: the handshake is complete.
    pub(super) fn establish(
        &mut self,
        shared: &Shared,
        id: CmId,
        link: &Arc<LinkShared>,
        hello: Hello,
        mtu: Mtu,
    ) {
        let (key, port) = (id.key(), id.device().map_or(1, |(_, port)| port));
        link.with_wakes(&mut self.wakes, |state, _, _| state.core.open(hello, self.now));
        link.set_route(|route| {
            (route.cm_key, route.port, route.mtu) = (Some(key), port, Some(mtu));
            (route.local, route.peer) = (id.local_addr(), id.peer_addr());
        });
        shared.is_well(link);
        shared.trace(link);
        self.handshakes.put(key, Handshake::Linked { id, link: link.name });
        self.timers.add(self.now, Timer::Keepalive(link.name)); // its handler restarts the timer
        // Messages that arrived meanwhile may need a reply.
        link.with_wakes(&mut self.wakes, LinkState::pump);
    }

    /// Ends a link whose handshake failed.
    pub(super) fn abandon_link(&mut self, shared: &Shared, link: &Arc<LinkShared>, error: &Error) {
        link.with_wakes(&mut self.wakes, |state, _, wakes| state.core.fail(error.clone(), wakes));
        self.service_link(shared, link.index);
    }
}

pub(super) fn params<'a>(
    shared: &Shared,
    device: &SharedDevice,
    link: &LinkShared,
    hello: &'a [u8],
) -> ConnectParams<'a> {
    let (reads_in, reads_out) = reads(shared, device);
    ConnectParams {
        qp_num: link.route().qp_num,
        srq: true,
        private_data: hello,
        reads_in,
        reads_out,
        retries: shared.config.retries,
        rnr_retries: RNR_RETRIES,
    }
}

/// Returns how many of the peer's reads a queue pair of this device serves at a time, and how many
/// of its own reads may be outstanding.
pub(super) fn reads(shared: &Shared, device: &SharedDevice) -> (u8, u8) {
    let limits = device.limits();
    // A device may support no reads, and would refuse a queue pair that asks for one.
    let max =
        |device: u32| u8::try_from(device).unwrap_or(u8::MAX).min(shared.config.max_reads.max(1));
    (max(limits.max_qp_rd_atom), max(limits.max_qp_init_rd_atom))
}

pub(super) fn initialise(id: &CmId, qp: &QueuePair) -> Result<(), Error> {
    Ok(qp.modify(&id.queue_pair_attributes(State::INIT)?.access(Access::LOCAL))?)
}

/// The parameters with which a queue pair is connected.
#[derive(Clone, Copy)]
pub(super) struct Connection {
    /// The peer's rights to our memory.
    pub(super) rights: Access,
    pub(super) reads_in: u8,
    pub(super) reads_out: u8,
    pub(super) ack_timeout: u8,
    /// See [`DeviceQuirks`](ferrite_verbs::DeviceQuirks). The connection manager would choose
    /// 655 ms.
    pub(super) rnr_timer: u8,
    /// The code of the MTU of the peer's port, or 0 if the peer did not report it. `None` for a
    /// foreign peer, which always uses the connection manager's path MTU.
    pub(super) peer_mtu: Option<u8>,
}

/// Moves the queue pair to ready-to-receive and then ready-to-send, as agreed with the connection
/// manager. Returns the MTU.
///
/// The connection manager knows only the MTU of the connecting side's port. The accepting side's
/// port may have a smaller MTU, and would lose each larger packet.
pub(super) fn bring_up(id: &CmId, qp: &QueuePair, with: Connection) -> Result<Mtu, Error> {
    let receive = id.queue_pair_attributes(State::READY_TO_RECEIVE)?;
    let (path, port) = (receive.mtu(), port_mtu(id, qp.domain().context())?);
    let mtu = match with.peer_mtu {
        None if path > port => return Err(too_large(path, port)),
        None | Some(0) => path.min(port),
        Some(peer) => path.min(port).min(Mtu::from_code(peer)),
    };
    let receive = receive.access(with.rights).reads_in(with.reads_in).rnr_timer(with.rnr_timer);
    qp.modify(&receive.path_mtu(mtu))?;
    // Set the RNR retries here. Otherwise the peer's settings decide how often to retry while the
    // peer has no receives, and some peers ask for no retries. Set the timeout here, because
    // kernels before 5.1 do not support `set_ack_timeout`.
    let send = id.queue_pair_attributes(State::READY_TO_SEND)?.reads_out(with.reads_out);
    qp.modify(&send.rnr_retries(RNR_RETRIES).ack_timeout(with.ack_timeout))?;
    Ok(mtu)
}

/// Returns the MTU of the port that an identifier is bound to.
pub(super) fn port_mtu(id: &CmId, context: &Context) -> Result<Mtu, Error> {
    let port = id.device().map_or(1, |(_, port)| port);
    Ok(context.port(port)?.active_mtu)
}

fn too_large(path: Mtu, port: Mtu) -> Error {
    let what = format!(
        "the peer sends packets of up to {path} bytes, and this port carries {port}: set the same \
         MTU on both hosts"
    );
    Error::new(ErrorKind::Unreachable, what)
}
