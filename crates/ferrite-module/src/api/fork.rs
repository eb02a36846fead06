//! Closes the descriptors of the module's listeners and of its admin port in forked children of the
//! engine, such as the child of BGSAVE.
//!
//! A child that outlives its engine would keep the port open, and a restarted engine could not
//! listen on it. The engine also closes its own listeners in its children.
#![expect(unsafe_code, reason = "a handler that the C library calls in a forked child")]

use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// A registered descriptor, and the file that it belonged to at that time. Its number may have been
/// reused for another file since.
struct Slot {
    descriptor: AtomicI32,
    device: AtomicU64,
    inode: AtomicU64,
}

/// The registered descriptors. Usually there are far fewer than slots; those that find no slot are
/// not closed.
static SLOTS: [Slot; 64] = [const {
    Slot { descriptor: AtomicI32::new(-1), device: AtomicU64::new(0), inode: AtomicU64::new(0) }
}; 64];

/// Makes forked children close these descriptors, instead of all that were registered before.
pub(crate) fn close_in_children(descriptors: impl IntoIterator<Item = RawFd>) {
    let mut descriptors = descriptors.into_iter();
    for slot in &SLOTS {
        slot.descriptor.store(-1, Ordering::SeqCst);
        if let Some(descriptor) = descriptors.next() {
            slot.set(descriptor);
        }
    }
    handle_forks();
}

/// Makes forked children close this descriptor, too.
pub(crate) fn close_also_in_children(descriptor: RawFd) {
    let free = SLOTS.iter().find(|slot| slot.descriptor.load(Ordering::SeqCst) < 0);
    if let Some(slot) = free {
        slot.set(descriptor);
    }
    handle_forks();
}

/// Makes the C library call the handler in forked children.
fn handle_forks() {
    static ONCE: Once = Once::new();
    // SAFETY: the handler exists as long as this library. If the library were unloaded, the C
    // library would remove its handlers.
    ONCE.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(in_child));
    });
}

impl Slot {
    fn set(&self, descriptor: RawFd) {
        if let Some((device, inode)) = file_of(descriptor) {
            self.device.store(device, Ordering::SeqCst);
            self.inode.store(inode, Ordering::SeqCst);
            self.descriptor.store(descriptor, Ordering::SeqCst);
        }
    }
}

/// Returns the device and inode of a descriptor's file. Makes only system calls, since it also runs
/// in forked children.
fn file_of(descriptor: RawFd) -> Option<(u64, u64)> {
    let mut status = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the structure has the right size, and is initialised if the call succeeds.
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
            // SAFETY: nothing in the child uses the descriptor, and the parent has its own.
            unsafe { libc::close(descriptor) };
        }
    }
}
