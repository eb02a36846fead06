//! What a forked child of the engine (BGSAVE, say) must not keep: the listener's descriptors.
//!
//! A child that outlives its engine would hold the port, and the engine that is started again could
//! not listen. The engine closes its own listeners in its children, too.
#![expect(unsafe_code, reason = "a handler that the C library calls in a forked child")]

use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// A descriptor, and the file that it was: its number may belong to another file by now.
struct Slot {
    descriptor: AtomicI32,
    device: AtomicU64,
    inode: AtomicU64,
}

/// More than addresses to listen on.
static SLOTS: [Slot; 64] = [const {
    Slot { descriptor: AtomicI32::new(-1), device: AtomicU64::new(0), inode: AtomicU64::new(0) }
}; 64];

/// From now on forked children close these, and none that were named before.
pub(crate) fn close_in_children(descriptors: impl IntoIterator<Item = RawFd>) {
    static ONCE: Once = Once::new();
    let mut descriptors = descriptors.into_iter();
    for slot in &SLOTS {
        slot.descriptor.store(-1, Ordering::SeqCst);
        let found =
            descriptors.next().and_then(|descriptor| Some((descriptor, file_of(descriptor)?)));
        if let Some((descriptor, (device, inode))) = found {
            slot.device.store(device, Ordering::SeqCst);
            slot.inode.store(inode, Ordering::SeqCst);
            slot.descriptor.store(descriptor, Ordering::SeqCst);
        }
    }
    // SAFETY: the handler is there as long as this library is, which takes its handlers along when
    // it is unloaded.
    ONCE.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(in_child));
    });
}

/// Which file a descriptor is. Only system calls: it runs in forked children, too.
fn file_of(descriptor: RawFd) -> Option<(u64, u64)> {
    let mut status = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the structure has its size, and is complete if the call says so.
    unsafe {
        (libc::fstat(descriptor, status.as_mut_ptr()) == 0).then(|| {
            let status = status.assume_init();
            (status.st_dev, status.st_ino)
        })
    }
}

unsafe extern "C" fn in_child() {
    for Slot { descriptor, device, inode } in &SLOTS {
        let descriptor = descriptor.load(Ordering::SeqCst);
        let file = (device.load(Ordering::SeqCst), inode.load(Ordering::SeqCst));
        if descriptor >= 0 && file_of(descriptor) == Some(file) {
            // SAFETY: the child does nothing with it; the parent has its own.
            unsafe { libc::close(descriptor) };
        }
    }
}
