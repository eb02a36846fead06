//! A peer made of plain verbs, which can send anything, even what the protocol forbids.

use std::net::SocketAddr;
use std::time::Instant;

use ferrite_fabric::Fabric;
use ferrite_fabric::wire::{Control, Frame, GrantToken};
use ferrite_verbs::cm::{self, Listener};
use ferrite_verbs::{
    Access, CmId, CompletionQueue, ConnectParams, Error, MemoryRegion, Operation, ProtectionDomain,
    QueuePair, QueuePairConfig, RecvRequest, RemoteSlice, SendRequest, Status, WorkCompletion,
};

use super::pair::pass;
use super::{Fixture, Host, TEST_TIMEOUT};

const BLOCK: usize = 8 << 10;
const RECEIVES: usize = 128;
/// Maximum number of outstanding send requests.
const SENDS: usize = 512;

/// This bit marks the `wr_id` of every receive.
const RECEIVE: u64 = 1 << 32;

pub(crate) struct VerbsPeer {
    pub(crate) id: CmId,
    pub(crate) qp: QueuePair,
    cq: CompletionQueue,
    region: MemoryRegion,
    /// Where in `region` the next bytes are sent from.
    next: usize,
    /// If true, the peer does not post completed receives again.
    pub(crate) deaf: bool,
    /// Messages that arrived while the peer waited for a send completion.
    early: Vec<Received>,
    _domain: ProtectionDomain,
}

/// A received message: its immediate data and its bytes.
pub(crate) type Received = (Option<u32>, Vec<u8>);

impl VerbsPeer {
    fn new(fixture: &Fixture, host: &Host, id: CmId) -> Self {
        let context =
            fixture.verbs().device(&host.device).and_then(|device| device.open()).expect("device");
        let domain = context.allocate_protection_domain().expect("domain");
        let cq =
            context.create_completion_queue((SENDS + RECEIVES) as u32, None, 0).expect("queue");
        let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
        let region = domain.allocate((RECEIVES + 2) * BLOCK, access).expect("region");
        let qp = domain
            .create_queue_pair(&QueuePairConfig {
                max_send_wr: SENDS as u32,
                max_recv_wr: RECEIVES as u32,
                ..QueuePairConfig::new(&cq)
            })
            .expect("queue pair");
        Self {
            id,
            qp,
            cq,
            region,
            next: RECEIVES * BLOCK,
            deaf: false,
            early: Vec::new(),
            _domain: domain,
        }
    }

    /// Connects to a listener with this private data and drives `fabrics` meanwhile. Also returns
    /// the private data of the answer.
    pub(crate) fn connect(
        fixture: &Fixture,
        to: SocketAddr,
        private_data: &[u8],
        fabrics: &[&Fabric],
    ) -> Result<(Self, Vec<u8>), Error> {
        let host = &fixture.hosts[1];
        std::thread::scope(|scope| {
            let calling = scope.spawn(|| {
                let id = cm::resolve(fixture.verbs(), Some(host.any_port()), to, TEST_TIMEOUT)?;
                id.set_ack_timeout(14)?;
                let verbs_peer = Self::new(fixture, host, id);
                let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
                let answer = cm::connect(
                    &verbs_peer.id,
                    &verbs_peer.qp,
                    access,
                    &params(private_data),
                    TEST_TIMEOUT,
                )?;
                verbs_peer.post_receives();
                Ok((verbs_peer, answer))
            });
            while !calling.is_finished() {
                pass(fabrics);
            }
            calling.join().expect("the thread did not panic")
        })
    }

    /// Waits for a connection request and accepts it with this private data. Drives `fabrics`
    /// meanwhile.
    pub(crate) fn accept(
        fixture: &Fixture,
        listener: &Listener,
        private_data: &[u8],
        fabrics: &[&Fabric],
    ) -> Result<Self, Error> {
        std::thread::scope(|scope| {
            let answering = scope.spawn(|| {
                let request = listener.next_request(TEST_TIMEOUT)?.expect("a request");
                request.id.set_ack_timeout(14)?;
                let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
                let mut verbs_peer = Self::new(fixture, &fixture.hosts[0], request.id);
                let request = ferrite_verbs::ConnectionRequest { id: verbs_peer.id, ..request };
                let accepted = cm::accept(
                    &request,
                    &verbs_peer.qp,
                    access,
                    &params(private_data),
                    TEST_TIMEOUT,
                );
                verbs_peer.id = request.id;
                accepted.map(|()| verbs_peer)
            });
            while !answering.is_finished() {
                pass(fabrics);
            }
            answering.join().expect("the thread did not panic")
        })
    }

    fn post_receives(&self) {
        (0..RECEIVES).for_each(|at| self.post_receive(at));
    }

