//! The verbs objects of a device that all its links share. The poller owns them. So polling
//! completions needs no lock, and the poller can release the objects when the device disappears.

use std::os::fd::AsFd;
use std::sync::Arc;

use ferrite_verbs::{
    CompletionChannel, CompletionQueue, Context, DeviceQuirks, Limits, ProtectionDomain, QueuePair,
    QueuePairConfig, SharedReceiveQueue,
};

use super::shared_device::{BATCH_MIN, Life, SharedDevice, inactive_ports};
use super::slots::{ReceiveStock, Taker};
use crate::config::Config;
use crate::error::{Error, ErrorKind};
use crate::mem::Pool;
use crate::wake::wait_set::{Ready, WaitSet};

/// The shared verbs objects of a device.
///
/// Must be dropped only when no queue pair of the device is left. If a queue pair is left, the
/// device still uses the receives, and they are leaked.
pub(crate) struct DeviceObjects {
    /// Queue pairs that were created in advance and have no link yet. None of them has taken a
    /// receive.
    pub(crate) prepared: Vec<QueuePair>,
    // These fields are in drop order. The stock destroys the shared receive queue, and must hold
    // its last handle.
    srq: SharedReceiveQueue,
    pub(crate) stock: ReceiveStock,
    pub(crate) cq: CompletionQueue,
    pub(crate) channel: CompletionChannel,
    /// Whether the completion queue will report its next completion.
    pub(crate) armed: bool,
    /// Number of running commands that create a queue pair of this device, or that own a queue pair
    /// without a link.
    pub(crate) under_way: usize,
    /// Whether a command is creating a queue pair in advance.
    pub(crate) is_preparing: bool,
    domain: ProtectionDomain,
    pub(crate) context: Context,
}

impl DeviceObjects {
    /// Creates the objects that all links of a device share.
    pub(crate) fn open(
        index: usize,
        domain: &ProtectionDomain,
        config: &Config,
    ) -> Result<(Life, Self), Error> {
        let context = domain.context().clone();
        let mut limits = context.limits()?;
        check(&context, &limits)?;
        // A device may report windows that it cannot allocate. Treat these as missing from the
        // start.
        limits.queue_pair_windows = limits.queue_pair_windows && domain.try_window().is_ok();
        let receives = config.recv_queue_depth.clamp(BATCH_MIN, limits.max_srq_wr);
        let entries = config.cq_size.max(receives + BATCH_MIN).min(limits.max_cqe);
        let receives = receives.min(entries / 2);
        let (quirks, inline) = (context.device().quirks(), config.inline_threshold);
        let objects = Self::new(domain, index, quirks, (receives, entries), config)?;
        let in_flight_max = entries - receives;
        let inactive_ports = inactive_ports(&context, config.device_port);
        let life = Life { context, limits, quirks, in_flight_max, inline, inactive_ports };
        Ok((life, objects))
    }

    /// Creates queues for `receives` receives and `entries` completions.
    fn new(
        domain: &ProtectionDomain,
        index: usize,
        quirks: DeviceQuirks,
        (receives, entries): (u32, u32),
        config: &Config,
    ) -> Result<Self, ferrite_verbs::Error> {
        let context = domain.context().clone();
        let channel = context.create_completion_channel()?;
        let cq = context.create_completion_queue(entries, Some(&channel), index as u32)?;
        let srq = domain.create_shared_receive_queue(receives, 1)?;
        let block_bytes = config.recv_buffer_size as usize;
        let in_order = quirks.takes_receives_in_order;
        let stock = ReceiveStock::new(srq.clone(), receives as usize, block_bytes, index, in_order);
        Ok(Self {
            prepared: Vec::new(),
            srq,
            stock,
            cq,
            channel,
            armed: false,
            under_way: 0,
            is_preparing: false,
            domain: domain.clone(),
            context,
        })
    }

    /// Adds the device's events to the fabric's descriptor.
    pub(crate) fn attach(&self, waits: &WaitSet, device: usize) -> Result<(), Error> {
        waits.add(self.channel.as_fd(), Ready::Completions(device))?;
        waits.add(self.context.as_fd(), Ready::Device(device))
    }

    /// Removes the device's events from the fabric's descriptor. The event descriptors close with
    /// the device objects, unless something on the device could not be released.
    pub(crate) fn detach(&self, waits: &WaitSet) {
        waits.remove(self.channel.as_fd());
        waits.remove(self.context.as_fd());
    }

