//! Releases the devices that librdmacm holds open, when they are removed.
//!
//! librdmacm opens each device that one of its identifiers uses, and keeps it open. The kernel
//! cannot finish removing a Soft-RoCE device while a process holds it open. librdmacm closes its
//! devices only in `sync_devices_list` (rdma-core's `librdmacm/cma.c`), which has two callers:
//!
//! - the lookup of a device that librdmacm does not know,
//! - `rdma_get_devices`. That call also opens all other devices, even those that this process does
//!   not use. Nothing would release those other devices when they are removed. And if the host has
//!   no device left, the call closes nothing.
//!
//! So when an identifier whose device is being removed is dropped, it replaces the descriptors of
//! librdmacm's context by others ([`release_context`]). Only for devices that were removed without
//! an event, this module calls `rdma_get_devices` ([`close_removed_devices`]).

use std::collections::HashMap;
use std::ffi::CStr;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::io::DupFlags;

use crate::sys;

/// The devices that librdmacm has opened for the identifiers of a channel, except those of whose
/// removal an identifier was notified. The key is the address of librdmacm's context.
#[derive(Default)]
pub(super) struct OpenedDevices(HashMap<usize, Incarnation>);

/// A device from its creation to its removal. A device that is added again has the same name.
struct Incarnation {
    directory: PathBuf,
    /// The inode number of the device's directory in sysfs, which the kernel never uses again.
    /// `None` if it could not be read; then the device is never regarded as removed.
    number: Option<u64>,
}

impl Incarnation {
    fn of(directory: &Path) -> Self {
        Self { directory: directory.to_owned(), number: number_of(directory) }
    }

    fn is_removed(&self) -> bool {
        self.number.is_some() && number_of(&self.directory) != self.number
    }
}

fn number_of(directory: &Path) -> Option<u64> {
    if directory.as_os_str().is_empty() {
        return None; // a device of the fake provider
    }
    std::fs::metadata(directory).ok().map(|metadata| metadata.ino())
}

impl OpenedDevices {
    /// Notes the device of an identifier, if it has one.
    ///
    /// # Safety
    /// The identifier is alive, and no other thread changes its device meanwhile.
    pub(super) unsafe fn note(&mut self, id: *const sys::rdma_cm_id) {
        // SAFETY: the caller guarantees that the identifier is alive. Its context and the device of
        // that live as long as the identifier.
        unsafe {
            let context = (*id).verbs;
            if !context.is_null() && !self.0.contains_key(&context.addr()) {
                let directory = CStr::from_ptr((*(*context).device).ibdev_path.as_ptr());
                let directory = Path::new(std::ffi::OsStr::from_bytes(directory.to_bytes()));
                self.0.insert(context.addr(), Incarnation::of(directory));
            }
        }
    }

    /// Forgets the device with this context, because an identifier was notified of its removal. The
    /// identifier releases the device when it is dropped.
    pub(super) fn forget(&mut self, context: usize) {
        self.0.remove(&context);
    }

    #[cfg(all(test, feature = "fake"))]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Forgets the devices that were removed. Returns whether at least one was removed.
    pub(super) fn forget_removed(&mut self) -> bool {
        let before = self.0.len();
        self.0.retain(|_, device| !device.is_removed());
        self.0.len() < before
    }
}

/// Makes librdmacm close the devices that were removed. As a side effect, librdmacm opens all other
/// devices.
#[cold]
pub(super) fn close_removed_devices(cm: &sys::CmFunctions) {
    if let (Some(devices), Some(free)) = (cm.rdma_get_devices, cm.rdma_free_devices) {
        // SAFETY: no preconditions; the list, if there is one, is freed at once.
        unsafe {
            let list = devices(std::ptr::null_mut());
            if !list.is_null() {
                free(list);
            }
        }
    }
}

/// Makes the kernel release a device that is being removed, before librdmacm closes its context of
/// the device. Each descriptor of the context then refers to `/dev/null` under its old number, so
/// that librdmacm can close it later.
///
/// Afterwards calls on the context fail, as they do on any device that was removed.
///
/// # Safety
/// The context is librdmacm's, or null, and is not closed during the call. Its device is being
/// removed.
pub(super) unsafe fn release_context(context: *const sys::ibv_context) {
    if context.is_null() {
        return;
    }
    // SAFETY: the caller guarantees that the context is open.
    let descriptors = unsafe { [(*context).cmd_fd, (*context).async_fd] };
    if descriptors.iter().all(|fd| *fd < 0) {
        return; // the fake provider has none
    }
    // Not writable, so that commands of older libraries, which use `write`, fail.
    let Ok(replacement) = File::open("/dev/null") else { return };
    for fd in descriptors {
        if fd >= 0 {
            // SAFETY: the descriptor is open and belongs to the context.
            unsafe { replace(fd, &replacement) };
        }
    }
}

/// Lets the descriptor `fd` refer to the open file of `replacement`.
///
/// # Safety
/// `fd` is open and is not closed during the call, and its owner permits the change.
unsafe fn replace(fd: RawFd, replacement: &File) {
    // SAFETY: the caller guarantees that the descriptor is open. It is not closed here.
    let mut fd = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(fd) });
    // `dup3` fails only if the process may open no more descriptors with such a number. Then the
    // device stays open until librdmacm closes it.
    let _ = rustix::io::dup3(replacement, &mut fd, DupFlags::CLOEXEC);
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::fd::IntoRawFd as _;

    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no dup3")]
    fn a_released_context_refers_to_no_device() {
        let ((mut command, its_end), (mut events, other_end)) =
            (std::io::pipe().expect("a pipe"), std::io::pipe().expect("a pipe"));
        let mut context = sys::ibv_context {
            cmd_fd: its_end.into_raw_fd(),
            async_fd: other_end.into_raw_fd(),
            ..Default::default()
        };
        for _ in 0..2 {
            // SAFETY: the context is alive and has these two descriptors.
            unsafe { release_context(&raw const context) };
            // The pipes have no writer any more.
            assert_eq!(command.read(&mut [0]).expect("the end"), 0);
            assert_eq!(events.read(&mut [0]).expect("the end"), 0);
        }
        // SAFETY: both are open, and nothing else owns them.
        drop(unsafe { [context.cmd_fd, context.async_fd].map(|fd| OwnedFd::from_raw_fd(fd)) });
        (context.cmd_fd, context.async_fd) = (-1, -1);
        // SAFETY: the context is alive and has no descriptors.
        unsafe { release_context(&raw const context) };
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no inode numbers")]
    fn a_device_that_was_added_again_is_another_one() {
        let directory = std::env::temp_dir().join(format!("incarnation-{}", std::process::id()));
        std::fs::create_dir(&directory).expect("a directory");
        let (first, absent) = (Incarnation::of(&directory), Incarnation::of(Path::new("")));
        assert!(!first.is_removed() && !absent.is_removed());
        // While the first directory exists under another name, its number is in use.
        let moved = directory.with_extension("moved");
        std::fs::rename(&directory, &moved).expect("renamed");
        assert!(first.is_removed());
        std::fs::create_dir(&directory).expect("a directory");
        assert!(first.is_removed() && !Incarnation::of(&directory).is_removed());
        for directory in [directory, moved] {
            std::fs::remove_dir(directory).expect("removed");
        }
    }
}