    fn post_receive(&self, at: usize) {
        let place = [self.region.sge(at * BLOCK..(at + 1) * BLOCK)];
        self.qp.post_recv(&[RecvRequest::new(RECEIVE | at as u64, &place)]).expect("post");
    }

    /// Sends bytes, with or without immediate data, and waits for the completion.
    pub(crate) fn send(&mut self, imm: Option<u32>, bytes: &[u8], fabrics: &[&Fabric]) -> Status {
        self.post(imm, bytes);
        self.sent(fabrics)
    }

    /// Posts a send without waiting for it.
    pub(crate) fn post(&mut self, imm: Option<u32>, bytes: &[u8]) {
        // Each message has its own place, because the device may not have read the previous one
        // yet.
        if self.next + bytes.len() > self.region.len() {
            self.next = RECEIVES * BLOCK;
        }
        let at = self.next;
        self.next += bytes.len();
        self.region.write(at, bytes);
        let local = [self.region.sge(at..at + bytes.len())];
        let local = if bytes.is_empty() { &local[..0] } else { &local[..] };
        let operation = imm.map_or(Operation::Send, Operation::SendImm);
        self.qp.post_send(&[SendRequest::new(0, operation, local).signaled()]).expect("post");
    }

    /// Reads all bytes of the grant. Returns the status of the read, and the bytes.
    pub(crate) fn read(&mut self, token: &GrantToken, fabrics: &[&Fabric]) -> (Status, Vec<u8>) {
        let len = token.len as usize;
        let local = [self.region.sge(RECEIVES * BLOCK..RECEIVES * BLOCK + len)];
        let from = RemoteSlice { addr: token.addr, len: token.len, rkey: token.rkey };
        self.qp.post_send(&[SendRequest::read(0, &local, from).signaled()]).expect("post");
        (self.sent(fabrics), self.region.to_vec(RECEIVES * BLOCK, len))
    }

    /// Writes a byte to the granted memory, with immediate data. Returns the status of the write.
    pub(crate) fn write_imm(
        &mut self,
        token: &GrantToken,
        imm: u32,
        fabrics: &[&Fabric],
    ) -> Status {
        let at = RECEIVES * BLOCK;
        let local = [self.region.sge(at..at + 1)];
        let to = RemoteSlice { addr: token.addr, len: token.len, rkey: token.rkey };
        let operation = Operation::WriteImm(to, imm);
        self.qp.post_send(&[SendRequest::new(0, operation, &local).signaled()]).expect("post");
        self.sent(fabrics)
    }

    pub(crate) fn control(&mut self, control: Control, fabrics: &[&Fabric]) -> Status {
        self.send(Some(frame(true, false, 0, 0)), &control.encode(), fabrics)
    }

    /// Waits for the next completion of a posted send.
    fn sent(&mut self, fabrics: &[&Fabric]) -> Status {
        let deadline = Instant::now() + TEST_TIMEOUT;
        loop {
            let mut out = [WorkCompletion::default()];
            if self.cq.poll(&mut out).expect("poll") == 0 {
                pass(fabrics);
                assert!(Instant::now() < deadline, "no completion in time");
            } else if out[0].wr_id() & RECEIVE == 0 {
                return out[0].status();
            } else {
                let received = self.take(&out[0]);
                self.early.extend(received);
            }
        }
    }

    /// Returns the messages received since the last call. Discards completions of sends.
    pub(crate) fn received(&mut self) -> Vec<Received> {
        let mut received = std::mem::take(&mut self.early);
        let mut out = [WorkCompletion::default()];
        while self.cq.poll(&mut out).expect("poll") > 0 {
            if out[0].wr_id() & RECEIVE != 0 {
                received.extend(self.take(&out[0]));
            }
        }
        received
    }

    fn take(&self, wc: &WorkCompletion) -> Option<Received> {
        if wc.status() != Status::SUCCESS {
            return None;
        }
        let at = (wc.wr_id() & !RECEIVE) as usize;
        let received = (wc.imm(), self.region.to_vec(at * BLOCK, wc.byte_len() as usize));
        if !self.deaf {
            self.post_receive(at);
        }
        Some(received)
    }
}

fn params(private_data: &[u8]) -> ConnectParams<'_> {
    ConnectParams {
        qp_num: 0,
        srq: false,
        private_data,
        reads_in: 4,
        reads_out: 4,
        retries: 6,
        rnr_retries: 7,
    }
}

/// Returns the immediate data of a frame.
pub(crate) fn frame(control: bool, more: bool, channel: u16, consumed: u16) -> u32 {
    Frame { control, more, channel, consumed }.to_imm()
}
