//! Two connected ends made of plain verbs: one of them plays the peer.

use std::time::Duration;

use ferrite_verbs::{
    Access, CompletionQueue, Context, Path, PeerAddress, ProtectionDomain, QueuePair,
    QueuePairAttributes, QueuePairConfig, RemoteSlice, SendRequest, Status, Verbs, WorkCompletion,
};

/// Longer than anything here takes, on the slowest kernel.
const TEST_TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) struct End {
    pub(crate) context: Context,
    pub(crate) domain: ProtectionDomain,
    cq: CompletionQueue,
    qp: QueuePair,
}

/// Connects ends on two hosts, each given by its device and its address.
pub(crate) fn connect(verbs: &Verbs, hosts: [(&str, &str); 2]) -> [End; 2] {
    let ends = hosts.map(|(device, _)| {
        let context = verbs.device(device).and_then(|device| device.open()).expect("device");
        let domain = context.allocate_protection_domain().expect("domain");
        let cq = context.create_completion_queue(16, None, 0).expect("queue");
        let qp = domain.create_queue_pair(&QueuePairConfig::new(&cq)).expect("queue pair");
        End { context, domain, cq, qp }
    });
    let addresses = [0, 1].map(|at| {
        let End { context, qp, .. } = &ends[at];
        let gids = context.gids().expect("addresses");
        let gid = gids
            .iter()
            .find(|entry| entry.gid.ip().to_string() == hosts[at].1)
            .expect("the host's address");
        (PeerAddress { qp_num: qp.number(), psn: 1, gid: gid.gid, lid: 0 }, gid.index as u8)
    });
    let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
    for (own, peer) in [(0, 1), (1, 0)] {
        let End { context, qp, .. } = &ends[own];
        let path = Path { mtu: context.port(1).expect("port").active_mtu, ..Path::default() };
        qp.modify(&QueuePairAttributes::init(1, access)).expect("init");
        let to_peer =
            QueuePairAttributes::connect_to(&addresses[peer].0, 1, addresses[own].1, &path, 1);
        qp.modify(&to_peer).expect("RTR");
        qp.modify(&QueuePairAttributes::ready_to_send(1, &path, 1)).expect("RTS");
    }
    ends
}

impl End {
    /// Writes `bytes` to the peer's memory and returns the status.
    pub(crate) fn write(&self, bytes: &[u8], target: RemoteSlice) -> Status {
        let mut region = self.domain.allocate(bytes.len(), Access::LOCAL).expect("region");
        region.write(0, bytes);
        let local = [region.sge(0..bytes.len())];
        self.qp.post_send(&[SendRequest::write(1, &local, target).signaled()]).expect("post");
        self.reap()
    }

    /// Reads the peer's memory.
    pub(crate) fn read(&self, len: usize, source: RemoteSlice) -> (Status, Vec<u8>) {
        let region = self.domain.allocate(len, Access::LOCAL).expect("region");
        let local = [region.sge(0..len)];
        self.qp.post_send(&[SendRequest::read(1, &local, source).signaled()]).expect("post");
        (self.reap(), region.to_vec(0, len))
    }

    fn reap(&self) -> Status {
        let mut out = [WorkCompletion::default()];
        let deadline = std::time::Instant::now() + TEST_TIMEOUT;
        while self.cq.poll(&mut out).expect("poll") == 0 {
            assert!(std::time::Instant::now() < deadline, "no completion within the time limit");
            std::thread::yield_now();
        }
        out[0].status()
    }
}
