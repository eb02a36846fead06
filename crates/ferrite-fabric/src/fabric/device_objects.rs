//! The verbs objects of a device that all its links share. The poller owns them, so that polling
//! completions needs no lock, and so that it can release them when the device disappears.

use std::sync::Arc;

use ferrite_verbs::{
    CompletionChannel, CompletionQueue, Context, ErrorKind, ProtectionDomain, QueuePair,
    QueuePairConfig, SharedReceiveQueue,
};

use super::config::Config;
use super::shared_device::SharedDevice;
use super::slots::{ReceiveStock, Taker};
use crate::error::Error;
use crate::mem::Pool;

/// The shared verbs objects of a device.
///
/// Drop it only when no queue pair of the device is left: otherwise the device would still use the
/// receives, so they are leaked.
pub(crate) struct DeviceObjects {
    /// Queue pairs that wait for their links. None of them has taken a receive.
    pub(super) prepared: Vec<QueuePair>,
    // In drop order. The stock destroys the shared receive queue and must hold the last handle of
    // it.
    srq: SharedReceiveQueue,
    pub(crate) stock: ReceiveStock,
    pub(crate) cq: CompletionQueue,
    pub(crate) channel: CompletionChannel,
    /// Whether the completion queue will report its next completion.
    pub(crate) armed: bool,
    /// Number of running commands that create or own a queue pair of this device.
    pub(crate) under_way: usize,
    /// Whether a command is creating a queue pair in advance.
    pub(super) is_preparing: bool,
    domain: ProtectionDomain,
    pub(crate) context: Context,
}

impl DeviceObjects {
    /// Creates queues for `receives` receives and `entries` completions.
    pub(super) fn new(
        domain: &ProtectionDomain,
        index: usize,
        receives: u32,
        entries: u32,
        config: &Config,
    ) -> Result<Self, ferrite_verbs::Error> {
        let context = domain.context().clone();
        let channel = context.create_completion_channel()?;
        let cq = context.create_completion_queue(entries, Some(&channel), index as u32)?;
        let srq = domain.create_shared_receive_queue(receives, 1)?;
        let block_bytes = config.recv_buffer_size as usize;
        // Soft-RoCE's queue is a ring. It is not known whether others are, nor whether they lose
        // receives.
        let in_order = context.device().driver().as_deref() == Some("rxe");
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

    /// Posts the missing receives. Pool exhaustion is not an error: peers wait until there is
    /// memory.
    pub(crate) fn refill(&mut self, pool: &Pool) -> Result<(), Error> {
        match self.stock.refill(pool) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == crate::mem::ErrorKind::Exhausted => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns a builder for a link's queue pair. It uses a prepared one, if there is one.
    pub(crate) fn queue_pair_builder(
        &mut self,
        device: &Arc<SharedDevice>,
        config: &Config,
    ) -> QueuePairBuilder {
        let prepared = self.prepared.pop();
        QueuePairBuilder { prepared, ..self.new_queue_pair(device, config) }
    }

    /// Returns a builder for a new queue pair.
    pub(super) fn new_queue_pair(
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
            // Before the queue pair exists: it cannot hold a receive that was taken earlier.
            taker: self.stock.taker(),
        }
    }
}

/// Creates a queue pair, in a command because that may block. The device objects are kept while a
/// builder exists ([`DeviceObjects::under_way`]).
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
        let mut inline = device.inline();
        loop {
            let made = domain.create_queue_pair(&QueuePairConfig {
                srq: Some(srq.clone()),
                max_send_wr: depth,
                max_recv_wr: 0,
                max_inline: inline,
                ..QueuePairConfig::new(&cq)
            });
            match made {
                // A device does not report its inline limit: it refuses a queue pair that exceeds
                // it.
                Err(error) if inline > 0 && may_mean_inline_limit(error.kind()) => {
                    inline = if inline > 64 { 64 } else { 0 };
                }
                Err(error) => return Err(error.into()),
                Ok(qp) => {
                    device.limit_inline(inline);
                    return Ok(NewQueuePair { qp, taker });
                }
            }
        }
    }
}

/// Returns whether a device may report this error if `max_inline` is too large. Each driver has its
/// own error number for that, and bnxt_re has none. Errors with another known cause, such as a lack
/// of memory, are excluded.
fn may_mean_inline_limit(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::DeviceLimit | ErrorKind::Misuse | ErrorKind::System)
}
