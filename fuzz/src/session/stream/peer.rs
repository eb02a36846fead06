//! The peer, which uses plain verbs.

use ferrite_proto::{MESSAGE_BYTES, Message, Registration};
use ferrite_verbs::fake::World;
use ferrite_verbs::{
    Access, CmEventKind, CmId, CompletionQueue, ConnectParams, MemoryRegion, Opcode, Operation,
    ProtectionDomain, QueuePair, QueuePairConfig, RecvRequest, SendRequest, State, Status,
    WorkCompletion,
};

use super::model::Model;
use super::{RECEIVES, slice};

/// The size of the peer's memory. The peer registers only parts of the middle half, so the stream
/// must not write to the first and the last quarter.
pub(super) const MEMORY: usize = 1024;
/// The size of a receive.
const PLACE: usize = 2 * MESSAGE_BYTES;
/// The content of memory that was never written.
pub(super) const UNTOUCHED: u8 = 0xa5;

pub(super) struct Peer {
    qp: QueuePair,
    cq: CompletionQueue,
    /// The memory that the peer may register, then memory for every receive, then for the payload
    /// to send.
    region: MemoryRegion,
    id: CmId,
    /// The stream's window, where the peer may write.
    pub(super) theirs: Option<Registration>,
}

impl Peer {
    pub(super) fn new(domain: &ProtectionDomain, id: CmId) -> Self {
        let cq = domain.context().create_completion_queue(8 * RECEIVES, None, 0).expect("a queue");
        let config = QueuePairConfig {
            max_send_wr: RECEIVES,
            max_recv_wr: RECEIVES,
            ..QueuePairConfig::new(&cq)
        };
        let qp = domain.create_queue_pair(&config).expect("a queue pair");
        let room = MEMORY + (RECEIVES as usize) * PLACE + 256;
        let mut region = domain.allocate(room, Access::REMOTE_WRITE).expect("memory");
        region.write(0, &[UNTOUCHED; MEMORY]);
        let init = id.queue_pair_attributes(State::INIT).expect("attributes");
        qp.modify(&init.access(Access::REMOTE_WRITE)).expect("INIT");
        let peer = Self { qp, cq, region, id, theirs: None };
        (0..RECEIVES as usize).for_each(|place| peer.receive(place));
        peer
    }

    fn params(&self) -> ConnectParams<'static> {
        ConnectParams {
            qp_num: self.qp.number(),
            srq: false,
            private_data: &[],
            reads_in: 1,
            reads_out: 1,
            retries: 7,
            rnr_retries: 7,
        }
    }

    pub(super) fn connect(&self) {
        self.id.connect(&self.params()).expect("connect");
    }

    pub(super) fn is_answered(&self) -> bool {
        let event = self.id.channel().next_event().expect("a channel");
        event.is_some_and(|event| event.kind == CmEventKind::CONNECT_RESPONSE)
    }

    pub(super) fn establish(&self) {
        self.bring_up();
        self.id.establish().expect("establish");
    }

    pub(super) fn accept(&self) {
        self.bring_up();
        self.id.accept(&self.params()).expect("accept");
    }

    fn bring_up(&self) {
        for state in [State::READY_TO_RECEIVE, State::READY_TO_SEND] {
            let attributes = self.id.queue_pair_attributes(state).expect("attributes");
            self.qp.modify(&attributes.access(Access::REMOTE_WRITE)).expect("a state");
        }
    }

    fn receive(&self, place: usize) {
        let at = MEMORY + place * PLACE;
        self.qp
            .post_recv(&[RecvRequest::new(place as u64, &[self.region.sge(at..at + PLACE)])])
            .expect("room in the queue");
    }

    /// Returns a part of the peer's memory as a registration. It never includes the first and the
    /// last quarter.
    pub(super) fn memory(&self, at: usize, length: usize) -> Registration {
        let at = at + MEMORY / 4;
        let remote = self.region.remote(at..at + length);
        Registration { addr: remote.addr, length: length as u32, rkey: remote.rkey }
    }

    /// Returns the offset of an address in the peer's memory.
    fn offset(&self, addr: u64) -> usize {
        (addr - self.region.remote(0..1).addr) as usize
    }

    pub(super) fn send(&mut self, message: &[u8]) {
        self.post(Operation::Send, message);
    }

    /// Writes to the stream's window, with `imm` as immediate data.
    pub(super) fn write(
        &mut self,
        window: Registration,
        at: u32,
        payload: &[u8],
        imm: Option<u32>,
    ) {
        let remote = slice(window, at, payload.len());
        self.post(
            imm.map_or(Operation::Write(remote), |imm| Operation::WriteImm(remote, imm)),
            payload,
        );
    }

    pub(super) fn post(&mut self, operation: Operation, payload: &[u8]) {
        let at = MEMORY + RECEIVES as usize * PLACE;
        self.region.write(at, payload);
        let piece = [self.region.sge(at..at + payload.len())];
        let local = if payload.is_empty() { &[] } else { &piece[..] };
        let request = SendRequest::new(u64::MAX, operation, local).signaled();
        self.qp.post_send(&[request]).map_err(|refused| refused.error).expect("room in the queue");
    }

    pub(super) fn disconnect(&self) {
        let _ = self.id.disconnect();
    }

    pub(super) fn break_queue_pair(&self, world: &World) {
        world.break_queue_pair(self.qp.number());
    }

    /// Takes the data that the stream has sent.
    pub(super) fn take_messages(&mut self, model: &mut Model) {
        let mut out = [WorkCompletion::default(); 16];
        loop {
            let taken = self.cq.poll(&mut out).expect("a queue");
            for wc in &out[..taken] {
                if wc.status() != Status::SUCCESS || wc.wr_id() == u64::MAX {
                    continue;
                }
                let place = wc.wr_id() as usize;
                if wc.opcode() == Opcode::RECV_WRITE_IMM {
                    let (memory, from, bytes) =
                        model.notified(wc.imm().expect("immediate data"), wc.byte_len());
                    let at = self.offset(memory.addr) + from as usize;
                    assert_eq!(self.region.to_vec(at, bytes.len()), bytes);
                    self.check_untouched();
                } else {
                    let bytes = self.region.to_vec(MEMORY + place * PLACE, wc.byte_len() as usize);
                    let message = Message::decode(&bytes).expect("a message");
                    model.message_from_stream(&message);
                    if let Message::RegisterXferMemory(memory) = message {
                        assert!(
                            self.theirs.is_none_or(|before| before == memory),
                            "the window must stay the same"
                        );
                        self.theirs = Some(memory);
                    }
                }
                self.receive(place);
            }
            if taken == 0 {
                return;
            }
        }
    }

    /// Checks that the stream wrote only to the part of the memory that the peer may register.
    fn check_untouched(&self) {
        let may_be = MEMORY / 4..MEMORY / 4 + 512;
        for range in [0..may_be.start, may_be.end..MEMORY] {
            let bytes = self.region.to_vec(range.start, range.len());
            assert!(
                bytes.iter().all(|byte| *byte == UNTOUCHED),
                "the stream wrote to memory that was not registered"
            );
        }
    }
}
