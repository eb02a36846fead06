//! The device objects of a device: the objects of its device that all links share. The poller has
//! it, so that taking completions needs no lock, and can let go of it when the device goes.

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

/// Dropped when no queue pair of the device is left: else the device would still use the receives,
/// and they are leaked.
pub(crate) struct DeviceObjects {
    // In the order in which they go. The stock destroys the shared receive queue and must have the
    // last handle of it.
    srq: SharedReceiveQueue,
    pub(crate) stock: ReceiveStock,
    pub(crate) cq: CompletionQueue,
    pub(crate) channel: CompletionChannel,
    /// The completion queue will tell of its next completion.
    pub(crate) armed: bool,
    /// Commands under way that make or have a queue pair of this device.
    pub(crate) under_way: usize,
    domain: ProtectionDomain,
    pub(crate) context: Context,
}

impl DeviceObjects {
    /// Queues for `receives` receives and `entries` completions.
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
        // Soft-RoCE's queue is a ring. Of others it is not known, nor that they lose any.
        let in_order = context.device().driver().as_deref() == Some("rxe");
        let stock = ReceiveStock::new(srq.clone(), receives as usize, block_bytes, index, in_order);
        Ok(Self {
            srq,
            stock,
            cq,
            channel,
            armed: false,
            under_way: 0,
            domain: domain.clone(),
            context,
        })
    }

    /// Posts what receives are missing. A pool without memory is no error: peers wait until there
    /// is some.
    pub(crate) fn refill(&mut self, pool: &Pool) -> Result<(), Error> {
        match self.stock.refill(pool) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == crate::mem::ErrorKind::Exhausted => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// What makes a queue pair for a link.
    pub(crate) fn maker(&mut self, device: &Arc<SharedDevice>, config: &Config) -> Maker {
        Maker {
            domain: self.domain.clone(),
            srq: self.srq.clone(),
            cq: self.cq.clone(),
            depth: device.send_queue_depth(config),
            device: Arc::clone(device),
            // Before the queue pair: it has no receive that was taken earlier.
            taker: self.stock.taker(),
        }
    }
}

/// Makes a queue pair where that may wait. The device objects stays while there is one
/// ([`DeviceObjects::under_way`]).
pub(crate) struct Maker {
    domain: ProtectionDomain,
    srq: SharedReceiveQueue,
    cq: CompletionQueue,
    depth: u32,
    device: Arc<SharedDevice>,
    taker: Taker,
}

/// A queue pair, and what stands for it in the stock of receives: it goes after the queue pair.
pub(crate) struct Made {
    pub(crate) qp: QueuePair,
    pub(crate) taker: Taker,
}

impl Maker {
    pub(crate) fn make(self) -> Result<Made, Error> {
        let Self { domain, srq, cq, depth, device, taker } = self;
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
                // A device does not say how much it takes inline: it refuses too much.
                Err(error) if inline > 0 && is_vague(error.kind()) => {
                    inline = if inline > 64 { 64 } else { 0 };
                }
                Err(error) => return Err(error.into()),
                Ok(qp) => {
                    device.takes_inline(inline);
                    return Ok(Made { qp, taker });
                }
            }
        }
    }
}

/// Whether a device that refuses inline bytes may say this. Each has an error number of its own for
/// it, and bnxt_re none; but not those of other causes, as a lack of memory.
fn is_vague(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::DeviceLimit | ErrorKind::Misuse | ErrorKind::System)
}
