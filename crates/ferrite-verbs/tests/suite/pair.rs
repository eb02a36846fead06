//! Two connected ends in one process, set up with RDMA CM.

use std::any::Any;
use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use ferrite_verbs::cm::{self, Listener};
use ferrite_verbs::{
    Access, CmId, CompletionChannel, CompletionQueue, ConnectParams, Context, MemoryRegion,
    ProtectionDomain, QueuePair, QueuePairConfig, RecvRequest, SendRequest, SharedReceiveQueue,
    WorkCompletion,
};

use super::{Fixture, Host, TIMEOUT};

/// How to wait for completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Poll,
    Event,
}

/// One end of a connection: its objects, and the identifier that connected them.
pub(crate) struct End {
    pub(crate) parts: Parts,
    pub(crate) id: CmId,
}

impl Deref for End {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.parts
    }
}

impl DerefMut for End {
    fn deref_mut(&mut self) -> &mut Parts {
        &mut self.parts
    }
}

/// The configuration of a pair.
#[derive(Clone)]
pub(crate) struct PairConfig {
    pub(crate) region_bytes: usize,
    pub(crate) cq_depth: u32,
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) sges: u32,
    pub(crate) inline: u32,
    pub(crate) retries: u8,
    pub(crate) rnr_retries: u8,
    /// Encoded: 14 means 67 ms, so that a dead peer is detected soon.
    pub(crate) ack_timeout: u8,
    /// The access rights of the region.
    pub(crate) region_access: Access,
    /// The access rights of the queue pair.
    pub(crate) access: Access,
    pub(crate) srq_receives: Option<u32>,
}

impl Default for PairConfig {
    fn default() -> Self {
        Self {
            region_bytes: 256 << 10,
            cq_depth: 256,
            max_send_wr: 64,
            max_recv_wr: 64,
            sges: 4,
            inline: 128,
            retries: 3,
            rnr_retries: 7,
            ack_timeout: 14,
            region_access: Access::REMOTE_READ | Access::REMOTE_WRITE,
            access: Access::REMOTE_READ | Access::REMOTE_WRITE,
            srq_receives: None,
        }
    }
}

/// Both ends of a connection: `ends[0]` listened, `ends[1]` connected.
pub(crate) struct Pair {
    pub(crate) ends: [End; 2],
}

impl Pair {
    pub(crate) fn new(fixture: &Fixture) -> Self {
        Self::with(fixture, &PairConfig::default())
    }

    pub(crate) fn with(fixture: &Fixture, config: &PairConfig) -> Self {
        let [host, peer] = &fixture.hosts;
        let listener = Listener::bind(&fixture.verbs, host.any_port(), 8).expect("listen");
        let target = listener.id().local_addr().expect("an address");
        let ends = std::thread::scope(|scope| {
            let passive = scope.spawn(|| {
                let request = listener.next_request(TIMEOUT).expect("events").expect("a request");
                let parts = Parts::new(fixture, host, config);
                let access = config.access;
                cm::accept(&request, &parts.qp, access, &params(config), TIMEOUT).expect("accept");
                End { parts, id: request.id }
            });
            let local = Some(peer.any_port());
            let id = cm::resolve(&fixture.verbs, local, target, TIMEOUT).expect("resolve");
            id.set_ack_timeout(config.ack_timeout).expect("ack timeout");
            let parts = Parts::new(fixture, peer, config);
            cm::connect(&id, &parts.qp, config.access, &params(config), TIMEOUT).expect("connect");
            [passive.join().expect("the passive side"), End { parts, id }]
        });
        Self { ends }
    }

    /// Returns every object separately, to be dropped in any order.
    pub(crate) fn into_pieces(self) -> Vec<Box<dyn Any>> {
        let mut pieces: Vec<Box<dyn Any>> = Vec::new();
        for End { parts: Parts { context, domain, channel, cq, region, srq, qp }, id } in self.ends
        {
            pieces.extend([Box::new(context) as Box<dyn Any>, Box::new(domain), Box::new(channel)]);
            pieces.extend([Box::new(cq) as Box<dyn Any>, Box::new(region), Box::new(qp)]);
            pieces.extend([Box::new(srq) as Box<dyn Any>, Box::new(id)]);
        }
        pieces
    }

