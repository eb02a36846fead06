//! Reads small kernel files, up to a maximum size.
//!
//! A host may have a hundred thousand routes or neighbours. Because of the maximum, a diagnosis on
//! such a host takes no longer than on others.

use std::fs::File;
use std::io::Read as _;
use std::net::{IpAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The directories from which kernel files are read. Tests use directories of their own.
#[derive(Debug, Clone)]
pub(super) struct Roots {
    pub(super) sys: PathBuf,
    pub(super) proc: PathBuf,
    /// Returns whether an address belongs to this host. It may also return true for an address of
    /// another host.
    pub(super) is_own: fn(IpAddr) -> bool,
}

impl Roots {
    pub(super) fn system() -> Self {
        // Only a local address can be bound, unless ip_nonlocal_bind is set.
        let is_own = |ip: IpAddr| UdpSocket::bind((ip, 0)).is_ok();
        Self { sys: "/sys".into(), proc: "/proc".into(), is_own }
    }

    /// Returns the directory of an RDMA device.
    pub(super) fn device(&self, name: &str) -> PathBuf {
        self.sys.join("class/infiniband").join(name)
    }

    /// Returns the directory of a network interface.
    pub(super) fn netdev(&self, name: &str) -> PathBuf {
        self.sys.join("class/net").join(name)
    }
}

/// Returns the first word of a file. Returns `None` if the file is empty or cannot be read.
pub(super) fn word(path: &Path) -> Option<String> {
    // One read is enough, because such files return everything at once.
    let mut bytes = [0; 256];
    let len = File::open(path).ok()?.read(&mut bytes).ok()?;
    let text = std::str::from_utf8(&bytes[..len]).ok()?;
    text.split_whitespace().next().map(str::to_owned)
}

/// Returns the number in a file.
pub(super) fn number<T: FromStr>(path: &Path) -> Option<T> {
    word(path)?.parse().ok()
}

/// Returns the start of a table, in whole lines, and whether this is the whole table.
pub(super) fn table(path: &Path, limit: u64) -> Option<(String, bool)> {
    let mut text = String::new();
    File::open(path).ok()?.take(limit + 1).read_to_string(&mut text).ok()?;
    let whole = text.len() as u64 <= limit;
    if !whole {
        text.truncate(text.rfind('\n').unwrap_or(0));
    }
    Some((text, whole))
}