    /// Posts the missing receives. Pool exhaustion is not an error, because peers wait until there
    /// is memory.
    pub(crate) fn refill(&mut self, pool: &Pool) -> Result<(), Error> {
        match self.stock.refill(pool) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == crate::mem::ErrorKind::Exhausted => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns a builder for a link's queue pair. The builder uses a prepared queue pair if there
    /// is one.
    pub(crate) fn queue_pair_builder(
        &mut self,
        device: &Arc<SharedDevice>,
        config: &Config,
    ) -> QueuePairBuilder {
        let prepared = self.prepared.pop();
        QueuePairBuilder { prepared, ..self.new_queue_pair(device, config) }
    }

    /// Creates the prepared queue pairs of a device that was just opened. Stops if the device
    /// refuses one.
    pub(crate) fn prepare_all(&mut self, device: &Arc<SharedDevice>, config: &Config) {
        while self.prepared.len() < config.prepared_queue_pairs {
            match self.new_queue_pair(device, config).build() {
                Ok(made) => self.prepared.push(made.qp),
                Err(error) => {
                    let (made, wanted) = (self.prepared.len(), config.prepared_queue_pairs);
                    let name = &device.name;
                    tracing::warn!("{name}: prepared {made} of {wanted} queue pairs: {error}");
                    return;
                }
            }
        }
    }

    /// Returns a builder for a new queue pair.
    pub(crate) fn new_queue_pair(
        &mut self,
        device: &Arc<SharedDevice>,
        config: &Config,
    ) -> QueuePairBuilder {
        QueuePairBuilder {
            prepared: None,
            domain: self.domain.clone(),
            srq: self.srq.clone(),
            cq: self.cq.clone(),
            depth: device.send_queue_depth(config),
            device: Arc::clone(device),
            // Register before the queue pair is created or, if it is a prepared one, before it is
            // connected. So every receive that the queue pair can hold is taken after the
            // registration.
            taker: self.stock.taker(),
        }
    }
}

/// Checks that a device has the features that the fabric needs. EFA has no shared receive queues:
/// `max_srq` is 0. iWARP has no immediate data.
fn check(context: &Context, limits: &Limits) -> Result<(), Error> {
    if context.device().is_iwarp() {
        let what = format!(
            "{} is an iWARP device, which has no immediate data; Ferrite needs RoCE or InfiniBand",
            context.device().name()
        );
        return Err(Error::new(ErrorKind::Absent, what));
    }
    let receives = if limits.max_srq == 0 { 0 } else { limits.max_srq_wr };
    let least = [
        ("receives in a shared receive queue", receives, BATCH_MIN),
        ("entries in a completion queue", limits.max_cqe, 2 * BATCH_MIN),
        ("requests in a send queue", limits.max_qp_wr, BATCH_MIN),
    ];
    match least.into_iter().find(|(_, has, needs)| has < needs) {
        None => Ok(()),
        Some((what, has, needs)) => {
            let name = context.device().name();
            let what = format!("{name} supports {has} {what}, but Ferrite needs {needs}");
            Err(Error::new(ErrorKind::Absent, what))
        }
    }
}

/// Creates a queue pair. For links, this runs in a command, because creating may block. The device
/// objects are kept while a builder exists ([`DeviceObjects::under_way`]).
pub(crate) struct QueuePairBuilder {
    prepared: Option<QueuePair>,
    domain: ProtectionDomain,
    srq: SharedReceiveQueue,
    cq: CompletionQueue,
    depth: u32,
    device: Arc<SharedDevice>,
    taker: Taker,
}

/// A queue pair and its registration with the stock of receives. The registration must be dropped
/// after the queue pair.
pub(crate) struct NewQueuePair {
    pub(crate) qp: QueuePair,
    pub(crate) taker: Taker,
}

impl QueuePairBuilder {
    pub(crate) fn build(self) -> Result<NewQueuePair, Error> {
        let Self { prepared, domain, srq, cq, depth, device, taker } = self;
        if let Some(qp) = prepared {
            return Ok(NewQueuePair { qp, taker });
        }
        let create = |max_inline| {
            domain.create_queue_pair(&QueuePairConfig {
                srq: Some(srq.clone()),
                max_send_wr: depth,
                max_recv_wr: 0,
                max_inline,
                ..QueuePairConfig::new(&cq)
            })
        };
        let wanted = device.inline();
        let (mut inline, mut made) = (wanted, create(wanted));
        // A device does not report its inline limit, but refuses a queue pair that exceeds the
        // limit.
        while inline > 0 && made.as_ref().is_err_and(|error| may_mean_inline_limit(error.kind())) {
            inline = if inline > 64 { 64 } else { 0 };
            made = create(inline);
        }
        let mut qp = made?;
        // The recorded limit applies until the device is reset, so record it only if the device
        // refuses twice. The first refusal may have had a temporary cause.
        if inline < wanted {
            match create(wanted) {
                Ok(larger) => qp = larger,
                Err(_) => device.limit_inline(inline),
            }
        }
        Ok(NewQueuePair { qp, taker })
    }
}

/// Returns whether a device may report this error if `max_inline` is too large. Each driver has a
/// different error number for that, and bnxt_re has none. Errors with another known cause, such as
/// a lack of memory, are excluded.
fn may_mean_inline_limit(kind: ferrite_verbs::ErrorKind) -> bool {
    use ferrite_verbs::ErrorKind;
    matches!(kind, ErrorKind::DeviceLimit | ErrorKind::Misuse | ErrorKind::System)
}