    /// Returns (from, to) for both directions.
    pub(crate) fn directions(&self) -> [(&End, &End); 2] {
        let [a, b] = &self.ends;
        [(a, b), (b, a)]
    }
}

pub(crate) fn params(config: &PairConfig) -> ConnectParams<'static> {
    ConnectParams {
        qp_num: 0,
        srq: false,
        private_data: &[],
        // The two values differ, so that tests fail if they are swapped.
        reads_in: 5,
        reads_out: 3,
        retries: config.retries,
        rnr_retries: config.rnr_retries,
    }
}

/// The objects of one end: a device with a queue pair, and a region for the peer to read and write.
pub(crate) struct Parts {
    pub(crate) context: Context,
    pub(crate) domain: ProtectionDomain,
    pub(crate) channel: CompletionChannel,
    pub(crate) cq: CompletionQueue,
    pub(crate) region: MemoryRegion,
    pub(crate) srq: Option<SharedReceiveQueue>,
    pub(crate) qp: QueuePair,
}

impl Parts {
    pub(crate) fn new(fixture: &Fixture, host: &Host, config: &PairConfig) -> Self {
        let context = fixture.verbs.device(&host.device).expect("device").open().expect("open");
        let domain = context.allocate_protection_domain().expect("domain");
        let channel = context.create_completion_channel().expect("channel");
        let cq =
            context.create_completion_queue(config.cq_depth, Some(&channel), 0).expect("queue");
        let region = domain.allocate(config.region_bytes, config.region_access).expect("region");
        let srq = config
            .srq_receives
            .map(|n| domain.create_shared_receive_queue(n, 1).expect("shared queue"));
        let qp = domain
            .create_queue_pair(&QueuePairConfig {
                srq: srq.clone(),
                max_send_wr: config.max_send_wr,
                max_recv_wr: config.max_recv_wr,
                max_send_sge: config.sges,
                max_recv_sge: config.sges,
                max_inline: config.inline,
                ..QueuePairConfig::new(&cq)
            })
            .expect("queue pair");
        Self { context, domain, channel, cq, region, srq, qp }
    }

    /// Returns the next completion.
    pub(crate) fn reap(&self, mode: Mode) -> WorkCompletion {
        self.reap_within(mode, TIMEOUT).expect("a completion in time")
    }

    /// Returns the next completion, if it arrives in time.
    pub(crate) fn reap_within(&self, mode: Mode, timeout: Duration) -> Option<WorkCompletion> {
        let mut out = [WorkCompletion::default()];
        if mode == Mode::Event {
            return (self.cq.wait(&mut out, timeout).expect("wait") == 1).then_some(out[0]);
        }
        let deadline = Instant::now() + timeout;
        while Instant::now() < deadline {
            if self.cq.poll(&mut out).expect("poll") == 1 {
                return Some(out[0]);
            }
            // The lab's guest has few CPUs, and Soft-RoCE needs one of them.
            std::thread::yield_now();
        }
        None
    }

    /// Posts one receive into `range` of the region, to the shared queue if there is one.
    pub(crate) fn receive_into(&self, wr_id: u64, range: std::ops::Range<usize>) {
        let place = [self.region.sge(range)];
        let request = [RecvRequest::new(wr_id, &place)];
        match &self.srq {
            Some(srq) => srq.post_recv(&request),
            None => self.qp.post_recv(&request),
        }
        .expect("post a receive");
    }

    pub(crate) fn post(&self, request: SendRequest<'_>) {
        self.qp.post_send(&[request]).expect("post");
    }
}

/// Returns bytes that differ by position and by `seed`.
pub(crate) fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len)
        .map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed).wrapping_add((at >> 8) as u8))
        .collect()
}
