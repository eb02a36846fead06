//! The pool on Soft-RoCE devices in the lab's guest (`cargo xtask lab-test mem`).

mod wire;

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use ferrite_fabric::mem::{ErrorKind, Pool, PoolError, Purpose};
use ferrite_verbs::{Access, ProtectionDomain, Status, Verbs};

const MIB: usize = 1 << 20;
const HOSTS: [(&str, &str); 2] = [("rxe1", "10.0.0.1"), ("rxe2", "10.0.0.2")];

fn verbs() -> Verbs {
    Verbs::system().expect("rdma-core")
}

fn domain(device: &str) -> ProtectionDomain {
    let context = verbs().device(device).and_then(|device| device.open()).expect("device");
    context.allocate_protection_domain().expect("domain")
}

/// If the guest has no huge pages reserved, the pool uses other pages. It reports how much memory
/// has which pages.
#[test]
fn falls_back_from_huge_pages() {
    let pool = Pool::builder(&[domain("rxe1")]).huge_pages(true).build().expect("pool");
    let pages = pool.stats().pages;
    let reserved = std::fs::read_to_string("/proc/sys/vm/nr_hugepages").unwrap_or_default();
    if reserved.trim().parse().unwrap_or(0) == 0 {
        assert_eq!(pages.huge_bytes, 0, "{pages:?}");
    }
    assert_eq!(
        pages.normal_bytes + pages.transparent_bytes + pages.huge_bytes,
        pool.stats().mapped_bytes
    );
    let mut buf = pool.take_uncharged(2 * MIB, Purpose::Send).expect("memory");
    buf.fill(1);
}

/// A pool grows in steps to 66 MiB on two devices, and releases everything again.
#[test]
fn grows_on_two_devices() {
    let domains = ["rxe1", "rxe2"].map(domain);
    let pool = Pool::builder(&domains)
        .memory_pool_max(66 * MIB)
        .receive_reserve(2 * MIB)
        .memory_pool_increase(16 * MIB)
        .build()
        .expect("pool");
    let mut taken: Vec<_> =
        (0..32).map(|_| pool.take_uncharged(2 * MIB, Purpose::Send).expect("memory")).collect();
    for buf in &mut taken {
        buf.fill(1);
    }
    let error = pool.take_uncharged(1, Purpose::Send).expect_err("all memory is taken");
    assert_eq!(error.kind(), ErrorKind::Exhausted, "{error}");
    let stats = pool.stats();
    assert_eq!(stats.send.in_use_bytes, 64 * MIB as u64);
    assert_eq!(stats.registered_bytes, 2 * 66 * MIB as u64);
    assert!(stats.growths >= 4, "{stats:?}");
    drop((pool, taken));
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

#[test]
fn peer_writes_until_revoked() {
    let [host, peer] = wire::connect(&verbs(), HOSTS);
    let pool = Pool::builder(std::slice::from_ref(&host.domain)).build().expect("pool");
    let mut buf = pool.take_uncharged(10_000, Purpose::Receive).expect("memory");
    buf.fill(0);
    let mut exposed =
        pool.expose(buf, 0, Access::REMOTE_WRITE | Access::REMOTE_READ).expect("exposed");
    let target = exposed.remote();
    let bytes: Vec<u8> = (0..10_000_u32).map(|at| (at % 251) as u8).collect();
    assert_eq!(peer.write(&bytes, target), Status::SUCCESS);
    let mut copy = vec![0; bytes.len()];
    exposed.read(0, &mut copy);
    assert_eq!(copy, bytes);
    exposed.write(0, b"answer");
    assert_eq!(peer.read(6, target), (Status::SUCCESS, b"answer".to_vec()));

    let buf = exposed.revoke().expect("revoked");
    assert_eq!(peer.write(&[0xee; 64], target), Status::REMOTE_ACCESS);
    assert_eq!(
        (&buf[..6], &buf[6..]),
        (&b"answer"[..], &bytes[6..]),
        "bytes were written after the revocation"
    );
}

const ROLE: &str = "FERRITE_LAB_ROLE";
/// The variable that tells cargo and nextest how to start tests, if not directly.
const RUNNER: &str = "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER";
const NOBODY: u32 = 65534;

/// Runs itself again as a user to whom the locked-memory limit applies.
#[test]
fn memlock_is_explained() {
    if std::env::var_os(ROLE).is_some() {
        let domains = [domain("rxe1")];
        let pool = Pool::builder(&domains).build().expect("4 MiB fit under the limit");
        let mut taken = Vec::new();
        let error = loop {
            match pool.take_uncharged(2 * MIB, Purpose::Send) {
                Ok(buf) => taken.push(buf),
                Err(error) => break error,
            }
            assert!(taken.len() < 10, "the limit is never reached");
        };
        let PoolError::Register(cause) = &error else { panic!("not a refusal: {error}") };
        assert_eq!(cause.kind(), ferrite_verbs::ErrorKind::Memlock, "{error:?}");
        assert_eq!(error.kind(), ErrorKind::Refused);
        assert!(error.to_string().contains("limit is 8 MiB, but 4 MiB more are needed"), "{error}");
        assert!(error.remedy().is_some_and(|remedy| remedy.contains("LimitMEMLOCK=infinity")));
        // Memory that was registered before still works.
        drop(taken);
        pool.take_uncharged(2 * MIB, Purpose::Send).expect("memory");
        let error = Pool::builder(&domains)
            .memory_pool_initial(64 * MIB)
            .build()
            .expect_err("the pool exceeds memlock");
        assert!(error.to_string().contains("32 MiB more are needed"), "{error}");
        return;
    }
    let runner = std::env::var(RUNNER).unwrap_or_default();
    // Root has CAP_IPC_LOCK, which lifts the limit.
    let out = Command::new("prlimit")
        .arg("--memlock=8388608")
        .args(runner.split_whitespace())
        .args(std::env::args().take(1))
        .args(["--exact", "memlock_is_explained", "--nocapture"])
        .env(ROLE, "child")
        .stdout(Stdio::null())
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .expect("prlimit");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}
